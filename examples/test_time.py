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
from runtime.batch import flatten, in_groups

# texts of the bundled model; another model may need others
OPENER = "</think><answer>"  # forces an answer
ANSWER = 16  # the most tokens of a forced answer
THINK_END = "</think>"
WAIT = "\n"  # after a line break, this model begins another step
STEP_END = "\n"
MOST_STEPS = 16
BUDGETS = (4, 8, 16, 24, 32)
WAITS = (1, 2)
SAMPLES = (1, 2, 4, 8)
PROBES = 2
ROUNDS = (1, 2, 4, 8)
TREES = (  # width, branches
    (1, 2),
    (1, 4),
    (2, 2),
    (2, 4),
)


class Sampling:
    """Lets the model continue texts, with seeds of its own, and counts the tokens it samples."""

    def __init__(self, llm, cfg, temperature):
        self.llm = llm
        self.cfg = cfg
        self.temperature = temperature
        self.calls = 0
        self.tokens = 0

    def __call__(self, examples, texts, n=1, until=None):
        """Per example, n Rollouts that begin with its text. They end after the string `until`, or
        where the model ends them. The text is encoded anew: `until` can end inside a token."""
        cfg = self.cfg
        tokenizer = self.llm.get_tokenizer()
        begun = []
        seeds = []
        for i, (example, text) in enumerate(zip(examples, texts)):
            begun.append(Begun(example, text, tokenizer))
            seeds.append(data.request_seed(cfg.seed, self.calls, i))
        prompts = [b.prompt + b.ids for b in begun]
        stops = {}
        if until:  # it may be a special token
            stops["stop"] = [until]
            stops["detokenize"] = True
            stops["skip_special_tokens"] = False
        sampled = nr.rollout(
            self.llm, prompts, n, self.temperature, cfg.max_tokens, seeds, **stops)
        self.calls += 1
        self.tokens += sum(r.length for r in sampled)
        groups = []
        for b, group in zip(begun, in_groups(sampled, n)):
            whole = [b.continued(new, until, cfg.max_tokens) for new in group]
            groups.append(whole)
        return groups


class Begun:
    """A completion up to where the model continues it. ids: the tokens of its text."""

    def __init__(self, example, text, tokenizer):
        self.prompt = example["prompt_ids"]
        # a text that the model continues has it already
        opened = data.opened_thinking(self.prompt, tokenizer)
        written = text.removeprefix(opened)
        self.ids = tokenizer.encode(written, add_special_tokens=False)
        self.text = opened + written
        self.shown = data.opened_thinking(self.prompt + self.ids, tokenizer)

    def continued(self, new, until, max_tokens):
        """A Rollout of what was begun and of what the model has sampled after it."""
        text = new.text.removeprefix(self.shown)  # nr.rollout took our text for a prompt
        if until and until in text:
            text = text.partition(until)[0] + until
        ids = self.ids + new.completion
        truncated = new.truncated or len(ids) >= max_tokens
        logps = [0.0] * len(ids)  # log-probs are not kept
        return nr.Rollout(self.prompt, ids, self.text + text, truncated, logps)


def is_open(r, until):
    """Whether a completion of Sampling stopped at `until`, so that it can be continued."""
    return r.text.endswith(until) and not r.truncated


# ----------------------------------------------------------------------------- longer and shorter

def force_answers(llm, rollouts, budget, opener=OPENER):
    """Budget forcing (s1, arXiv:2501.19393): cuts completions after `budget` tokens, appends the
    opener and lets the model answer, greedily. Completions that ended earlier stay as they are."""
    tokenizer = llm.get_tokenizer()
    opener = tokenizer.encode(opener, add_special_tokens=False)
    cut = [i for i, r in enumerate(rollouts) if len(r.completion) > budget]
    prompts = []
    starts = []
    for i in cut:
        r = rollouts[i]
        start = r.completion[:budget] + opener
        starts.append(start)
        prompts.append(r.prompt + start)
    answers = nr.rollout(llm, prompts, 1, 0.0, ANSWER)
    rollouts = list(rollouts)
    for i, start, answer in zip(cut, starts, answers):
        ids = start + answer.completion
        logps = [0.0] * len(ids)  # not kept
        sampled = [True] * len(ids)
        sampled[budget:len(start)] = [False] * len(opener)
        forced = nr.Rollout(rollouts[i].prompt, ids, "", answer.truncated, logps, sampled)
        [forced.text] = data.completion_texts([forced], tokenizer)
        rollouts[i] = forced
    return rollouts


def force_thinking(sample, examples, times, wait=WAIT):
    """"Wait" forcing (s1): where a completion ends its thinking, `wait` takes the place of the end,
    so many times. Then it answers. One that never ends its thinking stays as it is."""
    rollouts = flatten(sample(examples, [""] * len(examples), until=THINK_END))
    for time in range(times + 1):
        is_last = time == times
        ended = []
        texts = []
        for i, r in enumerate(rollouts):
            if is_open(r, THINK_END):
                thoughts = r.text.removesuffix(THINK_END)
                ended.append(i)
                texts.append(r.text if is_last else thoughts + wait)
        asked = [examples[i] for i in ended]
        continued = sample(asked, texts, until=None if is_last else THINK_END)
        for i, [r] in zip(ended, continued):
            rollouts[i] = r
    return rollouts


# -------------------------------------------------------------------------------- with a selector

def values_of(group, example, selector, until=None):
    """What a reward function gives to completions, without the gold answer: numbers or None.

    The mean of step rewards counts. A completion that stopped at `until` has no answer yet, so its
    last step reward, that of the answer, does not count.
    """
    values = []
    texts = [r.text for r in group]
    questions = [example["question"]] * len(group)
    for r, value in zip(group, selector(texts, question=questions)):
        if isinstance(value, list):
            steps = [x for _, x in value]
            if until and is_open(r, until):
                steps.pop()
            value = fmean(steps) if steps else None
        values.append(value)
    return values


def best_of(group, example, selector):
    """The sample to which a reward function gives the highest value; None is no value."""
    return highest(group, values_of(group, example, selector))


def best_of_each(groups, examples, selector):
    """best_of per example."""
    best = []
    for group, example in zip(groups, examples):
        best.append(best_of(group, example, selector))
    return best


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
    nothing_yet = [""] * len(examples)
    groups = sample(examples, nothing_yet, probes)
    difficulty = []
    for group, example in zip(groups, examples):
        values = values_of(group, example, selector)
        difficulty.append(1 - fmean(value or 0.0 for value in values))
    unit = (n - probes) * len(examples) / (sum(difficulty) or 1.0)
    ends = [round(unit * x) for x in itertools.accumulate(difficulty)]  # of each question's share
    owners = []  # number of a question, once for each further sample of it
    for i, end in enumerate(ends):
        owners += [i] * (end - len(owners))
    asked = [examples[i] for i in owners]
    more = sample(asked, [""] * len(asked))
    for i, [r] in zip(owners, more):
        groups[i].append(r)
    return best_of_each(groups, examples, selector)


def right_steps(r, example, selector):
    """The text of a completion up to the end of its last step before the first wrong one."""
    [steps] = selector([r.text], question=[example["question"]])
    end = 0
    for step_end, value in steps if isinstance(steps, list) else []:
        if value != 1:
            break
        end = step_end
    return r.text[:end]


def nothing(r, example, selector):
    """Keeps no text: a control for right_steps."""
    return ""


def refine(sample, examples, rounds, selector, keep=right_steps):
    """Revises answers that are not right by the selector, in rounds (Self-Refine, arXiv:2303.17651;
    sequential revisions, arXiv:2408.03314).

    The feedback is that of a step verifier: the model gets its former answer up to the first wrong
    step and samples the rest again. The better of the two goes into the next round.
    """
    best = flatten(sample(examples, [""] * len(examples)))
    for _ in range(rounds):
        wrong = []
        for i, (r, example) in enumerate(zip(best, examples)):
            [value] = values_of([r], example, selector)
            if value not in (None, 1.0):
                wrong.append(i)
        asked = [examples[i] for i in wrong]
        kept = [keep(best[i], examples[i], selector) for i in wrong]
        revised = sample(asked, kept)
        for i, [r] in zip(wrong, revised):
            best[i] = best_of([best[i], r], examples[i], selector)
    return best


def best_beams(group, example, width, selector):
    """The `width` beams that the selector likes best. Of equal ones, a complete one is better."""
    values = values_of(group, example, selector, STEP_END)
    order = []
    for i, r in enumerate(group):
        value = values[i] or 0.0
        order.append((-value, is_open(r, STEP_END), i))
    kept = sorted(order)[:width]
    return [group[i] for _, _, i in kept]


def tree_search(sample, examples, width, branches, selector):
    """Beam search with a step verifier (arXiv:2408.03314): of width * branches first steps it keeps
    the best `width`, continues each by one step in `branches` ways, keeps the best, and so on.

    A search ends when its best beam is complete.
    """
    first = sample(examples, [""] * len(examples), width * branches, STEP_END)
    groups = dict(enumerate(first))  # number of an example -> beams to choose from
    beams = {}  # number of an example -> its best beams
    for step in range(MOST_STEPS):
        for i, group in groups.items():
            beams[i] = best_beams(group, examples[i], width, selector)
        groups = {}  # of the searches that go on
        asked = []  # a number of an example per beam that grows
        texts = []
        for i, beam in beams.items():
            if is_open(beam[0], STEP_END):
                growing = [r for r in beam if is_open(r, STEP_END)]
                groups[i] = [r for r in beam if not is_open(r, STEP_END)]
                asked += [i] * len(growing)
                texts += [r.text for r in growing]
        if not asked or step == MOST_STEPS - 1:
            break
        grown = sample([examples[i] for i in asked], texts, branches, STEP_END)
        for i, children in zip(asked, grown):
            groups[i] += children
    return [beam[0] for beam in beams.values()]


# ------------------------------------------------------------------------------------ the measure

class Measure:
    """Runs the methods on the held-out examples and prints a line for each."""

    def __init__(self, cfg, llm, examples, verifier):
        self.cfg = cfg
        self.llm = llm
        self.examples = examples
        self.verifier = verifier
        self.prompts = [example["prompt_ids"] for example in examples]

    def report(self, name, rollouts, tokens):
        """Prints accuracy and tokens. rollouts: one per example; tokens: sampled for all."""
        nr.score(rollouts, self.examples, self.verifier)
        right = fmean(map(stats.is_right, rollouts))
        tokens = tokens / len(self.examples)
        print(f"{name:26s} accuracy {right:6.1%}   tokens per question {tokens:6.1f}")

    def method(self, name, method, *arguments, temperature=None):
        if temperature is None:
            temperature = self.cfg.temperature
        sample = Sampling(self.llm, self.cfg, temperature)
        rollouts = method(sample, self.examples, *arguments)
        self.report(name, rollouts, sample.tokens)

    def budgets(self):
        greedy = nr.rollout(self.llm, self.prompts, 1, 0.0, self.cfg.max_tokens)
        for budget in (*BUDGETS, self.cfg.max_tokens):
            rollouts = force_answers(self.llm, greedy, budget)
            tokens = sum(r.length for r in rollouts)
            self.report(f"greedy, budget {budget}", rollouts, tokens)

    def best_of_n(self):
        cfg = self.cfg
        n = max(SAMPLES)
        seeds = [data.request_seed(cfg.seed, i) for i in range(len(self.prompts))]
        samples = nr.rollout(
            self.llm, self.prompts, n, cfg.temperature, cfg.max_tokens, seeds)
        for k in SAMPLES:
            groups = [group[:k] for group in in_groups(samples, n)]
            best = best_of_each(groups, self.examples, steps_reward)
            tokens = sum(r.length for r in flatten(groups))
            self.report(f"best of {k} by `steps`", best, tokens)


def main(argv=None):
    with stop.with_one_line(ValueError, OSError, RuntimeError):
        cfg = nr.parse_config(argv)
        ranks.init_process_group(cfg.timeout)
        train_set, examples = data.load_splits(cfg, nr.load_tokenizer(cfg))
        verifier = nr.rewards.start_verifier(cfg, train_set, examples)
        cfg, _ = memory.plan(cfg)
    measure = Measure(cfg, nr.Sampler(cfg), examples, verifier)
    measure.budgets()
    for times in WAITS:
        measure.method(f"greedy, waits: {times}", force_thinking, times, temperature=0.0)
    measure.best_of_n()
    for k in SAMPLES:
        if k > PROBES:
            name = f"best of {k} by difficulty"
            measure.method(name, by_difficulty, k, PROBES, steps_reward)
    for name, keep in (("refined", right_steps), ("control: again", nothing)):
        for rounds in ROUNDS:
            measure.method(f"{name}, rounds: {rounds}", refine, rounds, steps_reward, keep)
    for width, branches in TREES:
        name = f"tree search, {width} x {branches}"
        measure.method(name, tree_search, width, branches, steps_reward)
    verifier.close()


if __name__ == "__main__":
    main()
