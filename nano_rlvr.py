"""nano_rlvr: GRPO with verifiable rewards (RLVR), the whole loop in one script.

    python nano_rlvr.py                              the bundled model learns arithmetic on a CPU in minutes
    python nano_rlvr.py --model Qwen2.5-Math-1.5B    GSM8K on one 24-80 GB GPU
    torchrun --nproc_per_node 2 nano_rlvr.py         two processes, each with a vLLM engine and a ZeRO shard
    python nano_rlvr.py --algo dr_grpo --help        all flags, with the default values of that preset

One step of the loop, in the order of this file; `train`, near the end, shows it on one screen:

    1. rollout     vLLM samples n completions for each of G prompts and returns the log-prob of every token
    2. reward      verifiers (rewards.py) turn texts into numbers; None means "no verdict", which is not 0
    3. advantage   A = (r - mean of its group) / (std of its group + 1e-4): the group replaces a critic
    4. pack        sequences are laid end to end without padding, a prompt once for all its completions
    5. log-probs   log pi(token) of each completion token, without storing logits: reference, then policy
    6. loss        clipped policy gradient per token + kl_coef * k3 KL to the frozen starting model
    7. update      DeepSpeed ZeRO: one backward pass per pack, then one AdamW step
    8. sync        the new weights go into vLLM in place; checksums of their bits show that they arrived

Differences from a textbook PPO: no critic, no GAE, no padding, no means per micro-batch. Instead, every token
has a weight, computed from the number of sequences and tokens in the optimizer step over all ranks, and
weighted losses are summed. The gradient is then the same for any packing and any number of ranks.

Shapes: G prompts, n completions per prompt, N = G*n sequences. Per pack: B sequences, R sampled tokens, T
tokens with each prompt stored once, K tokens with the prompt repeated for each completion. H hidden size, V
vocabulary. Papers: GRPO arXiv:2402.03300, R1 2501.12948, Dr. GRPO 2503.20783, DAPO 2503.14476.
"""
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

# Set before torch is imported: idle threads do not spin; large arrays on a CPU get 2 MB pages.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # pack sizes vary

import torch

import data
import rewards
from runtime import dist, evaluation, flags, guard, memory, stats, stop
from runtime.batch import (  # noqa: F401  some are here for those who import this script
    Rollout, balance, collate, ends_in_tokens, pack, pack_evenly, set_advantages, step_rewards)
from runtime.checkpoint import Checkpoints
from runtime.folder import claim_folder
from runtime.log import Log, summary, timed
from runtime.model import CHUNK, HeadLogps, WithoutAdapters, load_model, on_device
from runtime.sampler import Sampler
from runtime.trainer import (
    named_weights, place_frozen_weights, set_lr, start_deepspeed, store_kl, token_logps)

# ---------------------------------------------------------------------------------------------------- config


@dataclass
class Config(flags.RunFlags):
    """The flags that a student turns; model, data, memory and files are in runtime/flags.py.

    Defaults for 1.5B parameters on one GPU. The rows of ALGOS and MODELS replace some of them.
    """

    # rollout
    rollout: str = ""  # my_file.py:my_rollout samples instead of the function below, for example with tools
    steps: int = 200  # rollout batches; each gives epochs * minibatches optimizer steps
    prompts: int = 64  # G: prompts per step, over all ranks
    samples: int = 8  # n: completions per prompt
    temperature: float = 1.0  # of sampling; the trainer's log-probs use the same temperature
    top_p: float = 1.0  # nucleus sampling; needs --correction none --temperature 1
    max_prompt: int = 1024  # tokens; longer prompts are left out, and their number is printed
    max_tokens: int = 3000  # tokens per completion; one that reaches this limit is "truncated"
    # algorithm
    baseline: Literal["group", "leave_one_out", "batch", "running", "none"] = "group"  # mean to subtract
    scale: Literal["group", "batch", "mean", "none"] = "group"  # divisor of the advantage: group_advantages
    ratio: Literal["token", "sequence", "product"] = "token"  # pi/pi_old; geometric mean; product
    gate: Literal["clip", "detach", "soft", "squared"] = "clip"  # bound on the ratio: gated_objective
    aggregate: Literal["sequence", "token", "constant"] = "sequence"  # divisor of the loss: token_weights
    clip_low: float = 0.2  # the ratio is clipped to 1 - clip_low ...
    clip_high: float = 0.2  # ... and 1 + clip_high
    tau: float = 1.0  # of the soft gate, positive advantages; weight of the squared gate's penalty
    tau_neg: float = 1.05  # of the soft gate, negative advantages
    delta: float = 0.0  # upper bound of the ratio for negative advantages (two-sided clip); 0 = off
    kl_coef: float = 0.001  # weight of the KL to the starting model (R1: 0.001); 0 = no reference model
    kl_in: Literal["loss", "reward"] = "loss"  # k3 per token in the loss, or k1 subtracted from the reward
    correction: Literal["none", "token_truncate", "token_mask", "sequence_mask"] = (
        "token_truncate")  # importance weight for the difference between vLLM's and the trainer's log-probs
    correction_cap: float = 2.0  # largest importance weight pi_trainer / pi_vllm
    drop_flat_groups: bool = False  # no update from groups in which all rewards are the same
    resample: int = 0  # with drop_flat_groups: draw new prompts up to this many times to get G groups
    mask_truncated: bool = False  # truncated completions enter the group statistics but get no gradient
    overlong_buffer: float = 0.0  # penalty for completions in this last share of max_tokens; 0 = off
    epochs: int = 1  # passes over a rollout batch
    minibatches: int = 1  # optimizer steps per pass
    # optimizer
    lr: float = 1e-6  # AdamW's learning rate
    lr_end: float = 1.0  # linear decay to this share of lr, reached after the last step
    warmup: int = 0  # rollout batches of linear warm-up
    beta2: float = 0.999  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # the norm of the gradient is clipped to this


# name -> its differences from Config's defaults, which are GRPO's
ALGOS = {
    "grpo": {},  # arXiv:2402.03300
    "dr_grpo": dict(scale="none", aggregate="constant", kl_coef=0.0),  # arXiv:2503.20783
    "dapo": dict(clip_high=0.28, aggregate="token", kl_coef=0.0, drop_flat_groups=True, resample=3,
                 overlong_buffer=0.2),  # arXiv:2503.14476
    "bnpo": dict(aggregate="token", kl_coef=0.0),  # TRL's name for one mean over all tokens of the batch
    "rloo": dict(baseline="leave_one_out", scale="none", ratio="product", kl_coef=0.0),  # arXiv:2402.14740
    "reinforce++": dict(baseline="batch", scale="batch", aggregate="token"),  # arXiv:2501.03262
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),  # arXiv:2507.18071
    "cispo": dict(gate="detach", clip_high=4.0, aggregate="token", kl_coef=0.0),  # arXiv:2506.13585
    "sapo": dict(gate="soft", kl_coef=0.0),  # arXiv:2511.20347
    "rft": dict(baseline="none", scale="none", kl_coef=0.0),  # only right samples train, arXiv:2308.01825
    "maxrl": dict(scale="mean", aggregate="constant", kl_coef=0.0),  # arXiv:2602.02710
    "kimi": dict(scale="none", ratio="product", gate="squared", tau=0.1, kl_coef=0.0),  # k1.5, arXiv:2501.12599
}
# model -> its differences from Config's defaults, which suit 1.5B parameters on one GPU
MODELS = {
    "models/tiny": dict(task="arithmetic", template="chat", steps=50, prompts=32, samples=16, max_prompt=1536,
                        max_tokens=96, lr=1e-4, lr_end=0.1, kl_coef=0.1, eval_every=10),
}


def parse_config(argv=None):
    """Command line -> checked Config: see flags.parse. Raises ValueError with one line."""
    argv = sys.argv[1:] if argv is None else argv
    return flags.parse(Config, ALGOS, MODELS, argv, description=__doc__.split("\n\n")[0])


# ------------------------------------------------------------------------------------------------ 1. rollout

def rollout(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    """Samples n completions for each of G prompts (token ids) in one call: G*n Rollouts, in prompt order."""
    from vllm import SamplingParams
    tokenizer = llm.get_tokenizer()
    turn_end = tokenizer.get_vocab().get("<|im_end|>")  # ends a ChatML turn; a base model's EOS differs
    sampling = dict(n=n, temperature=temperature, max_tokens=max_tokens, logprobs=0, flat_logprobs=True,
                    detokenize=False, stop_token_ids=[] if turn_end is None else [turn_end]) | sampling
    params = [SamplingParams(seed=seed, **sampling) for seed in seeds or [None] * len(prompts)]
    requests = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    samples = [(prompt, s) for prompt, request in zip(prompts, requests) for s in request.outputs]
    texts = tokenizer.batch_decode([list(s.token_ids) for _, s in samples], skip_special_tokens=True)
    return [Rollout(prompt, list(s.token_ids), text, s.finish_reason == "length",
                    s.logprobs.logprobs)  # with logprobs=0 one number per token: that of the sampled token
            for (prompt, s), text in zip(samples, texts)]


def sampler(name):
    """The function that samples: rollout, or with --rollout my_file.py:my_rollout that one."""
    return guard.checked(rewards.load(*name.rsplit(":", 1), kind="rollout"), name) if name else rollout


# ------------------------------------------------------------------------------------------------- 2. reward

def score(rollouts, examples, verifier, step=0):
    """Fills reward, parts and steps of the N rollouts of G examples. Returns counts of time-outs and crashes.

    A reward function is f(completions, **columns) -> list of float, None or, for process supervision, lists
    of (end, reward): the reward of each step and how many characters of the text end with it. A completion is
    a string, or with --template chat a list with one message. Columns: those of the examples; prompts (the
    questions), completion_ids and step; sample_index, the number of a completion among those of its prompt.
    An example without one of the columns has None there.
    """
    n = len(rollouts) // len(examples)
    names = set().union(*examples) - {"prompt_ids", "completions"}
    columns = {name: [e.get(name) for e in examples for _ in range(n)] for name in names}  # N values each
    columns |= {"prompts": columns["question"], "step": step, "sample_index": [*range(n)] * len(examples)}
    columns["completion_ids"] = [r.completion for r in rollouts]
    values, parts, counts = verifier([r.text for r in rollouts], **columns)
    for i, r in enumerate(rollouts):
        r.parts = {name: parts[name][i] for name in verifier.weights_of(examples[i // n].get("reward"))}
        r.steps = values[i] if isinstance(values[i], list) else []
        r.reward = sum(value for _, value in r.steps) if r.steps else values[i]
    return counts


def collect_rollouts(run, step):
    """Stages 1 and 2 for this rank. -> (minibatches of groups to train on, all groups of n rollouts).

    With drop_flat_groups, groups whose rewards are all the same are left out. With resample, new prompts are
    then drawn until the ranks together have enough: DAPO's dynamic sampling. The ranks keep the groups that
    one rank would keep: the first of the data. Each step owns 1 + resample batches of prompts, used or not,
    so the data does not depend on what came before.
    """
    cfg, share = run.cfg, run.cfg.prompts // dist.world_size()
    groups, sampled = {}, []  # number of the prompt in this step -> group, all groups
    for draw in range(1 + cfg.resample):
        examples = data.batch_at(run.train_set, step * (1 + cfg.resample) + draw, cfg.prompts, cfg.seed,
                                 dist.rank(), dist.world_size())
        first = dist.rank() * share  # number of this rank's first prompt in the batch
        seeds = [data.request_seed(cfg.seed, step, draw, first + i) for i in range(share)]
        with timed(run.metrics, "rollout"):
            rollouts = sampler(cfg.rollout)(run.llm, [e["prompt_ids"] for e in examples], cfg.samples,
                                            cfg.temperature, cfg.max_tokens, seeds, top_p=cfg.top_p)
        with timed(run.metrics, "reward"):
            counts = score(rollouts, examples, run.verifier, step)
            ends_in_tokens(rollouts, run.llm.get_tokenizer())
        stats.add_counts(run.metrics, counts, "reward")
        for i in range(share):
            group = rollouts[i * cfg.samples:(i + 1) * cfg.samples]
            sampled.append(group)
            if not (cfg.drop_flat_groups and stats.is_flat(group)):
                groups[draw * cfg.prompts + first + i] = group
        kept = sorted(dist.all_gather(list(groups)))[:cfg.prompts]  # numbers, of all ranks
        if len(kept) == cfg.prompts:
            break
    guard.check_verdicts("reward", [r.reward for group in sampled for r in group], run.metrics, run.verifier)
    run.metrics["draws"] = draw + 1
    minibatches = [kept[i::cfg.minibatches] for i in range(cfg.minibatches)]
    return [[groups[number] for number in part if number in groups] for part in minibatches], sampled


# ---------------------------------------------------------------------------------------------- 3. advantage

def group_advantages(group_rewards, baseline="group", scale="group", eps=1e-4, running=0.0):
    """(G, n) rewards -> (G, n) advantages. NaN means "no verdict": it enters no mean and gets advantage 0.

    baseline: subtract the mean of the group, of the others in the group (leave_one_out), of the batch, the
    number `running`, or nothing. scale: divide by the standard deviation of the group or of the batch, plus
    eps, by the group's mean (MaxRL; 0 where it is not positive), or by nothing.

    The deviation is the population's, sqrt(1/n sum (r - mean)^2), as in the GRPO paper. TRL, verl and
    simple_GRPO divide by n - 1: their advantages are ours times sqrt((n-1)/n), 6.5 % smaller at n = 8.

    >>> group_advantages(torch.tensor([[1., 0., 0., 1.]]))
    tensor([[ 0.9998, -0.9998, -0.9998,  0.9998]])
    """
    group_mean, group_std = stats.nan_mean_std(group_rewards, dim=1)  # (G, 1), (G, 1)
    batch_mean, batch_std = stats.nan_mean_std(group_rewards, dim=(0, 1))  # (1, 1), (1, 1)
    no_verdict = group_rewards.isnan()  # (G, n)
    if baseline == "group":
        advantages = group_rewards - group_mean  # (G, n)
    elif baseline == "leave_one_out":  # r - mean of the others = (r - group mean) * n / (n - 1)
        n = (~no_verdict).sum(1, keepdim=True)  # (G, 1)
        advantages = (group_rewards - group_mean) * n / (n - 1).clamp(min=1)  # (G, n)
    elif baseline == "batch":
        advantages = group_rewards - batch_mean  # (G, n)
    elif baseline == "running":
        advantages = group_rewards - running  # (G, n)
    elif baseline == "none":
        advantages = group_rewards  # (G, n)
    else:
        raise ValueError(f"unknown baseline {baseline!r}")
    if scale == "group":
        advantages = advantages / (group_std + eps)  # (G, n)
    elif scale == "batch":
        advantages = advantages / (batch_std + eps)  # (G, n)
    elif scale == "mean":
        advantages = torch.where(group_mean > 0, advantages / (group_mean + eps), 0.0)  # (G, n)
    elif scale != "none":
        raise ValueError(f"unknown scale {scale!r}")
    return advantages.masked_fill(no_verdict, 0.0)  # (G, n)


def assign_advantages(groups, cfg, running_mean):
    """Fills the advantages of each rollout from the groups of all ranks. Returns the updated running mean.

    With process supervision a rollout has K step rewards. Those of all steps of a group are normalised
    together, and a token gets the sum of the advantages of the steps that end at it or later (GRPO+PS,
    arXiv:2402.03300, section 4.1.3).
    running_mean: moving average of the reward, for --baseline running; NaN before the first step.
    """
    if any(dist.all_gather([any(r.steps for group in groups for r in group)])):
        all_rewards = step_rewards(groups, cfg)  # (G, n K) of all ranks
    else:
        own = [[math.nan if r.reward is None else r.reward - cfg.kl_coef * r.kl for r in group]
               for group in groups]
        all_rewards = torch.tensor(dist.all_gather(own)).view(-1, cfg.samples)  # (G, n) of all ranks
    batch_mean = all_rewards.nanmean().item()  # NaN when nothing got a verdict
    if math.isnan(running_mean):
        running_mean = batch_mean
    advantages = group_advantages(all_rewards, cfg.baseline, cfg.scale, running=running_mean)
    set_advantages(groups, advantages)
    return running_mean if math.isnan(batch_mean) else 0.9 * running_mean + 0.1 * batch_mean


# --------------------------------------------------------------------------------------------------- 4. pack

def token_weights(lengths, aggregate, max_tokens, sequences=None, tokens=None):
    """(N,) completion lengths -> (N,) weight of each token, so that sum(weight * token loss) is a mean.

    `sequences` and `tokens` are counts over all ranks (default: of `lengths`). A masked sequence has length
    0: it counts as a sequence, but its tokens get weight 0.
        sequence  mean over sequences of the mean over their tokens: 1 / (N |o_i|)  GRPO; favours short ones
        token     mean over all tokens: 1 / sum |o|                                 DAPO, eq. 12
        constant  sum over tokens divided by a constant: 1 / (N max_tokens)         Dr. GRPO: no length bias

    >>> [token_weights([1, 3], aggregate, 8) for aggregate in ("sequence", "token", "constant")]
    [[0.5, 0.16666666666666666], [0.25, 0.25], [0.0625, 0.0625]]
    """
    sequences = sequences or len(lengths)
    tokens = tokens or sum(lengths)
    if aggregate == "sequence":
        return [1 / (sequences * n) if n else 0.0 for n in lengths]
    if aggregate == "token":
        return [1 / tokens if n else 0.0 for n in lengths]
    if aggregate == "constant":
        return [1 / (sequences * max_tokens) if n else 0.0 for n in lengths]
    raise ValueError(f"unknown aggregate {aggregate!r}")


def assign_token_weights(rollouts, cfg):
    """Fills the weight of the rollouts of one optimizer step. Returns those that are trained (weight > 0).

    The counts are over all ranks, so gradients of packs and ranks are summed, never averaged.
    """
    judged = [r for r in rollouts if r.reward is not None]
    lengths = [0 if cfg.mask_truncated and r.truncated else r.length for r in judged]
    sequences, tokens = dist.all_sum(len(lengths), sum(lengths))
    for r, weight in zip(judged, token_weights(lengths, cfg.aggregate, cfg.max_tokens, sequences, tokens)):
        r.weight = weight
    return [r for r in judged if r.weight]


# ---------------------------------------------------------------------------------------------- 5. log-probs

class TokenLogps(torch.nn.Module):
    """A causal language model that returns log-probs of given tokens. DeepSpeed wraps this module.

    forward(batch of collate) -> logp (R,), entropy (R,) in fp32.
    """

    def __init__(self, model, temperature=1.0, chunk=CHUNK):
        super().__init__()
        self.model, self.temperature, self.chunk = model, temperature, chunk

    def forward(self, batch):
        # use_cache=False: with a KV cache, transformers would silently treat the row as one sequence.
        # batch=batch reaches packed_attention in runtime/batch.py, which needs cu_seqlens_q, cu_seqlens_k and kv_index.
        output = self.model.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, batch=batch)
        hidden = output.last_hidden_state[0, batch.predictors]  # (R, H)
        head = self.model.get_output_embeddings().weight  # (V, H)
        # log_softmax(hidden @ head.T / temperature) at the targets, in chunks of the vocabulary
        return HeadLogps.apply(hidden, head, batch.targets, self.temperature, self.chunk)  # (R,), (R,)


@torch.no_grad()
def store_fixed_logps(policy, ref, batches, cfg):
    """Log-probs that stay fixed while the policy changes: batch.ref, for the KL, and batch.old, the policy's
    before the first step, if several steps follow."""
    if ref is not None and cfg.kl_in == "loss":
        with on_device(ref):
            for batch in batches:
                batch.ref, _ = ref(batch)  # (R,)
    if cfg.epochs * cfg.minibatches > 1:
        for batch in batches:
            batch.old, _ = policy(batch)  # (R,)


# --------------------------------------------------------------------------------------------------- 6. loss

MAX_LOG_RATIO = 20.0  # a ratio beyond e^20 is constant; the value of verl, SkyRL and OpenRLHF


def k3(logp, ref):
    """Schulman's estimator of KL(pi || ref) from samples of pi: exp(d) - d - 1 with d = log ref - log pi.

    (R,), (R,) -> (R,). Never negative. Its mean over tokens that pi samples is KL(pi || ref). As a loss, its
    mean gradient is that of KL(ref || pi): E[(1 - ref/pi) grad log pi] = -sum ref grad log pi.
    """
    d = ref - logp  # (R,)
    return d.expm1() - d  # (R,) exp(d) - 1 would round a small d away


def sequence_sum(x, batch):
    """(R,) -> (B,): the sum over each sequence."""
    return x.new_zeros(len(batch.lengths)).index_add(0, batch.sequence_ids, x)  # (B,)


def sequence_mean(x, batch):
    """(R,) -> (R,): each token gets the mean over its sequence."""
    return (sequence_sum(x, batch) / batch.lengths)[batch.sequence_ids]  # (R,)


def importance(mismatch, batch, cfg):
    """Importance weight pi_trainer / pi_vllm per token: vLLM's kernels sample from a slightly different
    distribution than the one that the trainer differentiates.

    mismatch (R,) = log pi_trainer - log pi_vllm -> (R,). token_truncate: at most correction_cap.
    token_mask: 0 above the cap. sequence_mask: 1 if the sequence's geometric mean is in [1/cap, cap], else 0.
    """
    if cfg.correction == "token_truncate":
        return mismatch.exp().clamp(max=cfg.correction_cap)  # (R,)
    if cfg.correction == "token_mask":
        return torch.where(mismatch.exp() <= cfg.correction_cap, mismatch.exp(), 0.0)  # (R,) not 0 * inf
    if cfg.correction == "sequence_mask":
        ratio = sequence_mean(mismatch, batch).exp()  # (R,)
        return ((ratio <= cfg.correction_cap) & (ratio >= 1 / cfg.correction_cap)).to(mismatch)  # (R,)
    raise ValueError(f"unknown correction {cfg.correction!r}")


def gated_objective(ratio, log_ratio, logp, advantage, cfg):
    """Objective per token with a bound on the ratio, and whether the bound takes its gradient: (R,), (R,)."""
    beyond = log_ratio.abs() > MAX_LOG_RATIO  # (R,) the ratio is constant there
    if cfg.gate == "clip":  # PPO, arXiv:1707.06347
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # (R,)
        # delta > 1 + clip_high, so it changes the minimum only for negative advantages
        bounded = ratio.clamp(max=cfg.delta) if cfg.delta else ratio  # (R,)
        # the minimum: a token that has moved far enough in the right direction gets no gradient
        objective = torch.minimum(bounded * advantage, clipped * advantage)  # (R,)
        return objective, beyond | (objective != ratio * advantage)
    if cfg.gate == "detach":  # CISPO: every token keeps its gradient; its weight is bounded from above
        weight = ratio.clamp(max=1 + cfg.clip_high).detach()  # (R,)
        return weight * advantage * logp, torch.zeros_like(beyond)
    if cfg.gate == "soft":  # SAPO: at ratio 1 the gradient is the advantage; it fades to 0 on both sides
        tau = torch.full_like(ratio, cfg.tau_neg).masked_fill(advantage > 0, cfg.tau)  # (R,)
        gate = torch.sigmoid(tau * (ratio - 1))  # (R,)
        return gate * 4 / tau * advantage, beyond | (gate == 1)  # 1: rounded, its derivative is 0
    if cfg.gate == "squared":  # Kimi k1.5, eq. 3: no bound, but a penalty on the squared log-ratio
        return advantage * log_ratio - cfg.tau / 2 * log_ratio**2, torch.zeros_like(beyond)
    raise ValueError(f"unknown gate {cfg.gate!r}")


def policy_loss(logp, old, ref, batch, cfg):
    """Policy gradient with a bounded ratio, plus k3 KL. logp, old, ref: (R,).

    old None: on-policy, old = logp. ref None: no KL. Returns the loss () and its terms per token, for the
    metrics. The loss is this pack's part of the global mean: gradients of packs and ranks are summed.
    """
    if old is None:
        old = logp.detach()  # (R,)
    log_ratio = logp - old  # (R,) on-policy it is 0, but has a gradient
    if cfg.ratio == "sequence":  # GSPO: geometric mean over the sequence
        log_ratio = sequence_mean(log_ratio, batch)  # (R,)
    elif cfg.ratio == "product":  # RLOO: the ratio of the whole sequence, the same for its |o| tokens
        log_ratio = sequence_sum(log_ratio, batch)[batch.sequence_ids]  # (R,)
    elif cfg.ratio != "token":
        raise ValueError(f"unknown ratio {cfg.ratio!r}")
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (R,) unbounded: inf and NaN
    objective, clipped = gated_objective(ratio, log_ratio, logp, batch.advantage, cfg)  # (R,), (R,)
    token_loss = -objective  # (R,)
    terms = {"ratio": ratio, "clipped": clipped, "mismatch": old - batch.vllm_logps}
    if cfg.correction != "none":
        terms["correction"] = importance(terms["mismatch"], batch, cfg)  # (R,)
        token_loss = token_loss * terms["correction"]  # (R,)
    if ref is not None:
        terms["kl"] = k3(logp, ref)  # (R,)
        token_loss = token_loss + cfg.kl_coef * terms["kl"]  # (R,)
    return (batch.weight * token_loss).sum(), terms


def loss_metrics(loss, terms, entropy, batch, cfg):
    """What update() reports of a pack: each term summed over its tokens. All 0 for a filler of pack_evenly."""
    mismatch = terms.pop("mismatch")  # (R,)
    terms |= {"entropy": entropy, "mismatch/k3": mismatch.expm1() - mismatch, "mismatch/mean_abs": mismatch.abs()}
    if cfg.correction != "none":
        weight = terms.pop("correction")  # (R,)
        uncapped = 1.0 if cfg.correction == "sequence_mask" else mismatch.exp()  # (R,)
        terms |= {"correction/w": weight, "correction/w2": weight**2,  # for the effective sample size
                  "correction/share": weight != uncapped}  # share of tokens that the cap changes
    sums = {"tokens": torch.ones_like(mismatch).sum(), "loss": loss, "mismatch/max": mismatch.abs().max()}
    sums |= {name: x.sum() for name, x in terms.items()}
    is_trained = batch.weight[0] != 0  # ()
    return {name: is_trained * x.detach() for name, x in sums.items()}


# ------------------------------------------------------------------------------------------------- 7. update

def make_policy(cfg):
    """The DeepSpeed engine around TokenLogps: ZeRO, AdamW on fp32 master weights, packs summed in fp32.

    bf16 weights alone would not learn: at lr 1e-6 an update is below the last bit of nearly every weight.
    """
    torch.manual_seed(cfg.seed)
    model = load_model(cfg).train()
    if cfg.checkpointing == "on":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    zero = {"stage": cfg.zero_stage, "reduce_bucket_size": memory.BUCKET}
    if cfg.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return start_deepspeed(
        TokenLogps(model, cfg.temperature),
        adamw=dict(lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay),
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # we call backward() any number of times, then step()
            "gradient_clipping": cfg.max_grad_norm,
            "bf16": {"enabled": cfg.dtype == "bfloat16"}, "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,  # torch's AdamW is not on DeepSpeed's list
        })


def make_reference(cfg, policy=None, stays_on_gpu=False):
    """The frozen model of the KL term, in host memory while it is not in use. None when kl_coef is 0."""
    if not cfg.kl_coef:
        return None
    if cfg.lora_rank:
        return WithoutAdapters(policy.module)  # the policy itself: no second copy
    ref = TokenLogps(load_model(cfg).eval().requires_grad_(False), cfg.temperature)
    ref.stays_on_gpu = stays_on_gpu
    return ref


def lr_at(step, cfg):
    """Linear decay from lr at step 0 to lr * lr_end at step `steps`, times a linear warm-up."""
    warmup = min(1.0, (step + 1) / max(1, cfg.warmup))
    return cfg.lr * warmup * (1 - (1 - cfg.lr_end) * step / max(1, cfg.steps))


def update(policy, batches, cfg):
    """One optimizer step: a backward pass per pack, whose gradients add up, then AdamW. Collective.

    batches: the packs, each as returned by collate. Nothing is read back from the GPU before the last one.
    Returns metrics over all ranks. Raises RunError before the step is taken: see guard.check_step.
    """
    sums = []  # per pack: each metric summed over its tokens
    for batch in batches:
        logp, entropy = policy(batch)  # (R,), (R,)
        loss, terms = policy_loss(logp, batch.old, batch.ref, batch, cfg)  # ()
        policy.backward(loss * dist.world_size())  # ZeRO averages gradients over the ranks; we want their sum
        sums.append(loss_metrics(loss, terms, entropy, batch, cfg))
    metrics = stats.token_means(sums)  # means over tokens, the sum for loss, the maximum for mismatch/max
    guard.check_step(metrics, cfg.mismatch_bound, cfg.rollout)
    policy.step()  # DeepSpeed skips it silently when the gradient is not finite
    return metrics | {"grad_norm": float(policy.get_global_grad_norm() or 0.0),
                      "skipped": float(not policy.was_step_applied())}


# --------------------------------------------------------------------------------------------------- 8. sync

def sync_weights(policy, llm):
    """Copies the policy's weights into vLLM, in place. Raises RunError if one bit differs afterwards."""
    place_frozen_weights(policy, "cpu")  # of LoRA with offload: vLLM needs their room on the GPU
    llm.load(named_weights(policy))


# ------------------------------------------------------------------------------------------------- the loop

@dataclass
class Run:
    """What the loop works with. main() fills the first nine, steps() the others."""
    cfg: Config
    train_set: list[dict]
    eval_set: list[dict]
    verifier: rewards.Verifier
    log: Log
    checkpoints: Checkpoints
    llm: Sampler
    policy: Any  # DeepSpeed's engine around TokenLogps
    ref: Any  # frozen TokenLogps, or None
    metrics: dict[str, float] = field(default_factory=dict)  # of the current step
    answers: list[dict] = field(default_factory=list)  # of its evaluation, if there is one

    def steps(self):
        """Yields the number of each step to take, and the frame around it: evaluation, checkpoint, signals.

        The final weights are evaluated and saved too.
        """
        cfg, log, progress = self.cfg, self.log, self.checkpoints.progress
        for step in range(progress.step, cfg.steps + 1):
            self.metrics, self.answers, progress.step = {}, [], step
            stop.check(self.checkpoints)
            if step % cfg.eval_every == 0 or step == cfg.steps:
                log.say(f"step {step}: evaluation of {len(self.eval_set)} examples ...")
                with timed(self.metrics, "evaluate"):
                    found, self.answers = evaluate(self.llm, self.eval_set, self.verifier, cfg)
                self.metrics |= found
            if step == cfg.steps or cfg.save_every and step % cfg.save_every == 0:
                self.checkpoints.save(final=step == cfg.steps)
            if step < cfg.steps:
                yield step
        log.write(cfg.steps, self.metrics, answers=self.answers)
        log.close()


def evaluate(llm, examples, verifier, cfg):
    """Metrics of the held-out examples, and a dict per greedy completion: see evaluation.summary."""
    metrics, sample = {}, sampler(cfg.rollout)
    indices = range(dist.rank(), len(examples), dist.world_size())  # of this rank
    mine = [examples[i] for i in indices]
    prompts = [e["prompt_ids"] for e in mine]
    greedy, groups = sample(llm, prompts, 1, 0.0, cfg.max_tokens), []
    stats.add_counts(metrics, score(greedy, mine, verifier), "eval")
    if n := cfg.eval_n:
        seeds = [data.request_seed(cfg.seed, "eval", i) for i in indices]
        samples = sample(llm, prompts, n, cfg.temperature, cfg.max_tokens, seeds)
        stats.add_counts(metrics, score(samples, mine, verifier), "eval")
        groups = [samples[i:i + n] for i in range(0, len(samples), n)]
    guard.check_verdicts("eval", [stats.first_part(r) for r in greedy], metrics, verifier)
    found, answers = evaluation.summary(mine, indices, greedy, groups, cfg)
    return metrics | found, answers


def train(run):
    """The loop. To try another one: write it from the same stages, and call main(argv, train=yours)."""
    cfg, llm, policy, ref, progress = run.cfg, run.llm, run.policy, run.ref, run.checkpoints.progress
    sync_weights(policy, llm)
    for step in run.steps():
        minibatches, sampled = collect_rollouts(run, step)  # 1. 2.
        groups, filler = [group for part in minibatches for group in part], sampled[0][0]
        with timed(run.metrics, "sync"):
            llm.sleep()  # GPU memory: from vLLM to the trainer, and back in sync_weights
            place_frozen_weights(policy, dist.device())
        shown = run.log.rollouts_with_tokens(step, sampled)  # for the report; none in most steps
        with timed(run.metrics, "report"):
            before = token_logps(policy, shown, filler, cfg)
        with timed(run.metrics, "update"):
            if cfg.kl_in == "reward" and ref is not None:
                run.metrics |= store_kl(policy, ref, groups, filler, cfg)
            progress.running_mean = assign_advantages(groups, cfg, progress.running_mean)  # 3.
            packed = []  # 4. a list of batches per optimizer step
            for part in minibatches:
                trained = assign_token_weights([r for group in part for r in group], cfg)
                trained = balance(trained, cfg.model)  # rollouts change ranks: equal FLOPs for each
                # ranks with fewer packs add copies of the filler; pack_evenly sets their weight to 0
                packs = pack_evenly(trained, filler, cfg.pack_tokens)
                packed.append([collate(p, dist.device()) for p in packs])  # 60 bytes per token
            for batches in packed:
                store_fixed_logps(policy, ref, batches, cfg)  # 5. ref, old
            set_lr(policy, lr_at(step, cfg))
            history = []
            for _ in range(cfg.epochs):
                for batches in packed:
                    if batches:  # not if all groups are flat or have no verdict
                        history.append(update(policy, batches, cfg))  # 5. 6. 7.
            run.metrics |= stats.step_means(history)
            progress.skipped = guard.count_skipped(progress.skipped, step, history, groups, run.log.folder)
        with timed(run.metrics, "report"):
            after = token_logps(policy, shown, filler, cfg)
        with timed(run.metrics, "sync"):
            sync_weights(policy, llm)  # 8.
        run.metrics |= {"lr": lr_at(step, cfg)} | summary(cfg, groups, sampled, run.metrics)
        run.log.write(step, run.metrics, sampled, run.answers, zip(shown, before, after))


# ------------------------------------------------------------------------------------------------------ main

def main(argv=None, train=train):
    """Runs the command line. train: a loop of your own in place of the one above; it gets a Run."""
    stop.keep_printing()
    with stop.on_signals():
        with stop.with_one_line(ValueError, OSError, RuntimeError):
            cfg = parse_config(argv)
            sampler(cfg.rollout)  # a user's file is imported before anything expensive
            dist.init_process_group(cfg.timeout)
            tokenizer = flags.load_tokenizer(cfg)
            train_set, eval_set = data.load_splits(cfg, tokenizer, dist.world_size(), notify=dist.print_once)
            verifier = evaluation.start_verifier(cfg, train_set, eval_set)
            cfg, plan = memory.plan(cfg)
            cfg = claim_folder(cfg, train_set + eval_set)
            log = Log(cfg, tokenizer, plan)
            checkpoints = Checkpoints(cfg, log)

        with stop.with_one_line(OSError, cfg=cfg, folder=log.folder):
            memory.limit_device(cfg)
            log.say("loading the model into vLLM ...")
            llm = Sampler(cfg)  # before the trainer: vLLM measures how much GPU memory is free
            llm.sleep()
            log.say("loading the model into the trainer ...")
            policy = make_policy(cfg)
            ref = make_reference(cfg, policy, plan["reference_stays"])
            if cfg.steps:  # --steps 0 only evaluates
                log.say("rehearsal: two updates on the largest pack, at learning rate 0 ...")
                guard.rehearse(policy, ref, cfg)
            checkpoints.restore(policy)
            train(Run(cfg, train_set, eval_set, verifier, log, checkpoints, llm, policy, ref))
        verifier.close()
    # The process group is left to vLLM, which closes it at exit.


if __name__ == "__main__":
    main()
