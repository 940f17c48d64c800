"""Comparison with TRL 1.16.0's own code: advantages, log-probs, losses, gradients, whole runs.

Both sides run in float64 (conftest): only a difference in the formulas can show, and every bound is EXACT.
Only generation is replaced, by a fixed table of completions: through GRPOTrainer's rollout_func, and for
RLOOTrainer, which has none, in the method that calls generate(). Where we differ from TRL on purpose, a test
states the difference exactly.
"""
import math
import os
import random
from contextlib import contextmanager
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
import runtime.model
import runtime.trainer
from conftest import EXACT, GROUP_VARIABLES, ROOT, close, exactly, make_config, within

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
MAX_TOKENS = 40
TEMPERATURE = 0.9  # not 1: a temperature that is missing on one side shows everywhere
LOW, HIGH, DELTA, CAP = 0.2, 0.28, 1.5, 2.0  # clip_low, clip_high, delta, correction_cap where used


class Table:
    """Fixed completions of different lengths, a quarter of them truncated, which TRL gets as its samples."""

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
        """For GRPOTrainer: the completions of a batch of prompts, each of which comes n times in a row."""
        rows = [self.by_prompt[p][i % trainer.num_generations] for i, p in enumerate(prompts)]
        columns = {"prompt_ids": "prompt", "completion_ids": "completion", "logprobs": "vllm_logps"}
        return {column: [getattr(r, name) for r in rows] for column, name in columns.items()}

    def reward(self, prompts, completion_ids, **columns):
        return [self.find[p, self.body(c)].reward for p, c in zip(prompts, completion_ids)]

    def members(self, tokenizer, inputs):
        """The rollouts of one of TRL's padded micro-batches."""
        prompts = [tokenizer.decode(row[mask.bool()])
                   for row, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
        return [self.find[p, self.body(c)] for p, c in zip(prompts, inputs["completion_ids"].tolist())]


@contextmanager
def without_group_variables():
    """Hides our process group: accelerate would set up distributed training."""
    hidden = {name: os.environ.pop(name) for name in GROUP_VARIABLES if name in os.environ}
    yield
    os.environ.update(hidden)


@pytest.fixture(scope="module")
def table(tokenizer):
    return Table(tokenizer, groups=4)


def make_trainer(folder, tokenizer, table, algo="GRPO", **options):
    """A real trainer of TRL on the bundled model. options: of its configuration."""
    import trl
    from datasets import Dataset
    common = dict(
        use_cpu=True, bf16=False, model_init_kwargs={"dtype": torch.float64}, gradient_checkpointing=False,
        optim="adamw_torch", report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        shuffle_dataset=False, num_generations=4, per_device_train_batch_size=len(table.by_prompt) * 4,
        max_completion_length=MAX_TOKENS, temperature=TEMPERATURE)
    generation = {"rollout_func": table.rollout_func} if algo == "GRPO" else {}
    with without_group_variables():
        args = getattr(trl, f"{algo}Config")(str(folder), **common | options)
        trainer = getattr(trl, f"{algo}Trainer")(
            model=str(ROOT / "models/tiny"), reward_funcs=table.reward, args=args, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": list(table.by_prompt)}), **generation)
    if algo == "RLOO":
        completions = {tuple(rows[0].prompt): rows for rows in table.by_prompt.values()}

        def generate(prompt_ids, *_):
            return [completions[tuple(p)][i % 4].completion for i, p in enumerate(prompt_ids)]
        trainer._generate_single_turn = generate
    trainer.model.train()
    return trainer


def batch_of(table, n=4):
    return [{"prompt": text} for text in table.by_prompt for _ in range(n)]


# ---- 1. advantages


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, tokenizer, table):
    folder = tmp_path_factory.mktemp("grpo")
    return make_trainer(folder, tokenizer, table, beta=0.04, use_bias_correction_kl=False)


@pytest.mark.parametrize("scale, count", [("group", 4), ("batch", 16), ("none", None)])
def test_advantages_equal_trls_after_the_stated_factor(trainer, table, scale, count):
    """TRL divides by s + 1e-4, where s has the denominator count - 1. Our deviation is c * s with
    c = sqrt((count - 1) / count). TRL's advantage is c * (r - mean) / (c * s + c * 1e-4): c times ours when
    our eps is c * 1e-4."""
    trainer.scale_rewards = scale
    trls = trainer._generate_and_score_completions(batch_of(table))["advantages"].view(4, 4)
    c = ((count - 1) / count) ** 0.5 if count else 1.0
    close(c * nr.group_advantages(table.rewards, scale=scale, eps=c * 1e-4), trls)
    if count:
        assert not torch.allclose(trls, nr.group_advantages(table.rewards, scale=scale), rtol=0.03)


@pytest.fixture
def with_nan(table):
    """Rewards (4, 4) without a verdict for none, one, two and three completions of a group."""
    no_verdict = [table.rollouts[i] for i in (4, 9, 10, 12, 13, 15)]
    kept = [r.reward for r in no_verdict]
    for r in no_verdict:
        r.reward = None
    yield torch.tensor([math.nan if r.reward is None else r.reward for r in table.rollouts]).view(4, 4)
    for r, reward in zip(no_verdict, kept):
        r.reward = reward


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_no_verdict_is_left_out_as_in_trl(trainer, table, with_nan, scale):
    """The same factor, where count is the number of verdicts. A single one gets advantage 0 on both sides."""
    trainer.scale_rewards = scale
    trls = trainer._generate_and_score_completions(batch_of(table))["advantages"].view(4, 4)
    for i, count in enumerate([4, 3, 2, 1]):
        c = {"group": (count - 1) / count, "batch": 9 / 10, "none": 1.0}[scale] ** 0.5 or 1.0
        ours = c * nr.group_advantages(with_nan, scale=scale, eps=c * 1e-4)
        close(ours[i], trls[i])
    assert trls[3].eq(0).all() and trls[with_nan.isnan()].eq(0).all()


def test_leave_one_out_advantages_equal_rloo_trainers(tmp_path, tokenizer, table, with_nan):
    rloo = make_trainer(tmp_path, tokenizer, table, "RLOO", beta=0.0)
    trls = rloo._generate_and_score_completions(batch_of(table))["advantages"].view(4, 4)
    ours = nr.group_advantages(with_nan, "leave_one_out", "none")
    close(ours, trls)
    assert ours[3].eq(0).all()  # a single verdict has no others to be compared with


# ---- 2. log-probs and entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.7])
def test_log_probs_and_entropy_equal_trls_on_padded_batches(tmp_path, tokenizer, table, temperature):
    trainer = make_trainer(tmp_path, tokenizer, table, temperature=temperature)
    inputs = trainer._generate_and_score_completions(batch_of(table))
    mask = inputs["completion_mask"].bool()  # (N, C)
    assert not mask.all() and not inputs["prompt_mask"].bool().all()  # padded on both sides
    ids, attention = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1)
                      for x in ("ids", "mask"))  # (N, P+C)
    policy = nr.TokenLogps(runtime.model.load_model(make_config()), temperature, chunk=50)
    with torch.no_grad():
        trls_logp, trls_entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, mask.shape[1], compute_entropy=True)
        logp, entropy = policy(nr.collate(table.rollouts))
    close(logp, trls_logp[mask])
    close(entropy, trls_entropy[mask])


# ---- 3. loss and the gradient of every parameter

AXES = {  # of the grid; clip_low and clip_high are never equal
    "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"],
    "level": ["token", "sequence"],
    "beta": [0.0, 0.04],
    "policy": ["on", "off"],
    "delta": [None, DELTA],
    "correction": ["none", "token_truncate", "token_mask"],
    "masked": [False, True],
    "micro": [1, 4],
}
OURS = {  # TRL's loss_type -> our axes
    "grpo": dict(aggregate="sequence"), "bnpo": dict(aggregate="token"), "dapo": dict(aggregate="token"),
    "dr_grpo": dict(aggregate="constant"), "cispo": dict(aggregate="token", gate="detach"),
    "sapo": dict(aggregate="sequence", gate="soft"),
}


def covering(axes, strength):
    """A few cases in which all values of any `strength` axes occur together; greedy and deterministic."""
    cases = [tuple(enumerate(case)) for case in product(*axes.values())]
    together = {case: set(combinations(case, strength)) for case in cases}
    missing = set().union(*together.values())
    while missing:
        best = max(cases, key=lambda case: len(together[case] & missing))
        missing -= together[best]
        yield {name: value for name, (_, value) in zip(axes, best)}


def moved(parameters, seed, size=0.05):
    """The weights plus noise, so that the policy, the one that sampled and the reference are different."""
    noise = torch.Generator().manual_seed(seed)
    return [p.detach() + size * p.std() * torch.randn(p.shape, generator=noise) for p in parameters]


def set_weights(model, weights):
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data.copy_(w)


@pytest.fixture(scope="module")
def setup(trainer, tokenizer, table):
    """Weights of the policy, the policy that sampled and the reference; log-probs under the latter two."""
    policy, past, reference = (
        nr.TokenLogps(runtime.model.load_model(make_config()), TEMPERATURE) for _ in range(3))
    ours, trls = ([n for n, _ in model.named_parameters()] for model in (policy.model, trainer.model))
    assert ours == trls
    start = [p.detach().clone() for p in policy.parameters()]
    weights = {"now": moved(start, 3), "old": start, "ref": moved(start, 2)}
    set_weights(reference, weights["ref"])
    set_weights(trainer.ref_model, weights["ref"])
    old, ref = logps(past, table.rollouts), logps(reference, table.rollouts)
    noise = torch.Generator().manual_seed(4)
    set_advantages(table.rollouts, nr.group_advantages(table.rewards, scale="none"))
    for r in table.rollouts:  # vLLM's numerics, much exaggerated
        sampled = old[id(r)] + 0.7 * torch.randn(len(r.completion), generator=noise)
        r.vllm_logps = [exactly(x) for x in sampled.tolist()]
    return SimpleNamespace(trainer=trainer, tokenizer=tokenizer, table=table, policy=policy, weights=weights,
                           old=old, ref=ref)


@torch.no_grad()
def logps(model, rollouts):
    """{id(rollout): its log-probs under the model}."""
    parts = model(nr.collate(rollouts))[0].split([len(r.completion) for r in rollouts])
    return {id(r): part for r, part in zip(rollouts, parts)}


def collated(rollouts, old=None, ref=None):
    """collate() with fixed log-probs from logps()."""
    batch = nr.collate(rollouts)
    batch.old, batch.ref = (x and torch.cat([x[id(r)] for r in rollouts]) for x in (old, ref))  # (R,), (R,)
    return batch


def set_advantages(rollouts, advantages):
    for r, advantage in zip(rollouts, advantages.flatten().tolist(), strict=True):
        r.advantages = [advantage] * len(r.completion)


def trls_gradient(s, loss_type, level, beta, policy, delta, correction, masked, micro,
                  bias_correction=False, steps=1):
    """TRL's loss, gradients, and the rollouts of each micro-batch, for the first of `steps` optimizer steps.

    Everything after generation is TRL's code.
    """
    t = s.trainer
    t.loss_type, t.importance_sampling_level, t.scale_rewards = loss_type, level, "none"
    t.beta, t.args.delta, t.args.use_bias_correction_kl = beta, delta, bias_correction
    # TRL's cispo bounds the ratio at epsilon_high, ours at 1 + clip_high
    t.epsilon_low, t.epsilon_high = LOW, HIGH + (loss_type == "cispo")
    t.use_vllm, t.vllm_importance_sampling_mode = correction != "none", correction
    t.vllm_importance_sampling_clip_max, t.mask_truncated_completions = CAP, masked
    t._last_loaded_step = t.state.global_step  # "vLLM has these weights": no sync
    t.num_iterations = {"on": 1, "off": 2}[policy]  # with two steps per batch TRL computes the old log-probs
    t.args.gradient_accumulation_steps = t.current_gradient_accumulation_steps = micro
    t.args.steps_per_generation = micro * steps
    t._buffered_inputs, batches, total = None, [], 0.0
    set_weights(t.model, s.weights["now" if policy == "on" else "old"])  # the policy that samples
    t.model.zero_grad()
    torch.manual_seed(0)  # TRL shuffles the batch before it splits it
    for t._step in range(micro):
        inputs = t._prepare_inputs(batch_of(s.table))
        set_weights(t.model, s.weights["now"])
        loss = t._compute_loss(t.model, inputs)
        loss.backward()
        total += loss.item()
        batches.append(s.table.members(s.tokenizer, inputs))
    t._step = 0
    return total, [p.grad.clone() for p in t.model.parameters()], batches


def our_gradient(s, batches, loss_type, level, beta, policy, delta, correction, masked, micro, means=False):
    """Our loss and gradients. means: the mean of the means of the micro-batches, not that of the batch."""
    cfg = make_config(
        ratio=level, kl_coef=beta, clip_low=LOW, clip_high=HIGH, delta=delta or 0.0, correction=correction,
        correction_cap=CAP, mask_truncated=masked, max_tokens=MAX_TOKENS, **OURS[loss_type])
    old, ref = s.old if policy == "off" else None, s.ref if beta else None
    parts = batches if means else [s.table.rollouts]
    trained = [nr.assign_token_weights(part, cfg) for part in parts]
    packs = [p for part in trained for p in nr.pack(part, 10**6 if micro == 1 else 100)]
    assert len(packs) >= micro
    set_weights(s.policy, s.weights["now"])
    s.policy.zero_grad()
    total = 0.0
    for members in packs:
        batch = collated(members, old, ref)
        loss, _ = nr.policy_loss(s.policy(batch)[0], batch.old, batch.ref, batch, cfg)
        (loss / len(parts)).backward()
        total += loss.item() / len(parts)
    return total, [p.grad.clone() for p in s.policy.parameters()]


def distance(ours, trls):
    """Norm of the difference / norm of trls: of all parameters together, and the largest of one parameter."""
    difference, size = ([x.norm().item() for x in xs] for xs in ([a - b for a, b in zip(ours, trls)], trls))
    return math.hypot(*difference) / math.hypot(*size), max(x / y for x, y in zip(difference, size))


@pytest.mark.parametrize("case", list(covering(AXES, 3)), ids=lambda case: "-".join(map(str, case.values())))
def test_loss_and_gradients_equal_trls(setup, case):
    """For bnpo in several micro-batches TRL takes the mean of their means, so here we do the same: see
    test_bnpo_in_several_micro_batches_is_a_mean_of_means_in_trl."""
    loss, gradients, batches = trls_gradient(setup, **case)
    total, ours = our_gradient(setup, batches, **case, means=case["loss_type"] == "bnpo")
    size = sum(abs(r.advantages[0]) for r in setup.table.rollouts) / 16  # the terms of the loss cancel
    within(abs(total - loss), EXACT * max(abs(loss), size))
    together, largest = distance(ours, gradients)
    within(together, EXACT)
    within(largest, EXACT)


def test_the_grid_meets_every_branch(setup):
    """The tokens of the cases above are on each side of each bound, for both signs of the advantage."""
    set_weights(setup.policy, setup.weights["now"])
    batch = collated(setup.table.rollouts, setup.old)
    with torch.no_grad():
        log_ratio = setup.policy(batch)[0] - batch.old  # (R,)
    for cfg, enough in ((make_config(), 10), (make_config(ratio="sequence"), 5)):
        ratio = (log_ratio if cfg.ratio == "token" else nr.sequence_mean(log_ratio, batch)).exp()  # (R,)
        for sign in (batch.advantage > 0, batch.advantage < 0):
            for inside in (ratio < 1 - LOW, ratio > 1 + HIGH, (ratio > 1 - LOW) & (ratio < 1)):
                assert (sign & inside).sum() >= enough
    assert ((batch.advantage < 0) & (log_ratio.exp() > DELTA)).sum() >= 10
    importance = (batch.old - batch.vllm_logps).exp()  # (R,)
    assert 10 <= (importance > CAP).sum() <= len(importance) / 2
    assert sum(r.truncated for r in setup.table.rollouts) >= 3
    assert len({len(r.completion) for r in setup.table.rollouts}) >= 10


PLAIN = dict(loss_type="grpo", level="token", beta=0.0, policy="off", delta=None, correction="none",
             masked=False, micro=1)


def test_bnpo_in_several_micro_batches_is_a_mean_of_means_in_trl(setup):
    """TRL's bnpo divides each micro-batch by its own number of tokens, so the result depends on how the batch
    was split. Ours divides by the tokens of the batch, which is what TRL calls dapo."""
    case = PLAIN | {"loss_type": "bnpo", "micro": 4}
    _, trls, batches = trls_gradient(setup, **case)
    tokens = [sum(len(r.completion) for r in part) for part in batches]
    assert max(tokens) > 1.2 * min(tokens)
    within(distance(our_gradient(setup, batches, **case, means=True)[1], trls)[0], EXACT)
    ours = our_gradient(setup, batches, **case)[1]
    assert distance(ours, trls)[0] > 0.05
    # TRL's dapo in any number of micro-batches, and its bnpo in one, is the mean over the batch
    for same in (case | {"loss_type": "dapo"}, case | {"micro": 1}):
        within(distance(ours, trls_gradient(setup, **same)[1])[0], EXACT)


def test_dapo_in_several_optimizer_steps_divides_by_the_mean_tokens_of_a_step_in_trl(setup):
    """TRL divides by the mean number of tokens of an optimizer step in the rollout batch. Ours divides by the
    tokens of this step, so that its weights sum to 1. With one step per batch the two are the same."""
    case = PLAIN | {"loss_type": "dapo", "micro": 1}
    _, trls, batches = trls_gradient(setup, **case, steps=4)
    members, cfg = [r for part in batches for r in part], make_config(aggregate="token")
    batch, setup.table.rollouts = setup.table.rollouts, members
    ours = our_gradient(setup, batches, **case)[1]
    setup.table.rollouts = batch
    close(sum(r.weight * len(r.completion) for r in nr.assign_token_weights(members, cfg)), 1)
    tokens, total = (sum(len(r.completion) for r in rollouts) for rollouts in (members, batch))
    factor = tokens / (total / 4)
    assert len(members) == 4 and abs(factor - 1) > 0.1
    within(distance([factor * g for g in ours], trls)[0], EXACT)


def test_a_completion_without_verdict_stays_in_trls_denominator(setup, with_nan):
    """Its advantage is 0 on both sides. TRL counts it as a sequence, ours does not: 10 verdicts of 16."""
    _, trls, batches = trls_gradient(setup, **PLAIN)
    kept = torch.tensor([r.advantages[0] for r in setup.table.rollouts])
    set_advantages(setup.table.rollouts, nr.group_advantages(with_nan, scale="none"))
    ours = our_gradient(setup, batches, **PLAIN)[1]
    set_advantages(setup.table.rollouts, kept)
    within(distance([g * 10 / 16 for g in ours], trls)[0], EXACT)


def test_cispo_bounds_at_1_plus_clip_high_where_trl_bounds_at_epsilon_high(setup):
    case = PLAIN | {"loss_type": "cispo"}
    _, trls, batches = trls_gradient(setup, **case)  # epsilon_high = 1.28
    within(distance(our_gradient(setup, batches, **case)[1], trls)[0], EXACT)  # clip_high = 0.28
    batch = collated(setup.table.rollouts, setup.old)
    assert ((setup.policy(batch)[0] - batch.old).exp() > 1 + HIGH).sum() >= 10


def test_trls_default_kl_is_ours_times_the_ratio(setup):
    """use_bias_correction_kl (TRL 1.16: on by default, from DeepSeek-V3.2) multiplies k3 by the ratio. Ours
    is the KL of the GRPO paper. On-policy the ratio is 1 but has a gradient, so they differ there too."""
    for policy in ("off", "on"):
        case = PLAIN | {"beta": 0.04, "policy": policy}
        loss, trls, batches = trls_gradient(setup, **case, bias_correction=True)
        total, ours = our_gradient(setup, batches, **case)
        assert distance(ours, trls)[0] > 0.01
        batch = collated(setup.table.rollouts, setup.old if policy == "off" else None, setup.ref)
        logp = setup.policy(batch)[0]
        ratio = (logp - (logp.detach() if batch.old is None else batch.old)).exp()
        extra = 0.04 * (batch.weight * (ratio - 1) * nr.k3(logp, batch.ref)).sum()
        extra.backward()  # adds to the gradients of our_gradient()
        close(total + extra.item(), loss)
        within(distance([p.grad for p in setup.policy.parameters()], trls)[0], EXACT)


# ---- 4. whole runs

STEPS, PARTS = 10, 2  # optimizer steps; micro-batches of each


def run_trl(folder, tokenizer, table, algo, **options):
    """TRL's train() for 10 optimizer steps -> final weights, start weights, rollouts of each step."""
    trainer = make_trainer(folder, tokenizer, table, algo, max_steps=STEPS, gradient_accumulation_steps=PARTS,
                           **options)
    members, compute_loss = [], trainer._compute_loss  # members: rollouts of each micro-batch

    def recorded(model, inputs):
        members.append(table.members(tokenizer, inputs))
        return compute_loss(model, inputs)

    trainer._compute_loss = recorded
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == STEPS and len(members) == STEPS * PARTS
    order = [sum(members[i:i + PARTS], []) for i in range(0, len(members), PARTS)]
    return [p.detach() for p in trainer.model.parameters()], start, order


def run_ours(table, order, per_batch, factor, cfg):
    """The same 10 optimizer steps through DeepSpeed ZeRO-2, `per_batch` of them per rollout batch.

    Returns the final weights, and the metrics of each step. The learning rate falls with every optimizer
    step, as in TRL; train() changes it once per rollout batch.
    """
    engine, reference, log = nr.make_policy(cfg), nr.make_reference(cfg), []
    advantages = nr.group_advantages(table.rewards, cfg.baseline, cfg.scale, factor * cfg.eps)
    set_advantages(table.rollouts, factor * advantages)  # factor: see the test of the advantages
    old = None
    for i, members in enumerate(order):
        packs = nr.pack(nr.assign_token_weights(members, cfg), cfg.pack_tokens)
        if per_batch > 1 and i % per_batch == 0:
            old = logps(engine, table.rollouts)
        if cfg.kl_in == "reward":
            batch = table.rollouts[i * 16:][:16]
            runtime.trainer.store_kl(engine, reference, [batch], batch[0], cfg, nr.collate)
            nr.assign_advantages([batch[j:j + 4] for j in range(0, 16, 4)], cfg, math.nan)
        ref = logps(reference, table.rollouts) if reference and cfg.kl_in == "loss" else None
        runtime.trainer.set_lr(engine, nr.lr_at(i, cfg))
        log.append(nr.update(engine, [collated(p, old, ref) for p in packs], cfg))
    return [w.clone() for name, w in runtime.trainer.named_weights(engine) if name != "lm_head.weight"], log


def flat(weights):
    return torch.cat([w.flatten() for w in weights])


RUNS = {  # name -> algorithm, optimizer steps per rollout batch, max_grad_norm, TRL's options, ours
    "grpo": ("GRPO", 1, 10.0, dict(beta=0.04), dict(kl_coef=0.04)),
    "dr_grpo": ("GRPO", 1, 6.0, dict(loss_type="dr_grpo", scale_rewards="none"),
                dict(aggregate="constant", scale="none")),
    "dapo, two epochs": ("GRPO", 2, 10.0, dict(loss_type="dapo", num_iterations=2, epsilon_high=HIGH),
                         dict(aggregate="token", clip_high=HIGH)),
    "gspo, two minibatches": (
        "GRPO", 2, 10.0, dict(steps_per_generation=4, importance_sampling_level="sequence"),
        dict(ratio="sequence")),
    "rloo": ("RLOO", 1, 250.0, {}, nr.ALGOS["rloo"]),
    "rloo, KL in the reward": (
        "RLOO", 1, 250.0, dict(beta=0.01), nr.ALGOS["rloo"] | dict(kl_coef=0.01, kl_in="reward")),
    "rloo, two epochs": ("RLOO", 2, 250.0, dict(num_iterations=2), nr.ALGOS["rloo"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_end_at_trls_weights(group, tmp_path, tokenizer, name):
    """AdamW with its usual epsilon of 1e-8, gradient clipping and linear decay; compares all 822,272 weights.

    AdamW divides a gradient by its own size plus epsilon. Where a gradient is only rounding, the step is
    lr * rounding / epsilon: in float32 as large as lr. In float64 the gradient, clipped to `limit`, rounds at
    1e-15 * limit at most, so no step of a weight differs by more than 1e-7 * limit * lr.
    """
    algo, per_batch, limit, theirs, ours = RUNS[name]
    table = Table(tokenizer, groups=4 * STEPS // per_batch, seed=1)
    if algo == "GRPO":
        theirs = dict(loss_type="grpo", use_bias_correction_kl=False) | theirs
    common = dict(learning_rate=1e-4, lr_scheduler_type="linear", max_grad_norm=limit, beta=0.0,
                  per_device_train_batch_size=4 if "steps_per_generation" in theirs else 8)
    trls, start, order = run_trl(tmp_path, tokenizer, table, algo, **common | theirs)
    for i in range(0, STEPS, per_batch):  # TRL took the table's batches in their order, however it split them
        wanted = table.rollouts[i // per_batch * 16:][:16]
        assert sorted(map(id, wanted)) == sorted({id(r) for part in order[i:i + per_batch] for r in part})

    common = dict(lr=1e-4, lr_end=0.0, steps=STEPS, max_grad_norm=limit, kl_coef=0.0, correction="none",
                  mismatch_bound=1e9, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, pack_tokens=150)
    cfg = make_config(**common | ours)
    factor = (3 / 4) ** 0.5 if cfg.scale == "group" else 1.0
    weights, log = run_ours(table, order, per_batch, factor, cfg)
    norms = [m["grad_norm"] for m in log]
    assert min(norms) < limit < max(norms)  # clipped in some steps and not in others
    if per_batch > 1:
        assert log[1]["clipped"] > 0  # the second step is off-policy, far enough to reach the bounds

    moved_by = (flat(trls) - flat(start)).norm()
    within((flat(weights) - flat(trls)).norm(), 1e-15 * limit / 1e-8 * moved_by)

    if name == "grpo":  # the difference between n and n - 1 would show
        other, _ = run_ours(table, order, per_batch, 1.0, cfg)
        assert (flat(other) - flat(trls)).norm() > 1e-2 * moved_by
