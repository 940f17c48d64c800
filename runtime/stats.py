"""Statistics of groups, steps and evaluations. Too short to require scipy or statsmodels."""
import functools
import math
from statistics import fmean, stdev

import numpy as np
import torch

from runtime import dist
from verify.number import vote


def is_flat(group):
    """Whether all rewards of a group (of all its steps, if steps have rewards) are equal; None is ignored.

    With --baseline group or leave_one_out all its advantages are then 0, unless --kl_in is reward."""
    return len({reward for r in group for _, reward in r.steps or [(0, r.reward)]} - {None}) <= 1


def wilson_interval(hits, n):
    """(low, high): 95 % interval of the proportion hits / n (Wilson 1927: also for small n, near 0 and 1)."""
    z, p = 1.959964, hits / n
    center = p + z * z / (2 * n)
    margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (center - margin) / (1 + z * z / n), (center + margin) / (1 + z * z / n)


@functools.cache
def t_quantile(df, level=0.95):
    """t with P(|T| <= t) = level for Student's t distribution with df degrees of freedom.

    With t = sqrt(df) tan(a), this probability is the integral of cos^(df-1) from 0 to a, divided by that from
    0 to pi/2: it is summed on a grid, with an error below 1e-8 in the probability.

    >>> round(t_quantile(4), 6)
    2.776445
    """
    a = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos(a) ** (df - 1)
    cumulative = np.cumsum((density[1:] + density[:-1]) / 2)
    return math.sqrt(df) * math.tan(np.interp(level, cumulative / cumulative[-1], a[1:]))


def mean_interval(values):
    """(mean, low, high): 95 % t interval of the mean of at least two values."""
    mean, half = fmean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def pass_at_k(n, correct, k):
    """Probability that k of n samples, of which `correct` are right, include a right one:
    1 - C(n - correct, k) / C(n, k) (arXiv:2107.03374)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_vote(answers):
    """Index of the first of the most frequent answers. None means no answer and does not vote; ties go to the
    answer seen first. Returns None when nobody gave an answer.

    >>> majority_vote([None, "4", "5", "5", None, None])
    2
    """
    given = [answer for answer in answers if answer is not None]
    return answers.index(max(given, key=given.count)) if given else None


def nan_mean_std(x, dim):
    """Mean and population standard deviation of the entries that are not NaN, over `dim`, which is kept.

    Both are 0 where all entries are NaN. Of equal entries, the mean is exactly their value and the deviation
    exactly 0: the smallest entry is subtracted first, because the sum of n equal numbers is rounded.
    """
    known = ~x.isnan()
    count = known.sum(dim, keepdim=True).clamp(min=1)
    smallest = torch.where(known, x, torch.inf).amin(dim, keepdim=True)
    smallest = torch.where(smallest.isinf(), 0.0, smallest)  # all entries are NaN
    excess = torch.where(known, x - smallest, 0.0)
    mean_excess = excess.sum(dim, keepdim=True) / count
    variance = ((excess - mean_excess) ** 2 * known).sum(dim, keepdim=True) / count
    return smallest + mean_excess, variance.sqrt()


def without_linear_part(x, lengths):
    """(G, n) -> (G, n): x without the part of each row that is linear in lengths (G, n), by least squares.
    Entries whose length is NaN do not count and stay as they are."""
    centred = (lengths - nan_mean_std(lengths, dim=1)[0]).nan_to_num()  # (G, n)
    slope = (x * centred).sum(1, keepdim=True) / (centred**2).sum(1, keepdim=True).clamp(min=1e-4)  # (G, 1)
    return x - slope * centred


def pack_sums(loss, terms, entropy, weight, cfg):
    """Metrics of a pack, summed over its tokens: a dict of tensors (). Those of a filler are 0.

    terms: those of policy_loss, each (R,), as are entropy and weight.
    """
    mismatch = terms.pop("mismatch")  # (R,)
    terms |= {"entropy": entropy, "tokens": torch.ones_like(entropy),
              "mismatch/k3": mismatch.expm1() - mismatch, "mismatch/mean_abs": mismatch.abs()}
    if cfg.correction != "none":
        correction = terms.pop("correction")  # (R,)
        uncapped = 1.0 if cfg.correction == "sequence_mask" else mismatch.exp()  # (R,)
        terms |= {"correction/w": correction, "correction/w2": correction**2,  # for their sample size
                  "correction/share": correction != uncapped}  # share of tokens that the cap changes
    sums = {name: x.sum() for name, x in terms.items()}
    sums |= {"loss": loss, "mismatch/max": mismatch.abs().max()}
    is_trained = weight[0] != 0  # () false for a filler: see pack_evenly
    return {name: is_trained * x.detach() for name, x in sums.items()}


def token_means(sums):
    """Metrics of an optimizer step, over all ranks, from sums over the tokens of each pack. Collective.

    sums: per pack a dict of tensors (), on any device; they are read in one transfer.
    Means over the tokens, but `loss` stays a sum, `mismatch/max` becomes the maximum and `tokens` the number
    of tokens.
    """
    largest = torch.stack([s.pop("mismatch/max") for s in sums]).max()  # ()
    totals = {name: sum(s[name] for s in sums) for name in sums[0]}
    *values, largest = torch.stack([x.double() for x in (*totals.values(), largest)]).tolist()
    largest = max(dist.all_gather([largest]))
    totals = dict(zip(totals, dist.all_sum(*values)))
    tokens = totals["tokens"]
    metrics = {name: x if name in ("loss", "tokens") else x / tokens for name, x in totals.items()}
    metrics["mismatch/max"] = largest
    return metrics


def step_means(history):
    """Metrics of a rollout batch from those of its optimizer steps, as update returns them; {} without steps.

    Means over the tokens of all optimizer steps, but the maximum of `mismatch/max`, and means over the steps
    of loss, grad_norm and skipped, which a step has once. `correction/ess` is the effective sample size of
    the importance weights as a fraction of the tokens: 1 when all are equal.
    """
    if not history:
        return {}
    tokens = [metrics["tokens"] for metrics in history]
    means = {}
    for name in (name for name in history[0] if name != "tokens"):
        values = [metrics[name] for metrics in history]
        weights = None if name in ("loss", "grad_norm", "skipped") else tokens
        means[name] = max(values) if name == "mismatch/max" else fmean(values, weights)
    if "correction/w2" in means:
        means["correction/ess"] = means["correction/w"] ** 2 / max(means.pop("correction/w2"), 1e-30)
    return means


def mean_of(rows):
    """The mean of each metric over several dicts."""
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def add_counts(metrics, counts, prefix):
    """Adds a verifier's counts {"reward/<name>": number}, over all ranks, to metrics["<prefix>/<name>"].
    Collective."""
    for name, count in zip(counts, dist.all_sum(*counts.values())):
        name = name.replace("reward", prefix)
        metrics[name] = metrics.get(name, 0) + count


def first_part(rollout):
    """What the first reward function, which the evaluation counts, gave; None = no verdict."""
    return next(iter(rollout.parts.values()))


def is_right(rollout):
    """Whether the first reward function gave 1."""
    return first_part(rollout) == 1


def greedy_values(rollout):
    """{metric: value} of a greedy completion. Without a verdict of the first reward function it is wrong."""
    return {"accuracy": is_right(rollout), "no_verdict": first_part(rollout) is None,
            "length": rollout.length, "truncated": rollout.truncated}


def best_is_right(group, scores):
    """Whether the sample with the highest score is right; the first of equals counts, None is no score."""
    scored = [(score, r) for score, r in zip(scores, group) if score is not None]
    return bool(scored) and is_right(max(scored, key=lambda pair: pair[0])[1])


def vote_of(rollout, final_answer):
    """What a rollout votes for; None if it has no answer, or one that is cut off.

    The answer of a truncated rollout is cut off if more text changes it: <answer>7 may be the
    start of <answer>72, but \\boxed{7} is complete.
    """
    answer = final_answer(rollout.text)
    cut_off = rollout.truncated and answer != final_answer(rollout.text + "0")
    return vote(answer) if answer and not cut_off else None


def sample_values(group, final_answer):
    """{metric: value} of the n samples of one example: mean@n, pass@k for k = 2, 4, 8, ... and n,
    maj@n, and best@n by the mean log-prob of the sampled tokens.

    final_answer(text) -> the answer of a completion, for the vote; None or "" if it gives none.
    """
    n, right = len(group), sum(map(is_right, group))
    winner = majority_vote([vote_of(r, final_answer) for r in group])
    ks = [*(2**i for i in range(1, (n - 1).bit_length())), n]
    logps = [fmean(x for x, sampled in zip(r.vllm_logps, r.sampled) if sampled) for r in group]
    return {f"mean@{n}": right / n,
            **{f"pass@{k}": pass_at_k(n, right, k) for k in ks},
            f"maj@{n}": winner is not None and is_right(group[winner]),
            f"best@{n}/logprob": best_is_right(group, logps)}


def set_metrics(values):
    """Metrics of a set from those of its examples, dicts {metric: value}: means, the number n, and low and
    high, the 95 % interval of the accuracy."""
    n = len(values)
    low, high = wilson_interval(sum(v["accuracy"] for v in values), n)
    return mean_of(values) | {"low": low, "high": high, "n": n}


def mean_of_sets(sets):
    """Metrics of several sets together: the mean of each, with equal weight per set, and the sum of n.

    The interval of the mean accuracy comes from those of the sets, whose errors are independent (MOVER, Zou &
    Donner 2008): low = accuracy - sqrt(sum (accuracy_i - low_i)^2) / number of sets; high likewise. Of one
    set, the interval is its own.
    """
    metrics = mean_of(sets)
    low, high = (math.hypot(*(m[side] - m["accuracy"] for m in sets)) / len(sets) for side in ("low", "high"))
    return metrics | {"low": metrics["accuracy"] - low, "high": metrics["accuracy"] + high,
                      "n": sum(m["n"] for m in sets)}
