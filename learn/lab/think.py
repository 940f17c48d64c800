"""Sums in two modes of thinking: the question ends in /think or /no_think (arXiv:2505.09388).

    python nano_rlvr.py --data learn/lab/think.py:fused --eval_data learn/lab/think.py:think \\
        --rewards learn/lab/think.py:obeyed_and_right

A row with a budget needs --rollout learn/lab/think.py:with_budget: the model thinks for so many
tokens, then its thinking is closed, and it answers.
"""
import re

import nano_rlvr as nr
from data import arithmetic, generate
from examples.test_time import force_answers
from learn.lab.faulty_rewards import is_right
from rewards import each

MODES = ("think", "no_think")


def rows(split, size, seed, modes, **columns):
    """Yields sums with the modes in turn."""
    examples = generate(arithmetic, split, size, seed)
    for number, example in enumerate(examples):
        mode = modes[number % len(modes)]
        question = f"{example['question']} /{mode}"
        yield example | columns | {"question": question, "mode": mode}


def fused(split, size, seed):
    return rows(split, size, seed, MODES)


def think(split, size, seed):
    return rows(split, size, seed, ["think"])


def no_think(split, size, seed):
    return rows(split, size, seed, ["no_think"])


def cut_8(split, size, seed):
    return rows(split, size, seed, ["think"], budget=8)


def cut_16(split, size, seed):
    return rows(split, size, seed, ["think"], budget=16)


def obeys(text, mode):
    """Whether the completion thinks in mode think, and does not in mode no_think."""
    thinking = re.match(r"<think>(.*?)</think>", text, re.DOTALL)
    if thinking is None:
        return False
    thinks = bool(thinking[1].strip())
    return thinks == (mode == "think")


@each
def obeyed_and_right(text, answer, mode):
    if not obeys(text, mode):
        return 0.0
    return float(is_right(text, answer))


@each
def obeyed(text, mode):
    """With weight 0: the share of the samples that obey."""
    return float(obeys(text, mode))


def with_budget(llm, prompts, n, temperature, max_tokens, seeds=None, examples=(), **sampling):
    """The script's rollout, in which the thinking of an example with a budget is cut there."""
    rollouts = nr.rollout(llm, prompts, n, temperature, max_tokens, seeds, **sampling)
    groups = nr.in_groups(rollouts, n)
    budgets = [example.get("budget") for example in examples]
    for budget in {*budgets} - {None}:
        places = [place for place, limit in enumerate(budgets) if limit == budget]
        chosen = nr.flatten(groups[place] for place in places)
        answered = force_answers(llm, chosen, budget)
        new_groups = nr.in_groups(answered, n)
        for place, group in zip(places, new_groups):
            groups[place] = group
    return nr.flatten(groups)
