"""Test-time compute: what more tokens, or fewer, do to the accuracy of a model, without training.

    python -m examples.test_time       the bundled model, minutes on a CPU; flags of nano_rlvr.py

Prints the accuracy and the sampled tokens per question of six methods: thinking budgets, "Wait"
forcing, best of n, best of n by difficulty, refinement, and tree search. The last four need a
selector: a reward function that gets the question and no gold answer. Here it is steps_reward,
which works out the sum itself and so never errs. With a learned verifier, expect less of them.
"""
import itertools
from statistics import fmean

import data
import nano_rlvr as nr
from examples.process_rewards import steps_reward
from runtime import memory, ranks, stats, stop

# texts of the bundled model; another model may need others
OPENER, ANSWER = "</think><answer>", 16  # to force an answer, and the most tokens that it gets
THINK_END, WAIT = "</think>", "\n"  # after a line break, this model begins another step
STEP_END, MOST_STEPS = "\n", 16
BUDGETS, WAITS, SAMPLES = (4, 8, 16, 24, 32), (1, 2), (1, 2, 4, 8)
PROBES, ROUNDS, TREES = 2, (1, 2, 4, 8), ((1, 2), (1, 4), (2, 2), (2, 4))  # width, branches


class Sampling:
    """Lets the model continue texts, with seeds of its own, and counts the tokens it samples."""

    def __init__(self, llm, cfg, temperature):
        self.llm, self.cfg, self.temperature = llm, cfg, temperature
        self.calls = self.tokens = 0

    def __call__(self, examples, texts, n=1, until=None):
        """Per example, n Rollouts that begin with its text. They end after the string `until`, or
        where the model ends them. The text is encoded anew: `until` can end inside a token."""
        encode, cfg = self.llm.get_tokenizer().encode, self.cfg
        starts = [encode(text, add_special_tokens=False) for text in texts]
        prompts = [e["prompt_ids"] + start for e, start in zip(examples, starts)]
        seeds = [data.request_seed(cfg.seed, self.calls, i) for i in range(len(prompts))]
        stops = dict(stop=[until], detokenize=True) if until else {}
        sampled = nr.rollout(
            self.llm, prompts, n, self.temperature, cfg.max_tokens, seeds, **stops)
        self.calls += 1
        self.tokens += sum(r.length for r in sampled)
        groups = [[] for _ in examples]
        for i, new in enumerate(sampled):
            e, start, text = examples[i // n], starts[i // n], new.text
            if until and until in text:
                text = text.partition(until)[0] + until
            ids = start + new.completion
            truncated = new.truncated or len(ids) >= cfg.max_tokens
            groups[i // n].append(nr.Rollout(e["prompt_ids"], ids, texts[i // n] + text, truncated,
                                             [0.0] * len(ids)))  # log-probs are not kept
        return groups


def is_open(r, until):
    """Whether a completion of Sampling stopped at `until`, so that it can be continued."""
    return r.text.endswith(until) and not r.truncated


def force_answers(llm, rollouts, budget, opener=OPENER):
    """Budget forcing (s1, arXiv:2501.19393): cuts completions after `budget` tokens, appends the
    opener and lets the model answer, greedily. Completions that ended earlier stay as they are."""
    tokenizer = llm.get_tokenizer()
    opener = tokenizer.encode(opener, add_special_tokens=False)
    cut = [r for r in rollouts if len(r.completion) > budget]
    prompts = [r.prompt + r.completion[:budget] + opener for r in cut]
    forced = {}
    for r, answer in zip(cut, nr.rollout(llm, prompts, 1, 0.0, ANSWER)):
        ids = r.completion[:budget] + opener + answer.completion
        text = tokenizer.decode(ids, skip_special_tokens=True)
        sampled = [True] * budget + [False] * len(opener) + [True] * len(answer.completion)
        logps = [0.0] * len(ids)  # not kept
        forced[id(r)] = nr.Rollout(r.prompt, ids, text, answer.truncated, logps, sampled)
    return [forced.get(id(r), r) for r in rollouts]


def force_thinking(sample, examples, times, wait=WAIT):
    """"Wait" forcing (s1): where a completion ends its thinking, `wait` takes the place of the end,
    so many times. Then it answers. One that never ends its thinking stays as it is."""
    rollouts = [r for [r] in sample(examples, [""] * len(examples), until=THINK_END)]
    for time in range(times + 1):
        ended = [i for i, r in enumerate(rollouts) if is_open(r, THINK_END)]
        texts, until = [rollouts[i].text for i in ended], None
        if time < times:
            texts = [text.removesuffix(THINK_END) + wait for text in texts]
            until = THINK_END
        continued = sample([examples[i] for i in ended], texts, until=until)
        for i, [r] in zip(ended, continued):
            rollouts[i] = r
    return rollouts


def values_of(group, example, selector, until=None):
    """What a reward function gives to completions, without the gold answer: numbers or None.

    The mean of step rewards counts. A completion that stopped at `until` has no answer yet, so its
    last step reward, that of the answer, does not count.
    """
    values = selector([r.text for r in group], question=[example["question"]] * len(group))
    for i, (r, value) in enumerate(zip(group, values)):
        if isinstance(value, list):
            steps = [x for _, x in value]
            if until and is_open(r, until):
                steps.pop()
            values[i] = fmean(steps) if steps else None
    return values


def best_of(group, example, selector):
    """The sample to which a reward function gives the highest value; None is no value."""
    return highest(group, values_of(group, example, selector))


def highest(group, scores):
    """The sample with the highest score, the first of equals; None is no score."""
    scores = list(scores)
    known = [i for i, score in enumerate(scores) if score is not None]
    return group[max(known, key=scores.__getitem__, default=0)]


def mean_logp(r):
    """The mean log-prob of the sampled tokens, a score that costs nothing."""
    return fmean(itertools.compress(r.vllm_logps, r.loss_mask))


def by_difficulty(sample, examples, n, probes, selector):
    """Best of n on average, with more samples for hard questions (arXiv:2408.03314).

    The difficulty of a question is 1 - the mean value of its first samples, the probes. The other
    n - probes samples per question are shared out in proportion to it; none if nothing is hard.
    """
    groups = sample(examples, [""] * len(examples), probes)
    difficulty = [1 - fmean(value or 0.0 for value in values_of(group, e, selector))
                  for group, e in zip(groups, examples)]
    unit = (n - probes) * len(examples) / (sum(difficulty) or 1.0)
    ends = [round(unit * x) for x in itertools.accumulate(difficulty)]  # of each question's share
    owners = [i for i, (start, end) in enumerate(zip([0, *ends], ends)) for _ in range(start, end)]
    more = sample([examples[i] for i in owners], [""] * len(owners))
    for i, [r] in zip(owners, more):
        groups[i].append(r)
    return [best_of(group, e, selector) for group, e in zip(groups, examples)]


def right_steps(r, example, selector):
    """The text of a completion up to the end of its last step before the first wrong one."""
    steps = selector([r.text], question=[example["question"]])[0]
    if not isinstance(steps, list):
        return ""
    right = itertools.takewhile(lambda step: step[1] == 1, steps)
    return r.text[:max((end for end, _ in right), default=0)]


def refine(sample, examples, rounds, selector, keep=right_steps):
    """Revises answers that are not right by the selector, in rounds (Self-Refine, arXiv:2303.17651;
    sequential revisions, arXiv:2408.03314).

    The feedback is that of a step verifier: the model gets its former answer up to the first wrong
    step and samples the rest again. The better of the two goes into the next round.
    """
    best = [r for [r] in sample(examples, [""] * len(examples))]
    for _ in range(rounds):
        wrong = [i for i, (r, e) in enumerate(zip(best, examples))
                 if values_of([r], e, selector)[0] not in (None, 1.0)]
        kept = [keep(best[i], examples[i], selector) for i in wrong]
        revised = sample([examples[i] for i in wrong], kept)
        for i, [r] in zip(wrong, revised):
            best[i] = best_of([best[i], r], examples[i], selector)
    return best


def tree_search(sample, examples, width, branches, selector):
    """Beam search with a step verifier (arXiv:2408.03314): of width * branches first steps it keeps
    the best `width`, continues each by one step in `branches` ways, keeps the best, and so on.

    A search ends when its best beam is complete. Of equal beams, a complete one is better.
    """
    def best(group, example):
        values = values_of(group, example, selector, STEP_END)
        ranks = [(value or 0.0, not is_open(r, STEP_END)) for r, value in zip(group, values)]
        order = sorted(range(len(group)), key=ranks.__getitem__, reverse=True)
        return [group[i] for i in order[:width]]

    groups = sample(examples, [""] * len(examples), width * branches, STEP_END)
    beams = [best(group, e) for group, e in zip(groups, examples)]
    for _ in range(1, MOST_STEPS):
        growing = [(i, r) for i, beam in enumerate(beams) if is_open(beam[0], STEP_END)
                   for r in beam if is_open(r, STEP_END)]
        groups = {i: [r for r in beams[i] if not is_open(r, STEP_END)] for i, _ in growing}
        steps = sample([examples[i] for i, _ in growing], [r.text for _, r in growing], branches,
                       STEP_END)
        for (i, _), children in zip(growing, steps):
            groups[i] += children
        for i, group in groups.items():
            beams[i] = best(group, examples[i])
    return [beam[0] for beam in beams]


def main(argv=None):
    with stop.with_one_line(ValueError, OSError, RuntimeError):
        cfg = nr.parse_config(argv)
        ranks.init_process_group(cfg.timeout)
        train_set, examples = data.load_splits(cfg, nr.load_tokenizer(cfg))
        verifier = nr.rewards.start_verifier(cfg, train_set, examples)
        cfg, _ = memory.plan(cfg)
    llm, n = nr.Sampler(cfg), max(SAMPLES)

    def report(name, rollouts, tokens):
        nr.score(rollouts, examples, verifier)
        right, tokens = fmean(map(stats.is_right, rollouts)), tokens / len(examples)
        print(f"{name:26s} accuracy {right:6.1%}   tokens per question {tokens:6.1f}")

    def measure(name, method, *arguments, temperature=cfg.temperature):
        sample = Sampling(llm, cfg, temperature)
        report(name, method(sample, examples, *arguments), sample.tokens)

    prompts = [e["prompt_ids"] for e in examples]
    greedy = nr.rollout(llm, prompts, 1, 0.0, cfg.max_tokens)
    for budget in (*BUDGETS, cfg.max_tokens):
        rollouts = force_answers(llm, greedy, budget)
        report(f"greedy, budget {budget}", rollouts, sum(r.length for r in rollouts))
    for times in WAITS:
        measure(f"greedy, waits: {times}", force_thinking, times, temperature=0.0)
    seeds = [data.request_seed(cfg.seed, i) for i in range(len(examples))]
    samples = nr.rollout(llm, prompts, n, cfg.temperature, cfg.max_tokens, seeds)
    for k in SAMPLES:
        groups = [samples[i:i + k] for i in range(0, len(samples), n)]
        best = [best_of(group, e, steps_reward) for group, e in zip(groups, examples)]
        report(f"best of {k} by `steps`", best, sum(r.length for group in groups for r in group))
    for k in (k for k in SAMPLES if k > PROBES):
        measure(f"best of {k} by difficulty", by_difficulty, k, PROBES, steps_reward)
    for name, keep in (("refined", right_steps), ("control: again", lambda *_: "")):
        for rounds in ROUNDS:
            measure(f"{name}, rounds: {rounds}", refine, rounds, steps_reward, keep)
    for width, branches in TREES:
        measure(f"tree search, {width} x {branches}", tree_search, width, branches, steps_reward)
    verifier.close()


if __name__ == "__main__":
    main()
