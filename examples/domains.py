"""Three domains, each with its own verifier, in one run: products, stories and instructions.

    python models/smollm2.py
    F=examples/domains.py
    python nano_rlvr.py --model models/smollm2 --data $F:mixed --rewards $F:judge \\
        --eval_data $F:multiply,$F:solve,$F:follow,$F:new_kinds --answer_key none \\
        --prompts 12 --steps 24 --max_prompt 128 --max_tokens 64

`new_kinds` has kinds of instructions that are not trained. What a run of one domain does to the
others: --data $F:solve. A control in which a coin rewards each completion, whatever it says:
--rewards $F:judge:0,random:1
"""
import random

import data
from examples import follow as instructions
from examples import stories
from examples.instructions import instruction
from rewards import each, right


def multiply(split, size, seed):
    """Products of two numbers from 2 to 12, asked in words; a quarter of the pairs is held out."""
    return data.products(split, size, seed)


def solve(split, size, seed):
    """Stories that take one or two steps."""
    return list(stories.make(split, size, seed))


def follow(split, size, seed):
    """Requests with one of 19 kinds of IFEval's instructions, a quarter of the topics held out."""
    return list(instructions.make(split, size, seed))


def new_kinds(split, size, seed):
    """The same with the six kinds that are held out."""
    return list(instructions.new_kinds(split, size, seed))


def mixed(split, size, seed):
    """Rows of the three domains in random order: of each as many as there are products."""
    parts = [make(split, size // 3, seed) for make in (multiply, solve, follow)]
    least = min(map(len, parts))
    rows = []
    for part in parts:
        rows += part[:least]
    random.Random(seed).shuffle(rows)
    return rows


@each
def judge(text, answer=None, instruction_id_list=None, kwargs=None):
    """A row with an answer is judged by its last number, a row with instructions by their rules."""
    if answer is not None:
        [value] = right([text], [answer])
    else:
        [value] = instruction([text], [instruction_id_list], [kwargs])
    return value
