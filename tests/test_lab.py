"""learn/lab/: the commands of each finding, its rule, and the table made from the results."""
import json
import runpy
import sys
from pathlib import Path

import pytest

import nano_rlvr as nr
from conftest import FAKE_RUN, ROOT, within
from learn.lab import lab, r1

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
    assert len({cfg.steps * cfg.prompts * cfg.samples for cfg in configs}) == 1


def test_the_stages_of_r1_are_valid_commands(monkeypatch):
    files = {name: Path(f"{name}.jsonl") for name in ("demos", "mix", "sums", "strings")}
    commands = r1.commands(7, Path("/tmp/a b{}"), files)
    assert "/tmp/a b{}/base" in commands["Zero"]
    assert len(parsed(commands.values(), monkeypatch)) == len(commands)


def test_a_finding_compares_its_arms_seed_by_seed(tmp_path, monkeypatch):
    """Accuracy after two steps of FAKE_RUN is 0.5 + (1 + seed) / 10; the other arm has 0.1 more."""
    monkeypatch.chdir(tmp_path)  # and back after the test: run() goes to ROOT
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    monkeypatch.setattr(lab, "BASE", "")
    (tmp_path / "fake.py").write_text(FAKE_RUN)
    measures = {"after": (lab.at("eval/accuracy"), lab.share),
                "after before": (lab.at("eval/accuracy", 0), lab.share)}
    finding = lab.Finding("c", "1", "r", {"a": "fake.py --fail 0", "b": "fake.py --fail 2"},
                          measures, lambda values: lab.above(values, "b", "a", "after"),
                          {"accuracy": "eval/accuracy"})
    lab.run(finding, "finding", results=tmp_path)
    values = json.loads((tmp_path / "finding.json").read_text())["values"]
    assert values["a"]["after"] == [0.6, 0.7, 0.8]
    within(max(abs(x - 0.1) for x in lab.gap(values, "b", "a", "after")), 1e-12)
    within(max(abs(x - y) for x, y in zip(lab.gain(values, "a", "after"), (
        0.2, 0.2 - 4.303 * 0.1 / 3**0.5, 0.2 + 4.303 * 0.1 / 3**0.5))), 1e-12)
    assert not lab.above(values, "a", "b", "after")
    assert lab.near(values, "a", "b", "after", 0.11)
    assert not lab.near(values, "a", "b", "after", 0.09)
    text = (tmp_path / "finding.md").read_text()
    assert "| b | 80.0% (55.2% to 100.0%) |" in text and "**agrees**" in text


def test_the_results_are_those_of_the_files_and_the_table_shows_them():
    for name, finding in FINDINGS.items():
        result = lab.stored(name)
        if result:
            assert result["digest"] == lab.digest(finding), f"run {name}.py again"
            assert bool(finding.judge(result["values"])) == result["agrees"]
    readme = (ROOT / "learn/lab/README.md").read_text()
    assert readme.split("<!-- table -->")[1].strip() == lab.lab_table()
    assert (lab.RESULTS / "r1.md").read_text() in (ROOT / "learn/lab/chapter_1.md").read_text()
    examples = (ROOT / "examples/README.md").read_text()
    assert examples == lab.examples_table(examples)
