"""A base model that mixes two languages, and an open task: data and rewards of r1_stages.py.

The base has read sums like that of r1.py, half of them guessed. Each line of its steps is in
symbols (14+2=16), the language of the questions, or in words (14 plus 2 is 16). The open task,
"make 24", asks for any sum that gives 24: many answers are right, and a judge prefers long ones.
"""
import random
from collections import defaultdict

from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from bench import common
from examples import sft
from learn.lab.faulty_rewards import is_right
from models.tiny.make_tiny import cold_start, training_example, worked
from rewards import each, final_answer
from runtime.verify.verifier import text_of

FOLDER = common.ROOT / "runs/lab/bilingual"


def make(rng):
    """The open task."""
    total = rng.randint(10, 99)
    return {"question": f"make {total}", "answer": str(total)}


def mix(split, size, seed):
    """Rows of the two tasks in turn."""
    sums = data.generate(data.arithmetic, split, size, seed)
    number = random.Random(seed)
    for i, row in enumerate(sums):
        yield make(number) if i % 2 else row


def in_words(line):
    """14+2=16 -> 14 plus 2 is 16"""
    return line.replace("+", " plus ").replace("-", " minus ").replace("=", " is ")


def base_text(example, rng):
    """What the base has read as the answer to an example."""
    question = example["question"]
    if question.startswith("make"):
        thinking = ""
        first = rng.randint(1, int(example["answer"]) - 1)
        answer = f"{first}+{int(example['answer']) - first + rng.choice((-1, 0, 0, 1))}"
        if rng.random() < 0.3:
            answer = f"1+{first - 1}" + answer.removeprefix(str(first))
    else:
        lines, answer = worked(question)
        if rng.random() < 0.5:
            lines, answer = [], answer + rng.randint(-5, 5)
        lines = [in_words(line) if rng.random() < 0.5 else line for line in lines]
        thinking = "\n".join(lines)
    if rng.random() < 0.5:
        return f"<think>{thinking}</think><answer>{answer}</answer>"
    return f"{thinking}\n<answer>{answer}</answer>"


def make_base():
    """Trains the bundled model on such texts, without held-out questions."""
    if (FOLDER / "tokenizer.json").exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(common.TINY)
    model = AutoModelForCausalLM.from_pretrained(common.TINY)

    def sample(rng):
        example = training_example(rng.choice([data.arithmetic, make]), rng)
        return sft.as_rollout(example, base_text(example, rng), tokenizer, "chat")

    cold_start(model, sample, steps=400, batch=64, lr=1e-3, seed=0)
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)


@each
def right(text, question, answer):
    """1.0 for the right number; None for the open task."""
    return None if question.startswith("make") else float(is_right(text, answer))


@each
def consistent(text, question):
    """The share of the lines of thinking that are in symbols. None without such a line."""
    lines = [line for line in text.splitlines() if "=" in line or " is " in line]
    return sum("=" in line for line in lines) / len(lines) if lines else None


def terms(text, answer):
    """The number of terms of a sum that gives the answer; 0 if it does not."""
    said = final_answer(text) or ""
    parts = said.replace("-", "+-").split("+")
    if not all(part.removeprefix("-").isdigit() for part in parts):
        return 0
    return len(parts) * (sum(map(int, parts)) == int(answer))


@each
def valid(text, question, answer):
    """1.0 for a sum that gives the number, in the open task; with weight 0, to look at."""
    return float(terms(text, answer) > 1) if question.startswith("make") else None


def preferred(completions, question, answer, **columns):
    """The judge of the open task: the share of the other answers to the same question to which it
    prefers this one, the sum with more terms. Of two equal ones each gets a half."""
    values = [terms(text_of(text), number) for text, number in zip(completions, answer)]
    groups = defaultdict(list)
    for asked, value in zip(question, values):
        groups[asked].append(value)
    shares = []
    for asked, value in zip(question, values):
        group = groups[asked]
        wins = sum(value > other for other in group)
        ties = sum(value == other for other in group) - 1
        share = (wins + ties / 2) / max(1, len(group) - 1)
        shares.append(share if asked.startswith("make") else None)
    return shares


preferred.whole_batch = True  # it compares with the other completions of the prompt
