"""GRPO with a reward per step of reasoning: process supervision (GRPO+PS, arXiv:2402.03300, 4.1.3).

    python -m examples.process_rewards --steps 30                      sums such as 14+2+9
    python -m examples.process_rewards --step_rewards my_file.py:my_steps --data my.jsonl

A step reward function is f(completions, **columns) -> per completion [(end, value), ...]: a pair
per step, which ends after `end` characters of the text. `end` rises from step to step, up to the
length of the text. A completion without such a list has one step, its outcome. The values of all
steps of a group are normalised together. A token's advantage is the sum of the advantages of the
steps that end at it or later.

--rewards still gives the outcome: the accuracy, the metrics and which groups have zero std. A step
reward function runs in the trainer's process: nothing limits its time. Flags of nano_rlvr.py work.
"""
import argparse
import bisect
import functools
import itertools
import math
import re
import sys

import torch

import nano_rlvr as nr
from data import completion_texts, opened_thinking
from rewards import each, final_number
from runtime import ranks
from runtime.messages import RunError
from runtime.verify.user_code import load, user_error

SUM = re.compile(r"\d{1,18}([+-]\d{1,18})+", re.A)
RUNNING_TOTAL = re.compile(r"=[ \t]*(-?\w+(?:\.\d+)?)?", re.A)


@each
def steps_reward(text, question):
    """A reward per running total of a sum such as 14+2+9 and for the final answer: 1.0 or 0.0.

    What follows "=" in the text before </think> is a running total, and ends a step there. The k-th
    one is right if it is the sum of the first k + 1 terms; one too many is wrong, so that repeating
    a total does not pay. One at the very end of a text is left out: it may be cut off. The final
    answer, read by gsm8k's rule, is the last step. 0.0 for an empty text; None if the question is
    no sum.

    >>> steps_reward(["<think>14+2=16\\n16+9=26</think><answer>25</answer>"], question="14+2+9")
    [[(14, 1.0), (22, 0.0), (49, 1.0)]]
    """
    question = question.replace(" ", "")
    if not SUM.fullmatch(question):
        return None
    if not text:
        return 0.0
    totals = list(itertools.accumulate(map(int, re.findall(r"[+-]?\d+", question))))
    wanted = map(str, totals[1:])
    thinking = text.rpartition("</think>")[0] if "</think>" in text else text
    steps = []
    for match in RUNNING_TOTAL.finditer(thinking):
        if match.end() < len(text):
            right = match[1] == next(wanted, "")
            steps.append((match.end(), float(right)))
    right = final_number(text) == totals[-1]
    steps.append((len(text), float(right)))
    return steps


def check_steps(steps, text):
    """Raises ValueError if the ends of steps do not rise within 1..len(text)."""
    before = 0
    for end, value in steps:
        if not before < end <= len(text) or not math.isfinite(value):
            raise ValueError(f"steps {str(steps)[:200]}: their ends must rise within 1..len(text), "
                             f"here {len(text)}, and their values must be finite")
        before = end


def in_tokens(steps, r, tokenizer):
    """Steps of a rollout with their ends in characters -> the same with their ends in tokens.

    A step ends with the token that completes its last character. A step that covers the whole text
    also covers the tokens without text after it, such as EOS.
    """
    last = len(r.completion)

    def texts_of(completions, prompt=()):
        cut = [nr.Rollout(prompt, ids, "", True, []) for ids in completions]
        return completion_texts(cut, tokenizer)

    pieces = texts_of([token] for token in r.completion[:-1])
    opened = opened_thinking(r.prompt, tokenizer)
    covered = list(itertools.accumulate(map(len, pieces), initial=len(opened)))  # characters
    # True: no token has a part of a character, or a text that depends on the tokens before it
    is_exact = r.text.startswith(opened + "".join(pieces))

    def is_complete(tokens, end):  # whether so many tokens give the first `end` characters
        if is_exact:  # decoding each prefix takes seconds for a long completion
            return covered[tokens] >= end
        [text] = texts_of([r.completion[:tokens]], r.prompt)
        return text[:end] == r.text[:end]

    found = []
    for end, value in steps:
        tokens = last
        if end < len(r.text):
            shorter = range(1, last)
            reaches = functools.partial(is_complete, end=end)
            tokens = 1 + bisect.bisect_left(shorter, True, key=reaches)
        found.append((tokens, value))
    return found


def set_advantages(r, of_steps):
    """Fills r.advantages: a token gets the sum of the advantages of the steps that end at it or
    after it. of_steps: those of r.steps, in their order."""
    at_end = [0.0] * len(r.completion)  # of the steps that end with this token
    for (end, _), advantage in zip(r.steps, of_steps):
        at_end[end - 1] += advantage
    r.advantages = list(itertools.accumulate(reversed(at_end)))[::-1]


def assign_advantages(groups, cfg, running_mean):
    """As nano_rlvr's, from r.steps: [(end in tokens, value), ...]; [] is one step, the outcome."""
    rows = []
    for group in groups:
        for r in group:
            if not r.steps:
                r.steps = [(len(r.completion), math.nan if r.reward is None else r.reward)]
            rows.append([value for _, value in r.steps])
    rows = ranks.all_gather(rows)  # of all ranks, in their order
    S = max(map(len, rows), default=1)
    rows = [row + [math.nan] * (S - len(row)) for row in rows]
    rewards = torch.tensor(rows).view(-1, cfg.samples * S)  # (P, G S)
    batch_mean = rewards.nanmean().item()
    if math.isnan(running_mean):
        running_mean = batch_mean
    advantages = nr.group_advantages(rewards, cfg.baseline, cfg.scale, running=running_mean)
    first = ranks.offset(len(groups))  # number of this rank's first group
    for group, row in zip(groups, advantages[first:].tolist()):
        for i, r in enumerate(group):
            set_advantages(r, row[i * S:(i + 1) * S])
    return running_mean if math.isnan(batch_mean) else 0.9 * running_mean + 0.1 * batch_mean


def train(run, function, name):
    """nano_rlvr's loop, with the step rewards of a function in place of the outcome."""
    examples = {tuple(e["prompt_ids"]): e for e in run.train_set}

    def find_steps(groups, cfg, running_mean):
        tokenizer = run.llm.get_tokenizer()
        for group in groups:
            example = examples[tuple(group[0].prompt)]
            columns = {key: [value] * len(group) for key, value in example.items()}
            try:
                found = function([r.text for r in group], **columns)
                for r, steps in zip(group, found, strict=True):
                    steps = steps if isinstance(steps, list) else []
                    check_steps(steps, r.text)
                    r.steps = in_tokens(steps, r, tokenizer)
            except Exception as e:  # a user's file: any type
                raise RunError(
                    f"--step_rewards {name}: {user_error(e, name)}") from e
        return assign_advantages(groups, cfg, running_mean)

    nr.train(run, assign_advantages=find_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step_rewards", default=f"{__file__}:steps_reward")
    own, argv = parser.parse_known_args()
    try:
        function = load(own.step_rewards, kind="step rewards")
    except ValueError as e:
        sys.exit(f"nano_rlvr: {e}")
    nr.main(argv, lambda run: train(run, function, own.step_rewards))
