"""Three kinds of tasks in one run, from exact to soft: each is judged by what can judge it.

    F=examples/spectrum.py
    OPENAI_BASE_URL=http://localhost:8001/v1 JUDGE_MODEL=Qwen/Qwen2.5-7B-Instruct \\
        python nano_rlvr.py --model SmolLM2-360M-Instruct --template chat --data $F:make \\
        --eval_data $F:exact,$F:checked,$F:soft --answer_key none --rewards $F:graded \\
        --max_prompt 256 --max_tokens 256 --reward_timeout 60

    exact      products in words: the number is right or wrong         a program that knows it
    checked    a text that has to follow an instruction                functions, as IFEval has them
    soft       an explanation: nobody can write a program for it       a language model (judge.py)

The softer the judge, the more a policy gains from what the judge overlooks, so look at the three
accuracies of the evaluation one by one, and read answers. For tasks that are softer still, people
compare two answers: examples/reward_model.py and preferences.py begin there.

Without JUDGE_MODEL, `make` has the first two kinds only.
"""
import os
import random

from data import products
from examples import follow
from examples.instructions import instruction
from examples.judge import check, judge
from rewards import each, right

RUBRIC = "Correct, easy for a child, with one example, at most five sentences."


def exact(split, size, seed):
    """Rows with a number that is right."""
    return products(split, size, seed)


def checked(split, size, seed):
    """Rows with an instruction that functions check."""
    return follow.make(split, size, seed)


def soft(split, size, seed):
    """Rows with a rubric for a judge. The topics of the evaluation are new."""
    rows = {row["topic"] for row in follow.make(split, 1000, seed)}
    for topic in sorted(rows)[:size]:
        yield {"question": f"Why do we have {topic}? Explain it to a child.", "rubric": RUBRIC}


def make(split, size, seed):
    """Rows of all kinds in random order, as many of each as there are."""
    kinds = [exact, checked] + [soft] * bool(os.environ.get("JUDGE_MODEL"))
    rows = []
    for kind in kinds:
        rows += kind(split, size // len(kinds), seed)
    return random.Random(seed).sample(rows, len(rows))


@each
def graded(text, question, answer=None, instruction_id_list=None, kwargs=None, rubric=None,
           timeout=5.0):
    """1.0 or 0.0 for the first two kinds, the judge's 0.0 to 1.0 for the third."""
    if answer is not None:
        [value] = right([text], [answer])
    elif rubric is not None:
        [value] = judge([text], question=[question], rubric=[rubric], timeout=timeout)
    else:
        [value] = instruction([text], [instruction_id_list], [kwargs])
    return value


if os.environ.get("JUDGE_MODEL"):
    graded.check = check  # called before the run
    graded.waits = True  # for a network
