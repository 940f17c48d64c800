"""Sums that are longer than those of the bundled model: the task of findings that need room.

    python nano_rlvr.py --data learn/lab/sums.py:long --eval_data learn/lab/sums.py:long
"""
from data import generate


def draw_sum(rng, fewest, most):
    """A sum of this many terms such as 14+2-9. Every running total is in 0..99."""
    total = rng.randint(1, 20)
    terms = rng.randint(fewest, most)
    question = str(total)
    for _ in range(terms - 1):
        x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
        total += x
        question += f"{x:+d}"
    return {"question": question, "answer": str(total), "terms": terms}


def seven_to_nine(rng):
    """A sum of 7 to 9 terms: the bundled model was trained on 3 to 6."""
    return draw_sum(rng, 7, 9)


def long(split, size, seed):
    """The rows of a split."""
    return generate(seven_to_nine, split, size, seed)

