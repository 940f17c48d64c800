"""Statistics of groups, optimizer steps and answers; clocks; the metrics and FLOPs of a step."""
import contextlib
import functools
import math
import re
import resource
import time
import timeit
from statistics import fmean, mode, pstdev

import torch

from runtime import ranks
from runtime.batch import flatten
from runtime.memory import GIB, ModelShape
from runtime.records import stage_seconds

# dense bf16 FLOP/s from the manufacturers' data sheets
DATA_SHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


def has_zero_std(group):
    """True if all rewards of a group are equal as advantages are computed, in PyTorch's default
    dtype, None ignored: with a baseline of the group every advantage is then 0."""
    rewards = {torch.tensor(r.reward).item() for r in group if r.reward is not None}
    return len(rewards) <= 1


def wilson_interval(hits, n):
    """(low, high): 95 % interval of the proportion hits / n (Wilson 1927; also for small n)."""
    z = 1.959964
    center = hits + z * z / 2
    margin = z * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return (center - margin) / (n + z * z), (center + margin) / (n + z * z)


def pass_at_k(n, correct, k):
    """Probability that k of n samples, of which `correct` are right, include a right one:
    1 - C(n - correct, k) / C(n, k) (arXiv:2107.03374)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_vote(answers):
    """Index of the most frequent answer but None, of several the one seen first; None if all are.

    >>> majority_vote([None, "4", "5", "5", None, None])
    2
    """
    votes = [answer for answer in answers if answer is not None]
    return answers.index(mode(votes)) if votes else None


def pack_sums(loss, terms, pack, cfg):
    """Metrics of a pack: sums over its tokens (0 for a filler), the loss, the largest mismatch.

    A dict of tensors (). terms: those of policy_loss, (R,) each.
    """
    mismatch = terms["mismatch"]  # (R,)
    columns = {name: x for name, x in terms.items() if name not in ("mismatch", "correction")}
    columns["entropy"] = pack.entropy  # (R,)
    columns["tokens"] = torch.ones_like(mismatch)  # (R,)
    columns["mismatch/mean_abs"] = mismatch.abs()  # (R,)
    columns["mismatch/k3"] = mismatch.expm1() - mismatch  # (R,) k3: KL(vLLM || trainer)
    if cfg.correction != "none":
        correction = terms["correction"]  # (R,)
        uncapped = 1.0 if cfg.correction == "sequence_mask" else mismatch.exp()  # (R,)
        columns["correction/w"] = correction
        columns["correction/w2"] = correction**2  # for ess
        columns["correction/share"] = correction != uncapped  # tokens that the cap changes
    sums = {name: x.sum() for name, x in columns.items()}
    sums["loss"] = loss
    sums["mismatch/max"] = mismatch.abs().max()
    is_trained = pack.weight[0] != 0  # () false for a filler: see pack_evenly
    return {name: is_trained * x.detach() for name, x in sums.items()}


def token_means(sums):
    """Metrics of an optimizer step over all ranks, from those of pack_sums. Collective.

    sums: per pack a dict of tensors (), which are read in one transfer. Returns means over the
    tokens, except for the sum of `loss`, the maximum of `mismatch/max`, and `tokens`, their number.
    """
    rows = []
    for pack in sums:
        values = [x.double() for x in pack.values()]
        rows.append(torch.stack(values))  # (metrics,)
    rows = torch.stack(rows).tolist()  # a row per pack
    columns = dict(zip(sums[0], zip(*ranks.all_gather(rows))))
    totals = {name: sum(column) for name, column in columns.items()}
    means = {name: total / totals["tokens"] for name, total in totals.items()}
    means["loss"] = totals["loss"]
    means["tokens"] = totals["tokens"]
    means["mismatch/max"] = max(columns["mismatch/max"])
    return means


def step_means(history):
    """Metrics of a rollout batch from those of its optimizer steps; {} without steps.

    Means over the tokens of all steps, except for the maximum of `mismatch/max` and the means over
    the steps of loss, grad_norm and skipped. `correction/ess`: effective sample size of the
    importance weights as a fraction of the tokens, 1 if all are equal.
    """
    if not history:
        return {}
    tokens = [metrics["tokens"] for metrics in history]
    means = {}
    for name in history[0]:
        values = [metrics[name] for metrics in history]
        if name == "mismatch/max":
            means[name] = max(values)
        elif name in ("loss", "grad_norm", "skipped"):
            means[name] = fmean(values)
        else:
            means[name] = fmean(values, tokens)
    del means["tokens"]
    if "correction/w2" in means:
        square = means.pop("correction/w2")
        means["correction/ess"] = means["correction/w"] ** 2 / max(square, 1e-30)
    return means


def mean_of(rows):
    """The mean of each metric over several dicts."""
    means = {}
    for name in rows[0]:
        means[name] = fmean(row[name] for row in rows)
    return means


def add_counts(metrics, counts, prefix):
    """Adds a verifier's counts {"reward/<name>": number}, over all ranks, to metrics as
    "<prefix>/<name>". Collective."""
    for name, count in zip(counts, ranks.all_sum(*counts.values())):
        name = prefix + name.removeprefix("reward")
        metrics[name] = metrics.get(name, 0) + count


def first_part(rollout):
    """What the first reward function, which the evaluation counts, gave; None = no reward."""
    return next(iter(rollout.parts.values()))


def is_right(rollout):
    """Whether the first reward function gave 1."""
    return first_part(rollout) == 1


@contextlib.contextmanager
def timed(metrics, stage):
    """Adds the seconds of a with-block to metrics["seconds/<stage>"] and puts its peak memory, in
    GiB, into metrics["memory/<stage>"]."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    metrics[f"seconds/{stage}"] = metrics.get(f"seconds/{stage}", 0.0) + seconds
    before = metrics.get(f"memory/{stage}", 0.0)
    metrics[f"memory/{stage}"] = max(before, peak_gib())


def peak_gib():
    """Peak GiB on the GPU since PyTorch's peak was reset, vLLM's too; on a CPU, of this process."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()) / GIB


def step_summary(cfg, trained_groups, sampled_groups, metrics):
    """Metrics of a step's completions and their cost, over all ranks. Collective. Rewards and
    lengths are those of all sampled groups. `trained` is the share of their rollouts that the
    update runs; the FLOPs in `mfu` are those of these rollouts."""
    rows = [(r.reward, r.length, r.truncated, r.parts) for r in flatten(sampled_groups)]
    rewards, lengths, truncated, parts = zip(*ranks.all_gather(rows))
    judged = [reward for reward in rewards if reward is not None] or [0.0]
    zero_std = ranks.all_gather(list(map(has_zero_std, sampled_groups)))
    trained = [r for r in flatten(trained_groups) if r.weight]
    flops = forward_flops(ModelShape.of(cfg.model), trained) * passes(cfg)
    flops, count = ranks.all_sum(flops, len(trained))
    seconds = stage_seconds([metrics])
    peak = peak_flops(cfg.dtype) * ranks.world_size()  # FLOP/s
    summary = {
        "reward/mean": fmean(judged),
        "reward/std": pstdev(judged),
        "reward/unscored": rewards.count(None) / len(rewards),
        **part_means(parts),
        "completion/length": fmean(lengths),
        "completion/truncated": fmean(truncated),
        "trained": count / len(lengths),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "mfu": flops / (metrics["seconds/update"] * peak),
    }
    if cfg.samples > 1:  # a group of one has no deviation
        summary["group/zero_std"] = fmean(zero_std)
    return summary


def part_means(parts):
    """The mean of each reward function, of the completions to which it gave a value."""
    means = {}
    for name in parts[0]:
        values = [part[name] for part in parts if part[name] is not None]
        if values:
            means[f"reward/{name}"] = fmean(values)
    return means


def passes(cfg):
    """Forward passes that an update of a sequence costs. A backward pass is two, but one with LoRA,
    which needs no gradients of the frozen weights. What checkpointing recomputes does not count."""
    each = 2 if cfg.lora_rank else 3
    several = cfg.epochs * cfg.minibatches > 1  # log-probs of the old policy
    return cfg.epochs * each + several + bool(cfg.kl_coef)


def forward_flops(shape, rollouts):
    """FLOPs of one forward pass of a model of this ModelShape over the completions and, once each,
    their prompts. A query has half of the sequence's keys on average; those of completions read the
    prompt."""
    prompts = {tuple(r.prompt) for r in rollouts}
    completion_tokens = sum(len(r.completion) for r in rollouts)
    tokens = sum(map(len, prompts)) + completion_tokens
    pairs = 0  # twice the (query, key) pairs
    for prompt in prompts:
        pairs += len(prompt) ** 2
    for r in rollouts:
        pairs += len(r) ** 2 - len(r.prompt) ** 2
    # the embedding is a look-up; an untied head is counted as body too: slightly too much
    head = shape.vocab * shape.hidden
    body = shape.parameters - head
    products = 2 * body * tokens + 2 * head * completion_tokens
    return products + 2 * shape.layers * shape.attention * pairs


@functools.cache
def peak_flops(dtype):
    """Dense FLOP/s of this device in `dtype`: from the data sheet, or measured in a few seconds."""
    cuda = torch.cuda.is_available()
    if cuda and dtype == "bfloat16":
        for name, flops in DATA_SHEET.items():
            if re.search(rf"\b{name}\b", torch.cuda.get_device_name()):
                return flops
    n = 8192 if cuda else 2048
    if not cuda and dtype == "bfloat16":
        n = 512  # a CPU without instructions for bfloat16 does less than 10^9 operations per second
    a = torch.randn(n, n, dtype=getattr(torch, dtype), device="cuda" if cuda else "cpu")

    def product():
        (a @ a)[0, 0].item()  # item() waits for a GPU

    return 2 * n**3 / min(timeit.repeat(product, number=1, repeat=4))
