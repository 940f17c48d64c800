"""The pure functions of the loop against naive references, in float64."""
import dataclasses
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

import nano_rlvr as nr
from conftest import EPS, close, fixed_rollouts, make_config, naive_logps, within
from runtime.batch import pack
from runtime.guard import largest_pack
from runtime.stats import pass_at_k, wilson_interval

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]


# ---- packs


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


# ---- log-probs


class Watch(TorchDispatchMode):
    """Collects the shapes of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {x.shape for x in tree_leaves(out) if torch.is_tensor(x)}
        return out


@pytest.mark.parametrize("implementation, temperature", [("eager", 1.0), ("sdpa", 0.7)])
def test_packed_chunked_logps_and_gradients_equal_one_sequence_at_a_time(
        model, tokenizer, implementation, temperature):
    """And no tensor as wide as the vocabulary is made but the weight of the head, its gradient."""
    from transformers import AutoModelForCausalLM
    rollouts = fixed_rollouts(tokenizer)
    naive = AutoModelForCausalLM.from_pretrained(
        make_config().model, dtype=torch.float64, attn_implementation=implementation)
    wanted, entropy = zip(*(naive_logps(naive, r, temperature) for r in rollouts))
    sum((w * torch.tensor(r.advantages)).sum() for w, r in zip(wanted, rollouts)).backward()

    policy = nr.TokenLogps(model, temperature, chunk=7)
    packs = pack(rollouts, 100)
    with Watch() as watch:
        for members in packs:
            batch = nr.collate(members)
            logp, h = policy(batch)
            close(logp, torch.cat([wanted[rollouts.index(r)] for r in members]))
            close(h, torch.cat([entropy[rollouts.index(r)] for r in members]))
            (logp * batch.advantage).sum().backward()
    assert sum(map(len, packs)) == len(rollouts) and len(packs) > 3
    for p, q in zip(model.parameters(), naive.parameters(), strict=True):
        close(p.grad, q.grad)
    V, H = model.get_output_embeddings().weight.shape
    assert (len(batch.targets), 7) in watch.shapes
    assert {shape for shape in watch.shapes if V in shape} <= {(V, H), (H, V)}


# ---- loss


@pytest.mark.parametrize(
    "axis", ["baseline", "scale", "aggregate", "ratio", "gate", "correction"])
def test_an_unknown_choice_is_an_error(axis):
    cfg = dataclasses.replace(nr.Config(), **{axis: "typo"})
    one = torch.zeros(1)
    batch = SimpleNamespace(advantage=one, vllm_logps=one, weight=one)
    with pytest.raises((ValueError, KeyError), match="typo"):
        nr.group_advantages(torch.rand(2, 3), cfg.baseline, cfg.scale)
        nr.token_weights([1, 2], cfg.aggregate, 8)
        nr.policy_loss(one, None, None, batch, cfg)


@settings(deadline=None)
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
    p, q = torch.randn(2, 50).log_softmax(-1)
    close((p.exp() * nr.k3(p, q)).sum(), (p.exp() * (p - q)).sum())


# ---- evaluation


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
