"""The evaluation of greedy completions and of samples, of one or several sets.

`examples` are dicts; the column eval_set names the set of an example, without it there is one set.
"""
import math
from statistics import fmean

import rewards
from runtime import dist
from runtime.stats import first_part, is_right, majority_vote, mean_of, pass_at_k, wilson_interval
from verify.answer import vote


def start_verifier(cfg, train_set, eval_set):
    """The Verifier of --rewards. Raises ValueError with one line if a reward function reads a
    column that its rows do not have, or cannot read any gold answer."""
    verifier = rewards.Verifier(
        cfg.rewards, timeout=cfg.reward_timeout, messages=cfg.template == "chat",
        allow_unsafe_code=cfg.allow_unsafe_code, random_seed=cfg.seed, max_tokens=cfg.max_tokens,
        overlong_buffer=math.ceil(cfg.overlong_buffer * cfg.max_tokens) or None,
        row_specs=[e.get("reward") for e in train_set + eval_set])
    verifier.check_columns(train_set, cfg.data or cfg.task)
    verifier.check_columns(eval_set, cfg.eval_data or cfg.data or cfg.task)
    verifier.count_unreadable(train_set, dist.print_once)
    return verifier


def vote_of(rollout):
    """What a rollout votes for; None if it has no answer, or one that is cut off.

    The answer of a truncated rollout is cut off if more text changes it: <answer>7 may be the start
    of <answer>72, but \\boxed{7} is complete.
    """
    answer = rewards.final_answer(rollout.text)
    cut_off = rollout.truncated and answer != rewards.final_answer(rollout.text + "0")
    return vote(answer) if answer and not cut_off else None


def best_is_right(group, scores):
    """Whether the sample with the highest score is right, the first of equals; None is no score."""
    scored = [(score, r) for score, r in zip(scores, group) if score is not None]
    return is_right(max(scored, key=lambda pair: pair[0])[1])


def sample_values(group):
    """{metric: value} of the n samples of one example: mean@n, pass@k for k = 2, 4, 8, ... and n,
    maj@n, and best@n by the mean log-prob of the sampled tokens."""
    n, right = len(group), sum(map(is_right, group))
    values = {f"mean@{n}": right / n}
    for k in [*(2**i for i in range(1, (n - 1).bit_length())), n]:
        values[f"pass@{k}"] = pass_at_k(n, right, k)
    winner = majority_vote(list(map(vote_of, group)))
    values[f"maj@{n}"] = winner is not None and is_right(group[winner])
    logps = [fmean(x for x, sampled in zip(r.vllm_logps, r.sampled) if sampled) for r in group]
    return values | {f"best@{n}/logprob": best_is_right(group, logps)}


def set_metrics(values):
    """Metrics of a set from those of its examples, dicts {metric: value}: means, the number n, and
    low and high, the 95 % interval of the accuracy."""
    n = len(values)
    low, high = wilson_interval(sum(v["accuracy"] for v in values), n)
    return mean_of(values) | {"low": low, "high": high, "n": n}


def mean_of_sets(sets):
    """Metrics of several sets: the mean of each, with equal weight per set, and the sum of n.

    The interval of the mean accuracy comes from those of the sets, whose errors are independent
    (MOVER, Zou & Donner 2008): low = accuracy - sqrt(sum (accuracy_i - low_i)^2) / number of sets.
    """
    metrics = mean_of(sets)
    for side, sign in (("low", -1), ("high", 1)):
        errors = [m[side] - m["accuracy"] for m in sets]
        metrics[side] = metrics["accuracy"] + sign * math.hypot(*errors) / len(sets)
    return metrics | {"n": sum(m["n"] for m in sets)}


def summary(examples, indices, greedy, groups, cfg):
    """Metrics eval/... over all ranks and, for eval.jsonl, a dict per example. Collective.

    examples: those of this rank; indices: their numbers; greedy: a scored rollout each; groups:
    the scored samples of each, with --eval_n, else []. With several sets there are also
    eval/<set>/..., and eval/... has the means of the sets.
    """
    values = [{"accuracy": is_right(r), "no_verdict": first_part(r) is None, "length": r.length,
               "truncated": r.truncated} for r in greedy]  # per example; no verdict is wrong
    for value, group in zip(values, groups):
        value |= sample_values(group)
    answers = [{"set": e.get("eval_set", cfg.eval_data or cfg.data or cfg.task),
                "question": e["question"], "answer": e.get("answer"), "completion": r.text,
                "reward": r.reward, "parts": r.parts, "right": is_right(r), "tokens": r.length,
                "finish": "length" if r.truncated else "stop"}
               for e, r in zip(examples, greedy)]
    rows = sorted(dist.all_gather(list(zip(indices, values, answers))), key=lambda row: row[0])
    by_set = {}
    for _, value, answer in rows:
        by_set.setdefault(answer["set"], []).append(value)
    sets, metrics = {name: set_metrics(of_set) for name, of_set in by_set.items()}, {}
    if len(sets) > 1:
        metrics |= {f"eval/{name}/{key}": x for name, m in sets.items() for key, x in m.items()}
    metrics |= {f"eval/{key}": x for key, x in mean_of_sets(list(sets.values())).items()}
    return metrics, [answer for _, _, answer in rows]
