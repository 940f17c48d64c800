"""--compile on: the same values and gradients, and nothing is compiled again for packs of other lengths.

What is only counted runs with a backend that traces and splits the graphs as Inductor does, without g++.
"""
import functools
import os
import random
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import nano_rlvr as nr
from conftest import EPS, fixed_rollouts, float64, make_config, within
import runtime.model

needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler: Inductor needs one on a CPU")


@pytest.fixture
def no_inductor(monkeypatch):
    """Compiled functions are traced and partitioned into forward and backward, then run by PyTorch."""
    backend = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", backend)
    fresh()
    yield
    fresh()


def fresh():
    torch._dynamo.reset()
    runtime.model.fused.cache_clear()
    counters.clear()


def packs(tokenizer, n):
    """Packs of n different lengths; the second one has a single completion token."""
    rng = random.Random(0)
    rollouts = [fixed_rollouts(tokenizer, rng.randint(1, 5), rng.randint(1, 5), seed) for seed in range(n)]
    rollouts[1] = [nr.Rollout([5, 6], [7], "", False, [-1.0], advantages=[1.0], weight=0.1)]
    return [nr.collate(r) for r in rollouts]


def results(policy, batches):
    """Log-probs, entropies and the gradient of the sum of the losses, as float64 vectors."""
    values = [policy(batch) for batch in batches]
    sum(nr.policy_loss(logp, None, None, batch, make_config(correction="none"))[0]
        for (logp, _), batch in zip(values, batches)).backward()
    gradient = [p.grad.flatten() for p in policy.parameters() if p.requires_grad]
    logp, entropy = zip(*values)
    return [torch.cat(x).detach().double() for x in (logp, entropy, gradient)]


@needs_compiler
@pytest.mark.numeric
def test_compiled_by_inductor_values_and_gradients_are_as_exact_as_eager_ones(group, tokenizer):
    """Both differ from float64 by rounding, in another order of summation: neither by ten times as much."""
    batches, got = packs(tokenizer, 3), []
    fresh()
    for compiled in ("off", "on"):
        policy = nr.TokenLogps(runtime.model.load_model(make_config(compile=compiled)), 0.9, 100, compiled == "on")
        got.append(results(policy, batches))
    assert counters["stats"]["unique_graphs"] > 0
    with float64():
        wanted = results(nr.TokenLogps(runtime.model.load_model(make_config()), 0.9, 100), batches)
    for eager, compiled, exact in zip(*got, wanted):
        within((compiled - exact).norm(), 10 * (eager - exact).norm() + EPS * exact.norm())


@pytest.mark.numeric
@pytest.mark.parametrize("changes", [{}, dict(checkpointing="on", zero_stage=1), dict(lora_rank=4)], ids=str)
def test_updates_equal_eager_ones_and_nothing_is_compiled_after_two_packs(
        llm, tokenizer, no_inductor, changes):
    """Policy and reference, also after vLLM has started, which must not switch the compiler off."""
    metrics, counts = {}, []
    for compiled in ("off", "on"):
        cfg = make_config(compile=compiled, kl_coef=0.1, lr=0.0, mismatch_bound=1e9, **changes)
        policy = nr.make_policy(cfg)
        ref, metrics[compiled] = nr.make_reference(cfg, policy), []
        for batch in packs(tokenizer, 6):
            nr.store_fixed_logps(policy, ref, [batch], cfg)
            metrics[compiled].append(nr.update(policy, [batch], cfg))
            counts.append(counters["stats"]["unique_graphs"])
    for eager, compiled in zip(*metrics.values()):
        for name in ("loss", "entropy", "grad_norm", "mismatch/mean_abs"):
            within(abs(eager[name] - compiled[name]), 1000 * EPS * abs(eager[name]))
    assert set(counts[:6]) == {0} and 0 < counts[6] <= counts[7] == counts[-1], counts


def test_vllm_on_a_cpu_compiles_nothing_with_inductor(llm):
    fresh()
    nr.rollout(llm, [[5, 6, 7]], 2, 1.0, 4, seeds=[1])
    assert counters["stats"]["unique_graphs"] and not counters["inductor"] and not counters["aot_autograd"]


def test_stage_3_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^--compile on needs --zero_stage 1 or 2") as e:
        make_config(compile="on", zero_stage=3)
    assert "\n" not in str(e.value)
