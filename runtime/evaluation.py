"""The evaluation of greedy completions and of samples, of one or several sets."""
import rewards
from runtime import ranks
from runtime.batch import in_groups
from runtime.stats import first_part, is_right, majority_vote, mean_of, pass_at_k, wilson_interval
from runtime.verify.answer import vote


def vote_of(rollout):
    """What a rollout votes for; None if it has no answer, or one that is cut off.

    The answer of a truncated rollout is cut off if more text changes it: <answer>7 may be the start
    of <answer>72, but \\boxed{7} is complete."""
    answer = rewards.final_answer(rollout.text)
    cut_off = rollout.truncated and answer != rewards.final_answer(rollout.text + "0")
    return vote(answer) if answer and not cut_off else None


def sample_values(group):
    """{metric: value} of the n samples of one example: mean@n, maj@n, and pass@k for k = 2, 4, 8,
    ... and n."""
    n, right = len(group), sum(map(is_right, group))
    values = {f"mean@{n}": right / n}
    for k in [*(2**i for i in range(1, (n - 1).bit_length())), n]:
        values[f"pass@{k}"] = pass_at_k(n, right, k)
    winner = majority_vote(list(map(vote_of, group)))
    values[f"maj@{n}"] = winner is not None and is_right(group[winner])
    return values


def set_metrics(values):
    """Metrics of a set from those of its examples, dicts {metric: value}: means, the number n, and
    low and high, the 95 % interval of the accuracy. `of` is the number with those left out."""
    n = len(values)
    low, high = wilson_interval(sum(v["accuracy"] for v in values), n)
    return mean_of(values) | {"low": low, "high": high, "n": n}


def summary(examples, indices, greedy, samples, cfg):
    """Metrics eval/... over all ranks and, for eval.jsonl, a dict per example. Collective.

    examples: those of this rank; indices: their numbers; greedy: a scored rollout each; samples:
    --eval_n of each, scored, or []. With several sets there are also eval/<set>/..., and eval/...
    has the means of the sets."""
    values = [{"accuracy": is_right(r), "unscored": first_part(r) is None, "length": r.length,
               "truncated": r.truncated, "of": e.get("eval_of", 0)}
              for e, r in zip(examples, greedy)]  # per example; no reward is wrong
    for value, group in zip(values, in_groups(samples, cfg.eval_n or 1)):
        value |= sample_values(group)
    answers = [{"set": e.get("eval_set", cfg.eval_data or cfg.data or cfg.task),
                "question": e["question"], "answer": e.get("answer"), "right": is_right(r)}
               | r.record() for e, r in zip(examples, greedy)]
    rows = sorted(ranks.all_gather(list(zip(indices, values, answers))))  # no index occurs twice
    by_set = {}
    for _, value, answer in rows:
        by_set.setdefault(answer["set"], []).append(value)
    sets = {name: set_metrics(of_set) for name, of_set in by_set.items()}
    mean, metrics = mean_of(list(sets.values())) | {"n": len(rows)}, {}
    if len(sets) > 1:
        # the mean of intervals is no interval of the mean
        del mean["low"], mean["high"], mean["of"]
        for name, own in sets.items():
            metrics |= {f"eval/{name}/{key}": x for key, x in own.items()}
    metrics |= {f"eval/{key}": x for key, x in mean.items()}
    return metrics, [answer for _, _, answer in rows]
