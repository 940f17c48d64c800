"""bench/seeds.py: the interval, the rule of a race, what counts as finished, and the table."""
import json
import math
import random
import sys
from statistics import fmean

import pytest

from bench import curves, seeds
from conftest import ROOT, close, within


def test_t_quantiles_are_those_of_closed_forms():
    close(seeds.t_quantile(1), math.tan(0.95 * math.pi / 2), 1e-6)  # Cauchy: P(|T| <= t) = 2/pi atan(t)
    close(seeds.t_quantile(2), 0.95 * math.sqrt(2 / (1 - 0.95**2)), 1e-6)  # P(|T| <= t) = t / sqrt(2 + t^2)
    within(abs(seeds.t_quantile(10**4) - 1.959964), 1e-3)  # the normal distribution


def test_for_four_degrees_of_freedom_the_probability_is_the_polynomial_in_sin():
    for level in (0.5, 0.95, 0.99):
        s = math.sin(math.atan(seeds.t_quantile(4, level) / 2))
        close(1.5 * (s - s**3 / 3), level, 1e-7)  # integral of cos^3 from 0, divided by 2/3


def test_the_interval_contains_the_true_mean_in_95_of_100_cases():
    rng, n = random.Random(0), 4000
    hits = 0
    for _ in range(n):
        _, low, high = seeds.mean_interval([rng.gauss(7, 3) for _ in range(5)])
        hits += low <= 7 <= high
    within(abs(hits / n - 0.95), 4 * math.sqrt(0.95 * 0.05 / n))  # four standard errors


def test_the_interval_by_hand():
    mean, low, high = seeds.mean_interval([1.0, 2.0, 3.0])  # s = 1, t(2) = 4.302653
    close([mean, low, high], [2, 2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)], 1e-6)


@pytest.mark.parametrize("own, rivals, step", [
    ({0: (0.4, 0.5), 10: (0.4, 0.5)}, [{0: (0.4, 0.5), 10: (0.6, 0.7)}], 10),
    ({0: (0.4, 0.5), 10: (0.4, 0.5)}, [{10: (0.5, 0.7)}], None),  # the bounds touch
    ({10: (0.6, 0.7), 20: (0.6, 0.7)}, [{10: (0.1, 0.2)}, {20: (0.8, 0.9)}], 20),  # one rival is enough
    ({10: (0.4, 0.5)}, [{20: (0.8, 0.9)}], None),  # only the same step counts
    ({0: (0.1, 0.2)}, [{0: (0.8, 0.9)}], None),  # step 0: nothing is trained yet
    ({10: (0.4, 0.5)}, [], None), ({}, [{10: (0.4, 0.5)}], None)])
def test_a_run_is_stopped_when_it_is_below_another_one_at_the_same_step(own, rivals, step):
    assert seeds.fell_behind(own, rivals) == step


def write_run(folder, command, accuracies, steps=20):
    """A folder as a run leaves it: an evaluation every 10 steps, with an interval of +-0.05."""
    folder.mkdir(parents=True)
    about = {"command": command, "commit": "c", "device": "d", "versions": {"python": "3"}}
    (folder / "config.json").write_text(json.dumps(about | {"config": {"steps": steps, "seed": 0}}))
    rows = [{"step": 10 * i, "eval/accuracy": a, "eval/low": a - 0.05, "eval/high": a + 0.05, "eval/n": 64,
             "eval/length": 10.0, "reward/mean": a, "completion/length": 9.0}
            for i, a in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_finished_after_its_last_evaluation_and_has_the_same_flags(tmp_path):
    command = "python nano_rlvr.py --lr 1e-4 --seed 0 --out x --name y --resume".split()
    assert not seeds.finished(tmp_path / "none", command)
    write_run(tmp_path / "half", "nano_rlvr.py --lr 1e-4 --seed 0", [0.5, 0.6])
    assert not seeds.finished(tmp_path / "half", command)
    write_run(tmp_path / "whole", "nano_rlvr.py --lr 1e-4 --seed 0", [0.5, 0.6, 0.7])
    assert seeds.finished(tmp_path / "whole", command)
    with pytest.raises(ValueError, match="choose another --out"):
        seeds.finished(tmp_path / "whole", [*command[:3], "1e-3", *command[4:]])


# writes metrics.jsonl as a run would, an evaluation per step; at step --wait it stays until it is stopped
FAKE = """
import json, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(flags["--out"], flags["--name"])
folder.mkdir()
about = {"command": " ".join(sys.argv), "config": {"steps": 40, "seed": 0}}
(folder / "config.json").write_text(json.dumps(about))
for step in range(41):
    accuracy = 0.5 + float(flags["--gain"]) * step
    row = {"step": step, "eval/accuracy": accuracy, "eval/low": accuracy - 0.05, "eval/high": accuracy + 0.05}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
    if step == int(flags["--wait"]):
        time.sleep(600)
"""


def test_a_race_stops_the_slower_setting_and_says_that_the_choice_is_biased(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "POLL", 0.05)
    (tmp_path / "fake.py").write_text(FAKE)
    command = [sys.executable, str(tmp_path / "fake.py"), "--gain"]
    settings = {"good": [*command, "0.01", "--wait", "99"], "bad": [*command, "0", "--wait", "13"]}
    folders = seeds.run_all(settings, [0], tmp_path, race=True)
    [good], [bad] = folders["good"], folders["bad"]
    assert seeds.read(good)[-1]["step"] == 40 and 11 <= seeds.read(bad)[-1]["step"] <= 13
    text = seeds.ranking(folders)
    assert "race-bad-0  behind at step 11" in text and "biased upwards" in text
    assert text.index("race-good-0") < text.index("race-bad-0")
    assert seeds.run_all(settings, [0], tmp_path, race=True) == folders  # starts none: mkdir() would fail


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "POLL", 0.05)
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match="run-0, run-1 failed; look at .*run-0.log"):
        seeds.run_all({"+ run": [sys.executable, str(tmp_path / "fail.py")]}, [0, 1], tmp_path, jobs=2)


def test_the_report_has_means_intervals_and_a_picture(tmp_path):
    folders = {"a": [], "b": []}
    for label, last in (("a", [0.7, 0.8, 0.9]), ("b", [0.6, 0.6, 0.6])):
        for seed, accuracy in enumerate(last):
            folders[label].append(tmp_path / f"{label}-{seed}")
            write_run(folders[label][-1], f"nano_rlvr.py --lr 1e-4 --seed {seed}", [0.5, 0.55, accuracy])
    seeds.report(folders, tmp_path / "table", "python bench/seeds.py")
    page = (tmp_path / "table.md").read_text()
    assert "| a | 50.0% | 80.0% (55.2%–100.0%) | 10.0 | 10.0 |" in page  # 0.8 +- 4.303 * 0.1 / sqrt(3)
    assert "| b | 50.0% | 60.0% | 10.0 | 10.0 |" in page and "3 seeds per row" in page
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert [run["setting"] for run in numbers["runs"]] == list("aaabbb")
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_the_command_line_gives_settings_of_a_command():
    common = ["python", "nano_rlvr.py", "--algo", "rft"]
    _, settings = seeds.parse(["--setting", "x=--lr 1", "--setting", "y=--lr 2 --steps 3", "--", *common])
    assert settings == {"x": [*common, "--lr", "1"], "y": [*common, "--lr", "2", "--steps", "3"]}
    args, settings = seeds.parse([])
    assert args.seeds == 5 and args.write == ROOT / "bench/results/learn" and len(settings) == 2
    for wrong in (["--seeds", "1"], ["--jobs", "0"], ["--race"], ["--setting", "x=--lr 1"]):
        with pytest.raises(ValueError):
            seeds.parse(wrong)


def test_each_row_of_the_ablation_adds_flags_that_end_in_the_preset():
    import nano_rlvr as nr
    _, settings, *_ = curves.dapo()
    flags = [command[2:] for command in settings.values()]
    assert all(new[:len(old)] == old and len(new) > len(old) for old, new in zip(flags, flags[1:]))
    last, preset = nr.parse_config(flags[-1]), nr.ALGOS["dapo"]
    assert {name: getattr(last, name) for name in preset} == preset


def test_metrics_over_steps():
    rows = [{"step": 0, "eval/accuracy": 0.5, "draws": 1}, {"step": 1, "draws": 3},
            {"step": 2, "eval/accuracy": 1}]
    assert seeds.series(rows, "eval/accuracy") == {0: 0.5, 2: 1}
    assert seeds.series(rows, curves.rollouts) == {0: 256, 1: 768}
    assert curves.at("eval/accuracy", -1)(rows) == 1 and curves.at("eval/accuracy", 0)(rows) == 0.5
    assert curves.mean("draws")(rows) == fmean([1, 3]) and curves.mean("draws", 1)(rows) == 3
