"""Two variants of the task `products`: products of two numbers, asked in words.

    python models/smollm2.py
    python nano_rlvr.py --model models/smollm2        a real language model learns it in minutes

The flags of this model are in its folder. For another one: --task products --template chat.
A control in which a coin rewards each completion: --rewards right:0,random:1
Whether what was learned holds for larger numbers: --eval_data examples/products.py:larger
How much of this a model knows already, if its answer is begun with "8 x 9 =":

    python nano_rlvr.py --model models/smollm2 --steps 0 --template examples/primed.txt \\
        --data examples/products.py:primed --eval_data examples/products.py:primed --rewards right
"""
import itertools
import random
import re

from data import ask_products, products
from rewards import anywhere, right  # noqa: F401 (--rewards of earlier commands name them)


def larger(split, size, seed):
    """Questions for evaluation only, with a number from 3 to 12 and one from 13 to 20."""
    pairs = list(itertools.product(range(3, 13), range(13, 21)))
    return ask_products(pairs, random.Random(0))[:size]


def primed(split, size, seed):
    """The questions of `products`, but the answer is begun: "8 x 9 =". So the model need not find
    out how to answer, only the number. For a model with ChatML, with --template
    examples/primed.txt."""
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    for row in products(split, size, seed):
        a, b = re.findall(r"\d+", row["question"])
        yield row | {"question": f"{row['question']}{turn}{a} x {b} ="}
