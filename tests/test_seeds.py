"""bench/seeds.py and curves.py: the runs, the report."""
import json
import sys

import pytest

import curves
import nano_rlvr as nr
import seeds

# writes what a run leaves: an evaluation per step, better with each seed; --fail 1 fails
FAKE = """
import json, pathlib, sys
words = [word for word in sys.argv[1:] if word != "--resume"]
flags = dict(zip(words[::2], words[1::2]))
sys.exit(3) if flags["--fail"] == "1" else None
folder = pathlib.Path(flags["--out"], flags["--name"])
folder.mkdir()
about = {"command": " ".join(sys.argv), "config": {"steps": 2}, "commit": "c", "device": "d"}
(folder / "config.json").write_text(json.dumps(about | {"versions": {}}))
for step in range(3):
    accuracy = 0.5 + step * (1 + int(flags["--seed"])) / 20
    row = {"step": step, "eval/accuracy": accuracy, "eval/n": 64, "eval/length": 10.0,
           "reward/mean": accuracy, "completion/length": 9.0}
    (folder / "metrics.jsonl").open("a").write(json.dumps(row) + "\\n")
"""


def test_runs_are_made_once_and_reported_with_their_interval(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    argv = ["--out", str(tmp_path), "--seeds", "3", "--setting", "a=--fail 0", "--", sys.executable,
            str(tmp_path / "fake.py")]
    seeds.main(argv)
    seeds.main(argv)  # starts none: mkdir() would fail
    wanted = "| a | 50.0% | 70.0% (45.2%–94.8%) | 10.0 | 10.0 |"  # 4.303 * 0.1 / sqrt(3)
    assert wanted in (tmp_path / "seeds.md").read_text()
    assert (tmp_path / "seeds.png").stat().st_size > 10_000
    runs = json.loads((tmp_path / "seeds.json").read_text())["runs"]
    assert [len(run["evaluations"]) for run in runs] == [3, 3, 3]
    with pytest.raises(ValueError, match="--seeds 2 or more"):
        seeds.main(["--seeds", "1"])
    with pytest.raises(ValueError, match="choose another --out"):
        seeds.main([*argv, "--lr", "1"])
    argv[5] = "b=--fail 1"
    with pytest.raises(ValueError, match="b-0 failed; look at .*b-0.log"):
        seeds.main(argv)


def test_each_row_of_the_ablation_adds_flags_that_end_in_the_preset():
    flags = [command[2:] for command in curves.dapo()[1].values()]
    assert all(new[:len(old)] == old and len(new) > len(old) for old, new in zip(flags, flags[1:]))
    last = nr.parse_config(flags[-1])
    assert all(getattr(last, name) == value for name, value in nr.ALGOS["dapo"].items())
