"""Which groups are trained, on any number of ranks, and the loop with real DeepSpeed, in float64.

The formulas of the algorithms are compared in test_vectors.py."""
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import nano_rlvr as nr
from conftest import close, judged, make_config, read_rows
from examples import entropy
from rewards import random_reward
from runtime import evaluation, ranks, stats
from runtime.checkpoint import Progress
from runtime.messages import RunError

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
TRAIN = [{"question": str(i), "answer": str(i), "prompt_ids": [i % 200, i // 200]}
         for i in range(1000)]
SECONDS = {"seconds/rollout": 1.0, "seconds/update": 2.0}


def test_a_flat_group_has_advantage_0_whatever_its_rewards():
    """The sum of n equal numbers is rounded, and eps may be much smaller than its last bit."""
    for reward in (1.2, 100.1, 1234.56, -0.7, 1e30):
        for n in (2, 3, 7, 100):
            flat = torch.full((1, n), reward, dtype=torch.float32)
            rows = torch.cat([torch.arange(n)[None], flat, flat])
            rows[2, n // 2] = math.nan  # no reward
            for axes in (("group", "group"), ("leave_one_out", "none"), ("group", "group_mean")):
                assert (nr.group_advantages(rows, *axes)[1:] == 0).all()
            assert (nr.group_advantages(flat, "batch", "batch") == 0).all()


def sample(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    """Completions are a function of prompt and seed; the seed is their text."""
    rollouts = []
    for prompt, seed in zip(prompts, seeds or [0] * len(prompts)):
        rng = random.Random(repr((prompt, seed)))
        for _ in range(n):
            tokens = rng.choices(range(256), k=rng.randint(2, 10))
            logps = [-1.0] * len(tokens)
            rollouts.append(nr.Rollout(prompt, tokens, str(seed), False, logps))
    return rollouts


by_index = judged(lambda texts, columns: [float(i % 4) for i in range(len(texts))])


def collect(cfg, verifier, step=0):
    """(minibatches, all groups, metrics) of collect_rollouts."""
    run = SimpleNamespace(cfg=cfg, train_set=TRAIN, verifier=verifier, llm=None, metrics={},
                          rollout=sample)
    return *nr.collect_rollouts(run, step), run.metrics


FLAT, HALF, NONE, ONE = (1.0, 1.0), (1.0, 0.0), (None, None), (None, 1.0)
A, B, C, D = (5.0, 0.0), (6.0, 0.0), (7.0, 0.0), (8.0, 0.0)
DROP = dict(filter_groups=True, resample=3)


@pytest.mark.parametrize("draws, flags, trained", [
    ([[A, B, C]], DROP, [A, B, C]),  # enough at once
    ([[A, FLAT, NONE], [ONE, B, FLAT], [C, D, HALF]], DROP, [A, B, C]),  # the first are kept
    ([[A, FLAT, FLAT], [B, FLAT, FLAT], [FLAT, NONE, ONE], [FLAT] * 3], DROP, [A, B]),  # too few
    ([[A, FLAT, NONE]], dict(), [A, FLAT, NONE])])  # nothing is dropped
def test_a_step_draws_again_until_it_has_as_many_groups_as_prompts_and_keeps_the_first(
        draws, flags, trained):
    """draws: the rewards of the groups of each draw."""
    calls = iter(draws)
    verify = judged(lambda *_: [x for pair in next(calls) for x in pair], **{"reward/timeouts": 1})
    [groups], sampled, metrics = collect(make_config(prompts=3, samples=2, **flags), verify)
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
        patched.setattr(ranks, "rank", lambda: own.rank)
        patched.setattr(ranks, "world_size", lambda: world)
        patched.setattr(ranks, "all_gather", all_gather)
        return list(pool.map(on_rank, range(world)))


@pytest.mark.parametrize("resample", [0, 9])
def test_any_number_of_ranks_trains_what_one_rank_trains(monkeypatch, resample):
    """Also the same rewards, which are random, advantages and weights, in the same minibatches, the
    same tokens of Clip-Cov and metrics. In some steps a rank has its share of groups first."""
    cfg = make_config(prompts=8, samples=2, minibatches=2, filter_groups=True, resample=resample,
                      aggregate="token")
    coin = judged(lambda texts, columns: random_reward(texts, **columns), **{"reward/timeouts": 1})
    monkeypatch.setattr(stats, "peak_flops", lambda dtype: 1e9)

    def minibatches(step):
        parts, sampled, metrics = collect(cfg, coin, step)
        groups = sum(parts, [])
        nr.assign_advantages(groups, cfg, 0.5)
        logps = [[-float(token % 7) for token in r.completion] for r in sum(groups, [])]
        drawn = entropy.clip_cov(sum(groups, []), logps, 0.1, random.Random(step))
        trained = [nr.assign_token_weights(sum(part, []), cfg) for part in parts]
        numbers = stats.step_summary(cfg, groups, sampled, SECONDS)
        numbers |= {"draws": metrics["draws"], "mfu": numbers["mfu"] * ranks.world_size(),
                    "timeouts": metrics["reward/timeouts"] / ranks.world_size(), "drawn": drawn}
        return [[(r.prompt, r.completion, r.reward, r.advantages, r.weight) for r in rollouts]
                for rollouts in trained], numbers

    for step in range(8):
        [(one, wanted)] = as_ranks(1, monkeypatch, lambda: minibatches(step))
        assert len(one[0] + one[1]) == 16 if resample else len(one[0] + one[1]) < 16
        for world in (2, 4):
            several = as_ranks(world, monkeypatch, lambda: minibatches(step))
            for i in range(2):
                assert sorted(r for parts, _ in several for r in parts[i]) == sorted(one[i])
            for _, numbers in several:
                close([*numbers.values()], [*wanted.values()])


def test_any_number_of_ranks_finds_the_same_in_an_evaluation(monkeypatch):
    """Of 5 questions. Only a reward of 1 is right; those of samples depend on seeds, the texts."""
    half = judged(lambda texts, columns: [int(text) % 2 or int(q) % 3 / 2
                                          for text, q in zip(texts, columns["question"])])
    run = SimpleNamespace(cfg=make_config(eval_n=2), llm=None, eval_set=TRAIN[:5], verifier=half,
                          rollout=sample)
    found = [x for world in (1, 2, 4) for x in as_ranks(
        world, monkeypatch, lambda: evaluation.evaluate(run, nr.score))]
    assert found == found[:1] * 7
    assert found[0][0]["eval/accuracy"] == 1 / 5 < found[0][0]["eval/mean@2"]


def loop(tmp_path, verify=by_index, **changes):
    """Runs train(). Returns the metrics of each row of its log, and (step, is it the last) of each
    checkpoint."""
    base = dict(prompts=4, samples=4, eval_every=100, lr=1e-3, out=str(tmp_path), name="x",
                kl_coef=0.0, correction="none", mismatch_bound=1e9)  # vLLM's log-probs are -1
    cfg, saved, progress = make_config(**base | changes), [], Progress()
    log = MagicMock(folder=tmp_path)
    checkpoints = SimpleNamespace(
        progress=progress, save=lambda final: saved.append((progress.step, final)))
    nr.train(nr.Run(cfg, TRAIN[:200], TRAIN[:2], verify, log, checkpoints, MagicMock(),
                    nr.make_policy(cfg), nr.make_reference(cfg), sample))
    return [call.args[1] for call in log.write.call_args_list], saved


@pytest.fixture
def updates(monkeypatch):
    """(packs, metrics, learning rate) of each call of update()."""
    calls, update = [], nr.update

    def recorded(engine, packs, *args):
        lr = engine.optimizer.param_groups[0]["lr"]
        calls.append((packs, update(engine, packs, *args), lr))
        return calls[-1][1]

    monkeypatch.setattr(nr, "update", recorded)
    return calls


def test_three_skipped_steps_in_a_row_end_the_run_and_their_batches_are_kept(
        tmp_path, updates, monkeypatch, capsys):
    taken = iter([False, False, True, False, False, False])
    monkeypatch.setattr("deepspeed.DeepSpeedEngine.was_step_applied", lambda self: next(taken))
    with pytest.raises(RunError, match="3 optimizer steps in a row"):
        loop(tmp_path, steps=9)
    assert capsys.readouterr().out.count("has a gradient that is not finite") == 5
    for step in (0, 1, 3, 4, 5):
        rows = read_rows(tmp_path / f"quarantine/step-{step}-rank-0.jsonl")
        trained = torch.cat([pack.targets for pack in updates[step][0]])
        assert sorted(sum((row["completion"] for row in rows), [])) == sorted(trained.tolist())


def test_a_run_in_which_all_groups_are_dropped_takes_no_step_and_goes_on(tmp_path, updates):
    equal = judged(lambda texts, columns: [1.0] * len(texts))
    rows, _ = loop(tmp_path, equal, filter_groups=True, resample=1, baseline="running")
    assert not updates and [row.get("draws") for row in rows] == [2, 2, None]


def test_a_run_has_the_steps_learning_rates_evaluations_and_checkpoints_of_its_flags(
        tmp_path, updates, monkeypatch):
    """Each optimizer step has the complete mean over its minibatch, against log-probs taken once.
    The learning rate falls to --lr_end of --lr after the last step."""
    looks = []
    monkeypatch.setattr(evaluation, "first_look",
                        lambda run, answers: looks.append(run.checkpoints.progress.step))
    rows, saved = loop(tmp_path, steps=5, epochs=2, minibatches=2, pack_tokens=40, warmup=2,
                       lr_end=0.5, eval_every=2, save_every=3, kl_coef=0.1)
    steps, metrics, rates = zip(*updates)
    tokens = [[pack.input_ids.tolist() for pack in packs] for packs in steps[:4]]
    assert tokens[:2] == tokens[2:] and tokens[0] != tokens[1]
    for packs in steps:
        assert sum(len(pack.lengths) for pack in packs) == 8
        assert max(len(pack.kv_index) for pack in packs) <= 40  # tokens
        close(sum(pack.weight.sum() for pack in packs), 1.0)
    close(metrics[0]["ratio"], 1)
    assert all(abs(m["ratio"] - 1) > 1e-3 for m in metrics[1:4])
    wanted = [5e-4, 9e-4, 8e-4, 7e-4, 6e-4]
    close(rates, [lr for lr in wanted for _ in range(4)])
    close([row["lr"] for row in rows[:5]], wanted)
    evaluated = ["eval/accuracy" in row for row in rows]
    assert evaluated == [True, False, True, False, True, True]  # the last weights, too
    assert looks == [0]
    assert saved == [(0, False), (3, False), (5, True)]
    assert all(row["kl"] for row in rows[:5])
    # the KL is in the loss alone: the advantages are those of the rewards 0, 1, 2 and 3
    found = {a for packs in steps for pack in packs for a in pack.advantage.tolist()}
    close(sorted(found), [(i - 1.5) / (1.25**0.5 + 1e-4) for i in range(4)])
