"""The tasks of reasoning-gym (arXiv:2505.24760), about 100 generators, each with its own scorer.

    pip install reasoning-gym==0.1.25
    G=examples/gym_tasks.py
    python nano_rlvr.py --data $G:sums --eval_data $G:sums --rewards $G:score    the bundled model
    python nano_rlvr.py --model Qwen2.5-1.5B-Instruct --data $G:leg_counting --rewards $G:score

What follows the file in --data is the name of a task in the package, or `sums`. Five tasks, such as
graph_color, have many right answers and no gold one: they need --answer_key none. Four, such as
word_ladder, are the same in every process only with PYTHONHASHSEED=0. Several scorers, such as that
of spiral_matrix, call eval on the answer: a text of the model then runs as Python, without a jail.
"""
import functools
import random

from rewards import each, final_answer

try:
    from reasoning_gym import create_dataset, get_score_answer_fn
    from reasoning_gym.factory import DATASETS
except ImportError as e:
    raise ImportError(f"{e}; pip install reasoning-gym==0.1.25") from None

scorer = functools.cache(get_score_answer_fn)  # name of a task -> f(answer, row)


def make(task, split, size, seed, **settings):
    """Rows of a task. Its row i comes from the seed + i: two sets need seeds that are far apart."""
    first = random.Random(f"{split}/{seed}").getrandbits(31)
    return list(create_dataset(task, size=size, seed=first, **settings))


def sums(split, size, seed):
    """chain_sum with 3 to 6 terms of one digit, written as the bundled model knows sums: 4+9-2."""
    rows = make("chain_sum", split, size, seed, min_terms=3, max_digits=1)
    return [row | {"question": row["metadata"]["expression"].replace(" ", "")} for row in rows]


def __getattr__(task):
    """The function of a task, for --data gym_tasks.py:task."""
    if task not in DATASETS:
        raise AttributeError(f"reasoning-gym has no task {task}")
    return functools.partial(make, task)


@each
def score(text, question, metadata, answer=None):
    """What the task's own scorer gives the final answer, 0 to 1. Only 1 counts as right."""
    row = {"question": question, "answer": answer, "metadata": metadata}
    try:
        return scorer(metadata["source_dataset"])(final_answer(text) or "", row)
    except (ValueError, TypeError, KeyError):  # some scorers fail on what they cannot read
        return 0.0
