"""The same numbers on one process and on two, with the real DeepSpeed, and the whole script under torchrun."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ENV, EPS, EXACT, ROOT, close, make_config, within

import nano_rlvr as nr

pytestmark = pytest.mark.numeric
ENV = ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize("aggregate, stage, tied", [("sequence", 2, True), ("token", 3, True), ("token", 3, False), ("constant", 1, True)])
def test_two_ranks_take_the_step_of_one(tmp_path, aggregate, stage, tied):
    """In float64 (rank_worker.py), every tensor to 1e-9 of the way it went: see test_ten_steps_end_at_trls_weights on AdamW."""
    model, results = make_config().model, []
    start = engines.load_model(make_config())
    if not tied:
        start.config.tie_word_embeddings, start.lm_head.weight = False, torch.nn.Parameter(start.lm_head.weight.clone())
        start.save_pretrained(model := str(tmp_path / "untied"))
    for launcher, name in (([sys.executable], "one"), (TORCHRUN, "two")):
        subprocess.run(launcher + [ROOT / "tests/rank_worker.py", tmp_path / name, model, aggregate, str(stage)], check=True, env=ENV)
        results.append(torch.load(tmp_path / name))
    (one, a), (two, b) = results
    assert a.keys() == b.keys()
    for name in a:
        close(b[name], a[name])
    start = start.state_dict()
    for name, w in one.items():
        within((w - two[name]).norm(), EXACT * (w - start[name]).norm())


def test_the_script_runs_under_torchrun_and_sees_the_same_first_step(tmp_path):
    """In float32: sums of a few hundred terms whose sizes are about 1, so that rounding is some EPS.

    vLLM samples the same tokens for batches of another size, unless one of 700 draws falls between two roundings of a
    probability (EPS wide each: 1 machine in 10,000)."""
    args = [ROOT / "nano_rlvr.py", "--steps", "1", "--prompts", "4", "--samples", "4", "--eval_size", "9", "--max_prompt", "64", "--out", tmp_path]
    subprocess.run([sys.executable] + args + ["--name", "one"], check=True, env=ENV)
    subprocess.run(TORCHRUN + args + ["--name", "two"], check=True, env=ENV)
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for name in ("reward/mean", "completion/length", "loss", "grad_norm", "entropy", "eval/accuracy", "eval/length", "eval/n"):
        within(abs(one[0][name] - two[0][name]), 100 * EPS * max(1, abs(one[0][name])))
    assert one[1]["eval/accuracy"] == two[1]["eval/accuracy"]
