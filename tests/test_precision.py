"""Precision: what is in float32 or float64 while weights and hidden states are in bfloat16.

u below is the unit roundoff: a result that is rounded once has a relative error of at most u."""
import pytest
import torch
import torch.nn.functional as F

import nano_rlvr as nr
from conftest import EPS, close, fixed_rollouts, float64, make_config, within
from runtime import ranks, stats
from runtime.head import HeadLogps

pytestmark = pytest.mark.numeric
U32, U16 = EPS / 2, 2**-8  # unit roundoff of float32 and of bfloat16, which has 8 bits of precision
R, H, V, CHUNK, TEMPERATURE = 24, 64, 320, 32, 0.75


def head_inputs(dtype):
    """Hidden states, weight of the head, targets, gradient of the log-probs."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(R, H).to(dtype), torch.randn(V, H).to(dtype)
    return hidden, weight, torch.randint(V, (R,)), torch.randn(R)


def of_logits(logits, targets):
    """Log-probs and entropies in float64."""
    logp = (logits.double() / TEMPERATURE).log_softmax(-1)  # (R, V)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)  # (R,), (R,)


def naive_head(hidden, weight, targets, temperature, chunk):
    """HeadLogps.apply, from the whole matrix of logits."""
    return of_logits(hidden @ weight.T, targets)  # (R,), (R,)


def ours(hidden, weight, targets, grad, compiles=False):
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    logp, entropy = HeadLogps.apply(hidden, weight, targets, TEMPERATURE, CHUNK, compiles)
    logp.backward(grad)
    return logp.detach(), entropy, hidden.grad, weight.grad


@pytest.mark.exercise_9
def test_in_float64_log_probs_entropies_and_gradients_are_those_of_autograd():
    with float64():
        inputs = hidden, weight, targets, grad = head_inputs(torch.float64)
        found = ours(*inputs)
        logp, entropy = of_logits(hidden.requires_grad_() @ weight.requires_grad_().T, targets)
        logp.backward(grad)
        exact = {"logp": logp, "entropy": entropy, "grad h": hidden.grad, "grad W": weight.grad}
        for x, (name, wanted) in zip(found, exact.items(), strict=True):
            close(x, wanted, case=name)


@pytest.mark.parametrize("uses_logp", [False, True])
def test_a_loss_of_the_entropy_has_the_gradients_of_autograd(uses_logp):
    """Also a loss that does not use the log-probs: their gradient is None."""
    with float64():
        inputs = head_inputs(torch.float64)
        grads = []
        for head in (HeadLogps.apply, naive_head):
            hidden, weight, targets, grad = (x.clone() for x in inputs)
            hidden.requires_grad_()
            weight.requires_grad_()
            logp, entropy = head(hidden, weight, targets, TEMPERATURE, CHUNK)
            loss = (grad * entropy).sum()
            if uses_logp:
                loss = loss + (grad * logp).sum()
            loss.backward()
            grads.append((hidden.grad, weight.grad))
        for ours, wanted in zip(*grads, strict=True):
            close(ours, wanted)


def test_a_compiled_head_has_the_same_log_probs_entropies_and_gradients():
    """By Inductor. Each number is a sum over at most V terms, each rounded a few times."""
    hidden, weight, targets, grad = head_inputs(torch.float32)
    for n in (R, R - 5):  # other shapes, the same code
        inputs = hidden[:n], weight, targets[:n], grad[:n]
        for x, wanted in zip(ours(*inputs, compiles=True), ours(*inputs), strict=True):
            within((x - wanted).abs().max(), 4 * V * U32 * wanted.abs().max())


def test_in_bfloat16_nothing_but_the_logits_is_rounded_to_bfloat16():
    """From these on, all is as exact as in float32: a few u32 per term of the sums over V."""
    hidden, weight, targets, grad = head_inputs(torch.bfloat16)
    logp, entropy, *_ = ours(hidden, weight, targets, grad)
    assert logp.dtype is entropy.dtype is torch.float32
    logits = torch.cat([F.linear(hidden, w) for w in weight.split(CHUNK)], -1)  # (R, V)
    size = logits.abs().max().item() / TEMPERATURE
    chosen, wanted = of_logits(logits, targets)
    within((logp - chosen).abs().max(), 10 * U32 * size)
    within((entropy - wanted).abs().max(), 10 * U32 * size * 10)


@pytest.mark.exercise_9
def test_the_gradient_of_hidden_states_is_summed_over_chunks_in_float32_and_rounded_once():
    """Against the same products, summed exactly: n float32 additions are off by at most n u32 of
    the sum of the sizes, and one rounding by u16 of the sum. A sum in bfloat16 rounds n times."""
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


def test_numbers_of_tokens_above_2_to_the_24_are_exact():
    """float32 has no odd numbers above 2**24: a batch of 16 million tokens is possible."""
    sums = [{"tokens": torch.tensor(2**24 + 1), "ratio": torch.tensor(2.0**24),
             "mismatch/max": torch.tensor(0.0), "loss": torch.tensor(0.5)} for _ in range(3)]
    close(stats.token_means(sums)["ratio"], 2**24 / (2**24 + 1), 1e-9)
    assert ranks.all_sum(2**24 + 1, 0.5) == [2**24 + 1, 0.5]


def test_hidden_states_in_float32_meet_a_head_in_bfloat16(tokenizer):
    """Mamba-2's last norm returns float32."""
    def widen(module, inputs, output):
        output.last_hidden_state = output.last_hidden_state.float()

    policy = nr.TokenLogps(nr.load_model(make_config(dtype="bfloat16")))
    pack = nr.collate(fixed_rollouts(tokenizer))
    wanted, _ = policy(pack)
    policy.model.get_decoder().register_forward_hook(widen)
    found, _ = policy(pack)
    assert found.equal(wanted)
