"""examples/what_if.py, examples/blame.py and bench/replay.py, on a run of four steps."""
import argparse
import json
import shutil
import subprocess
import sys

import pytest
import torch

import nano_rlvr as nr
from bench import replay
from conftest import ENV, EPS, ROOT, close, make_config, read_rows, within, write_rows
from examples import blame, what_if
from runtime import trainer
from runtime.checkpoint import Progress
from runtime.messages import RunError

FLAGS = ("--steps 4 --prompts 2 --samples 4 --eval_size 4 --eval_every 2 --save_every 2 --keep 9 "
         "--kl_coef 0.1 --name a").split()


def python(*words):
    """Runs Python in the repository. Returns what it prints."""
    env = ENV | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=env,
                          capture_output=True, text=True)
    assert not done.returncode, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with checkpoints of the steps 2 and 4."""
    out = tmp_path_factory.mktemp("runs")
    python("nano_rlvr.py", *FLAGS, "--out", out)
    return out / "a"


def asked(words, step=3):
    """Checks a question to a run of four steps of 2 prompts and 4 samples."""
    cfg = argparse.Namespace(prompts=2, samples=4, resample=0, steps=4)
    args, flags = what_if.cause_parser().parse_known_args(words.split())
    args.step = step
    what_if.check(args, flags, cfg, ranks=1)


def mixed(finished, step):
    """The first rollout of a step that has an advantage."""
    rows = [row for row in read_rows(finished / "rollouts.jsonl") if row["step"] == step]
    return next((i, row) for i, row in enumerate(rows) if row["advantage"])


def test_a_changed_reward_is_the_first_difference_and_the_unchanged_branch_is_the_run(finished):
    i, row = mixed(finished, 2)
    other = 1 - row["reward"]
    lines = python("-m", "examples.what_if", finished, "--step", 2, "--rollout", i,
                   "--reward", f"{other:g}", "--watch", 0, 3).splitlines()
    assert "the replay is the run: " in lines[1] and "weights of 2 checkpoints" in lines[1]
    assert lines[4].startswith(f"first difference: step 2, rewards: reward of rollout {i}: ")
    table = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [float(row[1]) > 0 for row in table] == [False, True, True]  # before the steps 2, 3, 4
    page = (finished.with_name("a-what-if") / f"step-2-rollout-{i}-reward-{other:g}.html")
    assert lines[4].replace("'", "&#x27;") in page.read_text()


def test_a_replay_that_is_not_the_run_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "b")
    assert "equal bit for bit" in replay.proof(finished, tmp_path / "b", 2)
    rows = read_rows(finished / "metrics.jsonl")
    rows[3]["kl"] += 1e-12
    write_rows(tmp_path / "b/metrics.jsonl", rows)
    with pytest.raises(RunError, match="the replay is not the run: step 3, loss: kl"):
        replay.proof(finished, tmp_path / "b", 2)


def test_the_newest_checkpoint_before_the_step_or_the_flag_that_would_have_kept_one(
        finished, capsys):
    assert [replay.start_of(finished, step) for step in (2, 3, 4)] == [2, 2, 4]
    assert not capsys.readouterr().out
    assert replay.start_of(finished, 1) == 0
    assert "--save_every 1 --keep 1000 would have kept one" in capsys.readouterr().out


def test_one_cause_is_asked_for(capsys):
    for wrong in ("", "--rollout 1", "--reward 1", "--rollout 1 --redraw 3", "--redraw 3",
                  "--group 1 --drop --lr 0"):
        with pytest.raises(ValueError, match="choose one cause"):
            asked(wrong)
    for wrong in ("--rollout 1 --group 1 --drop", "--group 0 --drop --reward 1"):
        with pytest.raises(SystemExit):
            asked(wrong)
        assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--rollout 8: a step has the numbers 0 to 7"):
        asked("--rollout 8 --drop")
    with pytest.raises(ValueError, match="has steps 0 to 3"):
        asked("--group 1 --redraw 0", step=4)
    for right in ("--group 1 --redraw 0", "--rollout 0 --reward 0", "--lr 0"):
        asked(right)


def adamw(gradients, first, second, lrs, count, beta2, most):
    """AdamW's steps from these moments, for autograd: (steps, moments, factors of the clipping)."""
    moments, steps, clips = [(first, second)], [], []
    for k, g in enumerate(gradients):
        clip = (most / g.norm()).clamp(max=1.0)  # ()
        first = 0.9 * first + 0.1 * clip * g  # (N,)
        second = beta2 * second + (1 - beta2) * (clip * g)**2  # (N,)
        mean = first / (1 - 0.9**(count + k))  # (N,)
        root = (second / (1 - beta2**(count + k))).sqrt()  # (N,)
        steps.append(-lrs[k] * mean / (root + 1e-8))
        moments.append((first, second))
        clips.append(clip.item())
    return steps, moments, clips


@pytest.mark.parametrize("most", [1.0, 1e9])
def test_the_sensitivities_are_the_derivatives_of_adamw(most):
    torch.manual_seed(0)
    like = torch.zeros(5, dtype=torch.float64)  # (N,)
    gradients = [torch.randn_like(like).requires_grad_() for _ in range(4)]
    slopes = [torch.randn_like(like) for _ in gradients]
    first, second = torch.randn_like(like), torch.rand_like(like)  # (N,), (N,)
    lrs = [0.1, 0.2, 0.05, 0.3]
    steps, moments, clips = adamw(gradients, first, second, lrs, 3, 0.95, most)
    assert (clips[0] < 1) == (most == 1)
    effect = sum(a @ b for a, b in zip(slopes, steps))
    wanted = torch.autograd.grad(effect, gradients)
    slopes = [[s[:2], s[2:]] for s in slopes]  # vectors of two parts
    moments = [[[x.detach()[:2], x.detach()[2:]] for x in pair] for pair in moments]
    settings = [(lr, 3 + k, clip) for k, (lr, clip) in enumerate(zip(lrs, clips))]
    for ours, theirs in zip(blame.sensitivities(slopes, moments, settings, 0.95), wanted):
        close(torch.cat(ours), theirs, 4 * EPS)  # they are rounded to float32 at the end
    fixed = blame.sensitivities(slopes, moments, settings, 0.95, is_fixed=True)
    slope, second = map(torch.cat, (slopes[-1], moments[-1][1]))  # (N,), (N,)
    last = slope * -lrs[-1] * 0.1 / (1 - 0.9**6) * clips[-1]  # (N,)
    close(torch.cat(fixed[-1]), last / ((second / (1 - 0.95**6)).sqrt() + 1e-8), 4 * EPS)


def test_parts_sum_to_the_step_and_a_replay_without_a_rollout_has_its_score(finished):
    """Between the parts and the moments lie roundings of float32. The score of a rollout of the
    last step is a derivative, so it is compared with a replay without a twentieth of the gradient:
    the error is of second order. A wrong sign or a factor of 2 is an error of 1 and more."""
    found = json.loads(python("tests/blame_worker.py", finished).splitlines()[-1])
    within(found["apart"], 1e-4)  # 1e-6 is usual: sums of 800 tokens in another order
    assert found["again"] == found["after"]
    within(abs(found["score"] - found["slope"]), 0.5 * abs(found["score"]))
    assert found["exact"][0] != found["exact"][1] != 0


def test_a_snapshot_brings_back_weights_optimizer_and_progress(group, tmp_path):
    cfg = make_config()
    policy = nr.make_policy(cfg)
    parameters = trainer.trained_parameters(policy)
    weights = {name: trainer.get_tensor(p, "fp32").clone() for name, p in parameters.items()}
    nr.guard.rehearse(policy, None, cfg)  # AdamW has its state after a step
    progress = Progress(step=7)
    run = argparse.Namespace(policy=policy, checkpoints=argparse.Namespace(progress=progress),
                             log=argparse.Namespace(folder=tmp_path))
    start = replay.take(run)
    progress.step = 9
    for state in trainer.adamw_states(policy):
        state["step"] = state["step"] + 5
    for p in parameters.values():
        for kind in trainer.KINDS:
            trainer.set_tensor(p, kind, trainer.get_tensor(p, kind) + 1)
    replay.put(run, start)
    for name, p in parameters.items():
        assert torch.equal(trainer.get_tensor(p, "fp32"), weights[name])
        assert torch.equal(p.detach(), weights[name])
        assert not trainer.get_tensor(p, "exp_avg").any()
        assert not trainer.get_tensor(p, "exp_avg_sq").any()
    assert {float(state["step"]) for state in trainer.adamw_states(policy)} == {0.0}
    assert progress.step == 7
