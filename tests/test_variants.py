"""Parts of the algorithms that TRL does not have or that need a case by hand, and the loop, in float64.

The other parts: test_math.py, test_trl.py.
"""
import contextlib
import dataclasses
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

import data
import nano_rlvr as nr
import rewards
from conftest import EXACT, close, judged_by, make_config, within
from runtime import dist, log, stats
from runtime.checkpoint import Progress

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
NAN = math.nan
EOS = 256


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---- advantages


def test_batch_baseline_subtracts_the_mean_of_all_verdicts():
    r = tensor([1.0, 0.0, 0.0], [1.0, 1.0, NAN])  # five verdicts, mean 3/5, variance 3/5 * 2/5
    close(nr.group_advantages(r, "batch", "none"), [[0.4, -0.6, -0.6], [0.4, 0.4, 0.0]])
    close(nr.group_advantages(r, "batch", "batch", eps=0.0)[0, 0], 0.4 / math.sqrt(6 / 25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_group_has_advantage_0_whatever_its_rewards(dtype):
    """The sum of n equal numbers is rounded, and eps may be much smaller than its last bit."""
    rng = random.Random(0)
    for reward in (1.2, 100.1, 1234.56, -0.7, 1e30, *(rng.uniform(-1000, 1000) for _ in range(20))):
        for n in (2, 3, 5, 7, 8, 16, 100):
            flat = torch.full((1, n), reward, dtype=dtype)
            with_others = torch.cat([torch.arange(n, dtype=dtype)[None], flat])
            without_verdict = torch.where(torch.arange(n) == n // 2, NAN, flat)
            for rows in (flat, with_others, without_verdict):
                for baseline, scale in (("group", "group"), ("leave_one_out", "none"), ("group", "mean")):
                    assert (nr.group_advantages(rows, baseline, scale)[-1] == 0).all()
            assert (nr.group_advantages(flat, "batch", "batch") == 0).all()


def test_running_baseline_subtracts_the_number_it_is_given():
    a = nr.group_advantages(tensor([1.0, 0.0], [NAN, 0.5]), "running", "none", running=0.3)
    close(a, [[0.7, -0.3], [0.0, 0.2]])


def test_no_baseline_and_no_scale_is_the_reward():
    a = nr.group_advantages(tensor([1.0, 0.0], [NAN, 1.0]), "none", "none")
    close(a, [[1.0, 0.0], [0.0, 1.0]])


def test_decorrelated_advantage_of_a_case_by_hand():
    """Advantages (-1/3, -1/3, 2/3), centred lengths (-1, 0, 1): the slope is 1/2.

    A group of equal lengths keeps its advantages.
    """
    r = tensor([0.0, 0.0, 1.0], [0.0, 0.0, 1.0])
    a = nr.group_advantages(r, "group", "none", lengths=torch.tensor([[1, 2, 3], [7, 7, 7]]))
    close(a, [[1 / 6, -1 / 3, 1 / 6], [-1 / 3, -1 / 3, 2 / 3]])


def test_decorrelated_advantages_are_orthogonal_to_length_and_still_sum_to_0():
    torch.manual_seed(0)
    r, lengths = torch.randn(6, 8, dtype=torch.float64), torch.randint(1, 3000, (6, 8))
    r[2, 3] = r[4, :6] = NAN
    plain, a = (nr.group_advantages(r, lengths=x) for x in (None, lengths))
    judged = (~r.isnan()).double()
    x = (lengths - (lengths * judged).sum(1, keepdim=True) / judged.sum(1, keepdim=True)) * judged
    assert ((plain * x).sum(1).abs() > 1e-2 * x.norm(dim=1)).all()  # without it they depend on length
    within(((a * x).sum(1).abs() / x.norm(dim=1)).max(), EXACT)
    within(a.sum(1).abs().max(), EXACT)
    assert a[r.isnan()].eq(0).all()


# ---- the ratio, its gate and the correction


def two_and_three(old, advantage=(1.0,) * 5):
    """A batch of one sequence of two tokens and one of three. vLLM's log-probs are 0."""
    return SimpleNamespace(
        lengths=torch.tensor([2, 3]), sequence_ids=torch.tensor([0, 0, 1, 1, 1]),
        weight=tensor(0.1, 0.2, 0.3, 0.4, 0.5), advantage=tensor(*advantage), old=tensor(*old),
        vllm_logps=tensor(*[0.0] * 5))


def single_tokens(old, advantage):
    """A batch of sequences of one token, all of weight 1."""
    n = len(old)
    return SimpleNamespace(lengths=torch.ones(n), sequence_ids=torch.arange(n),
                           weight=tensor(*[1.0] * n), advantage=tensor(*advantage), old=tensor(*old))


def loss_and_gradient(batch, logp, **changes):
    defaults = dict(correction="none", clip_low=0.2, clip_high=0.28)
    cfg = dataclasses.replace(nr.Config(), **defaults | changes)
    logp = tensor(*logp).requires_grad_()
    loss, sums = nr.policy_loss(logp, batch.old, None, batch, cfg)
    loss.backward()
    return loss.item(), logp.grad.tolist(), sums


@pytest.mark.parametrize("level, ratios", [
    ("token", [math.exp(x) for x in (0.1, -0.05, 0.02, 0.03, 0.1)]),
    ("sequence", [math.exp(0.025)] * 2 + [math.exp(0.05)] * 3),
    ("product", [math.exp(0.05)] * 2 + [math.exp(0.15)] * 3),
])
def test_the_ratio_of_a_token_of_a_sequences_mean_and_of_its_product(level, ratios):
    batch = two_and_three(old=[-1.0, -2.0, -3.0, -1.0, -2.0])
    loss, gradient, sums = loss_and_gradient(batch, [-0.9, -2.05, -2.98, -0.97, -1.9], ratio=level)
    w = batch.weight.tolist()
    close([loss, sums["ratio"]], [-sum(a * b for a, b in zip(w, ratios)), sum(ratios)])
    if level == "token":
        wanted = [-a * b for a, b in zip(w, ratios)]
    else:  # the derivative of the log-ratio of a sequence with respect to one of its log-probs
        first, second = {"sequence": (1 / 2, 1 / 3), "product": (1, 1)}[level]
        wanted = [-first * ratios[0] * (w[0] + w[1])] * 2 + [-second * ratios[2] * (w[2] + w[3] + w[4])] * 3
    close(gradient, wanted)


@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    (1.4, -1.0, 1.4, 1.4),  # above clip_high, below delta: full gradient, as in PPO
    (5.0, -1.0, 3.0, 0.0),  # above delta: bounded, and without a gradient
    (5.0, +1.0, -1.28, 0.0),  # clip_high is the tighter bound
    (0.5, -1.0, 0.8, 0.0), (0.9, -1.0, 0.9, 0.9),  # delta does not matter
])
def test_delta_bounds_the_ratio_of_negative_advantages(ratio, advantage, loss, gradient):
    got, grad, sums = loss_and_gradient(single_tokens([0.0], [advantage]), [math.log(ratio)], delta=3.0)
    close([got, grad[0]], [loss, gradient])
    assert int(sums["clipped"]) == (loss != -ratio * advantage)


def test_a_detached_ratio_multiplies_the_log_prob_and_is_bounded_from_above_only():
    logp = [math.log(0.01), math.log(5.0) - 1, math.log(1.1) - 1]
    batch = single_tokens([0.0, -1.0, -1.0], [1.0, 1.0, -2.0])
    loss, gradient, sums = loss_and_gradient(batch, logp, gate="detach", clip_high=3.0)
    close(gradient, [-0.01, -4.0, 2.2])  # 5 is bounded to 1 + 3; every token has a gradient
    close(loss, sum(g * x for g, x in zip(gradient, logp)))
    assert int(sums["clipped"]) == 0


@pytest.mark.parametrize("log_ratio", [-300.0, -21.0, -19.0, 0.3, 19.0, 21.0, 300.0])
def test_the_squared_gate_pulls_back_a_sequence_however_far_it_has_moved(log_ratio):
    """Kimi k1.5, eq. 3: the objective's gradient is A - tau * log-ratio, also where e^log-ratio is inf."""
    batch = single_tokens([-1.0], [0.5])
    _, gradient, sums = loss_and_gradient(batch, [log_ratio - 1.0], gate="squared", squared_tau=0.1)
    close(gradient, [-(0.5 - 0.1 * log_ratio)])
    assert int(sums["clipped"]) == 0


@pytest.mark.parametrize("gate", ["clip", "detach", "soft", "squared"])
def test_clipped_counts_the_tokens_without_a_gradient(gate):
    log_ratios = [-25.0, -19.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 6.0, 19.0, 25.0]
    for advantage in (1.0, -1.0):
        batch = single_tokens([-30.0] * len(log_ratios), [advantage] * len(log_ratios))
        logp = [x - 30 for x in log_ratios]
        _, gradient, sums = loss_and_gradient(batch, logp, gate=gate)
        assert int(sums["clipped"]) == gradient.count(0.0)
        assert 0 < gradient.count(0.0) or gate in ("detach", "squared")


RATIOS, SIGNS = (1.0, 1.0, 2.5, 2.5, 0.2), (1.0, -1.0, 1.0, -1.0, 1.0)


def soft_gate(**taus):
    """Loss and gradient of the tokens with the ratios RATIOS and the advantages SIGNS."""
    logp = [math.log(r) for r in RATIOS]
    return loss_and_gradient(single_tokens([0.0] * 5, SIGNS), logp, gate="soft", **taus)[:2]


def soft_gate_by_hand(tau_pos, tau_neg):
    """f(r) = 4 / tau * sigmoid(tau * (r - 1)) * A, whose derivative is 4 s (1 - s) A with s the sigmoid."""
    taus = [tau_pos if a > 0 else tau_neg for a in SIGNS]
    s = [1 / (1 + math.exp(-tau * (r - 1))) for tau, r in zip(taus, RATIOS)]
    loss = -sum(4 / tau * x * a for tau, x, a in zip(taus, s, SIGNS))
    return loss, [-a * 4 * x * (1 - x) * r for a, x, r in zip(SIGNS, s, RATIOS)]


def test_soft_gate_is_sapo():
    """tau is 1 for positive advantages and 1.05 for negative ones. At ratio 1 the gradient is that without a
    gate; it fades on both sides, faster for negative advantages."""
    loss, gradient = soft_gate()
    wanted_loss, wanted_gradient = soft_gate_by_hand(1.0, 1.05)
    close(loss, wanted_loss)
    close(gradient, wanted_gradient)
    close(gradient[:2], [-1.0, 1.0])
    assert abs(gradient[3]) < abs(gradient[2]) < 2.5


@pytest.mark.parametrize("tau_pos, tau_neg", [(1.0, 3.0), (0.5, 1.05), (2.0, 0.25)])
def test_the_temperatures_of_the_soft_gate_are_flags(tau_pos, tau_neg):
    loss, gradient = soft_gate(soft_tau_pos=tau_pos, soft_tau_neg=tau_neg)
    wanted_loss, wanted_gradient = soft_gate_by_hand(tau_pos, tau_neg)
    close(loss, wanted_loss)
    close(gradient, wanted_gradient)
    changed = [abs(a - b) > 1e-3 for a, b in zip(gradient, soft_gate()[1])]
    far = [r != 1 for r in RATIOS]  # at ratio 1 the temperature does not matter
    assert changed == [x and (tau_pos != 1.0 if a > 0 else tau_neg != 1.05) for x, a in zip(far, SIGNS)]


def test_corrections_of_a_case_by_hand():
    """Ratios pi_trainer / pi_vllm of (1/4, 2) and (1, 3, 9), geometric means 0.71 and 3, cap 2."""
    mismatch = [math.log(x) for x in (1 / 4, 2, 1, 3, 9)]
    wanted = {"none": [1, 1, 1, 1, 1], "token_truncate": [1 / 4, 2, 1, 2, 2],
              "token_mask": [1 / 4, 2, 1, 0, 0], "sequence_mask": [1, 1, 0, 0, 0]}
    batch = two_and_three(old=mismatch)
    for correction, weights in wanted.items():
        loss, gradient, _ = loss_and_gradient(batch, mismatch, correction=correction)  # on-policy
        close(gradient, [-w * x for w, x in zip(weights, batch.weight.tolist())])
        close(loss, sum(gradient))
    wide = loss_and_gradient(batch, mismatch, correction="sequence_mask", correction_cap=3.5)[1]
    assert wide[-1] < 0  # the cap is above 3
    less = [-x for x in mismatch]  # the second mean is 1/3, below 1/2
    assert loss_and_gradient(two_and_three(old=less), less, correction="sequence_mask")[1][2:] == [0, 0, 0]


def test_sequence_mask_equals_a_loop_over_sequences():
    torch.manual_seed(0)
    lengths = torch.randint(1, 30, (50,))
    sequence_ids = torch.arange(50).repeat_interleave(lengths)
    batch = SimpleNamespace(lengths=lengths, sequence_ids=sequence_ids)
    mismatch = torch.randn(len(sequence_ids), dtype=torch.float64)
    mismatch += torch.randn(50, dtype=torch.float64)[sequence_ids]
    wanted = []
    for part in mismatch.split(lengths.tolist()):
        mean = math.prod(math.exp(x) for x in part.tolist()) ** (1 / len(part))
        wanted += [float(0.5 <= mean <= 2.0)] * len(part)
    got = nr.importance(mismatch, batch, make_config(correction="sequence_mask"))
    assert got.tolist() == wanted and 0 < sum(wanted) < len(wanted)


class Policy:
    """Stands in for the DeepSpeed engine: returns given log-probs, records gradients and steps."""

    def __init__(self, *logps):
        self.logps, self.steps, self.grads = [tensor(*x).requires_grad_() for x in logps], 0, []

    def __call__(self, batch):
        logp = self.logps[len(self.grads)]
        return logp, torch.zeros_like(logp)

    def backward(self, loss):
        self.grads += torch.autograd.grad(loss, self.logps[len(self.grads)])

    def step(self):
        self.steps += 1

    def get_global_grad_norm(self):
        return 1.0

    def was_step_applied(self):
        return True


def test_update_reports_correction_over_all_packs():
    """Effective sample size as a fraction of R tokens: (sum w)^2 / (R sum w^2). Two packs, five tokens."""
    packs = [nr.collate([nr.Rollout([0], [1] * n, "", False, [0.0] * n, advantages=[1.0] * n, weight=0.1)])
             for n in (2, 3)]
    mismatch = [math.log(x) for x in (1 / 4, 2, 1, 3, 9)]
    cfg = make_config(kl_coef=0.0, mismatch_bound=1e9, correction="token_mask")
    engine = Policy(mismatch[:2], mismatch[2:])
    metrics = stats.step_means([nr.update(engine, packs, cfg)])
    w = [1 / 4, 2, 1, 0, 0]
    close(metrics["correction/ess"], sum(w) ** 2 / (5 * sum(x * x for x in w)))
    close([metrics["correction/share"], metrics["correction/w"]], [2 / 5, sum(w) / 5])
    close(torch.cat(engine.grads), [-0.1 * x for x in w])
    assert engine.steps == 1
    even = stats.step_means([nr.update(Policy([0.0] * 2, [0.0] * 3), packs, cfg)])
    close(even["correction/ess"], 1)
    assert even["correction/share"] == 0
    without = nr.update(Policy([0.0] * 2, [0.0] * 3), packs, dataclasses.replace(cfg, correction="none"))
    assert not [name for name in without if "correction" in name]


# ---- token weights of the sequences that are trained


def rollouts_of(*lengths, truncated=(), no_verdict=()):
    """Rollouts with these completion lengths; `truncated` and `no_verdict` are indices."""
    rollouts = [nr.Rollout([0], [1] * n, "", i in truncated, [0.0] * n) for i, n in enumerate(lengths)]
    for i, r in enumerate(rollouts):
        r.reward = None if i in no_verdict else 1.0
    return rollouts


@pytest.mark.parametrize("aggregate, weights", [
    ("sequence", [1 / 6, 0, 1 / 12]), ("token", [1 / 6, 0, 1 / 6]), ("constant", [1 / 24, 0, 1 / 24])])
def test_a_masked_truncated_completion_is_counted_as_a_sequence_but_not_by_its_tokens(aggregate, weights):
    """Lengths 2, 3 (truncated), 4: N = 3, 6 tokens are left, max_tokens = 8. TRL counts in the same way."""
    cfg = make_config(aggregate=aggregate, mask_truncated=True, max_tokens=8)
    rollouts = rollouts_of(2, 3, 4, truncated={1})
    trained = nr.assign_token_weights(rollouts, cfg)
    close([r.weight for r in rollouts], weights)
    assert [len(r.completion) for r in trained] == [2, 4]
    assert len(nr.assign_token_weights(rollouts, dataclasses.replace(cfg, mask_truncated=False))) == 3


def test_weights_come_from_counts_over_all_ranks(monkeypatch):
    """As with a second rank that has 3 sequences with 6 tokens in total."""
    monkeypatch.setattr(dist, "all_sum", lambda *counts: [a + b for a, b in zip(counts, (3, 6))])
    for aggregate, weight in (("sequence", 1 / (5 * 2)), ("token", 1 / 10), ("constant", 1 / (5 * 8))):
        trained = nr.assign_token_weights(rollouts_of(2, 2), make_config(aggregate=aggregate, max_tokens=8))
        close([r.weight for r in trained], [weight] * 2)


def test_a_completion_without_verdict_is_neither_trained_nor_counted():
    rollouts = rollouts_of(2, 3, 4, no_verdict={1})
    trained = nr.assign_token_weights(rollouts, make_config(aggregate="sequence"))
    close([r.weight for r in trained], [1 / 4, 1 / 8])
    assert rollouts[1] not in trained


# ---- sampling, with stand-ins for vLLM and the verifier


class Sampler:
    """Stands in for vLLM: completions are a function of prompt and seed. Records the seeds."""

    def __init__(self, tokenizer=None):
        self.tokenizer, self.seeds, self.synced = tokenizer, [], 0

    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(outputs=[self.sample(p["prompt_token_ids"], s, j) for j in range(s.n)])
                for p, s in zip(prompts, params)]

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

    def collective_rpc(self, name, kwargs):
        self.synced += 1

    def apply_model(self, function):
        return []  # it has no weights to compare

    def reset_prefix_cache(self):
        pass


TRAIN = [{"question": str(i), "answer": str(i), "prompt_ids": [i % 200, i // 200]} for i in range(1000)]


@judged_by("half")
def verifier(texts, question, **columns):
    """Every third question: half of the samples are right. All other questions: all samples are right."""
    values = [float(i % 2 == 0 or int(q) % 3 != 0) for i, q in enumerate(question)]
    return values, {"half": values}, {"reward/timeouts": 1}


def constant_reward(value):
    """A verifier that gives every completion the same reward."""
    return judged_by("x")(
        lambda texts, **columns: ([value] * len(texts), {"x": [value] * len(texts)}, {}))


def prompts_of(groups):
    return [str(g[0].prompt) for g in groups]


def prompts_of_draw(cfg, step, draw):
    """The prompts that collect_rollouts must use, from data.batch_at."""
    batch = data.batch_at(TRAIN, step * (1 + cfg.resample) + draw, cfg.prompts, cfg.seed)
    return [str(e["prompt_ids"]) for e in batch]


def test_flat_groups_are_left_out_and_new_prompts_drawn_until_the_batch_is_full():
    cfg, metrics, llm = make_config(prompts=4, samples=2, drop_flat_groups=True, resample=9), {}, Sampler()
    [groups], sampled = nr.collect_rollouts(cfg, llm, TRAIN, verifier, 5, metrics)
    assert len(groups) == 4 and all({r.reward for r in g} == {0.0, 1.0} for g in groups)
    draws = metrics["draws"]
    prompts = [p for draw in range(draws) for p in prompts_of_draw(cfg, 5, draw)]
    half_right = {str(e["prompt_ids"]) for e in TRAIN if int(e["question"]) % 3 == 0}
    assert prompts_of(sampled) == prompts
    assert prompts_of(groups) == [p for p in prompts if p in half_right][:4]
    assert 1 < draws < 10 and metrics["reward/timeouts"] == draws  # counts add up over the draws
    enough = [sum(p in half_right for p in prompts[:4 * n]) >= 4 for n in range(1, draws + 1)]
    assert enough == [False] * (draws - 1) + [True]  # it stops as soon as there are enough
    assert len(set(llm.seeds)) == len(llm.seeds) == len(prompts)  # no two requests share their noise


def test_draws_end_after_resample_rounds_even_without_enough_groups():
    cfg, metrics = make_config(prompts=4, samples=2, drop_flat_groups=True, resample=2), {}
    [groups], sampled = nr.collect_rollouts(cfg, Sampler(), TRAIN, constant_reward(1.0), 0, metrics)
    assert groups == [] and len(sampled) == 12 and metrics["draws"] == 3


def as_ranks(world, monkeypatch, function):
    """What function() returns on each of `world` ranks: threads, whose collective calls meet at a barrier."""
    own, shared, barrier = threading.local(), [None] * world, threading.Barrier(world, timeout=60)

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
        patched.setattr(dist, "all_sum", lambda *values: [sum(x) for x in zip(*all_gather([values]))])
        return list(pool.map(on_rank, range(world)))


@pytest.mark.parametrize("resample", [0, 9])
def test_any_number_of_ranks_keeps_the_groups_of_one_rank_in_its_minibatches(monkeypatch, resample):
    """Also their rewards, which are random."""
    cfg = make_config(prompts=8, samples=2, minibatches=2, drop_flat_groups=True, resample=resample)

    @judged_by("random")
    def coin(texts, **columns):
        values = rewards.random_reward(texts, **columns)
        return values, {"random": values}, {}

    def minibatches(step):
        parts, _ = nr.collect_rollouts(cfg, Sampler(), TRAIN, coin, step, {})
        return [[[(r.prompt, r.completion, r.reward) for r in group] for group in part] for part in parts]

    for step in (2, 3, 4):  # in step 1 all groups happen to be flat
        [one] = as_ranks(1, monkeypatch, lambda: minibatches(step))
        assert len(one[0] + one[1]) == 8 if resample else len(one[0] + one[1]) < 8
        for world in (2, 4):
            several = as_ranks(world, monkeypatch, lambda: minibatches(step))
            for i in range(2):
                together = [group for parts in several for group in parts[i]]
                assert sorted(together) == sorted(one[i])


def test_without_dropping_a_step_is_one_draw_and_keeps_its_flat_groups():
    cfg, metrics = make_config(prompts=4, samples=2), {}
    [groups], sampled = nr.collect_rollouts(cfg, Sampler(), TRAIN, verifier, 5, metrics)
    assert groups == sampled and prompts_of(sampled) == prompts_of_draw(cfg, 5, 0) and metrics["draws"] == 1
    assert any(stats.is_flat(g) for g in groups)


def test_the_data_of_a_draw_is_a_function_of_step_and_draw_alone():
    cfg = make_config(prompts=4, samples=2, drop_flat_groups=True, resample=3)

    def tokens(step, judge=verifier):
        _, sampled = nr.collect_rollouts(cfg, Sampler(), TRAIN, judge, step, {})
        return [r.completion for g in sampled for r in g]

    first = tokens(7)
    tokens(6)  # earlier calls do not matter
    assert first == tokens(7) != tokens(8)
    assert tokens(7, constant_reward(0.0))[:len(first)] == first  # other rewards: more draws, but the same
    prompts = [p for step in range(5) for draw in range(4) for p in prompts_of_draw(cfg, step, draw)]
    assert len(set(prompts)) == len(prompts)  # no overlap: 80 prompts of an epoch of 1,000


def test_metrics_of_a_rollout_batch_are_means_over_the_tokens_of_its_optimizer_steps():
    history = [{"loss": 0.5, "tokens": 10, "kl": 0.2, "mismatch/max": 0.1, "grad_norm": 1.0, "skipped": 0.0},
               {"loss": 0.1, "tokens": 30, "kl": 0.6, "mismatch/max": 0.7, "grad_norm": 3.0, "skipped": 1.0}]
    means = stats.step_means(history)
    assert means.keys() == history[0].keys() - {"tokens"} and stats.step_means([]) == {}
    wanted = {"loss": 0.3, "kl": 0.5, "mismatch/max": 0.7, "grad_norm": 2.0, "skipped": 0.5}
    close([means[name] for name in wanted], list(wanted.values()))


def test_a_reward_without_any_verdict_has_no_mean():
    judged = nr.Rollout([1], [2], "", False, [0.0], reward=1.0, parts={"a": 1.0, "b": None})
    other = nr.Rollout([1], [2], "", False, [0.0], reward=0.0, parts={"a": 0.0, "b": None})
    metrics = log.summary(make_config(), [], [[judged, other]], {"seconds/update": 1.0})
    assert metrics["reward/a"] == 0.5 and "reward/b" not in metrics


def test_a_group_is_flat_when_its_verdicts_agree():
    cases = (([1, 1, 1], True), ([0, 1, 0], False), ([1, None, 1], True), ([None, None], True),
             ([0, None, 1], False))
    for values, flat in cases:
        assert stats.is_flat([nr.Rollout([], [], "", False, [], reward=r) for r in values]) == flat


# ---- the loop: real DeepSpeed and model, stand-ins for vLLM and the verifier


def loop(tmp_path, tokenizer, judge, **changes):
    """Runs train(). Returns (metrics, sampled rollouts) of each step."""
    sizes = dict(prompts=4, samples=4, eval_every=100, lr=1e-3, out=str(tmp_path), name="x")
    unchecked = dict(correction="none", mismatch_bound=1e9)  # the log-probs of Sampler are not the model's
    cfg = make_config(**sizes | unchecked | changes)
    lines = []

    def write(step, metrics, groups=(), answers=()):
        lines.append((metrics, [r for group in groups for r in group]))

    log = SimpleNamespace(folder=tmp_path, tokenizer=tokenizer, write=write, close=lambda: None,
                          trace=lambda step: None, say=lambda text: None,
                          token_numbers=lambda *_: contextlib.nullcontext())
    checkpoints = SimpleNamespace(restore=lambda policy, ref: Progress(), save=lambda final: None,
                                  check=lambda: None, wait=lambda: None)
    nr.train(cfg, Sampler(tokenizer), nr.make_policy(cfg), nr.make_reference(cfg), TRAIN[:200], TRAIN[:2],
             judge, log, checkpoints)
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
def by_step(texts, step, **columns):
    """A verifier whose mean reward differs from step to step: sample i gets i % 4 + 8 * step."""
    values = [i % 4 + 8.0 * step for i in range(len(texts))]
    return values, {"x": values}, {}


def test_running_baseline_starts_at_the_first_mean_and_moves_by_a_tenth_per_step(group, tmp_path, tokenizer):
    """Means 1.5, 9.5, 17.5. The baseline: 1.5, 0.9 * 1.5 + 0.1 * 1.5, 0.9 * 1.5 + 0.1 * 9.5 = 2.3."""
    steps = loop(tmp_path, tokenizer, by_step, steps=3, baseline="running", scale="none", kl_coef=0.0)
    for (_, rollouts), baseline in zip(steps, (1.5, 1.5, 2.3), strict=True):
        assert len(rollouts) == 16
        close([r.advantages[0] for r in rollouts], [r.reward - baseline for r in rollouts])


def test_a_reference_that_is_reset_is_the_policy_of_that_step(group, tmp_path, tokenizer):
    kl = [m["kl"] for m, _ in loop(tmp_path, tokenizer, by_step, steps=5, ref_reset_every=2, kl_coef=0.01)]
    close(kl[::2], [0, 0, 0])
    kept = [m["kl"] for m, _ in loop(tmp_path, tokenizer, by_step, steps=3, kl_coef=0.01)]
    close(kept[:2], kl[:2])
    assert min(kl[1], kl[3], kept[2]) > 1e-3


def test_a_reference_is_reset_before_the_kl_in_the_reward(group, tmp_path, tokenizer, monkeypatch):
    seen, equal, store_fixed_logps = [], [], nr.store_fixed_logps

    def kl(policy, ref, *args):
        seen.append([p.clone() for p in ref.model.parameters()])
        return {}

    def fixed(policy, *args):
        equal.append(all(map(torch.equal, seen[-1], policy.module.model.parameters())))
        return store_fixed_logps(policy, *args)

    monkeypatch.setattr(nr.credit, "store_kl", kl)
    monkeypatch.setattr(nr, "store_fixed_logps", fixed)
    loop(tmp_path, tokenizer, by_step, steps=4, ref_reset_every=2, kl_coef=0.01, kl_in="reward")
    assert equal == [True, False, True, False]


def test_epochs_and_minibatches_are_optimizer_steps_against_log_probs_taken_once(
        group, tmp_path, tokenizer, updates):
    loop(tmp_path, tokenizer, by_step, steps=1, epochs=2, minibatches=2, kl_coef=0.0)
    rollouts, weights, old, metrics = zip(*updates)
    prompts = [{tuple(r.prompt) for r in members} for members in rollouts]
    assert len(updates) == 4 and prompts[:2] == prompts[2:]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 4
    assert old[:2] == old[2:] and None not in old[0] + old[1]
    # each step is a complete mean over its own minibatch
    close([sum(w * len(r.completion) for w, r in zip(*x)) for x in zip(weights, rollouts)], [1.0] * 4)
    close(metrics[0]["ratio"], 1)
    assert all(abs(m["ratio"] - 1) > 1e-3 for m in metrics[1:])
    updates.clear()
    loop(tmp_path, tokenizer, by_step, steps=1, kl_coef=0.0)
    assert len(updates) == 1 and set(updates[0][2]) == {None}  # one step: the policy is the one that sampled


def test_dropped_groups_cost_no_forward_pass_and_change_no_weight(group, tmp_path, tokenizer, updates):
    """A third of the groups is not flat. The others have advantage 0, but would enter the mean if kept."""
    [(metrics, sampled)] = loop(tmp_path, tokenizer, verifier, steps=1, prompts=8, drop_flat_groups=True,
                                kl_coef=0.0, keep_rollouts=1000)
    groups = [sampled[i:i + 4] for i in range(0, len(sampled), 4)]
    kept = [r for g in groups if not stats.is_flat(g) for r in g]
    assert 0 < len(kept) < len(sampled) == 32
    assert sorted(map(id, updates[0][0])) == sorted(map(id, kept))
    close([r.weight * len(r.completion) for r in kept], [1 / len(kept)] * len(kept))


# ---- presets


def test_every_preset_is_a_row_of_legal_values_of_configs_fields():
    hints, fields = get_type_hints(nr.Config), {f.name: f.default for f in dataclasses.fields(nr.Config)}
    for name, row in nr.ALGOS.items():
        for flag, value in row.items():
            legal = get_args(hints[flag])
            assert value in legal if legal else type(value) is type(fields[flag]), (name, flag)
            assert value != fields[flag], f"{name}: {flag} is the default"
        assert nr.parse_config(["--algo", name]).algo == name  # check_config() accepts it


@pytest.mark.parametrize("algo, baseline, scale, ratio, gate, aggregate", [
    ("grpo", "group", "group", "token", "clip", "sequence"),
    ("dr_grpo", "group", "none", "token", "clip", "constant"),
    ("dapo", "group", "group", "token", "clip", "token"),
    ("bnpo", "group", "group", "token", "clip", "token"),
    ("rloo", "leave_one_out", "none", "product", "clip", "sequence"),
    ("reinforce++", "batch", "batch", "token", "clip", "token"),
    ("gspo", "group", "group", "sequence", "clip", "sequence"),
    ("cispo", "group", "group", "token", "detach", "token"),
    ("sapo", "group", "group", "token", "soft", "sequence"),
    ("rft", "none", "none", "token", "clip", "sequence"),
])
def test_presets_have_the_axes_of_their_papers(algo, baseline, scale, ratio, gate, aggregate):
    cfg = nr.parse_config(["--algo", algo])
    axes = (cfg.baseline, cfg.scale, cfg.ratio, cfg.gate, cfg.aggregate)
    assert axes == (baseline, scale, ratio, gate, aggregate)
    assert (cfg.kl_coef == 0) == (algo not in ("grpo", "reinforce++"))


def test_presets_have_the_numbers_of_their_papers():
    dapo, gspo, cfg = nr.ALGOS["dapo"], nr.ALGOS["gspo"], nr.Config()
    assert (dapo["clip_high"], dapo["drop_flat_groups"], dapo["overlong_buffer"]) == (0.28, True, 0.2)
    assert (gspo["clip_low"], gspo["clip_high"]) == (3e-4, 4e-4)  # section 5.1
    assert cfg.clip_low == cfg.clip_high == 0.2 and cfg.kl_coef == 0.001


def test_rft_raises_the_likelihood_of_right_samples_only():
    cfg = dataclasses.replace(nr.Config(), **nr.ALGOS["rft"], correction="none")
    a = nr.group_advantages(tensor([1.0, 0.0]), cfg.baseline, cfg.scale)[0].tolist()
    batch = two_and_three(old=[-1.0] * 5, advantage=[a[0]] * 2 + [a[1]] * 3)
    logp = tensor(*[-1.0] * 5).requires_grad_()
    nr.policy_loss(logp, None, None, batch, cfg)[0].backward()
    close(logp.grad, [-0.1, -0.2, 0, 0, 0])  # the gradient of -weight * log-prob
