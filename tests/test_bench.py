"""Each bench: its main path at the smallest setting. What it starts for minutes is simulated."""
import importlib
import json
import subprocess
import sys

import pytest

import nano_rlvr as nr
from bench import random_model
from conftest import FAKE_RUN
from measure import common, seeds
from runtime import memory


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys, llm):
    """bench(name) -> a module whose processes are this one, and whose results are in tmp_path."""
    def here(script, *argv, launcher=None, **environment):
        importlib.import_module(script.removesuffix(".py")).main([str(x) for x in argv])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(common, "run_apart", here)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(nr, "Sampler", lambda cfg: llm)
    monkeypatch.setattr(nr, "TokenLogps", nr.TokenLogps)  # which a bench changes
    return importlib.import_module


def test_benches_of_one_process(bench, llm):
    bench("sampling").main([], prompts=2, samples=2, max_tokens=8)
    bench("habits").main(["--eval_size", "64"])
    bench("plan").plan("Qwen2.5-1.5B", 24)
    bench("ranks").main(["paper"])
    assert min(bench("roofline").measure_device()[1:5]) > 0
    bench("roofline").measure_python(llm, 16, 2)
    bench("verifiers").measure("name", "gsm8k", ["#### 1"] * 4, {"answer": ["1", "2"] * 2}, pools=1)


def test_benches_of_updates(bench, monkeypatch, tmp_path):
    bench("update").main(f"--model {common.TINY} --vocab 256 --sequences 8 --max_tokens 30 "
                         "--rounds 1".split())
    size = dict(layers=1, vocab=512, pack_tokens=64, max_tokens=30)
    monkeypatch.setattr(bench("scale"), "BASE", size)
    monkeypatch.setattr(bench("scale"), "AXES", {"rollouts": [{"sequences": n} for n in (2, 4)]})
    bench("scale").main()
    monkeypatch.setattr(bench("ranks"), "held", lambda: 0)  # of tensors of other tests
    monkeypatch.setattr(memory, "BUCKET", memory.BUCKET)  # which a bench changes
    monkeypatch.setitem(random_model.SHAPES, "small", random_model.SHAPES["tiny"])
    bench("ranks").main(["reduce"])
    assert len(json.loads((tmp_path / "ranks_reduce.json").read_text())) == 6


def test_benches_whose_runs_are_given(bench, monkeypatch, tmp_path):
    stages = dict.fromkeys(bench("vs_trl").STAGES, 1.0) | {"length": 9.0, "mismatch": 0.0}
    monkeypatch.setattr(common, "run_apart", lambda *_, **__: [stages] * 3)
    bench("vs_trl").main(["--prompts", "2"])
    monkeypatch.setattr(common, "run_apart", lambda *_, **__: [])
    rows = [{"reward/mean": 0.5, "mismatch/mean_abs": 0.0}] * 12
    monkeypatch.setattr(common, "read", lambda folder: rows)
    bench("stale").main()
    monkeypatch.setattr(bench("faults"), "differences", lambda a, b: [])
    monkeypatch.setattr(bench("faults"), "start", lambda folder, *_, **__: subprocess.Popen(
        ["bash", "-c", f"mkdir -p {folder}; sleep 0.2"]))
    assert {result for _, result in bench("faults").kill(tmp_path, times=2)} == {"equal"}
    assert subprocess.run(["bash", "-n", common.ROOT / "bench/gpu.sh"]).returncode == 0


def test_runs_are_made_once_and_reported_with_their_interval(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE_RUN)
    argv = ["--out", str(tmp_path), "--seeds", "3", "--setting", "a=--fail 0", "--", sys.executable,
            str(tmp_path / "fake.py")]
    seeds.main(argv)
    seeds.main(argv)  # starts none: mkdir() would fail
    wanted = "| a | 50.0% | 70.0% (45.2%–94.8%) | 10.0 | 10.0 |"  # 4.303 * 0.1 / sqrt(3)
    assert wanted in (tmp_path / "seeds.md").read_text()
    with pytest.raises(ValueError, match="choose another --out"):
        seeds.main([*argv, "--lr", "1"])
    argv[5] = "b=--fail 1"
    with pytest.raises(ValueError, match="b-0 failed; look at .*b-0.log"):
        seeds.main(argv)
