"""nano_rlvr: GRPO with verifiable rewards (RLVR), the whole loop in one script.

    python nano_rlvr.py                              the bundled model learns arithmetic on a CPU
    python nano_rlvr.py --model Qwen2.5-Math-1.5B    GSM8K on one 24-80 GB GPU
    torchrun --nproc_per_node 2 nano_rlvr.py         two processes, each with vLLM and a ZeRO shard
    python nano_rlvr.py --algo dr_grpo --help        all flags, with the defaults of that preset

On a first reading, begin with learn/ladder/5_vllm.py: this loop in half the lines, without options.

One step of the loop, in the order of this file; `train`, near the end, has it in one column:

    1. rollout     vLLM samples G completions for each of P prompts, with log-probs (log pi_vllm)
    2. reward      verifiers (rewards.py) turn texts into numbers; None is "no reward", not 0
    3. advantage   A = (r - mean of its group) / (std of its group + 1e-4): no critic is needed
    4. pack        a loss weight per token; a pack stores a prompt once for its completions
    5. log-probs   log pi of each token, by the trainer; pi_old is pi before the first update
    6. loss        -surrogate(pi / pi_old, A) * min(pi_old / pi_vllm, 2) + kl_coef * KL to the
                   starting model. By default a step has one update. Then pi_old is pi: the ratio
                   is 1, no clip acts, and the surrogate has the gradient of A * log pi
    7. update      DeepSpeed ZeRO: one backward pass per pack, then one AdamW step
    8. sync        the new weights go into vLLM in place; checksums of all weights that can be
                   read there must agree

A textbook PPO has a critic, GAE, padding and means per micro-batch. Here the loss is a sum over
tokens, each with a weight: for GRPO 1 / (S * tokens of its completion), where S counts the judged
sequences of the optimizer step over all packs and processes. So the gradient is the same for any
packing and any number of processes, up to rounding. A rank is one of these processes, and all of
them make a "collective" call together. With one process, skip what is said of ranks.

Shapes: P prompts, G completions of each (a group); all P * G completions of a step are a batch. A
minibatch: the groups of one optimizer step, from stage 4 on as packs. A pack: the tensors of one
forward pass, with B completions and R sampled tokens. In the layout "packed" they are one row of T
tokens; in "rows", for models that cannot take it, B rows padded to L tokens. The sequences of a
pack do not attend to each other. H hidden size, V vocabulary. mismatch: log pi_old - log pi_vllm of
a token. A completion that is rewarded, scored or judged has gone through stage 2.
Papers: GRPO arXiv:2402.03300, R1 2501.12948, Dr. GRPO 2503.20783, DAPO 2503.14476.
"""
import functools
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

import runtime  # noqa: F401  before torch: it sets environment variables that torch reads
import torch

import data
import rewards
from runtime import evaluation, flags, guard, memory, ranks, stats, stop, trainer
from runtime.batch import (Rollout, collate, deal, first_groups, flatten, in_groups, pack_evenly,
                           reward_table, sequence_mean, sequence_sum)
from runtime.checkpoint import Checkpoints, claim_folder
from runtime.engine import Sampler
from runtime.head import HeadLogps
from runtime.log import Log
from runtime.model import choose_layout, load_model, load_tokenizer, logit_factor_and_cap
from runtime.stats import timed
from runtime.sync import SentWeights
from runtime.trainer import WithoutAdapters, on_device
from runtime.verify.verifier import columns_of

# ------------------------------------------------------------------------------------------ config

@dataclass
class Config(flags.RunFlags):
    """The flags that a student turns; runtime/flags.py has those of model, data, memory and files.
    Defaults are for 1.5B parameters on one GPU; nano_rlvr.json of models/tiny has other ones.
    On a first reading, a branch whose flag is off here (False, 0, none) can be skipped."""

    # rollout
    rollout: str = ""  # my_file.py:my_rollout, used instead of this script's rollout()
    steps: int = 200  # each samples and judges, then makes epochs * minibatches updates
    prompts: int = 64  # P: prompts per step, over all ranks
    samples: int = 8  # G: completions per prompt, the group size
    temperature: float = 1.0  # of sampling; the trainer's log-probs use the same temperature
    top_p: float = 1.0  # nucleus sampling; below 1 needs --correction none --temperature 1
    max_prompt: int = 1024  # tokens; longer prompts are left out, and their number is printed
    max_tokens: int = 3000  # tokens per completion; one that reaches this limit is "truncated"
    # algorithm: advantage = (reward - baseline) / scale
    algo: str = "grpo"  # dr_grpo, dapo, rloo, gspo, ...: a row of ALGOS, which other flags override
    baseline: Literal["group", "leave_one_out", "batch", "running", "none"] = "group"  # subtracted
    scale: Literal["group", "batch", "centred", "group_mean", "none"] = "group"  # the divisor
    ratio: Literal["token", "sequence", "product"] = "token"  # pi/pi_old of one token or of all
    surrogate: Literal["ppo", "cispo", "sapo", "kimi"] = "ppo"  # how pi/pi_old is bounded
    aggregate: Literal["sequence", "token", "constant"] = "sequence"  # how tokens are averaged
    clip_low: float = 0.2  # pi/pi_old is clipped to 1 - clip_low at least (1: no lower bound) ...
    clip_high: float = 0.2  # ... and to 1 + clip_high at most
    delta: float = 0.0  # if the advantage is negative, the ratio is at most delta; 0 = off
    tau: float = 1.0  # sapo: temperature for positive advantages; kimi: weight of the penalty
    tau_neg: float = 1.05  # sapo: temperature for negative advantages
    kl_coef: float = 0.001  # weight of the KL to the starting model (R1: 0.001); 0 = no reference
    # multiplies a token's surrogate by pi_old / pi_vllm, because vLLM and the trainer differ a bit
    correction: Literal["none", "token_truncate", "token_mask", "sequence_mask"] = "token_truncate"
    correction_cap: float = 2.0  # largest importance weight pi_old / pi_vllm
    filter_groups: bool = False  # no update from groups in which all rewards are the same
    resample: int = 0  # draw further prompts, up to this many times, until P groups are left
    mask_truncated: bool = False  # truncated completions count in the group but get no gradient
    overlong_buffer: float = 0.0  # penalty 0 to -1 over this last share of max_tokens; 0 = none
    epochs: int = 1  # passes over the rollouts
    minibatches: int = 1  # optimizer steps per pass
    # optimizer
    lr: float = 1e-6  # AdamW's learning rate
    lr_end: float = 1.0  # linear decay to this share of lr after the last step; 1 = constant
    warmup: int = 0  # steps of linear warm-up
    beta2: float = 0.999  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # the norm of the gradient is clipped to this; 0 = no clipping


# Differences from Config's defaults, which are GRPO's with R1's weight of the KL. With one update
# per step the ratio is 1, so some presets coincide: cispo with bnpo, sapo and gspo with grpo
# without KL, gspo up to the correction. Such a preset acts with --minibatches 4.
ALGOS = {
    "grpo": {},  # arXiv:2402.03300
    "dr_grpo": dict(scale="none", aggregate="constant", kl_coef=0.0),  # 2503.20783
    "dapo": dict(  # 2503.14476
        clip_high=0.28, aggregate="token", kl_coef=0.0,
        filter_groups=True, resample=3, overlong_buffer=0.2),
    "bnpo": dict(aggregate="token", kl_coef=0.0),  # TRL's name for one mean over all tokens
    "rloo": dict(  # 2402.14740
        baseline="leave_one_out", scale="none", ratio="product", kl_coef=0.0),
    "reinforce++": dict(  # 2501.03262
        prompts=512, samples=1, baseline="batch", scale="batch", aggregate="token"),
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),  # 2507.18071
    "cispo": dict(  # 2506.13585
        surrogate="cispo", clip_high=4.0, aggregate="token", kl_coef=0.0),
    "sapo": dict(surrogate="sapo", kl_coef=0.0),  # 2511.20347
    "rft": dict(baseline="none", scale="none", kl_coef=0.0),  # A = reward, 2308.01825
    "maxrl": dict(scale="group_mean", aggregate="constant", kl_coef=0.0),  # 2602.02710
    "kimi": dict(  # 2501.12599
        scale="none", ratio="product", surrogate="kimi", tau=0.1, kl_coef=0.0),
}


def parse_config(argv=None):
    """Command line -> checked Config: see flags.parse. Raises ValueError with one line."""
    return flags.parse(Config, ALGOS, argv, description=__doc__)


# -------------------------------------------------------------------------------------- 1. rollout

def rollout(llm, prompts, n, temperature, max_tokens, seeds=None, examples=None, **sampling):
    """Samples n completions for each of the prompts (token ids): Rollouts, in prompt order.

    llm: a runtime.engine.Sampler. seeds: one per prompt; vLLM adds each sample's index to it.
    examples: the rows of the prompts, which a --rollout of yours may read. sampling: more of vLLM's
    SamplingParams. Rollout: see runtime/batch.py. r.length counts sampled tokens, not those of a
    tool; len(r) counts all tokens, with the prompt.
    """
    from vllm import SamplingParams  # not at the top: Sampler must set vLLM up first
    tokenizer = llm.get_tokenizer()
    turn_end = tokenizer.get_vocab().get("<|im_end|>")  # ends a ChatML turn; EOS may differ
    settings = dict(
        n=n, temperature=temperature, max_tokens=max_tokens,
        logprobs=0, flat_logprobs=True,  # of the sampled token only, as flat lists
        detokenize=False,  # all texts are decoded at once below, which is faster
        stop_token_ids=[] if turn_end is None else [turn_end])
    settings |= sampling
    seeds = seeds or [None] * len(prompts)
    params = [SamplingParams(seed=seed, **settings) for seed in seeds]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    requests = llm.generate(inputs, params, use_tqdm=False)
    rollouts = []
    for prompt, request in zip(prompts, requests):
        for sample in request.outputs:
            truncated = sample.finish_reason == "length"
            logps = sample.logprobs.logprobs  # FlatLogprobs' list: one per sampled token
            rollouts.append(Rollout(prompt, sample.token_ids, "", truncated, logps))
    texts = data.completion_texts(rollouts, tokenizer)
    for r, text in zip(rollouts, texts):
        r.text = text
    return rollouts


# --------------------------------------------------------------------------------------- 2. reward

def score(rollouts, examples, verifier, step=0):
    """Fills each rollout's reward and parts (the value of each reward function). Returns counts of
    failures. examples: one per group. What a reward function gets: see verifier.columns_of."""
    columns = columns_of(rollouts, examples, step)
    # parts: {name of a reward function: its values}; counts: of texts that ended without a verdict
    values, parts, counts = verifier([r.text for r in rollouts], **columns)
    for i, r in enumerate(rollouts):
        r.reward = values[i]
        r.parts = {name: part[i] for name, part in parts.items()}
    return counts


def sample_groups(run, step, draw=0):
    """Stages 1 and 2: samples and scores this process's part of P prompts -> its groups.

    The data are divided into numbered draws of P prompts. A step owns the draws from
    step * (1 + resample) on, 1 + resample of them, used or not. So the data of a step depend on its
    number only, also after --resume.
    """
    cfg = run.cfg
    number = step * (1 + cfg.resample) + draw
    examples = data.batch_at(run.train_set, number, cfg.prompts, cfg.seed,
                             ranks.rank(), ranks.world_size())
    prompts = [example["prompt_ids"] for example in examples]
    first = ranks.rank() * len(prompts)  # index of this rank's first prompt among the P
    seeds = [data.request_seed(cfg.seed, step, draw, first + i) for i in range(len(prompts))]
    with timed(run.metrics, "rollout"):
        rollouts = run.rollout(  # the function above, or that of --rollout
            run.llm, prompts, cfg.samples, cfg.temperature, cfg.max_tokens, seeds,
            examples=examples, top_p=cfg.top_p)
    with timed(run.metrics, "reward"):
        counts = score(rollouts, examples, run.verifier, step)
    stats.add_counts(run.metrics, counts, "reward")
    run.metrics["draws"] = draw + 1
    return in_groups(rollouts, cfg.samples)


def collect_rollouts(run, step):
    """Stages 1 and 2 of a step -> (the groups of each minibatch, all groups that were sampled).

    deal puts the group at position i into minibatch i % minibatches: by default all into one."""
    cfg = run.cfg
    if cfg.filter_groups:
        placed, sampled = sample_until_enough(run, step)
    else:
        sampled = sample_groups(run, step)
        placed = dict(enumerate(sampled))  # {position: group}
    rewards_of_all = [r.reward for r in flatten(sampled)]
    stop.check_scored("reward", rewards_of_all, run.metrics, run.verifier)
    return deal(placed, cfg.minibatches), sampled


def sample_until_enough(run, step):
    """DAPO's dynamic sampling: leaves out groups whose rewards are all the same.

    Draws new prompts, up to `resample` times, until P groups are left. Keeps the first P in data
    order. -> ({position among the kept groups of all ranks: group}, all groups that were sampled)
    """
    cfg = run.cfg
    sampled = []
    draws = []  # per draw, the groups with different rewards
    for draw in range(1 + cfg.resample):
        groups = sample_groups(run, step, draw)
        sampled += groups
        draws.append([group for group in groups if not stats.has_zero_std(group)])
        kept, enough = first_groups(draws, cfg.prompts)
        if enough:
            break
    return kept, sampled


# ------------------------------------------------------------------------------------ 3. advantage

def nan_mean_std(x, dim):
    """Mean and population standard deviation over `dim`, kept with size 1, of what is not NaN.

    Both are 0 where all entries are NaN. The smallest entry is subtracted first, so that equal
    entries have deviation 0. Else rounding of the mean could leave a deviation such as 1e-8, and
    drop_without_gradient would not see that the advantage is 0.
    """
    if not len(x):  # all groups were dropped, and amin() needs an entry
        zero = x.sum(dim, keepdim=True)
        return zero, zero
    smallest = x.nan_to_num(torch.inf).amin(dim, keepdim=True)  # (P, 1) if dim is 1
    excess = x - smallest  # (P, G)
    mean_excess = excess.nanmean(dim, keepdim=True)  # (P, 1)
    variance = ((excess - mean_excess) ** 2).nanmean(dim, keepdim=True)  # (P, 1)
    mean = smallest + mean_excess  # (P, 1)
    return mean.nan_to_num(), variance.sqrt().nan_to_num()


def group_advantages(group_rewards, baseline="group", scale="group", eps=1e-4, running=0.0):
    """(P, G) rewards -> (P, G) advantages. NaN is "no reward": in no mean, and its advantage is 0.

    baseline, subtracted: the mean of the group, of the others in it (leave_one_out), of all P * G
    (batch), the number `running`, or nothing. scale, the divisor: the standard deviation of the
    group, of all rewards (batch), of all advantages before the division (centred), or the group's
    mean (MaxRL; where it is <= 0, the advantage is 0), each plus eps; or 1.

    The deviation is the population's, sqrt(1/G sum (r - mean)^2). TRL and verl divide by G - 1:
    their advantages are ours times sqrt((G-1)/G), 6.5 % less at G = 8.

    >>> group_advantages(torch.tensor([[1., 0., 0., 1.]]))
    tensor([[ 0.9998, -0.9998, -0.9998,  0.9998]])
    """
    group_mean, group_std = nan_mean_std(group_rewards, 1)  # (P, 1), (P, 1)
    batch_mean, batch_std = nan_mean_std(group_rewards, (0, 1))  # (1, 1), (1, 1)
    known = group_rewards.isfinite().sum(1, keepdim=True)  # (P, 1) rewards that are not NaN
    advantages = {
        "group": group_rewards - group_mean,
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        "leave_one_out": (group_rewards - group_mean) * known / (known - 1).clamp(min=1),
        "batch": group_rewards - batch_mean,
        "running": group_rewards - running,
        "none": group_rewards,
    }[baseline]  # (P, G)
    divisor = {
        "group": group_std + eps,
        "batch": batch_std + eps,
        "centred": nan_mean_std(advantages, (0, 1))[1] + eps,
        "group_mean": torch.where(group_mean > 0, group_mean + eps, torch.inf),
        "none": 1.0,
    }[scale]  # (P, 1), (1, 1) or a number
    return (advantages / divisor).nan_to_num()  # (P, G)


def assign_advantages(groups, cfg, running_mean):
    """Fills the advantages of each rollout. Returns the new running mean, which only --baseline
    running uses: a moving average of the reward, NaN before the first step."""
    reward, own_rows = reward_table(groups, cfg.samples)  # (P, G) of all ranks; a slice of it
    batch_mean = reward.nanmean().item()  # NaN if no group is left
    before = batch_mean if math.isnan(running_mean) else running_mean
    advantages = group_advantages(reward, cfg.baseline, cfg.scale, running=before)  # (P, G)
    for group, row in zip(groups, advantages[own_rows].tolist()):
        for r, advantage in zip(group, row):
            r.advantages = [advantage] * len(r.completion)  # the same for each of its tokens
    return before if math.isnan(batch_mean) else 0.9 * before + 0.1 * batch_mean


# ----------------------------------------------------------------------------------------- 4. pack

def token_weights(lengths, aggregate, max_tokens, sequences=None, tokens=None):
    """Lengths of completions -> token weights; the loss is sum(weight * token loss).

    `sequences` and `tokens` are counts over all ranks (default: of `lengths`). A sequence left
    out by --mask_truncated has length 0: it counts as a sequence, but its tokens get weight 0.
        sequence  mean over sequences of the mean over tokens: 1 / (sequences * length)    GRPO
        token     mean over all tokens: 1 / tokens                                         DAPO
        constant  sum over tokens, divided by a constant: 1 / (sequences * max_tokens)  Dr. GRPO
    With `sequence`, a token of a short completion weighs more: short right answers are pushed up
    more, long wrong ones are pushed down less. With the others all tokens weigh the same.

    >>> [token_weights([1, 3], aggregate, 8) for aggregate in ("sequence", "token", "constant")]
    [[0.5, 0.16666666666666666], [0.25, 0.25], [0.0625, 0.0625]]
    """
    if sequences is None:
        sequences = len(lengths)
    if tokens is None:
        tokens = sum(lengths)
    weights = []
    for length in lengths:
        divisor = {
            "sequence": sequences * length,
            "token": tokens,
            "constant": sequences * max_tokens,
        }[aggregate]
        weights.append(1 / divisor if length else 0.0)
    return weights


def assign_token_weights(rollouts, cfg):
    """Fills the weight of the rollouts of one optimizer step. Returns those with weight > 0."""
    judged = [r for r in rollouts if r.reward is not None]
    lengths = [0 if cfg.mask_truncated and r.truncated else r.length for r in judged]
    # over all ranks, whose gradients are summed
    sequences, tokens = ranks.all_sum(len(lengths), sum(lengths))
    weights = token_weights(lengths, cfg.aggregate, cfg.max_tokens, sequences, tokens)
    for r, weight in zip(judged, weights):
        r.weight = weight
    return [r for r in judged if r.weight]


def drop_without_gradient(rollouts, cfg):
    """If the loss has no KL term, leaves out rollouts whose advantages are all 0. Returns the rest.

    The weight of a rollout that is left out becomes 0. The other weights stay as they are, because
    they come from the counts of all sequences. If no rollout is left, the shortest stays, because
    AdamW must step: its momentum moves weights at gradient 0 too.
    """
    if cfg.kl_coef or cfg.surrogate == "kimi":  # its penalty has a gradient without an advantage
        return rollouts
    kept = [r for r in rollouts if any(r.advantages)]
    if not kept:
        kept = sorted(rollouts, key=len)[:1]
    for r in rollouts:
        if not any(r.advantages) and r is not kept[0]:  # kept[0] may be the shortest, see above
            r.weight = 0.0
    return kept


def make_packs(groups, cfg, skip_zero_advantages=True):
    """The groups of one optimizer step -> their packs, as tensors. For skip_zero_advantages see
    train."""
    kept = assign_token_weights(flatten(groups), cfg)
    if skip_zero_advantages:
        kept = drop_without_gradient(kept, cfg)
    lists = pack_evenly(kept, cfg.pack_tokens, cfg.layout)
    # input_ids (1, T); predictors, targets, vllm_logps, advantage, weight, sequence_ids (R,);
    # lengths (B,); old and ref are None until stage 5
    return [collate(rollouts, layout=cfg.layout) for rollouts in lists]


# ------------------------------------------------------------------------------------ 5. log-probs

class TokenLogps(torch.nn.Module):
    """A causal language model that returns log-probs of given tokens. DeepSpeed wraps this module.
    forward(pack), as collate makes it -> logp (R,), entropy (R,) in fp32."""

    def __init__(self, model, temperature=1.0, chunk=2048):
        super().__init__()
        self.model = model
        factor, cap = logit_factor_and_cap(model.config)  # 1.0 and None for most models
        # logits: cap * tanh(factor * x / cap) / temperature, without a cap factor * x / temperature
        self.temperature = temperature / factor
        self.cap = cap and cap / temperature
        self.chunk = chunk

    def forward(self, pack):
        decoder = self.model.get_decoder()
        inputs = {"input_ids": pack.input_ids}  # (1, T), in the layout `rows` (B, L)
        if pack.layout != "rows":
            inputs["position_ids"] = pack.position_ids  # (1, T)
            # transformers hands it on to packed_attention (runtime/batch.py), which keeps the
            # sequences of the pack apart
            inputs["pack"] = pack
        output = decoder(**inputs, use_cache=False)  # a cache would hold all keys and values
        hidden = output.last_hidden_state.flatten(0, 1)  # (T, H) or (B * L, H)
        head = self.model.get_output_embeddings().weight  # (V, H)
        # predictors: for each target the position before it. Mamba-2's hidden states are fp32
        hidden = hidden[pack.predictors].to(head.dtype)  # (R, H)
        # log_softmax(hidden @ head.T / temperature) at the targets, and the entropy of each row.
        # HeadLogps computes both in chunks of V, so that (R, V) is never stored
        return HeadLogps.apply(
            hidden, head, pack.targets, self.temperature, self.chunk,
            getattr(self.model, "is_compiled", False), self.cap)  # -> (R,), (R,)


@torch.no_grad()
def store_fixed_logps(policy, ref, packs, cfg):
    """Computes the log-probs that stay fixed during the updates: pack.ref, under the reference,
    and, if there are several updates, pack.old, under the policy before the first."""
    if ref is not None:
        with on_device(ref):
            for pack in packs:
                pack.ref, _ = ref(pack)  # (R,)
    if cfg.epochs * cfg.minibatches > 1:
        for pack in packs:
            pack.old, _ = policy(pack)  # (R,)


# ----------------------------------------------------------------------------------------- 6. loss

MAX_LOG_RATIO = 20.0  # beyond e^20 a ratio is constant, as in verl, SkyRL and OpenRLHF


def k3(logp, ref):
    """Schulman's third estimator of KL(pi || ref): exp(d) - d - 1 with d = log ref - log pi.

    (R,), (R,) -> (R,). Never negative. Its mean over tokens that pi samples is KL(pi || ref).
    Its mean gradient is that of KL(ref || pi), because backward() does not differentiate the choice
    of the tokens. So training lowers KL(ref || pi)."""
    d = ref - logp  # (R,)
    return d.expm1() - d  # (R,) exp(d) - 1 would round a small d away


def importance_weight(mismatch, pack, cfg):
    """Importance weight pi_old / pi_vllm per token: vLLM's kernels sample from a slightly different
    distribution than the trainer computes with the same weights.

    mismatch (R,) = log pi_old - log pi_vllm -> (R,). token_truncate: at most the cap.
    token_mask: 0 above it. sequence_mask: 1 if the sequence's geometric mean is in [1/cap, cap].
    """
    cap = cfg.correction_cap
    weight = mismatch.exp()  # (R,)
    if cfg.correction == "token_truncate":
        return weight.clamp(max=cap)  # (R,)
    if cfg.correction == "token_mask":
        return torch.where(weight <= cap, weight, 0.0)  # (R,) weight * mask could be inf * 0
    mean = sequence_mean(mismatch, pack).exp()  # (R,) sequence_mask
    inside = (mean <= cap) & (mean >= 1 / cap)  # (R,)
    return inside.to(mismatch)  # (R,)


def surrogate_objective(ratio, log_ratio, logp, advantage, cfg):
    """(R,) objective per token: four ways to limit what a ratio far from 1 does."""
    if cfg.surrogate == "ppo":  # arXiv:1707.06347
        # is_clipped repeats this rule: change both
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # (R,)
        # flags.check wants delta > 1 + clip_high, so it acts on negative advantages only
        bounded = ratio.clamp(max=cfg.delta) if cfg.delta else ratio  # (R,)
        # a token that has moved far enough in the right direction gets no gradient
        return torch.minimum(bounded * advantage, clipped * advantage)  # (R,)
    if cfg.surrogate == "cispo":  # every token keeps its gradient; its weight is bounded
        weight = ratio.clamp(max=1 + cfg.clip_high).detach()  # (R,)
        return weight * advantage * logp  # (R,)
    if cfg.surrogate == "sapo":  # at ratio 1 the gradient is the advantage; it fades on both sides
        tau = torch.where(advantage > 0, cfg.tau, ratio.new_tensor(cfg.tau_neg))  # (R,)
        gate = torch.sigmoid(tau * (ratio - 1))  # (R,)
        return gate * 4 / tau * advantage  # (R,)
    return advantage * log_ratio - cfg.tau / 2 * log_ratio**2  # (R,) Kimi k1.5, eq. 3: a penalty


def is_clipped(ratio, advantage, cfg):
    """(R,) whether PPO's clip made a token's gradient 0. The other surrogates have no clip."""
    if cfg.surrogate != "ppo":
        return torch.zeros_like(ratio, dtype=torch.bool)  # (R,)
    clips_positive = ratio > 1 + cfg.clip_high  # (R,)
    clips_negative = ratio < 1 - cfg.clip_low  # (R,)
    if cfg.delta:
        clips_negative |= ratio > cfg.delta  # (R,)
    return (advantage > 0) & clips_positive | (advantage < 0) & clips_negative  # (R,)


def policy_loss(logp, old, ref, pack, cfg):
    """sum of weight * (-surrogate * correction + kl_coef * k3). logp, old, ref: (R,).

    old None: one update per step, so pi_old = pi. ref None: no KL. Returns (loss, terms). loss:
    this pack's share of the global mean. terms: values per token (R,) for the metrics. pack: see
    collate. A loss of yours must put mismatch into terms, and correction if --correction is on.
    """
    if old is None:
        old = logp.detach()  # (R,)
    log_ratio = logp - old  # (R,) with old = logp.detach() it is 0, with the gradient of logp
    if cfg.ratio == "sequence":  # GSPO: geometric mean of the sequence's ratios
        log_ratio = sequence_mean(log_ratio, pack)  # (R,) one value per sequence, at each token
    elif cfg.ratio == "product":  # RLOO: product of the ratios, at each token
        log_ratio = sequence_sum(log_ratio, pack)[pack.sequence_ids]  # (B,) -> (R,)
    # exp() of a large log-ratio could be inf
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (R,)
    token_loss = -surrogate_objective(ratio, log_ratio, logp, pack.advantage, cfg)  # (R,)
    terms = {  # (R,) each
        "ratio": ratio,
        "clip_ratio": is_clipped(ratio, pack.advantage, cfg),
        "mismatch": old - pack.vllm_logps,
    }
    if cfg.correction != "none":
        terms["correction"] = importance_weight(terms["mismatch"], pack, cfg)  # (R,)
        token_loss *= terms["correction"]  # (R,)
    if ref is not None:
        terms["kl"] = k3(logp, ref)  # (R,)
        token_loss += cfg.kl_coef * terms["kl"]  # (R,)
    return (pack.weight * token_loss).sum(), terms


# --------------------------------------------------------------------------------------- 7. update

def start_deepspeed(module, cfg):
    """DeepSpeed's engine: ZeRO, AdamW on fp32 master weights, gradients of packs summed in fp32.

    bf16 weights alone would not learn: at lr 1e-6 an update is below the last bit of most weights.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    memory.keep_freed_memory()  # on a CPU, after vLLM has allocated its KV cache
    adamw = functools.partial(torch.optim.AdamW, fused=True)  # on a CPU nine times as fast
    zero = {"stage": cfg.zero_stage, "reduce_bucket_size": memory.BUCKET}
    if cfg.offload == "optimizer":
        adamw = deepspeed.ops.adam.DeepSpeedCPUAdam
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = adamw(trained, lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1,  # required; it has no effect here, nor has the next
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # backward() may be called any number of times
        "gradient_clipping": cfg.max_grad_norm,
        "bf16": {"enabled": cfg.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
    })
    return engine


def make_policy(cfg):
    """DeepSpeed's engine around TokenLogps."""
    torch.manual_seed(cfg.seed)  # of LoRA's adapters
    module = TokenLogps(load_model(cfg).train(), cfg.temperature)
    return start_deepspeed(module, cfg)


def make_reference(cfg, policy=None, stays_on_gpu=False):
    """The frozen model of the KL term. It waits in host memory or stays_on_gpu. None without KL."""
    if not cfg.kl_coef:
        return None
    if cfg.lora_rank:
        return WithoutAdapters(policy.module)  # the policy itself: no second copy
    ref = TokenLogps(load_model(cfg), cfg.temperature).eval().requires_grad_(False)
    ref.stays_on_gpu = stays_on_gpu
    return ref


def set_lr(policy, step, cfg):
    """Sets the learning rate of a step, and returns it: linear decay from lr at step 0 to
    lr * lr_end at step `steps`, times a linear warm-up."""
    warmup = min(1.0, (step + 1) / max(1, cfg.warmup))
    lr = cfg.lr * warmup * (1 - (1 - cfg.lr_end) * step / max(1, cfg.steps))
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    return lr


def update(policy, packs, cfg, policy_loss=policy_loss):
    """One optimizer step: a backward pass per pack, whose gradients add up, then AdamW.

    The CPU waits for the GPU after the last pack only. Returns metrics over all ranks. Raises
    RunError, before AdamW's step, if the mismatch is above its bound or the loss not finite.
    """
    sums = []  # per pack: each metric summed over its tokens
    for pack in packs:
        # entropy: for the metrics, or for a loss of yours
        logp, pack.entropy = policy(pack)  # (R,), (R,) both have a gradient
        pack.logp = logp.detach()  # (R,) for the report
        loss, terms = policy_loss(logp, pack.old, pack.ref, pack, cfg)  # loss: ()
        # Collective. ZeRO averages over the ranks; we want the sum
        policy.backward(loss * ranks.world_size())
        sums.append(stats.pack_sums(loss, terms, pack, cfg))
    metrics = stats.token_means(sums)  # means over tokens; sum of loss, max of "mismatch/max"
    stop.check_step(metrics, cfg.mismatch_bound, cfg.rollout)
    policy.step()  # clears the gradients too; skips silently if one is not finite
    metrics["grad_norm"] = float(policy.get_global_grad_norm() or 0.0)
    metrics["skipped"] = float(not policy.was_step_applied())
    return metrics


# ----------------------------------------------------------------------------------------- 8. sync

def load_weights(llm, named_weights):
    """Wakes vLLM with new weights, (name, tensor) pairs. Raises RunError if vLLM refuses a tensor,
    or if a tensor that can be read there differs from the one that was sent."""
    llm.wake_for_weights()
    weights = SentWeights(named_weights)
    llm.reload_weights(weights)  # an iterator: vLLM takes one tensor after the other
    if llm.is_checked:
        weights.check(llm)  # checksums of what was sent, and of what vLLM has
    llm.wake_kv_cache()  # empty, because the old entries belong to old weights


def sync_weights(policy, llm):
    """Copies the policy's weights into vLLM and wakes it.

    Every step needs it: on a GPU llm.sleep() drops vLLM's weights. On a CPU vLLM would sample from
    older weights, and update() stops the run once the mismatch is above its bound. A loop that
    samples from older weights on purpose: examples/async_rl.py."""
    trainer.offload_frozen(policy)  # only LoRA with offload: frozen weights go to the host
    load_weights(llm, trainer.named_weights(policy))


# --------------------------------------------------------------------------------------- the loop

@dataclass
class Run:
    """What the loop works with: main makes it, a train function gets it."""
    cfg: Config
    train_set: list[dict]  # examples, see data.py
    eval_set: list[dict]
    verifier: rewards.Verifier
    log: Log
    checkpoints: Checkpoints
    llm: Sampler
    policy: Any  # DeepSpeed's engine around TokenLogps
    ref: Any  # the frozen model of the KL, or None
    rollout: Any = rollout  # or the function of --rollout
    metrics: Any = None  # {name: number} of the current step


def train(run, collect_rollouts=collect_rollouts, assign_advantages=assign_advantages,
          policy_loss=policy_loss, skip_zero_advantages=True):
    """The loop. With a stage of yours: main(argv, train=partial(train, policy_loss=yours)).

    skip_zero_advantages: without KL, a sequence whose advantages are all 0 has no gradient, so it
    is left out. For a loss with a gradient at advantage 0, such as a bonus for entropy: False.
    """
    cfg = run.cfg
    log = run.log
    llm = run.llm
    policy = run.policy
    checkpoints = run.checkpoints
    progress = checkpoints.progress
    sync_weights(policy, llm)  # wakes vLLM; after --resume it gets the checkpoint's weights
    for step in range(progress.step, cfg.steps + 1):  # the last round only evaluates and saves
        progress.step = step
        metrics = run.metrics = {}
        answers = []
        is_last = step == cfg.steps
        # before the step: a signal, an evaluation, a checkpoint
        stop.check(checkpoints)  # after a signal: saves and ends the run
        if step % cfg.eval_every == 0 or is_last:
            log.say(f"step {step}: evaluation of {len(run.eval_set)} examples ...")
            with timed(metrics, "evaluate"):
                results, answers = evaluation.evaluate(run, score)
            metrics |= results
            if step == 0:
                evaluation.first_look(run, answers)  # prompts and answers, on the screen
        if is_last or (cfg.save_every and step % cfg.save_every == 0):
            checkpoints.save(final=is_last)
        if is_last:
            break

        minibatches, sampled = collect_rollouts(run, step)  # 1. 2.
        groups = flatten(minibatches)  # minibatches: a list of groups per optimizer step
        with timed(metrics, "sync"):
            llm.sleep()  # frees GPU memory for the trainer; sync_weights wakes vLLM
            trainer.load_frozen(policy)  # only LoRA with offload: the frozen weights come back
        with timed(metrics, "update"):
            # 3. fills r.advantages
            progress.running_mean = assign_advantages(groups, cfg, progress.running_mean)
            # 4. per minibatch a list of packs; each epoch takes them in this order
            packed = [make_packs(part, cfg, skip_zero_advantages) for part in minibatches]
            # 5. of ref and, with several updates, of pi_old
            store_fixed_logps(policy, run.ref, flatten(packed), cfg)
            metrics["lr"] = set_lr(policy, step, cfg)
            history = []
            for _ in range(cfg.epochs):
                for packs in packed:
                    if packs:  # none if no completion of the minibatch has a weight
                        history.append(update(policy, packs, cfg, policy_loss))  # 6. 7.
            metrics |= stats.step_means(history)
            progress.skipped = stop.count_skipped(
                progress.skipped, step, history, groups, log.folder)  # 3 in a row: error
        log.token_changes(step, sampled, flatten(packed), policy, metrics)  # report only
        with timed(metrics, "sync"):
            sync_weights(policy, llm)  # 8.
        metrics |= stats.step_summary(cfg, groups, sampled, metrics)
        log.write(step, metrics, sampled, answers)
    log.write(cfg.steps, metrics, answers=answers)
    log.close()


# ------------------------------------------------------------------------------------------- main

def main(argv=None, train=train, sampler=Sampler):
    """Runs the command line. train: your loop, which gets a Run. sampler: your Sampler class."""
    with stop.on_signals():
        # these errors and RunError end in one line, without a traceback
        one_line = stop.with_one_line(ValueError, OSError, RuntimeError)
        with one_line, memory.without_garbage_collection():
            cfg = parse_config(argv)
            rollout_function = guard.load_rollout(cfg.rollout) if cfg.rollout else rollout
            ranks.init_process_group(cfg.timeout)
            tokenizer = load_tokenizer(cfg)
            cfg = choose_layout(cfg)
            train_set, eval_set = data.load_splits(
                cfg, tokenizer, ranks.world_size(), notify=ranks.print_once)
            verifier = rewards.start_verifier(cfg, train_set, eval_set, ranks.print_once)
            cfg, plan = memory.plan(cfg)  # fills pack_tokens and others that are 0 or auto
            plan_text = plan.pop("text")
            cfg = claim_folder(cfg, train_set + eval_set)  # a resumed run must have the same data
            log = Log(cfg, tokenizer, plan)
            ranks.print_once(plan_text)
            checkpoints = Checkpoints(cfg, log)

        with stop.with_one_line(OSError, cfg=cfg, folder=log.folder):
            log.say("loading the model into vLLM, then into the trainer ...")
            with memory.without_garbage_collection():
                llm = sampler(cfg)  # before the trainer: vLLM measures the free memory of a GPU
                llm.sleep()
                policy = make_policy(cfg)
                ref = make_reference(cfg, policy, plan["reference_stays"])
            if cfg.steps:  # --steps 0 only evaluates
                log.say("rehearsal: an update on the largest pack, at learning rate 0 ...")
                guard.rehearse(policy, ref, cfg)  # finds out now whether memory suffices
            checkpoints.restore(policy)
            run = Run(cfg, train_set, eval_set, verifier,
                      log, checkpoints, llm, policy, ref, rollout_function)
            train(run)
        verifier.close()  # not the process group: vLLM closes it at exit


if __name__ == "__main__":
    main()
