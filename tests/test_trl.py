"""Comparison with TRL 1.16.0's own code: advantages and whole runs.

Both sides run in float64 (conftest): only a difference in the formulas can show. Only generation is
replaced, by a fixed table of completions, through GRPOTrainer's rollout_func. The losses, also
those of RLOOTrainer, are compared in test_vectors.py.
"""
import os
import random
from unittest import mock

import pytest
import torch

import nano_rlvr as nr
from conftest import ENV, ROOT, close, exactly, make_config, within
from runtime.batch import pack

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
MAX_TOKENS, STEPS = 40, 4  # optimizer steps of a run
LIMIT = 15.0  # of the norm of the gradient
TEMPERATURE = 0.9  # not 1: a temperature that is missing on one side shows everywhere


class Table:
    """Completions of different lengths, a quarter of them truncated: TRL gets them as samples."""

    def __init__(self, tokenizer, groups, seed=0):
        self.by_prompt = {}  # text -> the rollouts of its group
        rng = random.Random(seed)
        for g in range(groups):
            text = f"<|user|>{g}" + "+1" * rng.randint(0, 9) + "<|assistant|>"
            rows = self.by_prompt[text] = []
            for length in rng.sample(range(1, MAX_TOKENS), 4):
                truncated = rng.random() < 0.25
                end = [] if truncated else [tokenizer.eos_token_id]
                completion = rng.choices(range(256), k=length) + end
                rows.append(nr.Rollout(tokenizer(text)["input_ids"], completion, text, truncated,
                                       [0.0] * len(completion), reward=exactly(rng.gauss(0, 1))))
        self.rollouts = sum(self.by_prompt.values(), [])
        self.by_ids = {(*r.prompt, *r.completion): r for r in self.rollouts}

    def rewards(self):
        """(G, n), NaN for no verdict."""
        rewards = [torch.nan if r.reward is None else r.reward for r in self.rollouts]
        return torch.tensor(rewards).view(-1, 4)

    def column(self, name, prompts):
        """An attribute of the completions of prompts, each of which comes n times in a row."""
        return [getattr(self.by_prompt[p][i % 4], name) for i, p in enumerate(prompts)]

    def rollout_func(self, prompts, trainer):
        columns = {"prompt_ids": "prompt", "completion_ids": "completion", "logprobs": "vllm_logps"}
        return {column: self.column(name, prompts) for column, name in columns.items()}

    def members(self, inputs):
        """The rollouts of one of TRL's padded micro-batches."""
        ids, mask = (torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
                     for kind in ("ids", "mask"))  # (N, L), (N, L)
        return [self.by_ids[tuple(row[real].tolist())] for row, real in zip(ids, mask.bool())]


def make_trainer(folder, tokenizer, table, **options):
    """A real trainer of TRL on the bundled model. options: of its configuration."""
    import trl
    from datasets import Dataset
    common = dict(
        use_cpu=True, bf16=False, model_init_kwargs={"dtype": torch.float64},
        gradient_checkpointing=False, optim="adamw_torch", report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, shuffle_dataset=False, num_generations=4,
        per_device_train_batch_size=len(table.rollouts), max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE)
    # ENV: accelerate would set up distributed training in our process group
    with mock.patch.dict(os.environ, ENV, clear=True):
        args = trl.GRPOConfig(str(folder), **common | options)
        trainer = trl.GRPOTrainer(
            model=str(ROOT / "models/tiny"), args=args, processing_class=tokenizer,
            reward_funcs=lambda prompts, **columns: table.column("reward", prompts),
            rollout_func=table.rollout_func,
            train_dataset=Dataset.from_dict({"prompt": list(table.by_prompt)}))
    trainer.model.train()
    return trainer


def test_advantages_equal_trls_after_the_stated_factor(tmp_path, tokenizer):
    """TRL divides by s + 1e-4, where s has the denominator count - 1 and count is the number of
    verdicts. Our deviation is c * s with c = sqrt((count - 1) / count). TRL's advantage is
    c * (r - mean) / (c * s + c * 1e-4): c times ours when our eps is c * 1e-4. A single verdict
    gets advantage 0 on both sides."""
    table = Table(tokenizer, groups=4)
    for i in (4, 9, 10, 12, 13, 15):
        table.rollouts[i].reward = None
    trainer = make_trainer(tmp_path, tokenizer, table)
    batch = [{"prompt": text} for text in table.by_prompt for _ in range(4)]
    for scale in ("group", "batch", "none"):
        trainer.scale_rewards = scale
        trls = trainer._generate_and_score_completions(batch)["advantages"].view(4, 4)
        for i, count in enumerate([4, 3, 2, 1]):
            c = {"group": (count - 1) / count, "batch": 9 / 10, "none": 1.0}[scale] ** 0.5 or 1.0
            ours = nr.group_advantages(table.rewards(), scale=scale, eps=c * 1e-4)[i]
            close(c * ours, trls[i])
        assert trls[3].eq(0).all() and trls[table.rewards().isnan()].eq(0).all()


# ---- whole runs


def run_trl(folder, tokenizer, table, **options):
    """TRL's train() in two micro-batches per step -> weights, start weights, rollouts per step."""
    trainer = make_trainer(folder, tokenizer, table, max_steps=STEPS,
                           gradient_accumulation_steps=2, **options)
    members, compute_loss = [], trainer._compute_loss  # members: rollouts of each micro-batch

    def recorded(model, inputs):
        members.append(table.members(inputs))
        return compute_loss(model, inputs)

    trainer._compute_loss = recorded
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == STEPS and len(members) == STEPS * 2
    order = [members[i] + members[i + 1] for i in range(0, len(members), 2)]
    return [p.detach() for p in trainer.model.parameters()], start, order


def run_ours(table, order, per_batch, cfg):
    """The same optimizer steps through DeepSpeed ZeRO-2, `per_batch` of them per rollout batch.

    Returns the final weights, and the metrics of each step. The learning rate falls with every
    optimizer step, as in TRL; train() changes it once per rollout batch.
    """
    engine, reference, metrics = nr.make_policy(cfg), nr.make_reference(cfg), []
    factor = (3 / 4) ** 0.5  # see the test of the advantages
    advantages = nr.group_advantages(table.rewards(), cfg.baseline, cfg.scale, factor * 1e-4)
    for r, advantage in zip(table.rollouts, (factor * advantages).flatten().tolist()):
        r.advantages = [advantage] * len(r.completion)
    for i, members in enumerate(order):
        if i % per_batch == 0:
            batch = table.rollouts[i // per_batch * 16:][:16]
            with torch.no_grad():
                logp, _ = engine(nr.collate(batch))  # (R,)
            for r, own in zip(batch, logp.split([len(r.completion) for r in batch])):
                r.vllm_logps = own.tolist()  # nothing else needs those of vLLM
        packs = pack(nr.assign_token_weights(members, cfg), cfg.pack_tokens)
        batches = list(map(nr.collate, packs))
        nr.store_fixed_logps(engine, reference, batches, cfg)
        if per_batch > 1:
            for packed in batches:
                packed.old = packed.vllm_logps  # (R,)
        nr.trainer.set_lr(engine, i, cfg)
        metrics.append(nr.update(engine, batches, cfg))
    weights = dict(nr.trainer.named_weights(engine))
    return [w.clone() for name, w in weights.items() if name != "lm_head.weight"], metrics


def flat(weights):
    return torch.cat([w.flatten() for w in weights])


RUNS = {  # name -> optimizer steps per rollout batch, TRL's options, ours
    "grpo": (1, dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False),
             dict(kl_coef=0.04)),
    "dapo, two epochs": (2, dict(loss_type="dapo", num_iterations=2, epsilon_high=0.28),
                         dict(aggregate="token", clip_high=0.28)),
    "gspo, two minibatches": (2, dict(loss_type="grpo", importance_sampling_level="sequence",
                                      steps_per_generation=4, per_device_train_batch_size=4),
                              dict(ratio="sequence")),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_at_trls_weights(tmp_path, tokenizer, name):
    """AdamW with its epsilon of 1e-8, gradient clipping and linear decay; compares 822,272 weights.

    AdamW divides a gradient by its own size plus epsilon. Where a gradient is only rounding, the
    step is lr * rounding / epsilon: in float32 as large as lr. In float64 the gradient, clipped to
    LIMIT, rounds at 1e-15 * LIMIT at most, so no step of a weight differs by more than
    1e-7 * LIMIT * lr.
    """
    per_batch, theirs, ours = RUNS[name]
    table = Table(tokenizer, groups=4 * STEPS // per_batch, seed=2)
    common = dict(learning_rate=1e-4, lr_scheduler_type="linear", max_grad_norm=LIMIT, beta=0.0,
                  per_device_train_batch_size=8)
    trls, start, order = run_trl(tmp_path, tokenizer, table, **common | theirs)
    for i in range(0, STEPS, per_batch):  # TRL took the table's batches in their order
        wanted = table.rollouts[i // per_batch * 16:][:16]
        taken = {id(r) for part in order[i:i + per_batch] for r in part}
        assert sorted(map(id, wanted)) == sorted(taken)

    common = dict(lr=1e-4, lr_end=0.0, steps=STEPS, max_grad_norm=LIMIT, kl_coef=0.0,
                  correction="none", mismatch_bound=1e9, temperature=TEMPERATURE,
                  max_tokens=MAX_TOKENS, pack_tokens=150)
    weights, metrics = run_ours(table, order, per_batch, make_config(**common | ours))
    norms = [m["grad_norm"] for m in metrics]
    assert min(norms) < LIMIT < max(norms)  # clipped in some steps and not in others
    if per_batch > 1:
        assert metrics[1]["clipped"] > 0  # the second step is off-policy, and reaches the bounds
    moved_by = (flat(trls) - flat(start)).norm()
    within((flat(weights) - flat(trls)).norm(), 1e-15 * LIMIT / 1e-8 * moved_by)
