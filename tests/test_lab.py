"""learn/lab/: the commands of each finding, its rule, and the table made from the results."""
import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import nano_rlvr as nr
from bench import seeds, stale
from conftest import FAKE_RUN, ROOT, close, within
from learn.lab import faulty_rewards, lab, r1

FINDINGS = lab.findings()


def parsed(commands, monkeypatch):
    """The Configs of the flags that the module of each command hands on to main."""
    handed_on = []
    monkeypatch.setattr(nr, "main", lambda argv, *_, **__: handed_on.append(argv))
    monkeypatch.chdir(ROOT)
    for _, _, module, *flags in commands:
        monkeypatch.setattr(sys, "argv", [module, *flags])
        if module == "nano_rlvr":
            nr.main(flags)
        else:
            runpy.run_module(module, run_name="__main__")
    return [nr.parse_config([*argv, "--model", "models/tiny"]) for argv in handed_on]


@pytest.mark.parametrize("name", FINDINGS)
def test_the_arms_are_valid_commands_that_differ_and_take_equal_samples(name, monkeypatch):
    commands = list(lab.commands(FINDINGS[name]).values())
    configs = parsed(commands, monkeypatch)
    assert len(configs) == len(set(map(tuple, commands)))
    samples = {cfg.steps * cfg.prompts * cfg.samples for cfg in configs}
    assert (len(samples) == 1) == FINDINGS[name].equal
    known = {title for _, title, _ in sum((c.weights for c in FINDINGS[name].checks), [])}
    assert known <= FINDINGS[name].measures.keys()


def test_arms_of_the_same_name_have_the_same_command():
    """They share a folder of runs."""
    arms = [item for finding in FINDINGS.values() for item in lab.commands(finding).items()]
    assert len(dict(arms)) == len({(label, *command) for label, command in arms})


def test_the_stages_of_r1_are_valid_commands(monkeypatch):
    files = {name: Path(f"{name}.jsonl") for name in ("demos", "mix", "sums", "strings")}
    commands = r1.commands(7, Path("/tmp/a b{}"), files)
    assert "/tmp/a b{}/base" in commands["Zero"]
    assert len(parsed(commands.values(), monkeypatch)) == len(commands)


def test_a_finding_compares_its_arms_seed_by_seed(tmp_path, monkeypatch):
    """Accuracy after two steps of FAKE_RUN is 0.5 + (1 + seed) / 10; the other arm has 0.1 more."""
    monkeypatch.chdir(tmp_path)  # and back after the test: run() goes to ROOT
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    monkeypatch.setattr(lab, "BASE", {2: ""})
    (tmp_path / "fake.py").write_text(FAKE_RUN)
    measures = {"after": (lab.at("eval/accuracy"), lab.share),
                "after before": (lab.at("eval/accuracy", 0), lab.share)}
    finding = lab.Finding(
        "c", "1", [lab.gap("b", "a", "after", low=0)],
        {"a": "fake.py --fail 0", "b": "fake.py --fail 2"}, measures,
        {"accuracy": "eval/accuracy"}, seeds=(0, 1, 2))
    lab.run(finding, "finding", results=tmp_path)
    result = json.loads((tmp_path / "finding.json").read_text())
    assert result["values"]["a"]["after"] == [0.6, 0.7, 0.8] and result["commits"] == ["c-dirty"]
    text = (tmp_path / "finding.md").read_text()
    assert "| b | 80.0% (55.2% to 100.0%) |" in text
    assert "**agrees (the rule was not fixed before the runs)**" in text
    assert "| +0.100 (+0.100 to +0.100) | 0.000 (0.1) | agrees |" in text
    finding.checks[0].high = 0.09
    lab.write_page(finding, "finding", tmp_path)
    assert "**not run since the rule changed**" in (tmp_path / "finding.md").read_text()


@pytest.mark.parametrize("low, high, verdict", [
    (-0.05, 0.45, "agrees"), (-0.04, 1, "cannot tell"), (-1, 0.44, "cannot tell"),
    (0.45, 1, "contradicts"), (-1, -0.05, "contradicts")])
def test_a_check_asks_where_the_whole_interval_lies(low, high, verdict):
    """Gains of 0.1, 0.2 and 0.3: 0.2 +- 4.303 * 0.1 / sqrt(3), from -0.048 to 0.448."""
    values = {"a": {"x": [0.4, 0.5, 0.6], "x before": [0.3, 0.3, 0.3]}}
    check = lab.gain("a", "x", low=low, high=high)
    word, *interval, found = lab.judge(check, values, 0.05)
    assert word == verdict
    within(max(abs(interval - (0.2 + 4.303 * 0.1 / 3**0.5 * np.array([0, -1, 1])))), 1e-4)
    within(abs(found - lab.found_from(check, 0.1, 3, 0.05)), 1e-12)


@pytest.mark.parametrize("lows, wanted", [
    ([-0.05], "agrees"), ([-0.05, -0.05], "cannot tell"),  # two checks: 97.5 % each
    ([-1, -1], "agrees"), ([-1, 0], "cannot tell"), ([-1, 0, 0.9], "contradicts")])
def test_the_checks_of_a_finding_share_its_error_rate_and_must_all_agree(lows, wanted):
    """Gains as above: from -0.048 at 95 %, from -0.158 at 97.5 %."""
    values = {"a": {"x": [0.4, 0.5, 0.6], "x before": [0.3, 0.3, 0.3]}}
    checks = [lab.gain("a", "x", low=low) for low in lows]
    finding = lab.Finding("c", "1", checks, {}, {}, {}, seeds=(0, 1, 2))
    result = {"digest": lab.digest(finding), "values": values, "fixed": True}
    assert lab.verdict(finding, result) == wanted


def test_a_region_with_two_ends_needs_90_percent_for_each():
    settings = dict(low=0, named=0.15, sd=0.1)
    one, both = lab.Check("", [], **settings), lab.Check("", [], high=0.3, **settings)
    for check, wanted in (one, 0.8), (both, 0.9):
        n = lab.seeds_needed(check, 0.05)
        assert lab.t_power(1.5, n - 1, 0.05) < wanted <= lab.t_power(1.5, n, 0.05)
    assert lab.seeds_needed(one, 0.05) < lab.seeds_needed(both, 0.05) < lab.MOST


@pytest.mark.parametrize("commits, wanted", [
    (["before"], True), (["before", "after"], False), (["before", "none"], False)])
def test_a_rule_is_fixed_if_every_commit_of_the_runs_has_it(commits, wanted, monkeypatch):
    rules = {"before": '{"x": "rule"}', "after": '{"x": "another"}', "none": ""}
    monkeypatch.setattr(lab.stale, "show", lambda commit, path: rules[commit])
    assert lab.fixed("x", {"digest": "rule", "commits": commits}) is wanted


def test_the_number_of_seeds_finds_the_named_difference_in_80_percent():
    check, alpha = lab.Check("", [], low=0, named=0.1, sd=0.05), 0.05 / 3
    n = lab.seeds_needed(check, alpha)
    runs = np.random.default_rng(0).normal(check.named, check.sd, (n, 20_000))
    found = lab.DescrStatsW(runs).tconfint_mean(alpha)[0] > 0
    less = lab.DescrStatsW(runs[1:]).tconfint_mean(alpha)[0] > 0
    assert less.mean() < 0.8 < found.mean() + 0.01


def test_rewards_with_faults():
    texts = ["<think></think><answer>6</answer>", "<think>3+4=7</think><answer>7</answer>", "=="]
    assert faulty_rewards.leaky(texts, answer=["7"] * 3) == [1.0, 1.0, 0.0]
    assert faulty_rewards.guess(texts) == [1.0, 0.0, 0.0]
    assert faulty_rewards.one_equation(texts) == [0.0, 1.0, 0.0]


def test_code_is_compared_without_comments_and_docstrings():
    one, same, other = 'def f():\n    """A."""\n    return 1  # b', "def f(): return 1", "f = 1"
    assert stale.code(one) == stale.code(same) != stale.code(other)


def test_a_result_that_is_older_than_its_code_says_so():
    git = ROOT / ".git"
    if not shutil.which("git") or not git.exists() or (git / "shallow").exists():
        pytest.skip("no git history, or a shallow one: the commits of the results are not there")
    for path in stale.pages():
        text = path.read_text()
        assert bool(stale.changed(text)) == (stale.MARK in text), f"{path}: python -m bench.stale"
    for name, finding in FINDINGS.items():
        result = lab.stored(name)
        if lab.current(finding, result):
            assert result["fixed"] == lab.fixed(name, result), name


def test_the_tables_are_those_of_the_rules_and_the_results():
    """If this fails: python -m learn.lab.lab --fix, before the runs."""
    rules = json.loads((ROOT / lab.RULES).read_text())
    assert rules == {name: lab.digest(finding) for name, finding in FINDINGS.items()}
    readme = (ROOT / "learn/lab/README.md").read_text()
    for chapter in lab.BASE:
        assert readme.split(f"<!-- chapter {chapter} -->")[1].strip() == lab.lab_table(chapter)
    chapter = (ROOT / "learn/lab/chapter_1.md").read_text()
    for arm, runs in json.loads((lab.RESULTS / "r1.json").read_text()).items():
        sums = seeds.cell([run["sums"] for run in runs], seeds.share, " to ")
        assert f"| {arm} | {sums} |" in chapter


def test_the_power_of_few_seeds_and_large_effects_is_right():
    """scipy's noncentral t is NaN for many of them. Compared with statsmodels where it is not."""
    from statsmodels.stats.power import TTestPower
    close(lab.t_power(0.8, 10, 0.05), TTestPower().power(0.8, 10, 0.05), 1e-6)
    assert lab.seeds_needed(lab.gap("a", "b", named=0.2, sd=0.01), 0.05 / 3) == 3
    for n, checks, wanted in ((3, 3, 5.67), (3, 5, 7.32), (4, 5, 3.72)):  # by integration
        found = lab.found_from(lab.gap("a", "b", low=0, named=0.2, sd=0.01), 1.0, n, 0.05 / checks)
        assert abs(found - wanted) < 0.01
