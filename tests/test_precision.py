"""Precision: what is in float32 or float64 while weights and hidden states are in bfloat16.

u below is the unit roundoff: a result that is rounded once has a relative error of at most u.
"""
import pytest
import torch
import torch.nn.functional as F

from conftest import EPS, close, within
from runtime import dist, stats
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


# ---- counts


def test_numbers_of_tokens_above_2_to_the_24_are_exact():
    """float32 has no odd numbers above 2**24: a batch of 16 million tokens is possible."""
    sums = [{"tokens": torch.tensor(2**24 + 1), "ratio": torch.tensor(2.0**24),
             "mismatch/max": torch.tensor(0.0), "loss": torch.tensor(0.5)} for _ in range(3)]
    close(stats.token_means(sums)["ratio"], 2**24 / (2**24 + 1), 1e-9)
    assert dist.all_sum(2**24 + 1, 0.5) == [2**24 + 1, 0.5]
