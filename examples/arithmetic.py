"""The task of the bundled model, sums, and how tasks are made from a random generator: in data.py.

    python nano_rlvr.py --task arithmetic
"""
from data import arithmetic, generate  # noqa: F401


def make(split, size, seed):
    """The rows of a split."""
    return generate(arithmetic, split, size, seed)
