"""Statistics of groups, optimizer steps and answers; clocks; the metrics of a step."""
import contextlib
import math
import time
from statistics import fmean, mode, pstdev

import torch

from runtime import memory, ranks
from runtime.memory import ModelShape, peak_flops
from runtime.records import stage_seconds

MAX_LOG_RATIO = 20.0  # a ratio beyond e^20 is constant; the value of verl, SkyRL and OpenRLHF


def has_zero_std(group):
    """True if all rewards of a group are equal as advantages are computed, in PyTorch's default
    dtype, None ignored: with a baseline of the group every advantage is then 0."""
    return len({torch.tensor(r.reward).item() for r in group if r.reward is not None}) <= 1


def moving_mean(mean, new):
    """A moving average that takes a tenth of `new`, or nothing of NaN."""
    return mean if math.isnan(new) else 0.9 * mean + 0.1 * new


def wilson_interval(hits, n):
    """(low, high): 95 % interval of the proportion hits / n (Wilson 1927; also for small n)."""
    z = 1.959964
    center, margin = hits + z * z / 2, z * math.sqrt(hits * (n - hits) / n + z * z / 4)
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
    given = [answer for answer in answers if answer is not None]
    return answers.index(mode(given)) if given else None


def nan_mean_std(x, dim):
    """Mean and population standard deviation over `dim`, kept with size 1, of what is not NaN.

    Both are 0 where all entries are NaN. Of equal entries the deviation is exactly 0: the smallest
    entry is subtracted first, because the sum of n equal numbers is rounded."""
    if not len(x):  # all groups were dropped, and amin() needs an entry
        return x.sum(dim, keepdim=True), x.sum(dim, keepdim=True)
    smallest = x.nan_to_num(torch.inf).amin(dim, keepdim=True)
    excess = x - smallest
    mean_excess = excess.nanmean(dim, keepdim=True)
    variance = ((excess - mean_excess) ** 2).nanmean(dim, keepdim=True)
    return (smallest + mean_excess).nan_to_num(), variance.sqrt().nan_to_num()


def is_clipped(ratio, advantage, cfg):
    """(R,) whether PPO's clip made a token's gradient 0. The other surrogates have none."""
    too_high, too_low = ratio > 1 + cfg.clip_high, ratio < 1 - cfg.clip_low  # (R,), (R,)
    if cfg.delta:
        too_low |= ratio > cfg.delta
    beyond = torch.where(advantage > 0, too_high, too_low & (advantage < 0))  # (R,)
    return beyond & (cfg.surrogate == "ppo")


def pack_sums(loss, terms, entropy, weight, cfg):
    """Metrics of a pack: sums over its tokens (0 for a dummy), the loss, the largest mismatch.

    A dict of tensors (). terms: those of policy_loss, (R,) like entropy and weight; used up."""
    mismatch = terms.pop("mismatch")  # (R,)
    terms |= {"entropy": entropy, "tokens": torch.ones_like(entropy),
              "mismatch/mean_abs": mismatch.abs(),
              "mismatch/k3": mismatch.expm1() - mismatch}  # k3: KL(vLLM || trainer)
    if cfg.correction != "none":
        correction = terms.pop("correction")  # (R,)
        uncapped = 1.0 if cfg.correction == "sequence_mask" else mismatch.exp()  # (R,)
        terms |= {"correction/w": correction, "correction/w2": correction**2,  # for ess
                  "correction/share": correction != uncapped}  # tokens that the cap changes
    sums = {name: x.sum() for name, x in terms.items()}
    sums |= {"loss": loss, "mismatch/max": mismatch.abs().max()}
    is_trained = weight[0] != 0  # () false for a dummy: see pack_evenly
    return {name: is_trained * x.detach() for name, x in sums.items()}


def token_means(sums):
    """Metrics of an optimizer step over all ranks, from those of pack_sums. Collective.

    sums: per pack a dict of tensors (), which are read in one transfer. Returns means over the
    tokens, except for the sum of `loss`, the maximum of `mismatch/max`, and `tokens`, their number.
    """
    rows = torch.stack([torch.stack([x.double() for x in pack.values()]) for pack in sums])
    columns = dict(zip(sums[0], zip(*ranks.all_gather(rows.tolist()))))
    totals = {name: sum(column) for name, column in columns.items()}
    means = {name: x / totals["tokens"] for name, x in totals.items()}
    return means | {"loss": totals["loss"], "tokens": totals["tokens"],
                    "mismatch/max": max(columns["mismatch/max"])}


def step_means(history):
    """Metrics of a rollout batch from those of its optimizer steps; {} without steps.

    Means over the tokens of all steps, except for the maximum of `mismatch/max` and the means over
    the steps of loss, grad_norm and skipped. `correction/ess`: effective sample size of the
    importance weights as a fraction of the tokens, 1 if all are equal."""
    means, tokens = {}, [metrics["tokens"] for metrics in history]
    for name in history[0] if history else ():
        values = [metrics[name] for metrics in history]
        weights = None if name in ("loss", "grad_norm", "skipped") else tokens
        means[name] = max(values) if name == "mismatch/max" else fmean(values, weights)
    means.pop("tokens", None)
    if "correction/w2" in means:
        square = means.pop("correction/w2")
        means["correction/ess"] = means["correction/w"] ** 2 / max(square, 1e-30)
    return means


def mean_of(rows):
    """The mean of each metric over several dicts."""
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


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


def peak(rows):
    """Highest peak memory of all stages in these rows of metrics, in GiB."""
    return max(x for row in rows for name, x in row.items() if name.startswith("memory/"))


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
    metrics[f"seconds/{stage}"] = metrics.get(f"seconds/{stage}", 0.0) + time.perf_counter() - start
    metrics[f"memory/{stage}"] = max(metrics.get(f"memory/{stage}", 0.0), memory.peak_gib())


def step_summary(cfg, trained_groups, sampled_groups, metrics):
    """Metrics of a step's completions and their cost, over all ranks. Collective. Rewards and
    lengths are those of all sampled groups. `trained` is the share of their rollouts that the
    update runs; the FLOPs in `mfu` are those of these rollouts."""
    own = [(r.reward, r.length, r.truncated, r.parts) for group in sampled_groups for r in group]
    rewards, lengths, truncated, parts = zip(*ranks.all_gather(own))
    judged = [x for x in rewards if x is not None] or [0.0]
    means = {}
    for name in parts[0]:
        if given := [values[name] for values in parts if values[name] is not None]:
            means[f"reward/{name}"] = fmean(given)
    # in forward passes (a backward pass is two); what checkpointing recomputes does not count
    passes = cfg.epochs * (2 if cfg.lora_rank else 3)  # LoRA: no gradients of the frozen weights
    passes += (cfg.epochs * cfg.minibatches > 1) + bool(cfg.kl_coef)  # old policy, reference
    trained = [r for group in trained_groups for r in group if r.weight]
    flops, count = ranks.all_sum(
        passes * ModelShape.of(cfg.model).forward_flops(trained), len(trained))
    return {
        "reward/mean": fmean(judged),
        "reward/std": pstdev(judged),
        "reward/unscored": rewards.count(None) / len(rewards),
        **means,
        "group/zero_std": fmean(ranks.all_gather(list(map(has_zero_std, sampled_groups)))),
        "completion/length": fmean(lengths),
        "completion/truncated": fmean(truncated),
        "trained": count / len(lengths),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / stage_seconds([metrics]),
        "mfu": flops / (metrics["seconds/update"] * peak_flops(cfg.dtype) * ranks.world_size()),
    }
