"""The evaluation: greedy completions, samples, best of n, and thinking budgets, of one or several sets.

`examples` are dicts; the column eval_set names the set of an example, without it there is one set.
"""
import functools
import math
import re
from statistics import fmean

from runtime import dist, guard, stats

LEAST_ANSWER, MOST_ANSWER = 16, 128  # tokens of an answer after a thinking budget


def token_budgets(spec):
    """--eval_budget "64,256" -> [64, 256]. Raises ValueError with one line."""
    if not re.fullmatch(r"([1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*)?", spec):
        raise ValueError(f"--eval_budget {spec}: must be numbers of tokens such as 64,256")
    return sorted({int(number) for number in spec.split(",") if number})


def answer_opening(cfg, tokenizer, opener):
    """The token ids of the opener (text), and how many tokens an answer may have after the largest budget.

    Raises ValueError with one line if they do not fit into --max_tokens.
    """
    ids, budget = tokenizer.encode(opener, add_special_tokens=False), max(token_budgets(cfg.eval_budget))
    if budget + len(ids) + LEAST_ANSWER > cfg.max_tokens:
        raise ValueError(f"--eval_budget {budget}: with {len(ids)} tokens that open the answer and "
                         f"{LEAST_ANSWER} for it, this is more than --max_tokens {cfg.max_tokens}")
    return ids, min(cfg.max_tokens - budget - len(ids), MOST_ANSWER)


def start_verifiers(cfg, Verifier, train_set, eval_set):
    """The Verifier of --rewards, and that of --eval_select or None.

    Verifier: the class, with its parser. Raises ValueError with one line if a reward function reads a column
    that its rows do not have, or cannot read any gold answer. The selector may read the question only.
    """
    make = functools.partial(
        Verifier, timeout=cfg.reward_timeout, messages=cfg.template == "chat",
        allow_unsafe_code=cfg.allow_unsafe_code, random_seed=cfg.seed, max_tokens=cfg.max_tokens,
        overlong_buffer=math.ceil(cfg.overlong_buffer * cfg.max_tokens) or None, overlong=cfg.overlong,
        judge_url=cfg.judge_url, judge_model=cfg.judge_model)
    verifier = make(cfg.rewards, row_specs=[e.get("reward") for e in train_set + eval_set])
    verifier.check_columns(train_set, cfg.data or cfg.task)
    verifier.check_columns(eval_set, cfg.eval_data or cfg.data or cfg.task)
    verifier.count_unreadable(train_set, dist.print_once)
    if not cfg.eval_select:
        return verifier, None
    try:
        selector = make(cfg.eval_select)
        selector.check_columns([{"question": ""}], "--eval_select, which sees the question only,")
    except ValueError as e:
        raise ValueError(str(e).replace("--rewards", "--eval_select", 1)) from None
    return verifier, selector


def select(selector, groups, examples):
    """The selector's value of each sample, a list per group, and its counts. A sample with step rewards has
    their mean. The selector gets the completions and the question, no other column: no gold answer."""
    samples = [r for group in groups for r in group]
    questions = [e["question"] for e, group in zip(examples, groups) for _ in group]
    values, _, counts = selector([r.text for r in samples], question=questions, prompts=questions,
                                 completion_ids=[r.completion for r in samples], step=0)
    values = iter([fmean(x for _, x in v) if isinstance(v, list) else v for v in values])
    return [[next(values) for _ in group] for group in groups], counts


def open_answers(rollouts, cfg, tokenizer, opener, sample):
    """Budget forcing (s1, arXiv:2501.19393): cuts each greedy completion that is longer than a budget there,
    appends the opener and lets the model answer, greedily. All answers come from one call. Collective.

    -> {(budget, index): rollout with the cut completion, the opener and the answer}.
    """
    opener, limit = answer_opening(cfg, tokenizer, opener)
    opened = {(budget, i): r.completion[:budget] + opener for budget in token_budgets(cfg.eval_budget)
              for i, r in enumerate(rollouts) if len(r.completion) > budget}
    prompts = [rollouts[i].prompt + tokens for (_, i), tokens in opened.items()]
    for (key, tokens), r in zip(opened.items(), sample(prompts, 1, 0.0, limit)):  # collective: also without
        tokens = tokens + r.completion
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        opened[key] = type(r)(rollouts[key[1]].prompt, tokens, text, r.truncated, [0.0] * len(tokens))
    return opened


def run(cfg, llm, examples, rollout, score, verifier, selector, seeds, opener, final_answer):
    """Evaluates on the examples, which are divided among the ranks. Collective.

    rollout(llm, prompts, n, temperature, max_tokens, seeds=None) samples; score(rollouts, examples, verifier)
    fills in rewards and returns counts. seeds: one per example. opener: text of an answer's beginning.

    Returns the metrics eval/... and, for eval.jsonl, a dict per example with its greedy completion. With
    several sets there are also eval/<set>/..., and eval/... has the means of the sets.
    Raises RunError if the first reward function, or the selector, has no verdict for any completion.
    """
    indices = range(dist.rank(), len(examples), dist.world_size())
    mine = [examples[i] for i in indices]
    prompts, metrics = [e["prompt_ids"] for e in mine], {}
    sample = functools.partial(rollout, llm)

    def judge(rollouts, examples):
        stats.add_counts(metrics, score(rollouts, examples, verifier), "eval")

    greedy = sample(prompts, 1, 0.0, cfg.max_tokens)
    judge(greedy, mine)
    guard.check_verdicts("eval", [stats.first_part(r) for r in greedy], metrics, verifier)
    values = [stats.greedy_values(r) for r in greedy]  # per example, {metric: value}
    if n := cfg.eval_n:
        samples = sample(prompts, n, cfg.temperature, cfg.max_tokens, [seeds[i] for i in indices])
        judge(samples, mine)
        groups = [samples[i:i + n] for i in range(0, len(samples), n)]
        values = [v | stats.sample_values(group, final_answer) for v, group in zip(values, groups)]
        if selector:
            scores, counts = select(selector, groups, mine)
            stats.add_counts(metrics, counts, "eval")
            guard.check_verdicts("eval", sum(scores, []), metrics, selector)
            name = f"best@{n}/{'+'.join(selector.weights_of(None))}"
            values = [v | {name: stats.best_is_right(*pair)} for v, *pair in zip(values, groups, scores)]
    if cfg.eval_budget:
        opened = open_answers(greedy, cfg, llm.get_tokenizer(), opener, sample)
        counts = {"reward/timeouts": 0, "reward/crashes": 0}
        if opened:  # perhaps only on other ranks
            counts = score(list(opened.values()), [mine[i] for _, i in opened], verifier)
        stats.add_counts(metrics, counts, "eval")
        values = [v | {f"budget@{budget}": stats.is_right(opened.get((budget, i), r))
                       for budget in token_budgets(cfg.eval_budget)}
                  for i, (v, r) in enumerate(zip(values, greedy))]

    answers = [{"set": e.get("eval_set", cfg.eval_data or cfg.data or cfg.task), "question": e["question"],
                "answer": e.get("answer"), "completion": r.text, "reward": r.reward, "parts": r.parts,
                "right": stats.is_right(r), "tokens": r.length, "finish": "length" if r.truncated else "stop"}
               for e, r in zip(mine, greedy)]
    rows = sorted(dist.all_gather(list(zip(indices, values, answers))), key=lambda row: row[0])
    sets = {}
    for _, value, answer in rows:
        sets.setdefault(answer["set"], []).append(value)
    sets = {name: stats.set_metrics(values) for name, values in sets.items()}
    if len(sets) > 1:
        metrics |= {f"eval/{name}/{key}": x for name, m in sets.items() for key, x in m.items()}
    metrics |= {f"eval/{key}": x for key, x in stats.mean_of_sets(list(sets.values())).items()}
    return metrics, [answer for _, _, answer in rows]
