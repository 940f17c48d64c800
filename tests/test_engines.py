"""The real vLLM and the real DeepSpeed: rollouts, equal log-probs, syncs, optimizer steps."""
import contextlib
import dataclasses

import pytest
import torch
from torch._inductor import config as inductor

import data
import nano_rlvr as nr
import rank_worker
from conftest import EPS, EXACT, close, fixed_rollouts, float64, make_config, within
from runtime import guard, ranks, trainer
from runtime.batch import fill_packs
from runtime.model import compile_layers, load_model
from runtime.trainer import named_weights

PROMPTS = 8
# Log-probs of one model from two implementations in float32. The logits here reach 40, where
# neighbouring float32 are 32 EPS apart. A log-prob sums some ten such roundings: 20 to 200 EPS.
# Other weights, or another temperature, differ by a hundred times the bound.
PARITY = 10_000 * EPS
OFF_POLICY = dict(kl_coef=0.0, mismatch_bound=1e9)  # for rollouts that vLLM has not sampled


def sample(llm, tokenizer, step=0, temperature=1.0):
    examples = data.load("arithmetic", "train", size=PROMPTS)
    prompts = [data.encode(e, tokenizer, "chat") for e in examples]
    seeds = [data.request_seed(0, step, i) for i in range(PROMPTS)]
    rollouts = nr.rollout(llm, prompts, 4, temperature, 64, seeds)
    for r in rollouts:
        r.reward, r.weight = 0.0, 1e-3
    return rollouts


def largest_mismatch(engine, rollouts):
    """Largest |log-prob of vLLM - log-prob of the trainer| over all sampled tokens."""
    pack = nr.collate(rollouts)
    with torch.no_grad():
        return (engine(pack)[0] - pack.vllm_logps).abs().max().item()


def weights_of(engine):
    return {name: w.clone() for name, w in named_weights(engine)}


@pytest.mark.numeric
def test_vllm_and_trainer_agree_before_and_after_a_sync_and_only_then(fresh_llm, tokenizer):
    hot = dict(temperature=1.7)
    rollouts = sample(fresh_llm, tokenizer, **hot)
    within(largest_mismatch(nr.make_policy(make_config(**hot)), rollouts), PARITY)
    assert largest_mismatch(nr.make_policy(make_config()), rollouts) > 100 * PARITY
    engine = nr.make_policy(make_config(lr=1e-2, **hot))
    nr.update(engine, [nr.collate(fixed_rollouts(tokenizer))], make_config(**OFF_POLICY))
    assert largest_mismatch(engine, rollouts) > 100 * PARITY  # vLLM has other weights
    before = weights_of(engine)
    with pytest.raises(RuntimeError, match="vLLM and the trainer disagree"):
        nr.update(engine, [nr.collate(rollouts)], make_config(kl_coef=0.0))
    assert all(torch.equal(w, before[name]) for name, w in named_weights(engine))  # no step
    nr.sync_weights(engine, fresh_llm)
    within(largest_mismatch(engine, sample(fresh_llm, tokenizer, step=1, **hot)), PARITY)


def test_a_sync_from_zero_3_gathers_one_tensor_at_a_time(fresh_llm, monkeypatch):
    """DeepSpeed gathers the largest tensor at most."""
    rank_worker.shard_small_weights(monkeypatch.setattr)
    policy = nr.make_policy(make_config(zero_stage=3))
    parameters, gathered = list(policy.module.parameters()), []

    def watched(engine):
        for name, w in named_weights(engine):
            gathered.append(sum(p.numel() for p in parameters if p.ds_status.name == "AVAILABLE"))
            yield name, w

    monkeypatch.setattr(trainer, "named_weights", watched)
    nr.sync_weights(policy, fresh_llm)
    assert max(gathered) == max(p.ds_numel for p in parameters) == 384 * 128
    assert len(gathered) > len(parameters)


@pytest.mark.numeric
@pytest.mark.parametrize("engine_flags", [
    {"zero_stage": 1, "gradient_checkpointing": "on"}, {"zero_stage": 2}, {"zero_stage": 3},
    {"offload": "optimizer"}], ids=str)
def test_every_engine_takes_the_step_of_plain_adamw_also_after_a_rehearsal(
        group, tokenizer, engine_flags):
    """In float64, but DeepSpeed's AdamW in host memory supports float32 only.
    There AdamW's epsilon is 1e-5, a thousand times the rounding of these gradients and a quarter of
    their root mean square: with 1e-8 a gradient that is only rounding moves its weight by lr."""
    offload = "offload" in engine_flags
    eps, bound = (1e-5, 10_000 * EPS) if offload else (1e-8, EXACT)
    with contextlib.nullcontext() if offload else float64():
        cfg = make_config(lr=1e-3, weight_decay=0.1, beta2=0.95, **OFF_POLICY, **engine_flags)
        rollouts, engine = fixed_rollouts(tokenizer), nr.make_policy(cfg)
        start = weights_of(engine)
        guard.rehearse(engine, None, dataclasses.replace(cfg, pack_tokens=500))
        assert all(torch.equal(w, start[n]) for n, w in named_weights(engine))
        for _ in range(2):
            for parameters in engine.optimizer.param_groups:  # as train() does at each step
                parameters |= dict(lr=cfg.lr, eps=eps)
            metrics = nr.update(engine, [nr.collate(p) for p in fill_packs(rollouts, 150)], cfg)
        ours = weights_of(engine)

        plain, pack = nr.TokenLogps(load_model(cfg)), nr.collate(rollouts)
        adam = torch.optim.AdamW(
            plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=eps)
        for _ in range(2):
            nr.policy_loss(plain(pack)[0], None, None, pack, cfg)[0].backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), cfg.max_grad_norm)
            adam.step()
            adam.zero_grad()
        close(metrics["grad_norm"], norm, bound)
        wanted = plain.model.state_dict()
        difference, distance = (torch.cat([(x[n] - w).flatten() for n, w in wanted.items()]).norm()
                                for x in (ours, start))
        within(difference, bound * distance)


@pytest.mark.parametrize("changes", [dict(gradient_checkpointing="on"), dict(lora_rank=4)])
def test_compiled_layers_have_the_same_log_probs_and_gradients(
        group, tokenizer, changes, monkeypatch):
    """Captured and cut at the attention as on a GPU, but run by PyTorch's own operators. All cores
    may compile, though vLLM's import allows one."""
    inductor.compile_threads = 1
    monkeypatch.setattr(ranks, "CORES", 3)  # also where a test has one core
    rollouts, found = fixed_rollouts(tokenizer), []
    for compiles in (False, True):
        torch.manual_seed(0)  # of the adapters
        module = nr.TokenLogps(load_model(make_config(**changes)).train())
        if compiles:
            compile_layers(module.model, backend="aot_eager_decomp_partition")
            module.model.is_compiled = False  # the head has a test of its own
        sums = []
        for part in (rollouts, rollouts[:3]):
            logp, _ = module(nr.collate(part))
            logp.sum().backward()
            sums += [logp.detach()]
        found.append(sums + [p.grad for p in module.parameters() if p.requires_grad])
    assert inductor.compile_threads == 3
    calls = torch._dynamo.utils.counters["frames"]
    assert calls["ok"] and len(found[0]) > 10
    for plain, compiled in zip(*found, strict=True):
        within((compiled - plain).abs().max(), PARITY * max(1.0, plain.abs().max()))


@pytest.mark.numeric
def test_only_adapters_are_trained_and_vllm_gets_them_merged(fresh_llm, tokenizer):
    cfg = make_config(lora_rank=4, lr=1e-2, kl_coef=0.1, mismatch_bound=1e9)
    engine, plain = nr.make_policy(cfg), nr.TokenLogps(load_model(make_config()))
    ref, pack = nr.make_reference(cfg, engine), nr.collate(fixed_rollouts(tokenizer))
    base, start = plain.model.state_dict(), weights_of(engine)
    assert start.keys() == base.keys()
    assert all(torch.equal(w, base[n]) for n, w in start.items())  # adapters are 0 at the start
    guard.rehearse(engine, ref, dataclasses.replace(cfg, pack_tokens=500))
    for _ in range(3):
        nr.set_lr(engine, 0, cfg)
        nr.store_fixed_logps(engine, ref, [pack], cfg)
        metrics = nr.update(engine, [pack], cfg)
    assert metrics["kl"] > 1e-3  # the policy is not the reference any more
    with torch.no_grad():
        within((pack.ref - plain(pack)[0]).abs().max(), PARITY)  # which is still the base model
    moved = {n for n, w in named_weights(engine) if not torch.equal(w, base[n])}
    assert moved == {n for n in base if n.endswith("_proj.weight")}
    nr.sync_weights(engine, fresh_llm)
    within(largest_mismatch(engine, sample(fresh_llm, tokenizer)), PARITY)
