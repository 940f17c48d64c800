"""Binary search: a small model that guesses numbers at random learns to halve the interval.

    python -m examples.guess_model --out runs/guess      the game, and a model that plays at random
    python -m examples.guess --model runs/guess ...      flags of nano_rlvr.py work

A game is one sequence. What stands in brackets is not sampled:

    <|user|>hbecf<|assistant|>20[<|user|>higher than 20<|assistant|>]47[<|user|>lower than 47 ...

A turn is rewarded with what the guesses from it on cost. Its group are the turns of the step at
which as many numbers are possible, because few games of one number come to the same interval. No
reward says how much a guess has narrowed the interval. With several ranks, each has its own groups.
"""
import re
import sys
from collections import defaultdict
from functools import partial

import nano_rlvr as nr
from examples.guess_model import MOST
from examples.turn_credit import compare_turns, from_turn, turn_starts
from runtime.batch import flatten

REPLY = re.compile(r"<\|user\|>(higher|lower) than \d\d<\|assistant\|>")
GAME = "examples/guess_model.py"


def guesses(text):
    """[(guess as text, the first and the last number that are possible before it)] of a game."""
    low, high = 1, MOST
    found = []
    *turns, last = REPLY.split(text)
    for guess, reply in zip(turns[::2], turns[1::2]):
        found.append((guess, low, high))
        if reply == "higher" and guess.isdecimal():
            low = max(low, int(guess) + 1)
        elif guess.isdecimal():
            high = min(high, int(guess) - 1)
    return [*found, (last, low, high)]


def assign_advantages(groups, cfg, running_mean):
    """A turn gets the rewards from it on, compared with the turns that have as many numbers."""
    turns = defaultdict(list)
    for r in flatten(groups):
        if r.reward is None:
            continue
        for turn, (start, (_, low, high)) in enumerate(zip(turn_starts(r), guesses(r.text))):
            value = from_turn(r, turn).reward
            turns[high - low].append((r, start, value))
    sizes = sorted(turns, reverse=True)  # an interval only shrinks: a later turn comes later
    compare_turns([turns[size] for size in sizes], cfg)
    return running_mean


if __name__ == "__main__":
    fixed = [
        "--data", f"{GAME}:games",
        "--eval_data", f"{GAME}:every_number",
        "--rollout", f"{GAME}:play",
        "--rewards", f"{GAME}:won:0,examples/environment.py:outcome,{GAME}:guesses:0",
        *"--template chat --max_prompt 16 --max_tokens 96 --kl_coef 0".split(),
    ]
    train = partial(nr.train, assign_advantages=assign_advantages)
    nr.main([*fixed, *sys.argv[1:]], train)
