"""A harder task for a small language model: stories whose question takes one or two steps.

    python models/smollm2.py
    python nano_rlvr.py --model models/smollm2 --data examples/stories.py:make \\
        --eval_data examples/stories.py:make --rewards examples/stories.py:right,\\
examples/stories.py:anywhere:0 --max_prompt 96 --max_tokens 64 --temperature 0.6 --steps 16

A control in which a coin rewards each completion: --rewards examples/stories.py:right:0,random:1
"""
import random

from examples.products import anywhere, right  # noqa: F401 (--rewards names them)

NAMES = "Ann Ben Eva Leo Mia Sam Tom Zoe".split()
THINGS = "apples books cards coins marbles pens shells stamps".split()
STORIES = (  # what happens, and the answer
    ("{n} has {a} {t}. {m} gives {n} {b} more {t}. How many {t} does {n} have now?",
     lambda a, b: a + b),
    ("{n} has {a} {t}. {n} gives {b} {t} to {m}. How many {t} does {n} have left?",
     lambda a, b: a - b),
    ("{n} has {a} boxes with {b} {t} in each box. How many {t} does {n} have in total?",
     lambda a, b: a * b),
    ("{n} has {a} {t}. {m} has {b} {t} more than {n}. How many {t} does {m} have?",
     lambda a, b: a + b),
    ("{n} has {a} {t}. {m} has {b} {t} more than {n}. How many {t} do they have together?",
     lambda a, b: 2 * a + b),
)


def make(split, size, seed, numbers=range(3, 15)):
    """Questions about one of `numbers` and a smaller number. A quarter of the pairs is for
    evaluation: no training question has these two numbers."""
    rng = random.Random(0)  # not the seed: the split must be the same in every run
    pairs = []
    for a in numbers:
        pairs += [(a, b) for b in range(2, a)]
    rng.shuffle(pairs)
    held_out = len(pairs) // 4
    pairs = pairs[:held_out] if split == "test" else pairs[held_out:]
    for _ in range(size):
        kind = rng.randrange(len(STORIES))
        a, b = rng.choice(pairs)
        story, answer = STORIES[kind]
        n, m = rng.sample(NAMES, 2)
        thing = rng.choice(THINGS)
        question = story.format(n=n, m=m, t=thing, a=a, b=b)
        yield {"question": question, "answer": str(answer(a, b)), "kind": kind}
