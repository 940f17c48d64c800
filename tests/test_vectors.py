"""tests/vectors/: the script and TRL's losses against a naive implementation without their code.

All in float64. make.py rounds its results to 15 digits (1e-15) and the bound is EXACT (1e-9)."""
import dataclasses
import json
import math
import re
import sys
from typing import get_args, get_type_hints

import pytest
import torch

import nano_rlvr as nr
from conftest import EXACT, ROOT, make_config, within
from examples import kl, process_rewards
from runtime.batch import fill_packs
from vectors import adapters, check, make

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
FOLDER = ROOT / "tests/vectors"
CASES = json.loads((FOLDER / "cases.json").read_text())
OPTIONS = CASES[0]["options"].keys() - {"kl_in"}  # that is an option of examples/kl.py
EXERCISES = {  # number in learn/exercises.md -> the cases that prove it, by name
    1: "kl_coef", 2: r"baseline .*(group|batch|none)$", 3: "surrogate ppo", 4: "aggregate",
    5: "ratio", 6: "correction (?!none)", 11: "scale group_mean$", 12: "process rewards"}


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


class Table(torch.nn.Module):
    """Stands in for TokenLogps: the log-prob of a token is looked up by its id."""

    def forward(self, pack):
        return self.logps[pack.targets], None


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
            r = nr.Rollout([1000 + g], list(ids), "", bool(c["truncated"]), c["vllm"],
                           list(map(bool, c["loss_mask"])),
                           reward=sum(value for _, value in steps) if steps else None)
            r.steps = [] if len(steps) == 1 and steps[0][0] == n else steps
            groups[-1].append(r)
    return groups, {name: torch.tensor(table) for name, table in tables.items()}


def solve(case, budget, policy_loss=nr.policy_loss):
    """The script's results for a case, with at most `budget` tokens per pack."""
    options = {name: case["options"][name] for name in OPTIONS}
    cfg = make_config(**options | dict(samples=len(case["groups"][0]), pack_tokens=budget))
    groups, tables = rollouts_of(case)
    rollouts, logp = [r for group in groups for r in group], tables["logp"].requires_grad_()
    before = math.nan if case["running_mean"] is None else case["running_mean"]
    in_reward = case["options"]["kl_in"] == "reward"
    if in_reward:
        policy, ref = Table(), Table()
        policy.logps, ref.logps = tables["old"], tables["ref"]
        kls = kl.sequence_kls(policy, ref, rollouts, cfg)
        running_mean = kl.assign_advantages(groups, kls, cfg, before)
    elif any(r.steps for r in rollouts):
        running_mean = process_rewards.assign_advantages(groups, cfg, before)
    else:
        running_mean = nr.assign_advantages(groups, cfg, before)
    loss = torch.zeros(())
    for members in fill_packs(nr.assign_token_weights(rollouts, cfg), budget):
        pack = nr.collate(members)
        old = tables["old"][pack.targets] if case["groups"][0][0]["old"] else None  # (R,)
        has_kl = cfg.kl_coef and not in_reward
        ref = tables["ref"][pack.targets] if has_kl else None  # (R,)
        loss = loss + policy_loss(logp[pack.targets], old, ref, pack, cfg)[0]
    (loss + 0 * logp.sum()).backward()

    def per_token(values):  # 0 where the policy did not sample
        return [x if s else 0.0 for r in rollouts for x, s in zip(values(r), r.loss_mask)]

    return dict(advantages=per_token(lambda r: r.advantages), loss=[loss.item()],
                gradient=logp.grad.tolist(),
                weights=per_token(lambda r: [r.weight] * len(r.completion)),
                running_mean=[None if math.isnan(running_mean) else running_mean])


@pytest.mark.parametrize("case", list(map(parameter, CASES)))
def test_script_agrees(case):
    for budget in 10**6, 4:  # one pack, and a pack per completion
        for field, ours in solve(case, budget).items():
            wanted = case["expected"][field]
            assert check.difference(ours, wanted) <= EXACT, (
                f"{case['name']}, {field}: yours {str(ours)[:99]}, wanted {str(wanted)[:99]}")


def test_trl_agrees_with_all_cases_but_those_that_the_page_names():
    """TRL counts completions without a reward, and does not bound the log-ratio. It gets the
    expected advantages; tests/test_trl.py compares the advantages themselves."""
    results = {case["name"]: adapters.trl(case) for case in CASES}
    shown = adapters.PAGE.read_text().split("<!-- table -->")[1].strip().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown]
    column = rows[0].index(f"TRL {adapters.metadata.version('trl')}")
    cells = {row[0]: row[column] for row in rows[2:] if row[column] != "-"}
    assert cells == adapters.count(results)
    for case in CASES:
        if adapters.row_of(case) not in ("no reward", "log-ratio beyond 20"):
            for field, found in results[case["name"]].items():
                within(check.difference(found, case["expected"][field]), EXACT)


def test_the_kl_of_examples_kl_is_trls_with_use_bias_correction_kl():
    names = ["kl_coef 0.2", "kl_coef 0.2, on-policy", "ratio sequence, tokens not sampled",
             "aggregate token, truncated", "correction token_mask, tool, KL"]
    by_name = {case["name"]: case for case in CASES}
    for case in map(by_name.get, names):
        trls = adapters.trl(case, bias_correction=True)
        ours = solve(case, 10**6, kl.with_kl("unbiased"))
        for field in "loss", "gradient":
            within(check.difference(ours[field], trls[field]), EXACT)
        assert check.difference(ours["gradient"], case["expected"]["gradient"]) > 1e-5  # k3's


def test_the_checker_names_what_differs(tmp_path, capsys):
    def of(results, *tolerance):  # exit status or message, lines
        (tmp_path / "results.json").write_text(json.dumps(results))
        with pytest.raises(SystemExit) as end:
            check.main(tmp_path / "results.json", *tolerance)
        return end.value.code, capsys.readouterr().out.splitlines()

    n, name = len(CASES), CASES[0]["name"]
    every = {case["name"]: case["expected"] for case in CASES}
    assert of(every) == (0, [f"{5 * n} of {5 * n} results agree; {n} of {n} cases"])
    results = every[name] | {"loss": every[name]["loss"] * (1 + 1e-6)}
    assert of({name: results}) == (1, [f"{name}: loss differs, 1e-06 of its size",
                                       f"4 of 5 results agree; 1 of {n} cases"])
    assert of({name: results}, "1e-4")[0] == 0
    for wrong in math.nan, None, [1.0, 1.0]:
        assert of({name: {"loss": wrong}})[0] == 1
    assert of({})[0] == 1 and "KeyError: 'no such'" in of({"no such": {"loss": 0.0}})[0]
