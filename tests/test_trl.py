"""Comparison with TRL 1.16.0's own code: advantages and whole runs.

Both sides run in float64 (conftest): only a difference in the formulas can show. Only generation is
replaced, by a fixed table of completions, through GRPOTrainer's rollout_func. The losses, also
those of RLOOTrainer, are compared in test_vectors.py.
"""
import os
import random
from contextlib import contextmanager

import pytest
import torch

import nano_rlvr as nr
from conftest import GROUP_VARIABLES, ROOT, close, exactly, make_config, within
from runtime.batch import pack

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
MAX_TOKENS, STEPS = 40, 4  # optimizer steps of a run
TEMPERATURE = 0.9  # not 1: a temperature that is missing on one side shows everywhere


class Table:
    """Completions of different lengths, a quarter of them truncated: TRL gets them as samples."""

    def __init__(self, tokenizer, groups, n=4, seed=0):
        self.rollouts, self.by_prompt, self.eos = [], {}, tokenizer.eos_token_id
        rng = random.Random(seed)
        for g in range(groups):
            text = f"<|user|>{g}" + "+1" * rng.randint(0, 9) + "<|assistant|>"
            rows = self.by_prompt[text] = []
            while len(rows) < n:
                truncated = rng.random() < 0.25
                body = [rng.randrange(256) for _ in range(rng.randint(truncated, MAX_TOKENS - 1))]
                if any(self.body(r.completion) == tuple(body) for r in rows):
                    continue
                completion, reward = body + [self.eos] * (not truncated), exactly(rng.gauss(0, 1))
                rows.append(nr.Rollout(tokenizer(text)["input_ids"], completion, text, truncated,
                                       [0.0] * len(completion), reward=reward))
            self.rollouts += rows
        self.find = {(r.text, self.body(r.completion)): r for r in self.rollouts}
        self.rewards = torch.tensor([r.reward for r in self.rollouts]).view(groups, n)  # (G, n)

    def body(self, ids):
        """Without the end-of-sequence token, which is also TRL's padding."""
        return tuple(t for t in ids if t != self.eos)

    def rollout_func(self, prompts, trainer):
        """The completions of prompts, each of which comes n times in a row."""
        rows = [self.by_prompt[p][i % trainer.num_generations] for i, p in enumerate(prompts)]
        columns = {"prompt_ids": "prompt", "completion_ids": "completion", "logprobs": "vllm_logps"}
        return {column: [getattr(r, name) for r in rows] for column, name in columns.items()}

    def reward(self, prompts, completion_ids, **columns):
        return [self.find[p, self.body(c)].reward for p, c in zip(prompts, completion_ids)]

    def members(self, tokenizer, inputs):
        """The rollouts of one of TRL's padded micro-batches."""
        prompts = [tokenizer.decode(row[mask.bool()])
                   for row, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
        completions = inputs["completion_ids"].tolist()
        return [self.find[p, self.body(c)] for p, c in zip(prompts, completions)]


@contextmanager
def without_group_variables():
    """Hides our process group: accelerate would set up distributed training."""
    hidden = {name: os.environ.pop(name) for name in GROUP_VARIABLES if name in os.environ}
    yield
    os.environ.update(hidden)


def make_trainer(folder, tokenizer, table, **options):
    """A real trainer of TRL on the bundled model. options: of its configuration."""
    import trl
    from datasets import Dataset
    common = dict(
        use_cpu=True, bf16=False, model_init_kwargs={"dtype": torch.float64},
        gradient_checkpointing=False, optim="adamw_torch", report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, shuffle_dataset=False, num_generations=4,
        per_device_train_batch_size=len(table.by_prompt) * 4, max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE)
    with without_group_variables():
        args = trl.GRPOConfig(str(folder), **common | options)
        trainer = trl.GRPOTrainer(
            model=str(ROOT / "models/tiny"), reward_funcs=table.reward, args=args,
            processing_class=tokenizer, rollout_func=table.rollout_func,
            train_dataset=Dataset.from_dict({"prompt": list(table.by_prompt)}))
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def scored(tmp_path_factory, tokenizer):
    """A table in which some completions have no verdict, and a trainer."""
    table = Table(tokenizer, groups=4)
    for i in (4, 9, 10, 12, 13, 15):
        table.rollouts[i].reward, table.rewards[i // 4, i % 4] = None, torch.nan
    return table, make_trainer(tmp_path_factory.mktemp("grpo"), tokenizer, table)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trls_after_the_stated_factor(scored, scale):
    """TRL divides by s + 1e-4, where s has the denominator count - 1 and count is the number of
    verdicts. Our deviation is c * s with c = sqrt((count - 1) / count). TRL's advantage is
    c * (r - mean) / (c * s + c * 1e-4): c times ours when our eps is c * 1e-4. A single verdict
    gets advantage 0 on both sides."""
    table, trainer = scored
    trainer.scale_rewards = scale
    batch = [{"prompt": text} for text in table.by_prompt for _ in range(4)]
    trls = trainer._generate_and_score_completions(batch)["advantages"].view(4, 4)
    for i, count in enumerate([4, 3, 2, 1]):
        c = {"group": (count - 1) / count, "batch": 9 / 10, "none": 1.0}[scale] ** 0.5 or 1.0
        close(c * nr.group_advantages(table.rewards, scale=scale, eps=c * 1e-4)[i], trls[i])
    assert trls[3].eq(0).all() and trls[table.rewards.isnan()].eq(0).all()


# ---- whole runs


def run_trl(folder, tokenizer, table, **options):
    """TRL's train() in two micro-batches per step -> weights, start weights, rollouts per step."""
    trainer = make_trainer(folder, tokenizer, table, max_steps=STEPS,
                           gradient_accumulation_steps=2, **options)
    members, compute_loss = [], trainer._compute_loss  # members: rollouts of each micro-batch

    def recorded(model, inputs):
        members.append(table.members(tokenizer, inputs))
        return compute_loss(model, inputs)

    trainer._compute_loss = recorded
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == STEPS and len(members) == STEPS * 2
    order = [members[i] + members[i + 1] for i in range(0, len(members), 2)]
    return [p.detach() for p in trainer.model.parameters()], start, order


@torch.no_grad()
def logps(model, rollouts):
    """{id(rollout): its log-probs under the model}."""
    parts = model(nr.collate(rollouts))[0].split([len(r.completion) for r in rollouts])
    return {id(r): part for r, part in zip(rollouts, parts)}


def run_ours(table, order, per_batch, cfg):
    """The same optimizer steps through DeepSpeed ZeRO-2, `per_batch` of them per rollout batch.

    Returns the final weights, and the metrics of each step. The learning rate falls with every
    optimizer step, as in TRL; train() changes it once per rollout batch.
    """
    engine, reference, metrics = nr.make_policy(cfg), nr.make_reference(cfg), []
    factor = (3 / 4) ** 0.5 if cfg.scale == "group" else 1.0  # see the test of the advantages
    advantages = nr.group_advantages(table.rewards, cfg.baseline, cfg.scale, factor * 1e-4)
    for r, advantage in zip(table.rollouts, (factor * advantages).flatten().tolist()):
        r.advantages = [advantage] * len(r.completion)
    for i, members in enumerate(order):
        batch = table.rollouts[i // per_batch * 16:][:16]
        if i % per_batch == 0:
            old = logps(engine, batch)
        packs = pack(nr.assign_token_weights(members, cfg), cfg.pack_tokens)
        batches = list(map(nr.collate, packs))
        for rollouts, packed in zip(packs, batches):
            if per_batch > 1:
                packed.old = torch.cat([old[id(r)] for r in rollouts])  # (R,)
            if reference:
                packed.ref, _ = reference(packed)  # (R,)
        nr.trainer.set_lr(engine, i, cfg)
        metrics.append(nr.update(engine, batches, cfg))
    weights = dict(nr.trainer.named_weights(engine))
    return [w.clone() for name, w in weights.items() if name != "lm_head.weight"], metrics


def flat(weights):
    return torch.cat([w.flatten() for w in weights])


RUNS = {  # name -> optimizer steps per rollout batch, max_grad_norm, TRL's options, ours
    "grpo": (1, 20.0, dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False),
             dict(kl_coef=0.04)),
    "dapo, two epochs": (
        2, 10.0, dict(loss_type="dapo", num_iterations=2, epsilon_high=0.28),
        dict(aggregate="token", clip_high=0.28)),
    "gspo, two minibatches": (
        2, 10.0, dict(loss_type="grpo", steps_per_generation=4,
                      importance_sampling_level="sequence"), dict(ratio="sequence")),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_at_trls_weights(tmp_path, tokenizer, name):
    """AdamW with its epsilon of 1e-8, gradient clipping and linear decay; compares 822,272 weights.

    AdamW divides a gradient by its own size plus epsilon. Where a gradient is only rounding, the
    step is lr * rounding / epsilon: in float32 as large as lr. In float64 the gradient, clipped to
    `limit`, rounds at 1e-15 * limit at most, so no step of a weight differs by more than
    1e-7 * limit * lr.
    """
    per_batch, limit, theirs, ours = RUNS[name]
    table = Table(tokenizer, groups=4 * STEPS // per_batch, seed=1)
    common = dict(learning_rate=1e-4, lr_scheduler_type="linear", max_grad_norm=limit, beta=0.0,
                  per_device_train_batch_size=4 if "steps_per_generation" in theirs else 8)
    trls, start, order = run_trl(tmp_path, tokenizer, table, **common | theirs)
    for i in range(0, STEPS, per_batch):  # TRL took the table's batches in their order
        wanted = table.rollouts[i // per_batch * 16:][:16]
        taken = {id(r) for part in order[i:i + per_batch] for r in part}
        assert sorted(map(id, wanted)) == sorted(taken)

    common = dict(lr=1e-4, lr_end=0.0, steps=STEPS, max_grad_norm=limit, kl_coef=0.0,
                  correction="none", mismatch_bound=1e9, temperature=TEMPERATURE,
                  max_tokens=MAX_TOKENS, pack_tokens=150)
    weights, metrics = run_ours(table, order, per_batch, make_config(**common | ours))
    norms = [m["grad_norm"] for m in metrics]
    assert min(norms) < limit < max(norms), norms  # clipped in some steps and not in others
    if per_batch > 1:
        assert metrics[1]["clipped"] > 0  # the second step is off-policy, and reaches the bounds
    moved_by = (flat(trls) - flat(start)).norm()
    within((flat(weights) - flat(trls)).norm(), 1e-15 * limit / 1e-8 * moved_by)
