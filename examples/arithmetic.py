"""The task of the bundled model, sums, and how tasks are made from a random generator.

    python nano_rlvr.py --task arithmetic
"""
import random
import zlib


def generate(draw, split, size, seed):
    """Yields `size` distinct examples. The checksum of a question decides its split: whatever the
    seed, no test question is in the training split."""
    rng, seen = random.Random(f"{draw.__name__}/{split}/{seed}"), set()
    while len(seen) < size:
        question = (example := draw(rng))["question"]
        is_test = zlib.crc32(question.encode()) % 8 == 0
        if is_test == (split == "test") and question not in seen:
            seen.add(question)
            yield example


def arithmetic(rng):
    """A sum of 3 to 6 terms such as 14+2+9. Every running total is in 0..99."""
    total, terms = rng.randint(1, 20), 1
    question = str(total)
    for _ in range(rng.randint(2, 5)):
        x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
        total, question, terms = total + x, question + f"{x:+d}", terms + 1
    return {"question": question, "answer": str(total), "terms": terms}


def make(split, size, seed):
    """The rows of a split."""
    return generate(arithmetic, split, size, seed)
