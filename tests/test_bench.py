"""Each bench: its main path at the smallest setting. What it starts for minutes is simulated."""
import importlib
import json
import subprocess
import sys

import pytest

import nano_rlvr as nr
from bench import common, faults, habits, plan, random_model, ranks, roofline, seeds, update, vs_trl
from conftest import FAKE_RUN
from runtime import memory


@pytest.fixture
def here(tmp_path, monkeypatch, capsys, llm):
    """The processes of a bench are this one, and its results are in tmp_path."""
    def run_apart(name, *argv, launcher=None, **environment):
        importlib.import_module(f"bench.{name}").main([str(x) for x in argv])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(common, "run_apart", run_apart)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(nr, "Sampler", lambda cfg: llm)
    monkeypatch.setattr(nr, "TokenLogps", nr.TokenLogps)  # which bench/update.py changes


def test_benches_of_one_process(here, llm):
    habits.main(["--eval_size", "64"])
    plan.plan("Qwen2.5-1.5B", 24)
    assert len(roofline.paper()) == 16
    assert min(roofline.measure_device()[1:5]) > 0
    assert set(roofline.measure_python(llm, 16, 2)) == set(roofline.PARTS)


def test_benches_of_updates(here, monkeypatch, tmp_path):
    update.main(f"--model {common.TINY} --vocab 256 --sequences 8 --max_tokens 30 "
                "--rounds 1".split())
    monkeypatch.setattr(ranks, "held", lambda: 0)  # of tensors of other tests
    monkeypatch.setattr(memory, "BUCKET", memory.BUCKET)  # which bench/ranks.py changes
    monkeypatch.setitem(random_model.SHAPES, "small", random_model.SHAPES["tiny"])
    ranks.main([])
    assert len(json.loads((tmp_path / "ranks_reduce.json").read_text())) == 6


def test_benches_whose_runs_are_given(here, monkeypatch, tmp_path):
    stages = dict.fromkeys(vs_trl.STAGES, 1.0) | {"length": 9.0, "mismatch": 0.0}
    monkeypatch.setattr(common, "run_apart", lambda *_, **__: [stages] * 3)
    vs_trl.main(["--prompts", "2"])
    monkeypatch.setattr(faults, "differences", lambda a, b: [])
    monkeypatch.setattr(faults, "start", lambda folder, *_, **__: subprocess.Popen(
        ["bash", "-c", f"mkdir -p {folder}; sleep 0.2"]))
    assert {result for _, result in faults.kill(tmp_path, times=2)} == {"equal"}
    assert subprocess.run(["bash", "-n", common.ROOT / "bench/gpu.sh"]).returncode == 0


@pytest.mark.parametrize("command", [
    "/x/nano_rlvr.py --steps 2 --seed 0", "python -m examples.dpo --steps 2 --seed 0",
    "python -m torch.distributed.run --nproc_per_node 2 nano_rlvr.py --steps 2 --seed 0",
    "torchrun --nproc_per_node 2 -m examples.dpo --steps 2 --seed 0"])
def test_the_flags_of_a_run_are_what_follows_its_script_or_module(command):
    assert seeds.own_flags(command) == "--steps 2"


def test_runs_are_made_once_and_reported_with_their_interval(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE_RUN)
    argv = ["--out", str(tmp_path), "--seeds", "3", "--setting", "a=--fail 0", "--", sys.executable,
            str(tmp_path / "fake.py")]
    seeds.main(argv)
    seeds.main(argv)  # starts none: mkdir() would fail
    seeds.run_all({"c": [*argv[7:], "--fail", "0"]}, [0], tmp_path, keep_weights=False)
    assert {path.parent.name[0] for path in tmp_path.glob("*/*/")} == {"a"}
    wanted = "| a | 50.0% | 70.0% (45.2%–94.8%) | 10.0 | 10.0 |"  # 4.303 * 0.1 / sqrt(3)
    assert wanted in (tmp_path / "seeds.md").read_text()
    folders = [tmp_path / f"a-{seed}" for seed in range(3)]
    seeds.report({"a": folders[:2], "b": [folders[2], folders[1]]}, tmp_path / "two")
    [head, _, a, b, *_] = (tmp_path / "two.md").read_text().split("\n")
    assert [line.split(" | ")[-1] for line in (head, a, b)] == [
        "points above a |", " |", "+10.0 (-117.1 to +137.1) |"]  # 12.706 * 14.1 / sqrt(2)
    with pytest.raises(ValueError, match="choose another --out"):
        seeds.main([*argv, "--lr", "1"])
    with pytest.raises(ValueError, match="b-0 failed; look at .*b-0.log"):
        seeds.main([*argv[:5], "b=--fail 1", *argv[6:]])
