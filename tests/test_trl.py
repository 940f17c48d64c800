"""Comparison with TRL 1.16.0's own code: advantages and whole runs.

Only generation is replaced, through GRPOTrainer's rollout_func. The losses, also those of
RLOOTrainer, are compared in test_vectors.py."""
import random

import pytest
import torch

import nano_rlvr as nr
import trl_runs
from conftest import ROOT, close, exactly, make_config, within
from runtime.batch import fill_packs

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
MAX_TOKENS, STEPS = 40, 4  # optimizer steps of a run
LIMIT = 15.0  # of the norm of the gradient
TEMPERATURE = 0.9  # not 1: a temperature that is missing on one side shows everywhere


def rollout_func(prompts, trainer):
    """Random completions of different lengths, a quarter of them truncated."""
    rng, tokenizer, completions = random.Random(repr(prompts)), trainer.processing_class, []
    for _ in prompts:
        end = [tokenizer.eos_token_id] * (rng.random() < 0.75)
        completions.append(rng.choices(range(256), k=rng.randint(1, MAX_TOKENS - 1)) + end)
    return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts],
            "completion_ids": completions, "logprobs": [[0.0] * len(c) for c in completions]}


def make_trainer(folder, tokenizer, reward, groups=4, **options):
    """On the bundled model. options: of TRL's configuration."""
    prompts = [f"<|user|>{g}" + "+1" * (g % 7) + "<|assistant|>" for g in range(groups)]
    common = dict(max_completion_length=MAX_TOKENS, temperature=TEMPERATURE)
    return trl_runs.make_trainer(folder, ROOT / "models/tiny", tokenizer, prompts, rollout_func,
                                 reward, **common | options)


def test_advantages_equal_trls_after_the_stated_factor(tmp_path, tokenizer):
    """TRL divides by s + 1e-4, where s has the denominator count - 1 and count is the number of
    verdicts. Our deviation is c * s with c = sqrt((count - 1) / count). TRL's advantage is
    c * (r - mean) / (c * s + c * 1e-4): c times ours when our eps is c * 1e-4. A single verdict
    gets advantage 0 on both sides."""
    counts = [4, 3, 2, 1]  # verdicts of each group
    rng = random.Random(0)
    values = [exactly(rng.gauss(0, 1)) if i % 4 < counts[i // 4] else None for i in range(16)]
    rewards = torch.tensor([torch.nan if x is None else x for x in values]).view(4, 4)  # (P, G)
    trainer = make_trainer(tmp_path, tokenizer, lambda **columns: values)
    batch = [trainer.train_dataset[i // 4] for i in range(16)]
    for scale in ("group", "batch", "none"):
        trainer.scale_rewards = scale
        trls = trainer._generate_and_score_completions(batch)["advantages"].view(4, 4)
        for i, count in enumerate(counts):
            c = {"group": (count - 1) / count, "batch": 9 / 10, "none": 1.0}[scale] ** 0.5 or 1.0
            ours = nr.group_advantages(rewards, scale=scale, eps=c * 1e-4)[i]
            close(c * ours, trls[i])
        assert trls[3].eq(0).all() and trls[rewards.isnan()].eq(0).all()


def flat(weights):
    return torch.cat([w.detach().flatten() for w in weights])


def run_trl(trainer):
    """TRL's train() in two micro-batches per step -> weights, start weights, rollouts per step."""
    members, compute_loss = [], trainer._compute_loss  # members: rollouts of each micro-batch

    def recorded(model, inputs):
        members.append(trl_runs.rollouts_of(inputs))
        return compute_loss(model, inputs)

    trainer._compute_loss = recorded
    start = flat(trainer.model.parameters())
    trainer.train()
    assert trainer.state.global_step == STEPS and len(members) == STEPS * 2
    return flat(trainer.model.parameters()), start, [
        members[i] + members[i + 1] for i in range(0, len(members), 2)]


def run_ours(steps, off_policy, cfg):
    """The same steps through DeepSpeed -> weights, metrics of each. As in TRL, the learning rate
    falls with every optimizer step; train() changes it once per rollout batch."""
    engine, reference, metrics = nr.make_policy(cfg), nr.make_reference(cfg), []
    for i, rollouts in enumerate(steps):
        packs = fill_packs(nr.assign_token_weights(rollouts, cfg), cfg.pack_tokens)
        batches = list(map(nr.collate, packs))
        nr.store_fixed_logps(engine, reference, batches, cfg)
        for batch in batches:
            batch.old = batch.vllm_logps if off_policy else None  # (R,) see trl_runs.py
        nr.set_lr(engine, i, cfg)
        metrics.append(nr.update(engine, batches, cfg))
    weights = dict(nr.trainer.named_weights(engine))
    weights.pop("lm_head.weight")  # tied
    return flat(weights.values()), metrics


@pytest.mark.parametrize("per_batch, theirs, ours", [  # optimizer steps per rollout batch
    (1, dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False), dict(kl_coef=0.04)),
    (2, dict(loss_type="dapo", num_iterations=2, epsilon_high=0.28),
     dict(aggregate="token", clip_high=0.28)),
    (2, dict(loss_type="grpo", importance_sampling_level="sequence", steps_per_generation=4,
             per_device_train_batch_size=4), dict(ratio="sequence"))],
    ids=["grpo", "dapo, two epochs", "gspo, two minibatches"])
def test_a_run_ends_at_trls_weights(tmp_path, tokenizer, per_batch, theirs, ours):
    """AdamW divides a gradient by its own size plus 1e-8. Where a gradient is only rounding, the
    step is lr * rounding / 1e-8: in float32 as large as lr. In float64 the gradient, clipped to
    LIMIT, rounds at 1e-15 * LIMIT at most: no step of a weight differs by over 1e-7 * LIMIT * lr.
    """
    common = dict(max_steps=STEPS, gradient_accumulation_steps=2, learning_rate=1e-4, beta=0.0,
                  lr_scheduler_type="linear", max_grad_norm=LIMIT, per_device_train_batch_size=8)

    def reward(completion_ids, **columns):
        return [exactly(random.Random(repr(ids)).gauss(0, 1)) for ids in completion_ids]

    trainer = make_trainer(tmp_path, tokenizer, reward, 4 * STEPS // per_batch, **common | theirs)
    trls, start, steps = run_trl(trainer)

    common = dict(lr=1e-4, lr_end=0.0, steps=STEPS, max_grad_norm=LIMIT, kl_coef=0.0,
                  correction="none", mismatch_bound=1e9, temperature=TEMPERATURE,
                  max_tokens=MAX_TOKENS, pack_tokens=150)
    weights, metrics = run_ours(steps, per_batch > 1, make_config(**common | ours))
    norms = [m["grad_norm"] for m in metrics]
    assert min(norms) < LIMIT < max(norms)  # clipped in some steps and not in others
    if per_batch > 1:
        assert metrics[1]["clip_ratio"] > 0  # the second step is off-policy, and reaches the bounds
    within((weights - trls).norm(), 1e-15 * LIMIT / 1e-8 * (trls - start).norm())
