"""The task of the bundled model, sums, and how tasks are made from a random generator.

    python nano_rlvr.py --task arithmetic
"""
import random
import zlib


def generate(draw, split, size, seed):
    """`size` distinct examples. The checksum of a question decides its split: whatever the seed, no
    test question is in the training split."""
    rng, seen = random.Random(f"{draw.__name__}/{split}/{seed}"), {}
    while len(seen) < size:
        example = draw(rng)
        if (zlib.crc32(example["question"].encode()) % 8 == 0) == (split == "test"):
            seen.setdefault(example["question"], example)
    return list(seen.values())


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
