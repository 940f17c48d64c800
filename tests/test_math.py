"""The pure functions of the loop against naive references, in float64."""
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nano_rlvr as nr
from conftest import EPS, close, make_config, within
from runtime.batch import fill_packs
from runtime.guard import largest_pack
from runtime.stats import pass_at_k

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]


@pytest.mark.exercise_7
@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_packs_hold_every_rollout_once_within_the_budget(lengths, budget):
    rollouts = [nr.Rollout([i // 4], [1] * n, "", False, [0.0] * n) for i, n in enumerate(lengths)]
    packs = fill_packs(rollouts, budget)
    case = (f"tokens {[len(r) for r in rollouts]}, budget {budget}: your packs "
            f"{[[len(r) for r in p] for p in packs]}, wanted: each once, first fit")
    assert sorted(id(r) for p in packs for r in p) == sorted(map(id, rollouts)), case
    assert all(len(p) == 1 or sum(map(len, p)) <= budget for p in packs), case
    free = [budget - sum(map(len, p)) for p in packs]
    assert all(len(p[-1]) > room for i, p in enumerate(packs) for room in free[:i]), case


@pytest.mark.exercise_7
def test_a_pack_takes_a_whole_group_before_it_begins_the_next():
    sizes = [(0, 9), (1, 20), (0, 8), (1, 30), (2, 7), (2, 6)]
    rollouts = [nr.Rollout([g], [1] * (n - 1), "", False, [0.0] * (n - 1))
                for g, n in sorted(sizes)]
    packs = [[(r.prompt[0], len(r)) for r in p] for p in fill_packs(rollouts, 50)]
    wanted = [[(1, 30), (1, 20)], [(0, 9), (0, 8), (2, 7), (2, 6)]]
    assert packs == wanted, f"(group, tokens) {sizes}: yours {packs}, wanted {wanted}"


@settings(deadline=None)
@given(prompt=st.integers(1, 50), completion=st.integers(1, 50), budget=st.integers(1, 400))
def test_the_rehearsed_pack_has_the_longest_sequence_and_all_tokens(prompt, completion, budget):
    """Or as many sequences as a step has."""
    cfg = make_config(max_prompt=prompt, max_tokens=completion, pack_tokens=budget)
    longest, *others = largest_pack(cfg)
    assert longest == (prompt, completion) and all(p == 1 <= c <= completion for p, c in others)
    tokens = sum(longest) + sum(map(sum, others))
    assert not others or tokens <= budget
    assert not others or tokens >= budget - 1 or len(others) == cfg.prompts * cfg.samples - 1


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


@pytest.mark.exercise_13
def test_pass_at_k_is_the_fraction_of_k_subsets_with_a_right_one():
    for k in range(1, 7):
        subsets = list(combinations([1, 0, 0, 1, 0, 0], k))
        close(pass_at_k(6, 2, k), sum(map(any, subsets)) / len(subsets), case=f"(6, 2, {k}):")
