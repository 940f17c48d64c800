"""Models that err: bases of length_bias.py, aha.py, methods_rare.py and dapo.py, and counters.

They have read sums worked out line by line, of which a share is wrong; the text goes on with the
wrong total. The doubter sometimes notices: it says "wait" and writes the line again, right. It
also says "wait" after a few right lines, and repeats them. The other one, erring, never notices.
"""
import dataclasses

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import common
from data import arithmetic
from examples import sft
from learn.lab.faulty_rewards import is_right
from models.tiny.make_tiny import cold_start, training_example
from rewards import each

WAIT = " wait\n"


@dataclasses.dataclass
class Habits:
    """Shares: of wrong lines; of these that are noticed; of right lines that are doubted."""
    err: float
    notice: float
    needless: float


BASES = {"doubter": Habits(0.15, 1 / 3, 0.05), "erring": Habits(0.4, 0.0, 0.0)}


def line(total, x, habits, rng):
    """(The text of a step, the total that the next step begins with)."""
    right = f"{total}{x:+d}={total + x}"
    if rng.random() > habits.err:
        is_doubted = rng.random() < habits.needless
        return right + (WAIT + right) * is_doubted, total + x
    said = total + x + rng.choice((-2, -1, 1, 2))
    wrong = f"{total}{x:+d}={said}"
    if rng.random() < habits.notice:
        return wrong + WAIT + right, total + x
    return wrong, said


def written(question, habits, rng):
    """A completion for a sum."""
    total, *terms = [int(x) for x in question.replace("-", "+-").split("+")]
    lines = []
    for x in terms:
        text, total = line(total, x, habits, rng)
        lines.append(text)
    thinking = "\n".join(lines)
    return f"<think>{thinking}</think><answer>{total}</answer>"


def make_base(name):
    """Trains the bundled model on texts with these habits, without held-out questions."""
    folder = common.ROOT / "runs/lab" / name
    if (folder / "tokenizer.json").exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(common.TINY)
    model = AutoModelForCausalLM.from_pretrained(common.TINY)

    def sample(rng):
        example = training_example(arithmetic, rng)
        text = written(example["question"], BASES[name], rng)
        return sft.as_rollout(example, text, tokenizer, "chat")

    cold_start(model, sample, steps=300, batch=64, lr=1e-3, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- counters, for --rewards with weight 0. None is left out of the mean.

@each
def waits(text):
    """The share of the completions that say "wait"."""
    return float(WAIT in text)


@each
def right_if_wait(text, answer):
    return float(is_right(text, answer)) if WAIT in text else None


@each
def right_if_none(text, answer):
    return None if WAIT in text else float(is_right(text, answer))


@each
def tokens_if_wrong(text, answer, completion_ids):
    return None if is_right(text, answer) else float(len(completion_ids))


@each
def tokens_if_right(text, answer, completion_ids):
    return float(len(completion_ids)) if is_right(text, answer) else None


COUNTERS = ("waits", "right_if_wait", "right_if_none", "tokens_if_wrong", "tokens_if_right")


def flags(name):
    """Flags of the arms that begin with this base."""
    return f"--model runs/lab/{name} --task arithmetic --template chat --max_tokens 96 --lr 1e-4"


def counted(*first):
    """--rewards with these rewards and all counters."""
    counters = [f"learn/lab/doubting.py:{name}:0" for name in COUNTERS]
    return ",".join([*first, *counters])


if __name__ == "__main__":
    for name in BASES:
        make_base(name)
