"""Several tasks in one run: one reward function judges each row by what the row has.

    python nano_rlvr.py --data examples/mixed_tasks.py:make --rewards examples/mixed_tasks.py:mixed

The rows are sums and Countdown's. To mix rows of files, give them columns of their own and branch
on these. A function that returns None for a row leaves it to the other functions of --rewards, as
in TRL. The evaluation counts the first function, so this one should know every row.
"""
import random

from data import arithmetic, countdown, generate
from rewards import countdown_reward, each, gsm8k_reward


def make(split, size, seed):
    """The rows for --data: half are sums, half are Countdown's, in random order."""
    sums = generate(arithmetic, split, size // 2, seed)
    others = generate(countdown, split, size - size // 2, seed)
    return random.Random(seed).sample([*sums, *others], size)


@each
def mixed(text, answer=None, numbers=None, target=None):
    """Countdown's reward for a row with numbers, gsm8k's for one with an answer, else None."""
    value = None
    if numbers is not None:
        [value] = countdown_reward([text], [numbers], [target])
    elif answer is not None:
        [value] = gsm8k_reward([text], [answer])
    return value
