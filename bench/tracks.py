"""The tracks of bench/speedrun.py. They are frozen: a change makes all records of a track void."""
import re
import zlib
from collections import namedtuple

import data
from learn.lab import sums

# parameters: of the model. weights: checksum of the model at the start. bound: the lower end of the
# accuracy's 95 % interval must be above it. flags: of every run. second(size, seed): the questions
# that decide. size: their number. max_tokens: of an answer to them. rewards: decide what is right
Track = namedtuple(
    "Track", "parameters weights bound flags second is_held_out size max_tokens rewards")


def second_sums(size, seed):
    """Sums that depend on the final weights, through `seed`: nobody knows them before."""
    return list(sums.longer("test", size, seed))


def is_test_sum(question):
    """data.generate keeps these questions for evaluations."""
    return zlib.crc32(question.encode()) % 8 == 0


def numbers(question):
    """The two numbers of a product, the smaller one first."""
    return tuple(sorted(map(int, re.findall(r"\d+", question))))


def held_out_products(half):
    """The questions of every second held-out pair of numbers: half 0 or 1."""
    rows = data.products("test", 10_000, 0)
    pairs = sorted({numbers(row["question"]) for row in rows})[half::2]
    return [row for row in rows if numbers(row["question"]) in pairs]


def first_products(split, size, seed):
    """The set that a recipe may look at."""
    return held_out_products(0)[:size]


def second_products(size, seed):
    return held_out_products(1)[:size]


def is_test_product(question):
    """Whether no recipe may ask for this product, in whatever words."""
    held_out = {numbers(row["question"]) for row in data.products("test", 10_000, 0)}
    return numbers(question) in held_out


TRACKS = {
    "sums": Track(
        parameters=822_272, weights=0, bound=0.1,
        flags="--model models/tiny --data learn/lab/sums.py:longer "
              "--eval_data learn/lab/sums.py:longer --eval_size 64 --max_tokens 128 "
              "--max_prompt 256 --rewards gsm8k",
        second=second_sums, is_held_out=is_test_sum, size=512, max_tokens=128, rewards="gsm8k"),
    "products": Track(
        parameters=134_515_008, weights=0, bound=0.5,
        flags="--model models/smollm2 --eval_data bench/tracks.py:first_products --eval_size 64",
        second=second_products, is_held_out=is_test_product, size=144, max_tokens=48,
        rewards="right"),
}
