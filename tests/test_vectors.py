"""tests/vectors/: the script and TRL's losses against a naive implementation without their code.

All in float64. make.py rounds its results to 15 digits (1e-15) and the bound is EXACT (1e-9).
"""
import dataclasses
import json
import math
import re
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import nano_rlvr as nr
from conftest import EXACT, ROOT, make_config, within
from runtime.batch import pack
from vectors import check, make

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
FOLDER = ROOT / "tests/vectors"
CASES = json.loads((FOLDER / "cases.json").read_text())
OPTIONS = CASES[0]["options"].keys()
EXERCISES = {  # number in learn/exercises.md -> the cases that prove it, by name
    1: "kl_coef", 2: r"baseline .*(group|batch|none)$", 3: "gate clip", 4: "aggregate", 5: "ratio",
    6: "correction (?!none)", 11: "scale mean$", 12: "process rewards"}


def parameter(case):
    """A pytest parameter with the markers of its exercises."""
    marks = [getattr(pytest.mark, f"exercise_{number}")
             for number, name in EXERCISES.items() if re.search(name, case["name"])]
    return pytest.param(case, marks=marks, id=case["name"].replace(" ", "_"))


def test_make_py_writes_the_committed_file_and_imports_only_the_standard_library():
    for made, case in zip(json.loads(make.text()), CASES, strict=True):
        assert made | {"expected": case["expected"]} == case
        for field, wanted in case["expected"].items():
            assert check.difference(made["expected"][field], wanted) <= 1e-12, case["name"]
    for file in "make.py", "check.py":
        imported = re.findall(r"^ *(?:import|from) (\w+)", (FOLDER / file).read_text(), re.M)
        assert set(imported) <= sys.stdlib_module_names


def test_every_preset_and_every_value_of_every_option_has_cases():
    assert len({case["name"] for case in CASES}) == len(CASES)
    for name, row in nr.ALGOS.items():
        cfg = dataclasses.replace(nr.Config(), **row)
        presets = [case["options"] for case in CASES if case["name"].startswith(f"preset {name},")]
        assert len(presets) >= 2, f"no vectors for {name}: add its row to PRESETS in make.py"
        for options in presets:
            assert all(options[o] == getattr(cfg, o) for o in OPTIONS - {"max_tokens"})
    hints = get_type_hints(nr.Config)
    for option in OPTIONS:
        values = get_args(hints[option]) or ((False, True) if hints[option] is bool else ())
        used = {case["options"][option] for case in CASES}
        assert used == set(values) if values else len(used) > 1, option


# ---- the script


class Table(torch.nn.Module):
    """Stands in for TokenLogps: the log-prob of a token is looked up by its id."""

    def forward(self, batch):
        return self.logps[batch.targets], None


def rollouts_of(case):
    """Groups of Rollouts, a table per list of log-probs. Each completion token has its own id."""
    groups, tables = [], {name: [] for name in ("logp", "old", "ref")}
    for g, completions in enumerate(case["groups"]):
        groups.append([])
        for c in completions:
            n, steps = len(c["logp"]), [tuple(step) for step in c["rewards"]]
            ids = range(len(tables["logp"]), len(tables["logp"]) + n)
            for name, table in tables.items():
                table += c[name] or c["logp"]
            groups[-1].append(nr.Rollout(
                [1000 + g], list(ids), "", bool(c["truncated"]), c["vllm"],
                list(map(bool, c["sampled"])),
                reward=sum(value for _, value in steps) if steps else None,
                steps=[] if len(steps) == 1 and steps[0][0] == n else steps))
    return groups, {name: torch.tensor(table) for name, table in tables.items()}


def solve(case, budget):
    """The script's results for a case, with at most `budget` tokens per pack."""
    cfg = make_config(**case["options"] | dict(samples=len(case["groups"][0]), pack_tokens=budget))
    groups, tables = rollouts_of(case)
    rollouts, logp = [r for group in groups for r in group], tables["logp"].requires_grad_()
    if case["options"]["kl_in"] == "reward":
        policy, ref = Table(), Table()
        policy.logps, ref.logps = tables["old"], tables["ref"]
        nr.trainer.store_kl(policy, ref, [rollouts], rollouts[0], cfg)
    before = math.nan if case["running_mean"] is None else case["running_mean"]
    running_mean = nr.assign_advantages(groups, cfg, before)
    loss = torch.zeros(())
    for members in pack(nr.assign_token_weights(rollouts, cfg), budget):
        batch = nr.collate(members)
        old = tables["old"][batch.targets] if case["groups"][0][0]["old"] else None  # (R,)
        has_kl = cfg.kl_coef and cfg.kl_in == "loss"
        ref = tables["ref"][batch.targets] if has_kl else None  # (R,)
        loss = loss + nr.policy_loss(logp[batch.targets], old, ref, batch, cfg)[0]
    (loss + 0 * logp.sum()).backward()

    def per_token(values):  # 0 where the policy did not sample
        return [x if s else 0.0 for r in rollouts for x, s in zip(values(r), r.sampled)]

    return dict(advantages=per_token(lambda r: r.advantages), loss=[loss.item()],
                gradient=logp.grad.tolist(),
                weights=per_token(lambda r: [r.weight] * len(r.completion)),
                running_mean=[None if math.isnan(running_mean) else running_mean])


@pytest.mark.parametrize("case", [*map(parameter, CASES)])
def test_script_agrees(case):
    for budget in 10**6, 4:  # one pack, and a pack per completion
        for field, ours in solve(case, budget).items():
            within(check.difference(ours, case["expected"][field]), EXACT)


# ---- TRL's _compute_loss, with log-probs from the case instead of a model

LOSS_TYPES = {  # aggregate, gate -> TRL's loss_type
    ("sequence", "clip"): "grpo", ("token", "clip"): "dapo", ("constant", "clip"): "dr_grpo",
    ("token", "detach"): "cispo", ("sequence", "soft"): "sapo"}


def trl_has(case):
    """Whether TRL has the same loss: it counts completions without verdict, and does not bound the
    log-ratio."""
    o, completions = case["options"], make.all_in(case["groups"])
    rloo = dict(aggregate="sequence", gate="clip", correction="none", kl_coef=0.0, delta=0.0)
    return (
        all(c["rewards"] and any(c["sampled"]) for c in completions) and "20" not in case["name"]
        and (o["aggregate"], o["gate"]) in LOSS_TYPES and o["correction"] != "sequence_mask"
        # RLOOTrainer has no KL in the loss, no correction and no delta
        and (o["ratio"] != "product" or rloo.items() <= o.items()))


TRLS = [case for case in CASES if trl_has(case)]


def padded(rows):
    """(N, C) from a list of numbers per completion."""
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def trls_loss(case, trainer, logp):
    """trainer._compute_loss with the case's options and advantages. logp: (N, C), the leaf."""
    o, completions = case["options"], make.all_in(case["groups"])
    real = padded([[1] * len(c["logp"]) for c in completions])  # (N, C)
    old, ref, vllm, sampled = (padded([c[name] or [] for c in completions])
                               for name in ("old", "ref", "vllm", "sampled"))
    truncated = torch.tensor([[c["truncated"]] for c in completions])
    mask = real * (1 - truncated * o["mask_truncated"])  # as _generate_and_score_completions does
    old = old if completions[0]["old"] else logp.detach()
    ratio = (old - vllm).exp()  # (N, C)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": real, "completion_mask": mask, "tool_mask": sampled,
        "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": (mask * sampled).sum(),
        "advantages": padded(make.all_in(case["expected"]["advantages"])),
        "importance_sampling_ratio": {
            "none": None, "token_truncate": ratio.clamp(max=o["correction_cap"]),
            "token_mask": ratio.masked_fill(ratio > o["correction_cap"], 0.0)}[o["correction"]]}
    if trainer.__name__ == "RLOOTrainer":  # without tool_mask: as if these tokens were not there
        inputs |= {"completion_mask": mask * sampled, "advantages": inputs["advantages"][:, 0],
                   "old_logps": (old * mask * sampled).sum(1)}
    loss_type = LOSS_TYPES[o["aggregate"], o["gate"]]
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        loss_type=loss_type, importance_sampling_level=o["ratio"],
        beta=o["kl_coef"] if o["kl_in"] == "loss" else 0.0,
        epsilon_low=o["clip_low"], epsilon_high=o["clip_high"] + (loss_type == "cispo"),
        use_vllm=o["correction"] != "none", vllm_importance_sampling_correction=True,
        max_completion_length=o["max_tokens"], current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=o["delta"] or None, use_bias_correction_kl=False, steps_per_generation=1,
            sapo_temperature_pos=o["tau"], sapo_temperature_neg=o["tau_neg"]),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)})
    return trainer._compute_loss(fake, None, inputs)


@pytest.mark.parametrize("case", TRLS, ids=lambda case: case["name"].replace(" ", "_"))
def test_trl_agrees(case):
    """TRL gets the expected advantages; tests/test_trl.py compares the advantages themselves."""
    from trl import GRPOTrainer, RLOOTrainer
    logp = padded([c["logp"] for c in make.all_in(case["groups"])]).requires_grad_()
    trainer = RLOOTrainer if case["options"]["ratio"] == "product" else GRPOTrainer
    loss = trls_loss(case, trainer, logp)
    loss.backward()
    within(check.difference(loss.item(), case["expected"]["loss"]), EXACT)
    gradient = padded(make.all_in(case["expected"]["gradient"]))
    within(check.difference(logp.grad.tolist(), gradient.tolist()), EXACT)


def test_trl_has_the_loss_of_many_cases():
    assert len(TRLS) >= 50
    assert {c["options"]["ratio"] for c in TRLS} == {"token", "sequence", "product"}
    assert {c["options"]["gate"] for c in TRLS} == {"clip", "detach", "soft"}


# ---- the checker


def checked(file, capsys, *tolerance):
    """(exit status or message, lines) of check.py."""
    with pytest.raises(SystemExit) as end:
        check.main(file, *tolerance)
    return end.value.code, capsys.readouterr().out.splitlines()


def test_the_checker_names_what_differs(tmp_path, capsys):
    def of(results, *tolerance):
        (tmp_path / "results.json").write_text(json.dumps(results))
        return checked(tmp_path / "results.json", capsys, *tolerance)

    n, name = len(CASES), CASES[0]["name"]
    every = {case["name"]: case["expected"] for case in CASES}
    assert of(every) == (0, [f"{5 * n} of {5 * n} results agree; {n} of {n} cases"])
    gradient = json.loads(json.dumps(every[name]["gradient"]))
    gradient[0][0][0] += 1e-6 * max(map(abs, check.flat(gradient)))
    results = {name: {"gradient": gradient, "loss": every[name]["loss"]}}
    assert of(results) == (1, [f"{name}: gradient differs, 1e-06 of its size",
                               f"1 of 2 results agree; 1 of {n} cases"])
    assert of(results, "1e-4")[0] == 0
    for wrong in math.nan, None, [1.0, 1.0]:
        assert of({name: {"loss": wrong}})[0] == 1
    assert of({})[0] == 1
    assert "KeyError: 'no such case'" in of({"no such case": {"loss": 0.0}})[0]
    assert "FileNotFoundError" in checked(tmp_path / "nowhere.json", capsys)[0]
