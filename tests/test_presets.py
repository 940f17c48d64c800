"""Every preset learns a toy task in eight real steps: reward 1 for working the sum out, right or not."""
import json
from statistics import fmean

import pytest

import data
import nano_rlvr as nr
import rewards
from conftest import make_config
from runtime.checkpoint import Checkpoints
from runtime.log import Log

STEPS = 8
MARGIN = 0.15  # the bundled model works out about half of its answers; the standard error here is 0.04


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text("def worked_out(completions, **_):\n    return [float('=' in c) for c in completions]\n")
    with rewards.Verifier(f"{path}:worked_out", max_tokens=96, overlong_buffer=19) as verifier:
        yield verifier


@pytest.mark.parametrize("algo", nr.ALGOS)
def test_preset_raises_the_reward(fresh_llm, tokenizer, verifier, tmp_path, algo):
    toy = dict(algo=algo, lr=2e-4, lr_end=1.0, steps=STEPS, prompts=16, samples=8, eval_size=8,
               out=str(tmp_path), name=algo)
    cfg = make_config(**nr.ALGOS[algo] | toy)
    train_set, eval_set = data.load_splits(cfg, tokenizer)
    engine, ref, log = nr.make_policy(cfg), nr.make_reference(cfg), Log(cfg, tokenizer)
    nr.train(cfg, fresh_llm, engine, ref, train_set, eval_set, verifier, log, Checkpoints(cfg, log))
    lines = map(json.loads, (tmp_path / algo / "metrics.jsonl").read_text().splitlines())
    curve = [m["reward/mean"] for m in lines if "loss" in m]
    assert fmean(curve[-2:]) > curve[0] + MARGIN, curve
