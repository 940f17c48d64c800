"""The task Countdown: make a number from others (TinyZero's task).

    python nano_rlvr.py --task countdown --model Qwen2.5-1.5B --template r1
"""
from examples.arithmetic import generate
from rewards import countdown_reward  # noqa: F401  # for mixed_tasks.py


def countdown(rng):
    """Make `target` from 3 or 4 numbers, each used once (TinyZero's task)."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
        value, text = numbers[0], str(numbers[0])
        for x in numbers[1:]:
            op = rng.choice([op for op in "+-*/" if op != "/" or value % x == 0])
            value = {"+": value + x, "-": value - x, "*": value * x, "/": value // x}[op]
            text = f"({text} {op} {x})"
        if 10 <= value <= 99:
            shown = rng.sample(numbers, len(numbers))
            question = (f"Combine the numbers {shown} with + - * / and brackets, each number "
                        f"exactly once, so that the result is {value}. Put the expression between "
                        "<answer> and </answer>.")
            return {"question": question, "answer": text[1:-1], "numbers": shown, "target": value}


def make(split, size, seed):
    """The rows of a split."""
    return generate(countdown, split, size, seed)
