"""Precision: what is in float32 or float64 while weights and hidden states are in bfloat16.

u below is the unit roundoff: a result that is rounded once has a relative error of at most u.
"""
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import nano_rlvr as nr
from conftest import EPS, close, make_config, within
from runtime import dist, stats
from runtime.batch import step_rewards
from runtime.model import HeadLogps

pytestmark = pytest.mark.numeric
U32, U16 = EPS / 2, 2**-8  # unit roundoff of float32 and of bfloat16, which has 8 bits of precision
R, H, V, CHUNK, TEMPERATURE = 24, 64, 320, 32, 0.75


def head_inputs(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(R, H).to(dtype), torch.randn(V, H).to(dtype)
    grad = torch.randn(R)  # of the log-probs
    return hidden, weight, torch.randint(V, (R,)), grad


def reference(hidden, weight, targets, grad):
    """Log-probs, entropy and gradients in float64."""
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T  # (R, V)
    logp = (logits / TEMPERATURE).log_softmax(-1)  # (R, V)
    chosen = logp.gather(1, targets[:, None])[:, 0]  # (R,)
    chosen.backward(grad.double())
    entropy = -(logp.exp() * logp).sum(-1)  # (R,)
    return [x.detach() for x in (chosen, entropy, hidden.grad, weight.grad)]


def ours(hidden, weight, targets, grad, chunk=CHUNK):
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    logp, entropy = HeadLogps.apply(hidden, weight, targets, TEMPERATURE, chunk)
    logp.backward(grad)
    return logp.detach(), entropy, hidden.grad, weight.grad


def largest(hidden, weight, targets, grad):
    """Bounds on a dot product's terms: of a logit, of an element of the two gradients."""
    absolute = hidden.double().abs() @ weight.double().abs().T  # (R, V) sum |h w|
    p = (hidden.double() @ weight.double().T / TEMPERATURE).softmax(-1)
    p = p.scatter_add(1, targets[:, None], torch.ones(len(targets), 1, dtype=p.dtype))
    grads = grad.double().abs()[:, None] * p / TEMPERATURE  # (R, V) at least |gradient of a logit|
    return absolute.max().item(), grads @ weight.double().abs(), grads.T @ hidden.double().abs()


@pytest.mark.exercise_9
def test_in_float32_the_head_is_exact_up_to_the_rounding_of_its_sums():
    """A dot product of H terms is off by at most H u sum |h w|, in any order. The log-prob is a
    difference of two logits, over the temperature; exp, log and the sums over V add a few u. The
    bounds have a factor of 10 in hand."""
    inputs = head_inputs(torch.float32)
    logp, entropy, grad_hidden, grad_weight = ours(*inputs)
    wanted = reference(*inputs)
    terms, rows, columns = largest(*inputs)
    logit = H * U32 * terms / TEMPERATURE
    assert logp.dtype is entropy.dtype is torch.float32
    within((logp - wanted[0]).abs().max(), 10 * logit)
    # dH = - sum p (log p + H) dlogit, and |log p| is at most 2 max |logit|
    within((entropy - wanted[1]).abs().max(), 10 * logit * 2 * terms / TEMPERATURE)
    within(((grad_hidden - wanted[2]).abs() / rows).max(), 10 * (V * U32 + 2 * logit))
    within(((grad_weight - wanted[3]).abs() / columns).max(), 10 * (R * U32 + 2 * logit))


def test_in_bfloat16_nothing_but_the_logits_is_rounded_to_bfloat16():
    """The matrix product gives bfloat16 logits, off by u16 of their size. From these logits on,
    log-probs and entropies are as exact as in float32: a few u32 per term of the sums over V."""
    hidden, weight, targets, grad = head_inputs(torch.bfloat16)
    logp, entropy, *_ = ours(hidden, weight, targets, grad)
    assert logp.dtype is entropy.dtype is torch.float32
    logits = torch.cat([F.linear(hidden, w) for w in weight.split(CHUNK)], -1).double()  # (R, V)
    size = logits.abs().max().item() / TEMPERATURE
    wanted = (logits / TEMPERATURE).log_softmax(-1)  # (R, V)
    chosen = wanted.gather(1, targets[:, None])[:, 0]
    within((logp - chosen).abs().max(), 10 * U32 * size)
    within((entropy + (wanted.exp() * wanted).sum(-1)).abs().max(), 10 * U32 * size * 10)
    exact = reference(hidden, weight, targets, grad)[0]
    # of the target and of the maximum
    within((logp - exact).abs().max(), 2 * U16 * size + 10 * U32 * size)


@pytest.mark.exercise_9
def test_the_gradient_of_hidden_states_is_summed_over_chunks_in_float32_and_rounded_once():
    """Against the same products of the chunks, summed exactly: n float32 additions are off by at
    most n u32 of the sum of the sizes, and one rounding by u16 of the sum. A sum in bfloat16 rounds
    n times."""
    hidden, weight, targets, grad = head_inputs(torch.bfloat16)
    products, mm = [], torch.Tensor.__matmul__

    def recorded(a, b):
        out = mm(a, b)
        products.append(out.detach().clone())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__matmul__", recorded)
        *_, grad_hidden, _ = ours(hidden, weight, targets, grad)
    assert len(products) == V // CHUNK and grad_hidden.dtype is torch.bfloat16
    exact = sum(x.double() for x in products)
    size = sum(x.double().abs() for x in products)
    bound = U16 * exact.abs() + 2 * len(products) * U32 * size  # factor 2: u16 of the rounded sum
    within(((grad_hidden - exact).abs() / bound).max(), 1)


# ---- rewards, advantages, weights, counts


def test_rewards_and_advantages_keep_seven_digits(group):
    """A reward of 100.001 is 100 in half precision and in bfloat16."""
    cfg = make_config(samples=4, scale="none")
    values = [100.001, 100.0, 100.0, 100.0]
    groups = [[nr.Rollout([0], [1, 1], "", False, [0.0] * 2, reward=r) for r in values]]
    nr.assign_advantages(groups, cfg, 0.0)
    mean = sum(values) / 4
    close([r.advantages[0] for r in groups[0]], [r - mean for r in values],
          2 * 4 * U32 * 100 / 0.00075)  # four sums of size 100, relative to the largest advantage
    assert step_rewards(groups, cfg).dtype is torch.float32


def test_collate_keeps_log_probs_advantages_and_weights_in_float32():
    numbers = [1 / 3, -2.0001, 1e-7]
    logps = [-abs(x) for x in numbers]
    r = nr.Rollout([0], [1, 2, 3], "", False, logps, advantages=numbers, weight=1 / 300001)
    batch = nr.collate([r])
    for got, wanted in (
            (batch.vllm_logps, logps), (batch.advantage, numbers), (batch.weight, [r.weight] * 3)):
        assert got.dtype is torch.float32
        error = got.double() / torch.tensor(wanted, dtype=torch.float64) - 1
        within(error.abs().max(), 2 * U32)


def test_numbers_of_tokens_above_2_to_the_24_are_exact(monkeypatch):
    """float32 has no odd numbers above 2**24: a batch of 16 million tokens is possible."""
    sums = [{"tokens": torch.tensor(2**24 + 1), "ratio": torch.tensor(2.0**24),
             "mismatch/max": torch.tensor(0.0), "loss": torch.tensor(0.5)} for _ in range(3)]
    close(stats.token_means(sums)["ratio"], 2**24 / (2**24 + 1), 1e-9)
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(2))
    assert dist.all_sum(2**24 + 1, 0.5) == [2**25 + 2, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_and_its_metrics_are_float32_sums_for_a_policy_in_any_dtype(dtype):
    """10,000 tokens of weight 1e-4 and advantage 1: the loss is -1. A running sum in bfloat16 stops
    at 1/32."""
    n = 10_000
    batch = SimpleNamespace(
        lengths=torch.tensor([n]), sequence_ids=torch.zeros(n, dtype=torch.long),
        weight=torch.full((n,), 1e-4), advantage=torch.ones(n), vllm_logps=torch.zeros(n))
    logp = torch.zeros(n).requires_grad_()  # what HeadLogps returns, also for a bfloat16 model
    for gate, correction in itertools.product(
            ("clip", "detach", "soft", "squared"),
            ("none", "token_truncate", "token_mask", "sequence_mask")):
        cfg = make_config(dtype=dtype, gate=gate, correction=correction)
        loss, terms = nr.policy_loss(logp, None, logp.detach(), batch, cfg)
        if gate == "clip":
            within(abs(loss.item() + 1), 20 * U32)  # pairwise: log2(n) roundings and that of 1e-4
        sums = stats.pack_sums(loss, terms, logp.detach(), batch.weight, cfg)
        assert sums["ratio"] == n
        assert {x.dtype for x in sums.values()} <= {torch.float32, torch.int64}
