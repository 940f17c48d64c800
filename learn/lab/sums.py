"""Sums with a fixed range of terms: tasks of findings that need room.

    python nano_rlvr.py --data learn/lab/sums.py:long --eval_data learn/lab/sums.py:long

The bundled model solves 6 % of `long`, mostly by lucky guesses.
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


def seven_to_ten(rng):
    return draw_sum(rng, 7, 10)


def of_six(rng):
    return draw_sum(rng, 6, 6)


def six(split, size, seed):
    """The rows of a split: sums of 6 terms."""
    return generate(of_six, split, size, seed)


def long(split, size, seed):
    """The rows of a split: sums of 7 to 9 terms, longer than all that the model was trained on."""
    return generate(seven_to_nine, split, size, seed)


def longer(split, size, seed):
    """The rows of a split: sums of 7 to 10 terms, the task of bench/speedrun.py."""
    return generate(seven_to_ten, split, size, seed)
