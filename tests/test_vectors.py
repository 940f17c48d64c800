"""tests/vectors/: the script and TRL's losses against a naive implementation without their code.

All in float64. make.py rounds its results to 15 digits (1e-15) and the bound is EXACT (1e-9).
"""
import ast
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

import nano_rlvr as nr
from conftest import EXACT, ROOT, make_config, within
from runtime.batch import pack
from vectors import make
from vectors.check import flat

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
FOLDER = ROOT / "tests/vectors"
CASES = json.loads((FOLDER / "cases.json").read_text())
OPTIONS = CASES[0]["options"].keys()
EXERCISES = {  # number in learn/exercises.md -> the cases that prove it, by name
    1: "kl_coef", 2: r"baseline .*(group|batch|none)$", 3: "gate clip", 4: "aggregate", 5: "ratio",
    6: "correction", 11: "scale mean$", 12: "process rewards"}


def parameters(cases):
    """A pytest parameter per case, with the markers of its exercises."""
    for case in cases:
        marks = [getattr(pytest.mark, f"exercise_{number}")
                 for number, name in EXERCISES.items() if re.search(name, case["name"])]
        yield pytest.param(case, marks=marks, id=case["name"].replace(" ", "_"))


def equal(a, b, bound):
    """Whether two values from JSON are the same, their floats within bound."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= bound * max(1.0, abs(b))
    if isinstance(a, (list, dict)) and type(a) is type(b) and len(a) == len(b):
        pairs = zip(a, b) if isinstance(a, list) else ((a[name], b.get(name)) for name in a)
        return all(equal(x, y, bound) for x, y in pairs)
    return type(a) is type(b) and a == b


def test_make_py_writes_the_committed_file_and_imports_only_the_standard_library():
    made = json.loads(make.text())
    assert [c["name"] for c in made] == [c["name"] for c in CASES]
    assert [c["name"] for a, c in zip(made, CASES) if not equal(a, c, 1e-12)] == []
    for file in "make.py", "check.py":
        for node in ast.walk(ast.parse((FOLDER / file).read_text())):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            imported = [node.module] if isinstance(node, ast.ImportFrom) else names
            assert set(imported) <= sys.stdlib_module_names | {None}


def test_every_preset_and_every_value_of_every_option_has_cases():
    names = Counter(c["name"] for c in CASES)
    assert max(names.values()) == 1 and len(names) >= 100
    for name in nr.ALGOS:
        cfg = dataclasses.replace(nr.Config(), **nr.ALGOS[name])
        presets = [c for c in CASES if c["name"].startswith(f"preset {name}, ")]
        assert len(presets) >= 2, f"no vectors for {name}: add its row to PRESETS in make.py"
        for c in presets:
            wanted = {option: getattr(cfg, option) for option in OPTIONS - {"max_tokens"}}
            assert c["options"] == wanted | {"max_tokens": c["options"]["max_tokens"]}
    hints = get_type_hints(nr.Config)
    for option in OPTIONS:
        values = get_args(hints[option]) or ((False, True) if hints[option] is bool else ())
        used = {c["options"][option] for c in CASES}
        assert used == set(values) if values else len(used) > 1, option


@pytest.mark.parametrize("option, value, needs", [
    ("clip_low", 0.99, dict(gate="clip")), ("clip_high", 9.0, dict(gate="clip")),
    ("clip_high", 0.1, dict(gate="detach")), ("delta", 9.0, dict(delta=1.3)),
    ("tau", 2.0, dict(gate="soft")), ("tau_neg", 2.0, dict(gate="soft")),
    *[("correction_cap", 9.0, dict(correction=kind)) for kind in (
        "token_truncate", "token_mask", "sequence_mask")]])
def test_the_tokens_of_the_cases_are_on_both_sides_of_every_bound(option, value, needs):
    """Moving a bound changes the gradient of several tokens, at each level of the ratio."""
    for ratio in "token", "sequence", "product":
        changed = 0
        for case in CASES:
            if needs.items() | {("ratio", ratio)} <= case["options"].items():
                moved = make.solve(case | {"options": case["options"] | {option: value}})
                gradients = flat(moved["gradient"]), flat(case["expected"]["gradient"])
                changed += sum(abs(x - y) > 1e-6 for x, y in zip(*gradients))
        assert changed >= 3


# ---- the script


class Table(torch.nn.Module):
    """Stands in for TokenLogps: the log-prob of a token is looked up by its id."""

    def forward(self, batch):
        return self.logps[batch.targets], None


def rollouts_of(case):
    """Groups of Rollouts, and a table per list of log-probs. Each completion token has its own
    id."""
    groups, tables = [], {name: [] for name in ("logp", "old", "ref")}
    for g, completions in enumerate(case["groups"]):
        groups.append([])
        for c in completions:
            n, steps = len(c["logp"]), [tuple(step) for step in c["rewards"]]
            ids = range(len(tables["logp"]), len(tables["logp"]) + n)
            for name, table in tables.items():
                table += c[name] or [math.nan] * n
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
        policy.logps = logp if tables["old"].isnan().any() else tables["old"]
        ref.logps = tables["ref"]
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


def near(ours, wanted):
    """As in check.py: the terms of a loss may cancel."""
    ours, wanted = (torch.as_tensor(x).detach() for x in (ours, wanted))
    assert ours.shape == wanted.shape
    within((ours - wanted).abs().max(), EXACT * max(wanted.abs().max().item(), 1e-3))


def agree(ours, wanted):
    for field, numbers in ours.items():
        expected = flat(wanted[field])
        if None in numbers + expected:
            assert numbers == expected, field
        else:
            near(numbers, expected)


@pytest.mark.parametrize("case", list(parameters(CASES)))
def test_script_agrees(case):
    for budget in 10**6, 4:  # one pack, and a pack per completion
        agree(solve(case, budget), case["expected"])


# ---- TRL's _compute_loss, with log-probs from the case instead of a model

LOSS_TYPES = {  # aggregate, gate -> TRL's loss_type
    ("sequence", "clip"): "grpo", ("token", "clip"): "dapo", ("constant", "clip"): "dr_grpo",
    ("token", "detach"): "cispo", ("sequence", "soft"): "sapo"}


def trl_has(case):
    """Whether TRL has the same loss: it counts completions without verdict, and does not bound the
    log-ratio."""
    o, completions = case["options"], [c for group in case["groups"] for c in group]
    rloo = dict(aggregate="sequence", gate="clip", correction="none", kl_coef=0.0, delta=0.0)
    return (
        all(c["rewards"] and any(c["sampled"]) for c in completions) and "20" not in case["name"]
        and (o["aggregate"], o["gate"]) in LOSS_TYPES and o["correction"] != "sequence_mask"
        # RLOOTrainer has no KL in the loss, no correction and no delta
        and (o["ratio"] != "product" or rloo.items() <= o.items()))


TRLS = [case for case in CASES if trl_has(case)]


def trls_loss(case, trainer, padded, logp):
    """trainer._compute_loss with the case's options; padded: name -> (N, C), logp the leaf."""
    o, mask = case["options"], padded["real"]
    truncated = torch.tensor([[c["truncated"]] for group in case["groups"] for c in group])
    masked = mask * (1 - truncated * o["mask_truncated"])  # as _generate_and_score_completions does
    advantages = padded["advantages"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": mask, "completion_mask": masked, "tool_mask": padded["sampled"],
        "old_per_token_logps": padded["old"] if case["groups"][0][0]["old"] else None,
        "ref_per_token_logps": padded["ref"],
        "num_items_in_batch": (masked * padded["sampled"]).sum(), "advantages": advantages}
    old = logp.detach() if inputs["old_per_token_logps"] is None else inputs["old_per_token_logps"]
    ratio = (old - padded["vllm"]).exp()  # (N, C)
    inputs["importance_sampling_ratio"] = {
        "none": None, "token_truncate": ratio.clamp(max=o["correction_cap"]),
        "token_mask": ratio.masked_fill(ratio > o["correction_cap"], 0.0)}[o["correction"]]
    if trainer.__name__ == "RLOOTrainer":  # without tool_mask: as if these tokens were not there
        inputs |= {"completion_mask": masked * padded["sampled"], "advantages": advantages[:, 0]}
        inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
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
        _metrics={"train": {name: [] for name in (
            "kl", "entropy", "cispo_clip_ratio", *(f"clip_ratio/{x}" for x in (
                "low_mean", "high_mean", "region_mean", "low_min", "high_max")))}})
    return trainer._compute_loss(fake, None, inputs)


@pytest.mark.parametrize("case", TRLS, ids=lambda case: case["name"].replace(" ", "_"))
def test_trl_agrees(case):
    """TRL gets the expected advantages; tests/test_trl.py compares the advantages themselves."""
    from trl import GRPOTrainer, RLOOTrainer
    completions = [c for group in case["groups"] for c in group]
    advantages = [a for group in case["expected"]["advantages"] for a in group]
    gradient = [a for group in case["expected"]["gradient"] for a in group]
    longest = max(len(c["logp"]) for c in completions)

    def pad(rows):
        return torch.tensor([[*map(float, row), *[0.0] * (longest - len(row))] for row in rows])

    padded = {name: pad([c[name] or [] for c in completions])
              for name in ("old", "ref", "vllm", "sampled")}
    padded["real"] = pad([[1] * len(c["logp"]) for c in completions])
    padded["advantages"] = pad(advantages)
    logp = pad([c["logp"] for c in completions]).requires_grad_()
    trainer = RLOOTrainer if case["options"]["ratio"] == "product" else GRPOTrainer
    loss = trls_loss(case, trainer, padded, logp)
    loss.backward()
    near(loss.item(), case["expected"]["loss"])
    near(logp.grad, pad(gradient))


def test_trl_has_the_loss_of_many_cases():
    assert len(TRLS) >= 50
    assert {c["options"]["ratio"] for c in TRLS} == {"token", "sequence", "product"}
    assert {c["options"]["gate"] for c in TRLS} == {"clip", "detach", "soft"}


# ---- the checker


def check(tmp_path, results, *tolerance):
    (tmp_path / "results.json").write_text(json.dumps(results))
    command = [sys.executable, FOLDER / "check.py", tmp_path / "results.json", *tolerance]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_the_checker_names_what_differs(tmp_path):
    results = {c["name"]: dict(c["expected"]) for c in CASES}
    n, name = len(CASES), CASES[0]["name"]
    assert check(tmp_path, results) == (0, [f"{5 * n} of {5 * n} results agree; {n} of {n} cases"])
    gradient = json.loads(json.dumps(results[name]["gradient"]))
    gradient[0][0][0] += 1e-6 * max(map(abs, flat(gradient)))
    results = {name: {"gradient": gradient, "loss": CASES[0]["expected"]["loss"]}}
    assert check(tmp_path, results) == (1, [
        f"{name}: gradient differs, 1e-06 of its size",
        f"1 of 2 results agree; 1 of {n} cases"])
    assert check(tmp_path, results, "1e-4")[0] == 0
    results = {c["name"]: {"loss": bad} for c, bad in zip(CASES, (math.nan, None, [1.0, 1.0]))}
    assert check(tmp_path, results)[1][-1] == f"0 of 3 results agree; 3 of {n} cases"
    assert check(tmp_path, {})[0] == 1


@pytest.mark.parametrize("argv, says", [
    ("nowhere.json", "FileNotFoundError"), ("results.json much", "could not convert string"),
    ("results.json", "KeyError: 'no such case'"), ("", "check.py results.json [tolerance]")])
def test_the_checker_says_what_it_cannot_read_without_a_traceback(tmp_path, argv, says):
    (tmp_path / "results.json").write_text(json.dumps({"no such case": {"loss": 0.0}}))
    command = [sys.executable, FOLDER / "check.py", *argv.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
