"""Whole runs of the script, in processes of their own: what they leave, kill -9, and two ranks."""
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

import nano_rlvr as nr
from bench.diff import TIMED
from conftest import ENV, EPS, ROOT, TORCHRUN, make_config, read_rows, within
from examples import async_rl
from runtime import checkpoint

FLAGS = ("--name run --steps 2 --prompts 8 --samples 4 --eval_size 9 --eval_n 4 --eval_every 2 "
         "--save_every 1 --max_tokens 64 --lr_end 1 --mismatch_bound 20").split()  # as async_rl.py
PARITY = 10_000 * EPS  # see test_engines.py


def start(*argv, launcher=(sys.executable,), script=("nano_rlvr.py",)):
    env = ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB: less depends on what other programs leave
    return subprocess.Popen([*launcher, *script, *argv], env=env, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process):
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    return output


def left_by(run):
    """What a run has left that does not depend on time: checksums, metrics, rollouts, answers."""
    manifest = json.loads((run / "step-2/manifest.json").read_text())
    weights = {name: x for name, x in manifest.items() if name.endswith(".safetensors")}
    metrics = [{name: x for name, x in row.items() if not name.startswith(TIMED)}
               for row in read_rows(run / "metrics.jsonl")]
    return weights, metrics, read_rows(run / "rollouts.jsonl"), read_rows(run / "eval.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two steps, without a break, and what the run has printed in it."""
    out = tmp_path_factory.mktemp("whole")
    printed = finish(start(*FLAGS, "--out", out))
    (out / "run/printed").write_text(printed)
    return out / "run"


def test_a_killed_run_continues_bit_for_bit_also_with_an_asynchronous_sampler(run, tmp_path):
    """Here a copy of what kill -9 leaves while a checkpoint is written; bench/faults.py
    kills real ones. With --lag 0 examples/async_rl.py has the bits of a synchronous run."""
    killed = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("final", "*.png"))
    (killed / "step-2").rename(killed / "step-2.part")
    (killed / "step-2.part/manifest.json").unlink()
    finish(start("--resume", killed, "--lag", "0", script=("-m", "examples.async_rl")))
    assert left_by(killed) == left_by(run)
    assert not list(killed.glob("*.part")) and (killed / "final").exists()


def test_two_ranks_have_the_first_step_of_one_and_stop_with_a_checkpoint_if_torchrun_is_killed(
        run, tmp_path):
    """In float32: sums of a few hundred terms of size 1, with rounding of some EPS.

    vLLM samples the same tokens for batches of another size, unless one of 2,000 draws falls
    between two roundings of a probability (EPS wide each: 1 machine in 4,000)."""
    stopped = start(  # --resume: there is no run yet, so it starts one
        *FLAGS, "--out", tmp_path, "--resume", "--steps", "50", launcher=(*TORCHRUN, "2"))
    while not list((tmp_path / "run").glob("step-1*")):  # it is being written or there
        assert stopped.poll() is None, stopped.communicate()[0][-3000:]
        time.sleep(0.01)
    stopped.kill()  # its ranks get SIGTERM
    output = stopped.communicate()[0]  # returns when the ranks have ended
    newest = checkpoint.newest_whole(tmp_path / "run")
    said = f"nano_rlvr: stopped by SIGTERM at {newest.name.replace('-', ' ')};"
    assert output.count(said) == 1, output
    one, two = read_rows(run / "metrics.jsonl")[0], read_rows(tmp_path / "run/metrics.jsonl")[0]
    for name in ("reward/mean", "completion/length", "loss", "grad_norm", "entropy",
                 "eval/accuracy", "eval/length", "eval/n"):
        within(abs(one[name] - two[name]), 100 * EPS * max(1, abs(one[name])))


def test_a_process_alone_listens_on_no_network(group):
    listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    assert listening <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("lag", [1, 2])
def test_an_asynchronous_step_asks_for_rollouts_of_the_weights_before_the_step_lag_earlier(
        monkeypatch, tmp_path, lag):
    """Asks the sampler's process, in whose place is `submit`."""
    cfg = make_config(steps=6, out=str(tmp_path), name="run")
    (tmp_path / "run/step-2").mkdir(parents=True)  # a checkpoint
    asked, answer = [], Future()
    answer.set_result(([], [], {}))

    def submit(function, *args):
        if function is async_rl.answer:
            path, step = args
            asked.append((step, load_file(path)["step"].item()))
        return answer

    monkeypatch.setattr(async_rl, "ProcessPoolExecutor", lambda *_: SimpleNamespace(submit=submit))
    remote = async_rl.RemoteSampler(cfg, lag)
    for remote.version in range(-1, 5):
        step = remote.version + 1
        remote.reload_weights([("step", torch.tensor(step))])
        remote.collect(SimpleNamespace(cfg=cfg, metrics={}), step)
    assert asked == [(step, max(0, step - lag)) for step in range(6)]
    # of the last step, and of a run that goes on from the checkpoint: each with the lag before it
    kept = {int(path.name) for path in remote.folder.glob("[0-9]*")}
    assert kept == {*range(5 - lag, 6), *range(2 - lag, 3)}


@pytest.mark.numeric
def test_metrics_hold_every_diagnostic(run):
    first, second, last = read_rows(run / "metrics.jsonl")
    names = set("""
        reward/mean reward/gsm8k group/zero_std completion/length completion/truncated loss kl ratio
        clip_ratio trained entropy grad_norm lr mismatch/mean_abs mismatch/max mismatch/k3
        seconds/rollout seconds/reward seconds/update seconds/sync tokens_per_second tokens mfu
        memory/rollout memory/update""".split())
    assert names <= first.keys() and names <= second.keys()
    assert second["tokens"] == 32 * second["completion/length"] and 0 < second["mfu"] < 1
    within(second["mismatch/max"], PARITY)
    # k3 is exp(d) - d - 1: where policy and reference are the same, rounding leaves about EPS of it
    within(abs(first["kl"]), 10 * EPS)
    assert second["kl"] > 100 * EPS
    assert {f"eval/{name}" for name in ("accuracy", "low", "high", "length", "truncated", "mean@4",
                                        "pass@2", "pass@4", "maj@4")} <= last.keys()
    assert "eval/accuracy" in first and "eval/accuracy" not in second and last["step"] == 2


def test_the_first_of_two_evaluations_shows_prompts_and_completions(run):
    printed = (run / "printed").read_text()
    assert printed.count("evaluation of 9 examples") == 2
    assert printed.count("a prompt: ") == 2 and printed.count("a completion (") == 3


@pytest.mark.numeric
def test_a_run_leaves_a_line_per_sample_its_settings_and_the_weights_of_each_step(run):
    rows, lr = read_rows(run / "rollouts.jsonl"), nr.flags.model_row("models/tiny", nr.Config)["lr"]
    assert len(rows) == 2 * 32
    for group in (rows[i:i + 4] for i in range(0, len(rows), 4)):
        assert len({r["prompt"] for r in group}) == 1
        within(abs(sum(r["advantage"] for r in group)), 100 * EPS)
        assert all(r["reward"] == r["parts"]["gsm8k"] for r in group)
    about = json.loads((run / "config.json").read_text())
    assert about["config"]["lr"] == lr and "commit" in about
    assert {"torch", "deepspeed", "transformers", "python"} <= about["versions"].keys()
    base, one, final = (load_file(f"{folder}/model.safetensors")
                        for folder in (make_config().model, run / "step-1", run / "final"))
    first, both = (max((a[name] - base[name]).abs().max().item() for name in base)
                   for a in (one, final))
    # AdamW's first step moves no weight further than lr plus rounding: EPS for weights below 2
    assert 0 < first <= 1.01 * lr < both
