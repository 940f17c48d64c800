"""Every preset learns: eight real steps (vLLM, DeepSpeed) on a toy reward - 1 for working the sum out, right or not."""
import json
from statistics import fmean

import pytest
from conftest import make_config

import nano_rlvr as nr
import rewards

STEPS, MARGIN = 8, 0.15  # the bundled model works out about half of its answers before; a coin's standard error here is 0.04


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text("def worked_out(completions, **_):\n    return [float('=' in c) for c in completions]\n")
    with rewards.Verifier(f"{path}:worked_out", max_tokens=96, overlong_buffer=19) as verifier:
        yield verifier


@pytest.mark.parametrize("algo", nr.ALGOS)
def test_preset_raises_the_reward(fresh_llm, tokenizer, verifier, tmp_path, algo):
    cfg = make_config(**nr.ALGOS[algo] | dict(algo=algo, lr=2e-4, lr_end=1.0, steps=STEPS, prompts=16, samples=8, eval_size=8, out=str(tmp_path), name=algo))
    _, train_set, eval_set = nr.prepare(cfg)
    nr.train(cfg, fresh_llm, nr.make_policy(cfg), nr.make_reference(cfg), train_set, eval_set, verifier, nr.Log(cfg, tokenizer))
    curve = [m["reward/mean"] for m in map(json.loads, (tmp_path / algo / "metrics.jsonl").read_text().splitlines()) if "loss" in m]
    print("CURVE", cfg.seed, algo, [round(x, 3) for x in curve], round(fmean(curve[-2:]) - curve[0], 3))
    assert fmean(curve[-2:]) > curve[0] + MARGIN, curve
