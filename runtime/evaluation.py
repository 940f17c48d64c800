"""The evaluation of greedy completions and of samples, of one or several sets."""
import re

import data
from runtime import ranks, stats, stop
from runtime.batch import in_groups
from runtime.verify.answer import final_answer, vote


def evaluate(run, score):
    """A greedy completion of each held-out example and, with --eval_n, samples of it.

    run: a Run of nano_rlvr. score(rollouts, examples, verifier) fills their rewards. Right: the
    first reward function gave 1. -> (metrics, a dict per greedy completion). Collective.
    """
    cfg = run.cfg
    llm = run.llm
    verifier = run.verifier
    metrics = {}
    indices = range(ranks.rank(), len(run.eval_set), ranks.world_size())  # of this rank
    examples = [run.eval_set[i] for i in indices]
    prompts = [example["prompt_ids"] for example in examples]
    greedy = run.rollout(llm, prompts, 1, 0.0, cfg.max_tokens, examples=examples)
    counts = score(greedy, examples, verifier)
    stats.add_counts(metrics, counts, "eval")
    samples = []
    if cfg.eval_n:
        seeds = [data.request_seed(cfg.seed, "eval", i) for i in indices]
        samples = run.rollout(llm, prompts, cfg.eval_n, cfg.eval_temperature, cfg.max_tokens, seeds,
                             examples=examples, top_p=cfg.eval_top_p)
        counts = score(samples, examples, verifier)
        stats.add_counts(metrics, counts, "eval")
    first_parts = [stats.first_part(r) for r in greedy]
    stop.check_scored("eval", first_parts, metrics, verifier)
    results, answers = summary(examples, indices, greedy, samples, cfg)
    return metrics | results, answers


FIRST_LOOK = "first look: "  # how its lines begin


def first_look(run, answers):
    """Says, once, what the first evaluation of a run looks like: two prompts as the model sees
    them, three completions with their rewards, the shares that are rewarded and cut off and, if no
    first reward is above 0, which of the usual reasons are present. answers: of `evaluate`,
    which has sampled them."""
    tokenizer = run.llm.get_tokenizer()
    prompts = [tokenizer.decode(example["prompt_ids"]) for example in run.eval_set[:2]]
    lines = [f"a prompt: {excerpt(prompt)}" for prompt in prompts]
    for answer in answers[:3]:
        parts = ", ".join(f"{name} {value}" for name, value in answer["parts"].items())
        gold = excerpt(str(answer["answer"]))
        lines.append(f"a completion ({parts}; gold answer {gold}): "
                     f"{excerpt(answer['completion'])}")
    n = len(answers)
    first_rewards = [next(iter(answer["parts"].values())) for answer in answers]
    rewarded = sum((value or 0) > 0 for value in first_rewards)
    cut_off = sum(answer["finish"] == "length" for answer in answers)
    lines.append(f"of {n} answers {rewarded / n:.0%} are rewarded, and {cut_off / n:.0%} were cut "
                 f"off at --max_tokens {run.cfg.max_tokens}")
    if not rewarded:
        for reason in usual_reasons(answers, prompts, run.cfg, tokenizer):
            lines.append(f"no answer is rewarded: {reason}")
    for line in lines:
        run.log.say(FIRST_LOOK + line)


def excerpt(text, most=240):
    """A text in quotes, without its middle if it is long."""
    if len(text) > most:
        text = f"{text[:most // 2]} [...] {text[-most // 2:]}"
    return repr(text)


def usual_reasons(answers, prompts, cfg, tokenizer):
    """Why an evaluation may have rewarded no answer, in words. prompts: some texts."""
    n = len(answers)
    cut_off = sum(answer["finish"] == "length" for answer in answers)
    unmarked = sum(not final_answer(answer["completion"]) for answer in answers)
    unscored = [answer for answer in answers if None in answer["parts"].values()]
    reasons = []
    if cut_off:
        reasons.append(f"{cut_off / n:.0%} were cut off: see --max_tokens")
    if unmarked:
        reasons.append(f"{unmarked / n:.0%} mark no final answer: see --template")
    if unscored:
        gold = excerpt(str(unscored[0]["answer"]))
        reasons.append(f"{len(unscored) / n:.0%} have no reward. The reward failed or cannot read "
                       f"the gold answer, one is {gold}: see --answer_key and --rewards")
    if lacks_chat_format(prompts, cfg, tokenizer):
        reasons.append(f"--template {cfg.template} is not this model's chat format: try chat")
    return reasons or ["no usual reason is present: compare completions and gold answers"]


def lacks_chat_format(prompts, cfg, tokenizer):
    """Whether the model's name says that it was trained to chat, and its prompts have none of the
    control tokens of its chat template."""
    is_instruct = re.search(r"instruct|chat|-it\b", cfg.model, re.I)
    template = tokenizer.chat_template
    if not is_instruct or not template or cfg.template == "chat":
        return False
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens -= {tokenizer.bos_token, tokenizer.eos_token}  # other templates have them, too
    text = "".join(prompts)
    return not any(token in template and token in text for token in tokens)


def vote_of(rollout):
    """What a rollout votes for; None if it has no answer, or one that is cut off.

    The answer of a truncated rollout is cut off if more text changes it: <answer>7 may be the start
    of <answer>72, but \\boxed{7} is complete.
    """
    answer = final_answer(rollout.text)
    cut_off = rollout.truncated and answer != final_answer(rollout.text + "0")
    return vote(answer) if answer and not cut_off else None


def sample_values(group):
    """{metric: value} of the n samples of one example: mean@n, maj@n, and pass@k for k = 2, 4, 8,
    ... and n."""
    n = len(group)
    right = sum(map(stats.is_right, group))
    values = {f"mean@{n}": right / n}
    k = 2
    while k < n:
        values[f"pass@{k}"] = stats.pass_at_k(n, right, k)
        k *= 2
    values[f"pass@{n}"] = stats.pass_at_k(n, right, n)
    winner = stats.majority_vote([vote_of(r) for r in group])
    values[f"maj@{n}"] = winner is not None and stats.is_right(group[winner])
    return values


def set_metrics(values):
    """Metrics of a set from those of its examples, dicts {metric: value}: means, the number n, and
    low and high, the 95 % interval of the accuracy. `of` is the number with those left out."""
    n = len(values)
    right = sum(value["accuracy"] for value in values)
    low, high = stats.wilson_interval(right, n)
    return stats.mean_of(values) | {"low": low, "high": high, "n": n}


def summary(examples, indices, greedy, samples, cfg):
    """Metrics eval/... over all ranks and, for eval.jsonl, a dict per example. Collective.

    examples: those of this rank; indices: their numbers; greedy: a scored rollout each; samples:
    --eval_n of each, scored, or []. With several sets there are also eval/<set>/..., and eval/...
    has the means of the sets.
    """
    groups = in_groups(samples, cfg.eval_n) if samples else [[] for _ in examples]
    rows = []
    for i, example, r, group in zip(indices, examples, greedy, groups):
        right = stats.is_right(r)
        value = {
            "accuracy": right,
            "unscored": stats.first_part(r) is None,  # no reward counts as wrong
            "length": r.length,
            "truncated": r.truncated,
            "of": example.get("eval_of", 0),
        }
        if group:
            value |= sample_values(group)
        answer = {
            "set": example.get("eval_set", cfg.eval_data or cfg.data or cfg.task),
            "question": example["question"],
            "answer": example.get("answer"),
            "right": right,
        }
        rows.append((i, value, answer | r.record()))
    rows = sorted(ranks.all_gather(rows))  # no index occurs twice
    values_of = {}  # name of a set -> the values of its examples
    for _, value, answer in rows:
        values_of.setdefault(answer["set"], []).append(value)
    sets = {name: set_metrics(values) for name, values in values_of.items()}
    mean = stats.mean_of(list(sets.values()))
    mean["n"] = len(rows)
    metrics = {}
    if len(sets) > 1:
        # the mean of intervals is no interval of the mean
        for name in ("low", "high", "of"):
            del mean[name]
        for name, of_set in sets.items():
            for key, x in of_set.items():
                metrics[f"eval/{name}/{key}"] = x
    for key, x in mean.items():
        metrics[f"eval/{key}"] = x
    return metrics, [answer for _, _, answer in rows]
