"""Tasks for the lab beside the sums of data.py, and rewards that only measure."""
import random

from rewards import each, final_answer


def long_sums(split, size, seed):
    """Sums of 7 to 9 terms, in 0..99 at each step: longer than any that the bundled model saw."""
    rng = random.Random(f"{split}/{seed}")
    for _ in range(size):
        terms = [total] = [rng.randint(1, 20)]
        for _ in range(rng.randint(6, 8)):
            x = rng.choice([x for x in range(-20, 21) if x and 0 <= total + x <= 99])
            total += x
            terms.append(x)
        yield {"question": str(terms[0]) + "".join(f"{x:+d}" for x in terms[1:]),
               "answer": str(total)}


@each
def wrong_length(text, answer):
    """Characters of a wrong completion, None for a right one. Its weight is 0: it only measures."""
    return None if final_answer(text) == answer else float(len(text))
