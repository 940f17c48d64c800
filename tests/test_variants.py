"""Which groups are trained, on any number of ranks, and the loop with real DeepSpeed, in float64.

The formulas of the algorithms are compared in test_vectors.py.
"""
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
import rewards
from conftest import close, judged_by, make_config
from runtime import dist, stats
from runtime.checkpoint import Progress
from runtime.dist import RunError

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
NAN, EOS = math.nan, 256
TRAIN = [{"question": str(i), "answer": str(i), "prompt_ids": [i % 200, i // 200]}
         for i in range(1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_group_has_advantage_0_whatever_its_rewards(dtype):
    """The sum of n equal numbers is rounded, and eps may be much smaller than its last bit."""
    rng = random.Random(0)
    for reward in (1.2, 100.1, 1234.56, -0.7, 1e30, *(rng.uniform(-1000, 1000) for _ in range(9))):
        for n in (2, 3, 5, 7, 8, 16, 100):
            flat = torch.full((1, n), reward, dtype=dtype)
            with_others = torch.cat([torch.arange(n, dtype=dtype)[None], flat])
            without_verdict = torch.where(torch.arange(n) == n // 2, NAN, flat)
            for rows in (flat, with_others, without_verdict):
                for axes in (("group", "group"), ("leave_one_out", "none"), ("group", "mean")):
                    assert (nr.group_advantages(rows, *axes)[-1] == 0).all()
            assert (nr.group_advantages(flat, "batch", "batch") == 0).all()


# ---- which groups are trained, with stand-ins for vLLM and the verifier


class FakeVllm:
    """Its completions are a function of prompt and seed."""

    def __init__(self, tokenizer=None):
        self.tokenizer, self.seeds = tokenizer, []

    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(outputs=[self.sample(p["prompt_token_ids"], s, j)
                                         for j in range(s.n)]) for p, s in zip(prompts, params)]

    def sample(self, prompt, params, j):
        self.seeds += [params.seed] * (j == 0)
        rng = random.Random(repr((prompt, params.seed, j)))
        tokens = [rng.randrange(256) for _ in range(rng.randint(1, 9))] + [EOS]
        logprobs = SimpleNamespace(logprobs=[-1.0] * len(tokens))
        return SimpleNamespace(token_ids=tokens, finish_reason="stop", logprobs=logprobs)

    def get_tokenizer(self):
        def batch_decode(ids, skip_special_tokens):
            return [str(x) for x in ids]
        return self.tokenizer or SimpleNamespace(batch_decode=batch_decode, get_vocab=dict)

    def sleep(self):
        pass

    def load(self, named_weights, *_, **__):
        pass


@judged_by("half")
def even(texts, question, **columns):
    """Half of the samples of even questions are right, and all of the others."""
    values = [float(i % 2 == 0 or int(q) % 2 == 1) for i, q in enumerate(question)]
    return values, {"half": values}, {"reward/timeouts": 1}


def collect(cfg, judge, step=0):
    """(minibatches, all groups, run) of collect_rollouts."""
    run = SimpleNamespace(cfg=cfg, train_set=TRAIN, verifier=judge, llm=FakeVllm(), metrics={})
    return *nr.collect_rollouts(run, step), run


FLAT, HALF, NONE, ONE = (1.0, 1.0), (1.0, 0.0), (None, None), (None, 1.0)
A, B, C, D = (5.0, 0.0), (6.0, 0.0), (7.0, 0.0), (8.0, 0.0)
DROP = dict(drop_flat_groups=True, resample=3)


@pytest.mark.parametrize("draws, flags, trained", [
    ([[A, B, C]], DROP, [A, B, C]),  # enough at once
    ([[A, FLAT, NONE], [ONE, B, FLAT], [C, D, HALF]], DROP, [A, B, C]),  # the first are kept
    ([[A, FLAT, FLAT], [B, FLAT, FLAT], [FLAT, NONE, ONE], [FLAT] * 3], DROP, [A, B]),  # too few
    ([[A, FLAT, NONE]], dict(), [A, FLAT, NONE]),  # nothing is dropped
    ([[A, FLAT, NONE]], dict(drop_flat_groups=True), [A]),
    ([[NONE] * 3] * 2, dict(drop_flat_groups=True, resample=1), None),  # no verdict: the run ends
])
def test_a_step_draws_again_until_it_has_as_many_groups_as_prompts_and_keeps_the_first(
        monkeypatch, draws, flags, trained):
    """draws: the rewards of the groups of each draw."""
    calls = []

    def sample(llm, prompts, n, *_, **__):
        calls.append(draws[len(calls)])
        return [nr.Rollout(p, [1], "", False, [0.0]) for p in prompts for _ in range(n)]

    @judged_by("x")
    def verify(texts, **columns):
        values = [x for pair in calls[-1] for x in pair]
        return values, {"x": values}, {"reward/timeouts": 1}

    monkeypatch.setattr(nr, "rollout", sample)
    cfg = make_config(prompts=3, samples=2, **flags)
    if trained is None:
        with pytest.raises(RunError, match="none of 12 completions got a verdict"):
            collect(cfg, verify)
        return
    [groups], sampled, run = collect(cfg, verify)
    assert [tuple(r.reward for r in g) for g in groups] == trained
    assert len(calls) == len(draws) == run.metrics["draws"] == run.metrics["reward/timeouts"]
    assert len({str(g[0].prompt) for g in sampled}) == len(sampled) == 3 * len(draws)


def test_the_data_of_a_draw_is_a_function_of_step_and_draw_alone():
    cfg = make_config(prompts=4, samples=2, **DROP)

    def draws(step, judge=even):
        _, sampled, run = collect(cfg, judge, step)
        assert len(set(run.llm.seeds)) == len(sampled)  # no two requests share their noise
        return [r.completion for g in sampled for r in g], [str(g[0].prompt) for g in sampled]

    first, _ = draws(7)
    draws(6)  # earlier calls do not matter
    assert draws(7)[0] == first != draws(8)[0]

    def flat(texts, **_):  # other rewards: more draws, but the same
        return [0.0] * len(texts), {"x": [0.0] * len(texts)}, {}

    more = [draws(step, judged_by("x")(flat)) for step in range(5, 10)]
    assert more[2][0][:len(first)] == first and len(more[2][0]) > len(first)
    used = [prompt for _, prompts in more for prompt in prompts]
    assert len(set(used)) == len(used) == 80  # no overlap, in an epoch of 1,000


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
        patched.setattr(dist, "all_sum", lambda *x: [sum(y) for y in zip(*all_gather([x]))])
        return list(pool.map(on_rank, range(world)))


@pytest.mark.parametrize("resample", [0, 9])
def test_any_number_of_ranks_trains_what_one_rank_trains(monkeypatch, resample):
    """The same groups in the same minibatches, with the same rewards, which are random, advantages
    and weights. Ranks may have surplus groups, and groups of several draws."""
    cfg = make_config(prompts=8, samples=2, minibatches=2, drop_flat_groups=True, resample=resample,
                      aggregate="token")

    @judged_by("random")
    def coin(texts, **columns):
        values = rewards.random_reward(texts, **columns)
        return values, {"random": values}, {}

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


def loop(tmp_path, tokenizer, judge, **changes):
    """Runs train(). Returns (metrics, sampled rollouts) of each step."""
    base = dict(prompts=4, samples=4, eval_every=100, lr=1e-3, out=str(tmp_path), name="x",
                correction="none", mismatch_bound=1e9)  # FakeVllm's log-probs are not the model's
    cfg, lines = make_config(**base | changes), []

    def write(step, metrics, groups=(), *_, **__):
        lines.append((metrics, [r for group in groups for r in group]))

    log = SimpleNamespace(folder=tmp_path, write=write, close=lambda: None, say=lambda text: None,
                          rollouts_with_tokens=lambda *_: [])
    checkpoints = SimpleNamespace(progress=Progress(), save=lambda final: None, check=lambda: None,
                                  wait=lambda: None)
    nr.train(nr.Run(cfg, TRAIN[:200], TRAIN[:2], judge, log, checkpoints, FakeVllm(tokenizer),
                    nr.make_policy(cfg), nr.make_reference(cfg)))
    return lines[:-1]  # the last one is evaluation only


@pytest.fixture
def updates(monkeypatch):
    """(rollouts, their weights, old log-probs of each pack, metrics) of each call of update()."""
    calls, update, collate, members = [], nr.update, nr.collate, {}

    def remembered(rollouts, device):
        batch = collate(rollouts, device)
        members[id(batch)] = rollouts
        return batch

    def recorded(engine, batches, cfg):
        rollouts = [r for batch in batches for r in members[id(batch)]]
        old = [None if batch.old is None else batch.old.tolist() for batch in batches]
        calls.append((rollouts, [r.weight for r in rollouts], old, update(engine, batches, cfg)))
        return calls[-1][-1]

    monkeypatch.setattr(nr, "collate", remembered)
    monkeypatch.setattr(nr, "update", recorded)
    return calls


@judged_by("x")
def by_index(texts, **columns):
    values = [float(i % 4) for i in range(len(texts))]
    return values, {"x": values}, {}


def test_three_batches_in_a_row_whose_step_was_skipped_end_the_run(
        tmp_path, tokenizer, updates, monkeypatch):
    monkeypatch.setattr("deepspeed.DeepSpeedEngine.was_step_applied", lambda self: False)
    with pytest.raises(RunError, match="3 optimizer steps in a row"):
        loop(tmp_path, tokenizer, by_index, steps=4, kl_coef=0.0)
    assert len(updates) == 3 and len(list((tmp_path / "quarantine").iterdir())) == 3


def test_epochs_and_minibatches_are_optimizer_steps_against_log_probs_taken_once(
        tmp_path, tokenizer, updates):
    loop(tmp_path, tokenizer, by_index, steps=1, epochs=2, minibatches=2, kl_coef=0.0)
    rollouts, weights, old, metrics = zip(*updates)
    prompts = [{tuple(r.prompt) for r in members} for members in rollouts]
    assert len(updates) == 4 and prompts[:2] == prompts[2:]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 4
    assert old[:2] == old[2:] and None not in old[0] + old[1]
    # each step is a complete mean over its own minibatch
    totals = [sum(w * len(r.completion) for w, r in zip(*x)) for x in zip(weights, rollouts)]
    close(totals, [1.0] * 4)
    close(metrics[0]["ratio"], 1)
    assert all(abs(m["ratio"] - 1) > 1e-3 for m in metrics[1:])


def test_dropped_groups_cost_no_forward_pass_and_change_no_weight(tmp_path, tokenizer, updates):
    """Half of the groups are not flat. The others would enter the mean if they were kept. With
    one optimizer step, the policy is the one that sampled: no old log-probs."""
    [(_, sampled)] = loop(tmp_path, tokenizer, even, steps=1, prompts=8, drop_flat_groups=True,
                          kl_coef=0.0)
    groups = [sampled[i:i + 4] for i in range(0, len(sampled), 4)]
    kept = [r for g in groups if not stats.is_flat(g) for r in g]
    assert 0 < len(kept) < len(sampled) == 32
    assert sorted(map(id, updates[0][0])) == sorted(map(id, kept))
    close([r.weight * len(r.completion) for r in kept], [1 / len(kept)] * len(kept))
    assert len(updates) == 1 and set(updates[0][2]) == {None}
