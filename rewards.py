r"""Rewards: what a completion is worth. A reward is a function in TRL's convention,

    f(completions, **columns) -> list[float | None]

with one value per completion. None leaves the completion out, it does not count as 0. Completions
are strings or TRL's lists of messages. Columns are those of the data set and what Verifier adds.
Your own reward is a file and a flag, --rewards my_file.py:brief.

    from rewards import each, final_answer

    @each
    def brief(text, answer):
        return float(final_answer(text) == answer and len(text) < 400)
"""
import ast
import functools
import hashlib
import inspect
import math
import operator
import re
from fractions import Fraction

from runtime.verify import latex, verifier
from runtime.verify.answer import after_thinking as after_thinking  # for rewards of yours
from runtime.verify.answer import final_answer, final_number, is_float, read_number


def each(score_one):
    """Decorator: turns score_one(text, **columns) -> float or None into a reward function.

    The parameters of score_one are the columns it reads. One number or string as a column holds for
    every completion. Where a column is missing or None, the default is taken.

    >>> each(lambda text, wanted, by=1.0: by * (text == wanted))(["a", "b"], ["a", "a"], by=0.5)
    [0.5, 0.0]
    """
    parameters = list(inspect.signature(score_one).parameters.values())[1:]
    with_default = {p.name for p in parameters if p.default is not p.empty}

    @functools.wraps(score_one)
    def reward(completions, *args, **columns):
        names = [p.name for p in parameters]
        columns |= zip(names, args)  # positional arguments are columns, too
        columns = {name: columns[name] for name in names if columns.get(name) is not None}
        for name, column in columns.items():  # one value for all completions
            if isinstance(column, (str, int, float)):
                columns[name] = [column] * len(completions)
        values = []
        for completion, *row in zip(completions, *columns.values(), strict=True):
            # a gap in a column: score_one takes its default
            row = {name: value for name, value in zip(columns, row)
                   if value is not None or name not in with_default}
            values.append(score_one(verifier.text_of(completion), **row))
        return values

    return reward


@each
def gsm8k_reward(text, answer):
    """1.0 if the final answer is exactly the gold number, else 0.0 (arXiv 2110.14168).

    `answer` is a number or a GSM8K solution that ends with `#### 72`. None if it has no number. A
    gold number with the digits of a float has noise at its end: 5400.9999999999996 is 5401."""
    gold_text = str(answer).rpartition("####")[2]
    gold, said = read_number(gold_text), final_number(text)
    if gold is None or said is None:
        return None if gold is None else 0.0
    noise = abs(gold) / 10**14 if is_float(gold_text) else 0
    return float(abs(said - gold) <= noise)


@each
def math_reward(text, answer):
    r"""1.0 if the final answer equals the gold answer in LaTeX, else 0.0. None if the gold answer
    cannot be read. runtime/verify/latex.py says what is equal.

    `answer` may also be a whole solution, of which the last \boxed{} or GSM8K's `####` counts.

    >>> math_reward([r"\boxed{\{2, 1\}}", r"\boxed{(1, 2]}"], answer=[r"\{1,2\}", "[1,2]"])
    [1.0, 0.0]
    """
    gold, said = str(answer), final_answer(text)
    if r"\boxed" in gold or "####" in gold:
        gold = final_answer(gold)
    equal = latex.same_math(gold, said or "") if gold else None
    return None if equal is None else float(equal)


# such attributes: see Traits in runtime/verify/verifier.py
gsm8k_reward.reads_gold = math_reward.reads_gold = True

SIGNS = [
    ("×", "*"), ("·", "*"), ("⋅", "*"), ("∗", "*"),
    ("÷", "/"),
    ("−", "-"),
    ("（", "("), ("）", ")"),
    (r"\times", "*"), (r"\cdot", "*"),
    (r"\div", "/"),
    (r"\left", ""), (r"\right", ""),
    (r"\(", ""), (r"\)", ""),
]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@each
def countdown_reward(text, numbers, target):
    """1.0 if the final answer is an expression with each of `numbers` once and the value `target`.

    Else 0.0. "(2 + 3) * 4" or "(2 + 3) * 4 = 20", with + - * / ( ) only. The arithmetic is exact.
    """
    answer = final_answer(text) or ""
    for sign, meaning in SIGNS:
        answer = answer.replace(sign, meaning)
    answer, equals, value = answer.strip(" $`.").partition("=")
    answer = answer.strip()
    if equals and value.strip() != str(Fraction(target)):  # in a column with gaps 21 is 21.0
        return 0.0
    if not re.fullmatch(r"[\d+\-*/() ]{1,300}", answer, re.A):
        return 0.0
    used = re.findall(r"\d+", answer)
    if sorted(map(int, used)) != sorted(map(int, numbers)):
        return 0.0  # before parsing: the expression is now no larger than `numbers` allow
    try:
        tree = ast.parse(answer, mode="eval")
        return float(_evaluate(tree.body) == Fraction(target))
    except (SyntaxError, ZeroDivisionError, KeyError, AttributeError, MemoryError,
            RecursionError):
        return 0.0


def _evaluate(node):
    """The value as a Fraction. KeyError for // and **, AttributeError for a sign or call."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    left, right = _evaluate(node.left), _evaluate(node.right)
    return OPERATORS[type(node.op)](left, right)


# ------------------------------------------------------------------------------ the task `products`

def numbers_in(text):
    return re.findall(r"-?\d+", text.replace(",", ""))


@each
def right(text, answer):
    """1.0 if the last number of the text is the answer."""
    return float(numbers_in(text)[-1:] == [answer])


@each
def anywhere(text, answer):
    """1.0 if any number of the text is the answer: what the format alone can gain is the difference
    to `right`. With weight 0 it is only shown."""
    return float(answer in numbers_in(text))


# ------------------------------------------------------------------- form, length and a control

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@each
def format_reward(text):
    """1.0 for <think>...</think><answer>...</answer> and nothing else (R1, arXiv 2501.12948).

    Each tag once, in this order; the answer is not empty; only white space between and around the
    two blocks. The opening <think> may be missing, because the prompt may end with it. Else 0.0.
    """
    if "<think>" not in text and "</think>" in text:
        text = "<think>" + text
    pieces = re.split(f"({'|'.join(TAGS)})", text)  # text, tag, text, tag, ..., text
    if pieces[1::2] != TAGS:
        return 0.0
    before, thinking, between, answer, after = pieces[0::2]
    outside = before + between + after
    return float(answer.strip() != "" and outside.strip() == "")


@each
def overlong(text, completion_ids, max_tokens, overlong_buffer=None):
    """A penalty for the length (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_tokens - buffer tokens, then falling linearly to -1 at max_tokens. The buffer is a
    fifth of max_tokens unless given (4,096 of 20,480 in the paper).

    >>> ids = [[0] * 80, [0] * 90, [0] * 101]
    >>> overlong(["", "", ""], completion_ids=ids, max_tokens=100, overlong_buffer=20)
    [0.0, -0.5, -1.0]
    """
    buffer = max_tokens // 5 if overlong_buffer is None else overlong_buffer
    excess = len(completion_ids) - (max_tokens - buffer)
    if excess <= 0:
        return 0.0
    return -1.0 if excess >= buffer else -excess / buffer


def random_reward(completions, prompts=None, sample_index=None, step=None, random_seed=0, **_):
    """A fair coin that ignores the answer: the control of Spurious Rewards (arXiv 2506.10947).

    0.0 or 1.0 from a hash of (random_seed, step, sample_index, prompt, completion), so a resumed
    run, and a run on another number of ranks, get the same values. Without `step` and
    `sample_index`, the number of a completion among those of its prompt, equal texts would always
    get equal values, which could be learned.
    """
    n = len(completions)
    samples = zip(sample_index or range(n), prompts or [None] * n, completions, strict=True)
    rewards = []
    for index, prompt, completion in samples:
        key = repr((random_seed, step, index, prompt, verifier.text_of(completion)))
        digest = hashlib.blake2b(key.encode(), digest_size=1).digest()
        rewards.append(float(digest[0] & 1))
    return rewards


# --------------------------------------------------------------------------------------- by name

KNOWN = {  # name: function  # the columns it reads; what 1.0 means
    "gsm8k": "rewards:gsm8k_reward",  # answer; the final answer is this number
    "math": "rewards:math_reward",  # answer (LaTeX); they are equal
    "countdown": "rewards:countdown_reward",  # numbers, target; an expression makes the target
    "right": "rewards:right",  # answer; the last number of the text is this number
    "anywhere": "rewards:anywhere",  # answer; any number of the text is this number
    "format": "rewards:format_reward",  # <think>...</think><answer>...</answer>
    "overlong": "rewards:overlong",  # completion_ids; -1 at max_tokens
    "random": "rewards:random_reward",  # heads of a coin: a control
}
# Verifier runs the rewards of a spec in processes that can be killed, weights and adds them. Only
# these processes import a user's file, so Verifier gets names, not functions.
Verifier = functools.partial(verifier.Verifier, known=KNOWN)
parse_spec = functools.partial(verifier.parse_spec, known=KNOWN)


def start_verifier(cfg, train_set, eval_set, notify=print):
    """The Verifier of --rewards. notify(text) is called if some gold answers cannot be read. Raises
    ValueError with one line if a reward reads a column that its rows lack, or no gold answer."""
    # as it was typed: the float 0.07 times 100 is above 7
    buffer = math.ceil(Fraction(str(cfg.overlong_buffer)) * cfg.max_tokens)
    started = Verifier(
        cfg.rewards, timeout=cfg.reward_timeout, messages=cfg.template == "chat",
        random_seed=cfg.seed, max_tokens=cfg.max_tokens, overlong_buffer=buffer or None)
    source = cfg.data or cfg.task
    for examples, name in (train_set, source), (eval_set, cfg.eval_data or source):
        started.check_columns(examples, name)
        started.count_unreadable(examples, notify)
    return started
