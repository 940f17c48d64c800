"""The pure functions of the loop against hand-derived cases and naive references, in float64."""
import dataclasses
import inspect
import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import data
import nano_rlvr as nr
from conftest import EPS, EXACT, close, fixed_rollouts, make_config, within
from runtime.batch import pack
from runtime.guard import largest_pack
from runtime.stats import pass_at_k, wilson_interval
from runtime.trainer import lr_at

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
NAN = math.nan
PLAIN = dataclasses.replace(nr.Config(), correction="none")


# ---- advantages


def test_advantage_is_the_z_score_with_population_deviation_and_1e4():
    a = nr.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    sigma = math.sqrt(3 / 16)  # mean 1/4, deviations 3/4 and three times 1/4
    close(a[0], [0.75 / (sigma + 1e-4)] + [-0.25 / (sigma + 1e-4)] * 3)


def test_no_verdict_gets_advantage_0_and_does_not_change_the_others():
    with_nan = nr.group_advantages(torch.tensor([[1.0, NAN, 0.0, 0.0]]))
    without = nr.group_advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    assert with_nan[0, 1] == 0
    assert torch.equal(with_nan[0, [0, 2, 3]], without[0])
    r = torch.tensor([[NAN, NAN], [NAN, 1.0]])
    for baseline in ("group", "leave_one_out", "none"):
        for scale in ("group", "batch", "none"):
            assert nr.group_advantages(r, baseline, scale).isfinite().all()


# ---- token weights


def test_weights_of_two_ranks_are_those_of_one_batch():
    lengths = [2, 5, 3, 7]
    for aggregate in ("sequence", "token", "constant"):
        first, second = (nr.token_weights(part, aggregate, 8, sequences=4, tokens=17)
                         for part in (lengths[:2], lengths[2:]))
        assert nr.token_weights(lengths, aggregate, 8) == first + second


# ---- pack and collate


@pytest.mark.exercise_7
@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_packs_hold_every_rollout_once_within_the_budget(lengths, budget):
    rollouts = [nr.Rollout([i // 4], [1] * n, "", False, [0.0] * n) for i, n in enumerate(lengths)]
    packs = pack(rollouts, budget)
    assert sorted(id(r) for p in packs for r in p) == sorted(map(id, rollouts))
    assert all(len(p) == 1 or sum(map(len, p)) <= budget for p in packs)
    free = [budget - sum(map(len, p)) for p in packs]
    # first fit: no rollout fits into an earlier pack
    assert all(len(p[-1]) > tokens for i, p in enumerate(packs) for tokens in free[:i])


@pytest.mark.exercise_7
def test_a_pack_takes_a_whole_group_before_it_begins_the_next():
    sizes = [(0, 9), (1, 20), (0, 8), (1, 30), (2, 7), (2, 6)]
    rollouts = [nr.Rollout([g], [1] * (n - 1), "", False, [0.0] * (n - 1))
                for g, n in sorted(sizes)]
    packs = [[(r.prompt[0], len(r)) for r in p] for p in pack(rollouts, 50)]
    assert packs == [[(1, 30), (1, 20)], [(0, 9), (0, 8), (2, 7), (2, 6)]]


def test_collate_points_at_the_token_before_each_completion_token():
    a = nr.Rollout([10, 11], [12, 13, 14], "", False, [-1.0, -2.0, -3.0], advantages=[0.5] * 3,
                   weight=2.0)
    b = nr.Rollout([20], [21], "", False, [-4.0], advantages=[-1.0], weight=3.0)
    c = nr.Rollout([10, 11], [15], "", False, [-5.0], advantages=[2.0], weight=4.0)
    batch = nr.collate([a, b, c])
    # the prompt of a and c once
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21, 15]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.kv_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 7]
    assert batch.cu_seqlens_q.tolist() == [0, 5, 7, 8]
    assert batch.cu_seqlens_k.tolist() == [0, 5, 7, 10]
    assert batch.max_seqlen == 5
    assert batch.lengths.tolist() == [3, 1, 1]
    assert batch.predictors.tolist() == [1, 2, 3, 5, 1]
    assert batch.targets.tolist() == [12, 13, 14, 21, 15]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2]
    assert batch.advantage.tolist() == [0.5, 0.5, 0.5, -1.0, 2.0]
    assert batch.weight.tolist() == [2.0, 2.0, 2.0, 3.0, 4.0]
    assert batch.vllm_logps.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert batch.old is None and batch.ref is None


# ---- log-probs


def naive_logps(model, rollout, temperature):
    """Log-probs and entropies of one sequence, from the full logits of the library's pass."""
    ids, start = torch.tensor([rollout.prompt + rollout.completion]), len(rollout.prompt)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1:-1] / temperature  # (R, V)
    logp = logits.log_softmax(-1)  # (R, V)
    return logp.gather(1, ids[0, start:, None])[:, 0], -(logp.exp() * logp).sum(-1)  # (R,), (R,)


@pytest.mark.parametrize("implementation, temperature", [("eager", 1.0), ("sdpa", 0.7)])
def test_packed_chunked_logps_and_gradients_equal_one_sequence_at_a_time(
        model, tokenizer, implementation, temperature):
    from transformers import AutoModelForCausalLM
    rollouts = fixed_rollouts(tokenizer)
    naive = AutoModelForCausalLM.from_pretrained(
        make_config().model, dtype=torch.float64, attn_implementation=implementation)
    wanted, entropy = zip(*(naive_logps(naive, r, temperature) for r in rollouts))
    sum((w * torch.tensor(r.advantages)).sum() for w, r in zip(wanted, rollouts)).backward()

    policy = nr.TokenLogps(model, temperature, chunk=7)
    packs = pack(rollouts, 100)
    for members in packs:
        batch = nr.collate(members)
        logp, h = policy(batch)
        close(logp, torch.cat([wanted[rollouts.index(r)] for r in members]))
        close(h, torch.cat([entropy[rollouts.index(r)] for r in members]))
        (logp * batch.advantage).sum().backward()
    assert sum(map(len, packs)) == len(rollouts) and len(packs) > 3
    for p, q in zip(model.parameters(), naive.parameters(), strict=True):
        close(p.grad, q.grad)


def test_no_tensor_as_wide_as_the_vocabulary_is_made(model, tokenizer):
    batch, shapes = nr.collate(fixed_rollouts(tokenizer, groups=8)), set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            shapes.update(x.shape for x in tree_leaves(out) if torch.is_tensor(x))
            return out

    with Watch():
        nr.TokenLogps(model, chunk=200)(batch)[0].sum().backward()
    R, (V, H) = len(batch.targets), model.get_output_embeddings().weight.shape
    assert R > 400 and {(R, 200), (R, V - 200)} < shapes
    # the weight and its gradient
    assert {shape for shape in shapes if V in shape} <= {(V, H), (H, V)}


def test_any_split_into_packs_gives_the_same_gradient(model, tokenizer):
    cfg, grads = make_config(kl_coef=0.05, correction="token_mask"), []
    rollouts = fixed_rollouts(tokenizer)
    policy = nr.TokenLogps(model)
    with torch.no_grad():
        logp = {id(r): policy(nr.collate([r]))[0] for r in rollouts}
    # off-policy, away from the reference
    old, ref = ({key: x + 0.3 * torch.randn_like(x) for key, x in logp.items()} for _ in range(2))
    for budget in (1, 64, 10**6):
        model.zero_grad()
        for members in pack(rollouts, budget):
            batch = nr.collate(members)
            batch.old = torch.cat([old[id(r)] for r in members])  # (R,)
            batch.ref = torch.cat([ref[id(r)] for r in members])  # (R,)
            nr.policy_loss(policy(batch)[0], batch.old, batch.ref, batch, cfg)[0].backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for g in grads[1:]:
        within((g - grads[0]).norm(), EXACT * grads[0].norm())


# ---- loss


def one_token(advantage):
    return SimpleNamespace(
        advantage=torch.tensor([advantage]), weight=torch.ones(1), vllm_logps=torch.zeros(1),
        lengths=torch.ones(1), sequence_ids=torch.zeros(1, dtype=torch.long))


def loss_of(ratio, advantage, **changes):
    """Loss of a single token, its gradient by the log-prob, and whether it was clipped."""
    cfg = dataclasses.replace(PLAIN, **changes)
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, sums = nr.policy_loss(logp, torch.zeros(1), None, one_token(advantage), cfg)
    loss.backward()
    return loss.item(), logp.grad.item(), int(sums["clipped"])


@pytest.mark.parametrize("ratio, advantage, loss, gradient, clipped", [
    (1.1, +1.0, -1.1, -1.1, 0),  # inside the clip range: plain policy gradient
    (0.9, -1.0, +0.9, +0.9, 0),
    (1.5, +1.0, -1.28, 0.0, 1),  # good and already 28 % likelier: no gradient
    (0.5, -1.0, +0.8, 0.0, 1),  # bad and already 20 % less likely: no gradient
    (0.5, +1.0, -0.5, -0.5, 0),  # good but less likely: full gradient
    (1.5, -1.0, +1.5, +1.5, 0),  # bad but likelier: full gradient, however far it moved
])
def test_the_four_quadrants_of_the_clip(ratio, advantage, loss, gradient, clipped):
    got = loss_of(ratio, advantage, clip_low=0.2, clip_high=0.28)
    close(got[:2], (loss, gradient))
    assert got[2] == clipped


@pytest.mark.parametrize("axis, call", [
    *((axis, lambda axis, cfg: nr.group_advantages(torch.rand(2, 3), **{axis: "typo"}))
      for axis in ("baseline", "scale")),
    ("aggregate", lambda axis, cfg: nr.token_weights([1, 2], "typo", 8)),
    *((axis, lambda axis, cfg: nr.policy_loss(torch.zeros(1), None, None, one_token(1.0), cfg))
      for axis in ("gate", "ratio", "correction")),
    ("correction", lambda axis, cfg: nr.importance(torch.zeros(1), None, cfg)),
])
def test_an_unknown_choice_is_an_error(axis, call):
    cfg = dataclasses.replace(PLAIN, **{axis: "typo"})
    with pytest.raises((ValueError, KeyError), match="typo"):
        call(axis, cfg)


@given(prompt=st.integers(1, 50), completion=st.integers(1, 50), budget=st.integers(1, 400))
def test_the_rehearsed_pack_has_the_longest_sequence_all_tokens_and_the_most_head_rows(
        prompt, completion, budget):
    cfg = make_config(max_prompt=prompt, max_tokens=completion, pack_tokens=budget)
    sequences = largest_pack(cfg)
    tokens, head_rows = (sum(x) for x in zip(*([p + c, c] for p, c in sequences)))
    assert sequences[0] == (prompt, completion) and all(p and c <= completion for p, c in sequences)
    assert len(sequences) == 1 or budget - 1 <= tokens <= budget
    # completions with prompts of one token have the most rows; a longest one costs its prompt
    most = budget // (1 + completion) * completion + max(0, budget % (1 + completion) - 1)
    assert head_rows >= min(most, budget) - prompt - completion


def test_k3_in_float32_is_never_negative_and_exact_where_the_log_probs_hardly_differ():
    """Against d^2 / 2 + d^3 / 6, whose next term is far below the rounding of d, EPS * d."""
    d = np.logspace(-6, -3, 2000, dtype=np.float32)
    d = torch.from_numpy(np.concatenate([d, -d]))
    ours, d = nr.k3(torch.zeros_like(d), d), d.double()
    assert ours.dtype is torch.float32 and (ours >= 0).all()
    within((ours - (d**2 / 2 + d**3 / 6)).abs().div(10 * EPS * d.abs()).max(), 1)
    within((ours.double().mean() - (d**2 / 2).mean()).abs(), 0.01 * (d**2 / 2).mean())


def test_mean_of_k3_under_the_policy_is_the_exact_kl():
    torch.manual_seed(0)
    p, q = torch.randn(50).log_softmax(0), torch.randn(50).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    close((p.exp() * nr.k3(p, q)).sum(), exact)  # expectation over samples of p
    # samples of q would not give it
    assert abs((q.exp() * nr.k3(p, q)).sum() - exact) > 0.05 * exact
    assert (nr.k3(p, q) >= 0).all()


def test_the_gradient_of_the_kl_leads_to_the_reference():
    cfg = dataclasses.replace(PLAIN, kl_coef=0.5)
    batch = SimpleNamespace(advantage=torch.zeros(2), weight=torch.ones(2),
                            lengths=torch.ones(2), sequence_ids=torch.arange(2),
                            vllm_logps=torch.zeros(2))
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, terms = nr.policy_loss(logp, None, torch.tensor([-2.0, -2.0]), batch, cfg)
    loss.backward()
    # descent lowers the token that is too likely, raises the other
    assert logp.grad[0] > 0 > logp.grad[1]
    wanted = sum(math.exp(d) - d - 1 for d in (-1.0, 1.0))
    close([loss.item(), terms["kl"].sum().item()], [0.5 * wanted, wanted])


# ---- evaluation and schedule


@pytest.mark.exercise_13
def test_pass_at_k_is_the_fraction_of_k_subsets_with_a_right_one():
    from itertools import combinations
    right = [1, 0, 0, 1, 0, 0]
    for k in range(1, 7):
        subsets = list(combinations(right, k))
        close(pass_at_k(6, 2, k), sum(map(any, subsets)) / len(subsets))


def test_wilson_interval_of_known_cases():
    """0 of n: the upper end is z^2 / (n + z^2). n/2 of n: 1/2 +- z / (2 sqrt(n + z^2))."""
    z = NormalDist().inv_cdf(0.975)  # wilson_interval() uses seven digits of it
    close(wilson_interval(0, 10), (0.0, z**2 / (10 + z**2)), 1e-6)
    half = z / (2 * math.sqrt(100 + z**2))
    close(wilson_interval(50, 100), (0.5 - half, 0.5 + half), 1e-6)


def test_learning_rate_warms_up_and_ends_at_lr_end():
    cfg = dataclasses.replace(nr.Config(), lr=1.0, warmup=4, steps=10, lr_end=0.0)
    close([lr_at(s, cfg) for s in (0, 3)], [0.25, 0.7])
    assert lr_at(10, cfg) == 0
    assert lr_at(7, dataclasses.replace(cfg, lr_end=1.0)) == 1.0


def test_no_two_samples_share_a_seed():
    n = 8  # vLLM gives sample j of a request seed + j
    seeds = {data.request_seed(0, step, i) + j
             for step in range(20) for i in range(64) for j in range(n)}
    assert len(seeds) == 20 * 64 * n
    assert data.request_seed(0, 1, 2) == data.request_seed(0, 1, 2) != data.request_seed(1, 1, 2)


def test_docstring_examples():
    import doctest
    result = doctest.testmod(nr)
    assert result.failed == 0 and result.attempted >= 2


# ---- the names that a notebook uses


def test_the_public_names_of_the_script():
    for name in ("Config ALGOS Rollout group_advantages token_weights collate TokenLogps "
                 "HeadLogps k3 policy_loss importance update rewards parse_config").split():
        assert hasattr(nr, name), name
    assert "math" in nr.rewards.REWARDS
    names = list(inspect.signature(nr.policy_loss).parameters)
    assert names == ["logp", "old", "ref", "batch", "cfg"]
