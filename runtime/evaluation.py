"""The evaluation of greedy completions and of samples, of one or several sets.

`examples` are dicts; the column eval_set names the set of an example, without it there is one set.
"""
import math
import os

import rewards
from runtime import dist, stats


def start_verifier(cfg, train_set, eval_set):
    """The Verifier of --rewards. Raises ValueError with one line if a reward function reads a column that its
    rows do not have, or cannot read any gold answer."""
    verifier = rewards.Verifier(
        cfg.rewards, timeout=cfg.reward_timeout, messages=cfg.template == "chat",
        allow_unsafe_code=cfg.allow_unsafe_code, random_seed=cfg.seed, max_tokens=cfg.max_tokens,
        overlong_buffer=math.ceil(cfg.overlong_buffer * cfg.max_tokens) or None,
        judge_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), judge_model=cfg.judge_model,
        row_specs=[e.get("reward") for e in train_set + eval_set])
    verifier.check_columns(train_set, cfg.data or cfg.task)
    verifier.check_columns(eval_set, cfg.eval_data or cfg.data or cfg.task)
    verifier.count_unreadable(train_set, dist.print_once)
    return verifier


def summary(examples, indices, greedy, groups, cfg):
    """Metrics eval/... over all ranks and, for eval.jsonl, a dict per example with its greedy completion.

    examples: those of this rank; indices: their numbers; greedy: a scored rollout each; groups: the scored
    samples of each, with --eval_n, else []. With several sets there are also eval/<set>/..., and eval/... has
    the means of the sets. Collective.
    """
    values = [stats.greedy_values(r) for r in greedy]  # per example, {metric: value}
    for value, group in zip(values, groups):
        value |= stats.sample_values(group, rewards.final_answer)
    answers = [{"set": e.get("eval_set", cfg.eval_data or cfg.data or cfg.task), "question": e["question"],
                "answer": e.get("answer"), "completion": r.text, "reward": r.reward, "parts": r.parts,
                "right": stats.is_right(r), "tokens": r.length, "finish": "length" if r.truncated else "stop"}
               for e, r in zip(examples, greedy)]
    rows = sorted(dist.all_gather(list(zip(indices, values, answers))), key=lambda row: row[0])
    sets, metrics = {}, {}
    for _, value, answer in rows:
        sets.setdefault(answer["set"], []).append(value)
    sets = {name: stats.set_metrics(values) for name, values in sets.items()}
    if len(sets) > 1:
        metrics |= {f"eval/{name}/{key}": x for name, m in sets.items() for key, x in m.items()}
    metrics |= {f"eval/{key}": x for key, x in stats.mean_of_sets(list(sets.values())).items()}
    return metrics, [answer for _, _, answer in rows]
