"""The real vLLM and the real DeepSpeed: rollouts, equal log-probs, syncs, optimizer steps."""
import contextlib
import dataclasses
import os

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import data
import nano_rlvr as nr
import rank_worker
from conftest import (
    EPS,
    EXACT,
    close,
    fixed_rollouts,
    float64,
    make_checkpoints,
    make_config,
    within,
)
from runtime import guard, trainer
from runtime.batch import pack
from runtime.model import load_model
from runtime.trainer import get_tensor, named_weights

PROMPTS = 8
# Log-probs of one model from two implementations in float32. The logits here reach 40, where
# neighbouring float32 are 32 EPS apart. A log-prob sums some ten such roundings: 20 to 200 EPS.
# Other weights, or another temperature, differ by a hundred times the bound.
PARITY = 10_000 * EPS
OFF_POLICY = dict(kl_coef=0.0, mismatch_bound=1e9)  # for rollouts that vLLM has not sampled


def sample(llm, tokenizer, step=0, n=4, max_tokens=64, temperature=1.0):
    examples = data.load("arithmetic", "train", size=PROMPTS)
    prompts = [data.encode(e, tokenizer, "chat") for e in examples]
    seeds = [data.request_seed(0, step, i) for i in range(PROMPTS)]
    rollouts = nr.rollout(llm, prompts, n, temperature, max_tokens, seeds)
    for r in rollouts:
        r.reward, r.weight = 0.0, 1e-3
    return rollouts


def largest_mismatch(engine, rollouts):
    """Largest |log-prob of vLLM - log-prob of the trainer| over all sampled tokens."""
    batch = nr.collate(rollouts)
    with torch.no_grad():
        return (engine(batch)[0] - batch.vllm_logps).abs().max().item()


def moved_policy(tokenizer, **changes):
    """An engine one AdamW step away from the bundled weights (each weight moves by about lr)."""
    engine = nr.make_policy(make_config(lr=1e-2, **changes))
    nr.update(engine, [nr.collate(fixed_rollouts(tokenizer))], make_config(**OFF_POLICY))
    return engine


def weights_of(engine):
    return {name: w.clone() for name, w in named_weights(engine)}


# ---- vLLM


def test_rollouts_of_a_prompt_are_adjacent_and_end_with_eos(llm, tokenizer):
    rollouts = sample(llm, tokenizer)
    for group in (rollouts[i:i + 4] for i in range(0, 4 * PROMPTS, 4)):
        assert len({tuple(r.prompt) for r in group}) == 1
    assert len({tuple(r.prompt) for r in rollouts}) > 1
    short = sample(llm, tokenizer, max_tokens=5)
    for r in rollouts + short:
        assert len(r.vllm_logps) == len(r.completion) and max(r.vllm_logps) <= 0
        assert r.truncated == (r.completion[-1] != tokenizer.eos_token_id)
        assert r.text == tokenizer.decode(r.completion, skip_special_tokens=True)
    assert any(r.truncated for r in short) and max(len(r.completion) for r in short) == 5


@pytest.mark.numeric
def test_vllm_and_trainer_agree_before_and_after_a_sync_and_only_then(fresh_llm, tokenizer):
    hot = dict(temperature=1.7)
    rollouts = sample(fresh_llm, tokenizer, **hot)
    within(largest_mismatch(nr.make_policy(make_config(**hot)), rollouts), PARITY)
    assert largest_mismatch(nr.make_policy(make_config()), rollouts) > 100 * PARITY
    engine = moved_policy(tokenizer, **hot)
    assert largest_mismatch(engine, rollouts) > 100 * PARITY  # vLLM has other weights
    before = weights_of(engine)
    with pytest.raises(RuntimeError, match="vLLM and the trainer disagree"):
        nr.update(engine, [nr.collate(rollouts)], make_config(kl_coef=0.0))
    assert all(torch.equal(w, before[name]) for name, w in named_weights(engine))  # no step
    nr.sync_weights(engine, fresh_llm)
    within(largest_mismatch(engine, sample(fresh_llm, tokenizer, step=1, **hot)), PARITY)


def test_a_sync_from_zero_3_gathers_one_tensor_at_a_time(fresh_llm, monkeypatch):
    """DeepSpeed gathers the largest tensor at most. vLLM keeps what it gets until all parts of a
    fused matrix have come, here gate_proj and up_proj, and an embedding to the end."""
    rank_worker.shard_small_weights(monkeypatch.setattr)
    policy = nr.make_policy(make_config(zero_stage=3))
    parameters, gathered, alive, handed_out = list(policy.module.parameters()), [], [], []

    def watched(engine):
        for name, w in named_weights(engine):
            handed_out.append((StorageWeakRef(w.untyped_storage()), w.numel()))
            gathered.append(sum(p.numel() for p in parameters if p.ds_status.name == "AVAILABLE"))
            alive.append(sum(size for storage, size in handed_out if not storage.expired()))
            yield name, w
            del w

    monkeypatch.setattr(trainer, "named_weights", watched)
    nr.sync_weights(policy, fresh_llm)
    largest = max(p.ds_numel for p in parameters)
    assert max(gathered) == largest == 384 * 128 and len(gathered) > len(parameters)
    assert largest <= max(alive) <= 3 * largest


@pytest.mark.parametrize("asked", [False, True])
def test_no_kernel_of_flashinfer_is_compiled_unless_the_user_asks_for_it(monkeypatch, asked):
    from vllm import envs
    monkeypatch.setattr("vllm.LLM", lambda **arguments: None)
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        monkeypatch.setenv(name, "1")  # undone after the test
        if not asked:
            del os.environ[name]
    envs.disable_envs_cache()  # which another engine of this process has filled
    nr.Sampler(make_config())
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is envs.VLLM_ALLREDUCE_USE_FLASHINFER is asked


# ---- DeepSpeed


@pytest.mark.numeric
@pytest.mark.parametrize("engine_flags", [
    {"zero_stage": 1, "checkpointing": "on"}, {"zero_stage": 2}, {"zero_stage": 3},
    {"offload": "optimizer"}], ids=str)
def test_every_engine_takes_the_step_of_plain_adamw_also_after_a_rehearsal(
        group, tokenizer, engine_flags):
    """In float64, but DeepSpeed's AdamW in host memory supports float32 only.

    In float32 AdamW's epsilon of 1e-8 would not do: a gradient that is only rounding would move its
    weight by lr. There it is 1e-5 on both sides, a thousand times the rounding of these gradients
    and a quarter of their root mean square.
    """
    offload = "offload" in engine_flags
    eps, bound = (1e-5, 10_000 * EPS) if offload else (1e-8, EXACT)
    with contextlib.nullcontext() if offload else float64():
        cfg = make_config(lr=1e-3, weight_decay=0.1, **OFF_POLICY, **engine_flags)
        rollouts, engine = fixed_rollouts(tokenizer), nr.make_policy(cfg)
        start = weights_of(engine)
        guard.rehearse(engine, None, dataclasses.replace(cfg, pack_tokens=500))
        assert all(torch.equal(w, start[n]) for n, w in named_weights(engine))
        for _ in range(2):
            for parameters in engine.optimizer.param_groups:  # as train() does at each step
                parameters |= dict(lr=cfg.lr, eps=eps)
            metrics = nr.update(engine, [nr.collate(p) for p in pack(rollouts, 150)], cfg)
        ours = weights_of(engine)

        plain, batch = nr.TokenLogps(load_model(cfg)), nr.collate(rollouts)
        adam = torch.optim.AdamW(
            plain.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, eps=eps)
        for _ in range(2):
            nr.policy_loss(plain(batch)[0], None, None, batch, cfg)[0].backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), cfg.max_grad_norm)
            adam.step()
            adam.zero_grad()
        close(metrics["grad_norm"], norm, bound)
        wanted = plain.model.state_dict()
        difference, distance = (torch.cat([(x[n] - w).flatten() for n, w in wanted.items()]).norm()
                                for x in (ours, start))
        within(difference, bound * distance)


def test_fp32_master_weights_keep_a_step_that_bf16_weights_cannot_hold(group, tokenizer):
    cfg = make_config(dtype="bfloat16", lr=1e-6, **OFF_POLICY)
    engine, start = nr.make_policy(cfg), load_model(cfg).state_dict()
    nr.update(engine, [nr.collate(fixed_rollouts(tokenizer))], cfg)
    weight = engine.module.model.model.layers[0].mlp.up_proj.weight
    before = start["model.layers.0.mlp.up_proj.weight"]
    # a step of 1e-6 is below the last bit of every bf16 weight above 5e-4: 99 % of them
    assert (weight == before).float().mean() > 0.9
    assert (get_tensor(weight, "fp32") != before.float()).float().mean() > 0.9


@pytest.mark.numeric
def test_only_adapters_are_trained_and_vllm_gets_them_merged(fresh_llm, tokenizer, tmp_path):
    cfg = make_config(lora_rank=4, lr=1e-2, kl_coef=0.1, mismatch_bound=1e9)
    engine, plain = nr.make_policy(cfg), nr.TokenLogps(load_model(make_config()))
    ref, batch = nr.make_reference(cfg, engine), nr.collate(fixed_rollouts(tokenizer))
    base, start = plain.model.state_dict(), weights_of(engine)
    assert start.keys() == base.keys()
    assert all(torch.equal(w, base[n]) for n, w in start.items())  # adapters are 0 at the start
    guard.rehearse(engine, ref, dataclasses.replace(cfg, pack_tokens=500))
    for _ in range(3):
        trainer.set_lr(engine, 0, cfg)
        nr.store_fixed_logps(engine, ref, [batch], cfg)
        metrics = nr.update(engine, [batch], cfg)
    assert metrics["kl"] > 1e-3  # the policy is not the reference any more
    with torch.no_grad():
        within((batch.ref - plain(batch)[0]).abs().max(), PARITY)  # which is still the base model
    moved = {n for n, w in named_weights(engine) if not torch.equal(w, base[n])}
    assert moved == {n for n in base if n.endswith("_proj.weight")}
    frozen = {n.replace(".base_layer", ""): p for n, p in engine.module.model.named_parameters()
              if not p.requires_grad}
    assert all(torch.equal(p, base[n]) for n, p in frozen.items()) and moved <= frozen.keys()
    nr.sync_weights(engine, fresh_llm)
    within(largest_mismatch(engine, sample(fresh_llm, tokenizer)), PARITY)
    checkpoints = make_checkpoints(engine, out=str(tmp_path), name="lora", lora_rank=4)
    checkpoints.progress.step = 1
    checkpoints.save(final=True)
    again = nr.TokenLogps(load_model(make_config(model=str(tmp_path / "lora/final"))))
    with torch.no_grad():
        within((again(batch)[0] - engine(batch)[0]).abs().max(), PARITY)
