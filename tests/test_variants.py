"""Which groups are trained, on any number of ranks, and the loop with real DeepSpeed, in float64.

The formulas of the algorithms are compared in test_vectors.py.
"""
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import nano_rlvr as nr
import rewards
from conftest import close, judged, make_config, read_rows
from runtime import dist, stats
from runtime.checkpoint import Progress
from runtime.dist import RunError

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64", "sampled")]
TRAIN = [{"question": str(i), "answer": str(i), "prompt_ids": [i % 200, i // 200]}
         for i in range(1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_group_has_advantage_0_whatever_its_rewards(dtype):
    """The sum of n equal numbers is rounded, and eps may be much smaller than its last bit."""
    for reward in (1.2, 100.1, 1234.56, -0.7, 1e30):
        for n in (2, 3, 7, 100):
            flat = torch.full((1, n), reward, dtype=dtype)
            with_others = torch.cat([torch.arange(n, dtype=dtype)[None], flat])
            without_verdict = torch.where(torch.arange(n) == n // 2, math.nan, flat)
            for rows in (flat, with_others, without_verdict):
                for axes in (("group", "group"), ("leave_one_out", "none"), ("group", "mean")):
                    assert (nr.group_advantages(rows, *axes)[-1] == 0).all()
            assert (nr.group_advantages(flat, "batch", "batch") == 0).all()


# ---- which groups are trained, with stand-ins for rollout() and the verifier


@pytest.fixture
def sampled(monkeypatch):
    """Completions are a function of prompt and seed; the seed is their text."""
    def sample(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
        rollouts = []
        for prompt, seed in zip(prompts, seeds or [0] * len(prompts)):
            rng = random.Random(repr((prompt, seed)))
            for _ in range(n):
                tokens = rng.choices(range(256), k=rng.randint(2, 10))
                logps = [-1.0] * len(tokens)
                rollouts.append(nr.Rollout(prompt, tokens, str(seed), False, logps))
        return rollouts

    monkeypatch.setattr(nr, "rollout", sample)


def judge(rewards_of):
    """A stand-in for a Verifier. rewards_of: f(columns) -> rewards."""
    return judged(lambda texts, columns: rewards_of(columns), **{"reward/timeouts": 1})


# half of the samples of even questions are right, and all of the others
even = judge(lambda columns: [float(i % 2 == 0 or int(question) % 2 == 1)
                              for i, question in enumerate(columns["question"])])
by_index = judge(lambda columns: [float(i % 4) for i in range(len(columns["question"]))])


def collect(cfg, verifier, step=0):
    """(minibatches, all groups, metrics) of collect_rollouts."""
    run = SimpleNamespace(cfg=cfg, train_set=TRAIN, verifier=verifier, llm=MagicMock(), metrics={})
    return *nr.collect_rollouts(run, step), run.metrics


FLAT, HALF, NONE, ONE = (1.0, 1.0), (1.0, 0.0), (None, None), (None, 1.0)
A, B, C, D = (5.0, 0.0), (6.0, 0.0), (7.0, 0.0), (8.0, 0.0)
DROP = dict(drop_flat_groups=True, resample=3)


@pytest.mark.parametrize("draws, flags, trained", [
    ([[A, B, C]], DROP, [A, B, C]),  # enough at once
    ([[A, FLAT, NONE], [ONE, B, FLAT], [C, D, HALF]], DROP, [A, B, C]),  # the first are kept
    ([[A, FLAT, FLAT], [B, FLAT, FLAT], [FLAT, NONE, ONE], [FLAT] * 3], DROP, [A, B]),  # too few
    ([[A, FLAT, NONE]], dict(), [A, FLAT, NONE]),  # nothing is dropped
    ([[NONE] * 3] * 2, dict(drop_flat_groups=True, resample=1), None),  # no verdict: the run ends
])
def test_a_step_draws_again_until_it_has_as_many_groups_as_prompts_and_keeps_the_first(
        draws, flags, trained):
    """draws: the rewards of the groups of each draw."""
    calls = iter(draws)
    verify = judge(lambda columns: [x for pair in next(calls) for x in pair])
    cfg = make_config(prompts=3, samples=2, **flags)
    if trained is None:
        with pytest.raises(RunError, match="none of 12 completions got a verdict"):
            collect(cfg, verify)
        return
    [groups], sampled, metrics = collect(cfg, verify)
    assert [tuple(r.reward for r in g) for g in groups] == trained
    assert len(draws) == metrics["draws"] == metrics["reward/timeouts"]
    assert len({str(g[0].prompt) for g in sampled}) == len(sampled) == 3 * len(draws)


def as_ranks(world, monkeypatch, function):
    """What function() returns on each of `world` ranks: threads, whose collective calls meet."""
    own, shared = threading.local(), [None] * world
    barrier = threading.Barrier(world, timeout=60)

    def all_gather(items, group=None):
        shared[own.rank] = items
        barrier.wait()
        lists = list(shared)
        barrier.wait()
        return [item for part in lists for item in part]

    def on_rank(rank):
        own.rank = rank
        return function()

    with monkeypatch.context() as patched, ThreadPoolExecutor(world) as pool:
        patched.setattr(dist, "rank", lambda: own.rank)
        patched.setattr(dist, "world_size", lambda: world)
        patched.setattr(dist, "all_gather", all_gather)
        return list(pool.map(on_rank, range(world)))


@pytest.mark.parametrize("resample", [0, 9])
def test_any_number_of_ranks_trains_what_one_rank_trains(monkeypatch, resample):
    """The same groups in the same minibatches, with the same rewards, which are random, advantages
    and weights. Ranks may have surplus groups, and groups of several draws."""
    cfg = make_config(prompts=8, samples=2, minibatches=2, drop_flat_groups=True, resample=resample,
                      aggregate="token")
    coin = judge(lambda columns: rewards.random_reward(columns["question"], **columns))

    def minibatches(step):
        parts, *_ = collect(cfg, coin, step)
        nr.assign_advantages([group for part in parts for group in part], cfg, 0.5)
        trained = [nr.assign_token_weights([r for g in part for r in g], cfg) for part in parts]
        return [[(r.prompt, r.completion, r.reward, r.advantages, r.weight) for r in rollouts]
                for rollouts in trained]

    for step in (2, 3, 4):  # in step 1 all groups happen to be flat
        [one] = as_ranks(1, monkeypatch, lambda: minibatches(step))
        assert len(one[0] + one[1]) == 16 if resample else len(one[0] + one[1]) < 16
        for world in (2, 4):
            several = as_ranks(world, monkeypatch, lambda: minibatches(step))
            for i in range(2):
                assert sorted(r for parts in several for r in parts[i]) == sorted(one[i])


# ---- the loop: real DeepSpeed and model, stand-ins for vLLM and the verifier


def loop(tmp_path, verifier, **changes):
    """Runs train(). Returns its Log, a mock."""
    base = dict(prompts=4, samples=4, eval_every=100, lr=1e-3, out=str(tmp_path), name="x",
                kl_coef=0.0, correction="none", mismatch_bound=1e9)  # vLLM's log-probs are -1
    cfg = make_config(**base | changes)
    log = MagicMock(folder=tmp_path, rollouts_with_tokens=lambda *_: [])
    nr.train(nr.Run(cfg, TRAIN[:200], TRAIN[:2], verifier, log, MagicMock(progress=Progress()),
                    MagicMock(), nr.make_policy(cfg), ref=None))
    return log


@pytest.fixture
def updates(monkeypatch):
    """(batches, metrics) of each call of update()."""
    calls, update = [], nr.update

    def recorded(engine, batches, *args):
        calls.append((batches, update(engine, batches, *args)))
        return calls[-1][-1]

    monkeypatch.setattr(nr, "update", recorded)
    return calls


def test_three_skipped_steps_in_a_row_end_the_run_and_their_batches_are_kept(
        tmp_path, updates, monkeypatch, capsys):
    monkeypatch.setattr("deepspeed.DeepSpeedEngine.was_step_applied", lambda self: False)
    with pytest.raises(RunError, match="3 optimizer steps in a row"):
        loop(tmp_path, by_index, steps=4)
    assert capsys.readouterr().out.count("has a gradient that is not finite") == 3
    for step, (batches, _) in enumerate(updates):
        rows = read_rows(tmp_path / f"quarantine/step-{step}-rank-0.jsonl")
        trained = torch.cat([batch.targets for batch in batches])
        assert sorted(sum((row["completion"] for row in rows), [])) == sorted(trained.tolist())
    assert len(updates) == 3


def test_epochs_and_minibatches_are_optimizer_steps_against_log_probs_taken_once(
        tmp_path, updates):
    loop(tmp_path, by_index, steps=1, epochs=2, minibatches=2)
    batches, metrics = zip(*updates)
    tokens = [[batch.input_ids.tolist() for batch in packs] for packs in batches]
    assert len(updates) == 4 and tokens[:2] == tokens[2:] and tokens[0] != tokens[1]
    for packs in batches:  # each step is a complete mean over its own minibatch
        assert sum(len(batch.lengths) for batch in packs) == 8
        close(sum(batch.weight.sum() for batch in packs), 1.0)
    close(metrics[0]["ratio"], 1)
    assert all(abs(m["ratio"] - 1) > 1e-3 for m in metrics[1:])


def test_dropped_groups_cost_no_forward_pass_and_change_no_weight(tmp_path, updates):
    """Half of the groups are not flat. The others would enter the mean if they were kept. With
    one optimizer step, the policy is the one that sampled: no old log-probs."""
    log = loop(tmp_path, even, steps=1, prompts=8, drop_flat_groups=True)
    groups = log.write.call_args_list[0].args[2]
    kept = [r for g in groups if not stats.is_flat(g) for r in g]
    assert 0 < len(kept) < 32
    [(batches, _)] = updates
    trained = [token for batch in batches for token in batch.targets.tolist()]
    assert sorted(trained) == sorted(token for r in kept for token in r.completion)
    close([r.weight * len(r.completion) for r in kept], [1 / len(kept)] * len(kept))
    assert all(batch.old is None for batch in batches)
