"""Rewards per step and per row: what `steps` gives, how Verifier adds it, who judges a row."""
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
from conftest import ROOT
from verify import verifier

# ---- the reward `steps`

REAL = [  # completions of the bundled model: question, text, the ends of the steps and their values
    ("13-2-3-1+6-13", "<think></think><answer>0</answer>", [("</answer>", 1)]),  # a right guess
    # the left side does not count; a total after a wrong one may be right again
    ("4+15+2+18", "<think>4+15=19\n18+2=+2\n19+18=39</think><answer>44</answer>",
     [("4+15=19", 1), ("18+2=", 0), ("=39", 1), ("</answer>", 0)]),
    # one total too many
    ("17-10-4+17",
     "<think>17-1\ufffd<think>17-10=7\n7-4=3\n3+17=20\n20+17=20</think><answer>20</answer>",
     [("=7", 1), ("=3", 1), ("=20", 1), ("+17=20", 0), ("</answer>", 1)]),
    ("9+18-16", "<think>9+18=27<think>9-16=11", [("=27", 1), ("=11", 0)]),  # cut off: no answer
    ("3-5+1", "<think>3-5=-2\n-2+1=-1</think><answer>-1</answer>",
     [("=-2", 1), ("=-1", 1), ("</answer>", 1)]),
]


@pytest.mark.exercise_12
def test_steps_judges_running_totals_and_the_answer():
    for question, text, wanted in REAL:
        (steps,) = rewards.steps_reward([text], question=[question])
        assert [value for _, value in steps] == [value for _, value in wanted]
        assert all(text[:end].endswith(tail) for (end, _), (tail, _) in zip(steps, wanted))
        assert steps[-1][0] == len(text)
        # spaces in the question, TRL's messages and an equal answer change nothing
        message = [{"role": "assistant", "content": text}]
        assert rewards.steps_reward([message], " ".join(question)) == [steps]


def test_steps_has_no_verdict_for_a_question_that_is_no_sum_and_0_for_an_empty_text():
    questions = ["Why?", "2*3", "", "5", "2+", "+2+3", "9" * 5000 + "+1", "1+2"]
    assert rewards.steps_reward([""] * 8, question=questions) == [None] * 7 + [0.0]


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "=", "3", "6", "1+2", "-",
                          " ", "\n", ".", "None", "٣", "½", "\ud800", "\0", "answer is",
                          "9" * 30])


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES | st.text(max_size=9), max_size=20).map("".join))
def test_steps_of_any_text_are_steps_and_only_as_many_are_right_as_the_sum_has(text):
    (value,) = rewards.steps_reward([text], question="1+2+3")
    assert (value == 0.0) == (text == "")
    if text:
        assert verifier._checked(value, text) == value and {x for _, x in value} <= {0.0, 1.0}
        assert sum(x for _, x in value) <= 3


# ---- Verifier adds steps

FUNCTIONS = """
import numpy as np
def letters(completions, **_):  # a step per letter: 1 if it is upper case
    return [[(i + 1, float(c.isupper())) for i, c in enumerate(text)] for text in completions]
def size(completions, **_):
    return [float(len(c)) for c in completions]
def one(completions, **_):
    return [1.0] * len(completions)
def batch(completions, index, correct=None, **_):
    correct = correct or [-1] * len(index)
    return [[(1, float(i)), (2, float(c)), (3, float(len(index)))] for i, c in zip(index, correct)]
batch.whole_batch = True
def never(completions, **_):
    raise KeyError("never")
def code(completions, **_):
    return [0.0]
def asks(completions, **_):
    return [len(completions) + 1.0]
asks.waits = True
def kinds(completions, **_):
    kind, _, _ = completions[0].partition(" ")
    nan, inf, n = float("nan"), float("inf"), len(completions[0])
    return [{"empty": [], "list": [[1, True]], "whole": [(n, 1.0)], "none": None, "number": 0.25,
             "numpy": [(np.int64(3), np.float32(2))], "zero": [(0, 1.0)], "long": [(n + 1, 1.0)],
             "equal": [(2, 1.0), (2, 1.0)], "float": [(2.0, 1.0)], "nan": [(2, nan)],
             "inf": [(2, 1.0), (3, inf)], "nothing": [(2, None)], "one": [(2,)],
             "bare": [1.0], "deep": [[(2, 1.0)]], "dict": {2: 1.0}, "huge": [(2, 10 ** 400)]}[kind]]
"""
ADDED = [  # spec, what it gives the text "aBcD"
    # a number is a step at the end
    ("letters:2,size:0.5", [(1, 0), (2, 2), (3, 0), (4, 2 + 0.5 * 4)]),
    ("letters:0,size", 4.0),  # without weight: no steps, only the part
    # correct: the mean of the letters' steps
    ("letters,batch:0.5", [(1, 0), (2, 1 + 0.5 * 0.5), (3, 0.5 * 1), (4, 1)]),
    ("letters:0,batch", [(1, 0), (2, 0.5), (3, 1)]),
    ("letters,never", None),
]


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "my.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def judge(my):
    """judge("letters:2,size", texts, **columns) -> (rewards, parts, metrics), from one pool."""
    specs = [*dict(ADDED), "kinds:2", "kinds:0.5,size:0.1", "asks,size:0.5", "size"]
    full = {spec: ",".join(f"{my}:{part}" for part in spec.split(",")) for spec in specs}
    with rewards.Verifier(f"{my}:one", workers=2, row_specs=full.values()) as verify:
        def judge(specs, texts, **columns):
            specs = specs if isinstance(specs, list) else [specs] * len(texts)
            return verify(texts, reward=[spec and full[spec] for spec in specs], **columns)
        judge.verify, judge.full = verify, full
        yield judge


def test_steps_and_numbers_are_weighted_and_added_where_they_end(judge):
    means = {"letters": 0.5, "size": 4, "batch": (0 + 0.5 + 1) / 3}
    for spec, wanted in ADDED:
        (value,), parts, _ = judge(spec, ["aBcD"])
        assert value == wanted and type(value) is type(wanted)
        named = {part.partition(":")[0] for part in spec.split(",")}
        assert parts == {name: [means.get(name) if name in named else None] for name in parts}


def test_one_batch_may_hold_steps_numbers_and_no_verdicts(judge):
    texts = ["whole", "none", "number", "empty", "list", "numpy"]
    values, parts, metrics = judge("kinds:2", texts)
    assert values == [[(5, 2.0)], None, 0.5, None, [(1, 2.0)], [(3, 4.0)]]
    assert parts["kinds"] == [1.0, None, 0.25, None, 1.0, 2.0] and not any(metrics.values())
    values, _, _ = judge("kinds:0.5,size:0.1", texts)  # a number becomes a step only beside steps
    assert values[:3] == [[(5, 0.5 + 0.1 * 5)], 0.1 * 4, 0.5 * 0.25 + 0.1 * 6]
    assert values[3] == 0.1 * 5
    assert judge("letters:2,size:0.5", [""])[0] == [0.0]  # an empty completion has no steps


def test_malformed_steps_are_crashes_with_a_reason(judge):
    malformed = ["zero", "long", "equal", "float", "nan", "inf", "nothing", "one", "bare", "deep",
                 "dict", "huge"]
    values, parts, metrics = judge("kinds:0.5,size:0.1", [kind + " ......" for kind in malformed])
    assert values == [None] * len(malformed) == parts["kinds"]
    assert metrics == {"reward/timeouts": 0.0, "reward/crashes": len(malformed)}
    text = verifier._call(lambda completions: [[(0, 1.0)]], ["aBcDe"], {})
    assert "ValueError: returned [(0, 1.0)]: the ends of the steps must rise within 1" in text


def test_the_example_in_the_docs_gives_the_steps_that_they_name(tmp_path):
    page = (ROOT / "docs/data_and_rewards.md").read_text()
    (code,) = re.findall(r"```python\n(# my_steps.py.*?)```", page, re.S)
    (tmp_path / "my_steps.py").write_text(code)
    text = "It is 6*12.\n" + "x" * 61 + "\n#### 72"
    spec = f"gsm8k:1,{tmp_path}/my_steps.py:short_lines:0.1"
    with rewards.Verifier(spec, workers=1, messages=True) as verify:  # ends count the text
        values, _, _ = verify([text, ""], answer=["72"] * 2)
    assert values == [[(12, 0.1), (74, 0.0), (81, 0.1 + 1)], 0.0]


STEPS = st.dictionaries(st.integers(1, 9), st.integers(-4, 4), min_size=1)
STEPS = STEPS.map(lambda steps: sorted(steps.items()))


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), STEPS | st.integers(-4, 4)),
                min_size=1))
def test_a_character_gets_the_weighted_sum_of_what_each_function_gives_it(given_values):
    """It gets the values of the steps that end at or after it. All numbers are exact in binary."""
    def later(value, at):
        return sum(x for end, x in value if end > at) if isinstance(value, list) else value
    value = verifier._weighted(given_values, "123456789")
    has_steps = any(weight and isinstance(v, list) for weight, v in given_values)
    assert isinstance(value, list) == has_steps
    for at in range(9 if has_steps else 1):
        assert later(value, at) == sum(weight * later(v, at) for weight, v in given_values)


# ---- a reward per row


def test_each_row_is_judged_by_its_own_spec_alone(judge):
    """Also by a function that waits for a network, and by one that gets a whole batch."""
    specs = ["letters,never", None, "", "asks,size:0.5", "letters,batch:0.5", "letters,batch:0.5"]
    texts = ["a", "b", "x", "cd", "efg", "HIJ"]
    values, parts, metrics = judge(specs, texts)
    assert values[:4] == [None, 1.0, 1.0, 2.0 + 0.5 * 2]
    assert values[4:] == [[(1, 2.0), (2, 0), (3, 1)], [(1, 3.5), (2, 1.5), (3, 2)]]
    assert metrics["reward/crashes"] == 1
    assert parts["batch"][:4] == [None] * 4 and parts["one"] == [None, 1.0, 1.0, None, None, None]
    verify, spec = judge.verify, judge.full["asks,size:0.5"]
    assert verify.weights_of(None) == verify.weights_of("") == {"one": 1.0}
    assert list(verify.weights_of(spec).items()) == [("asks", 1.0), ("size", 0.5)]
    assert verify(texts)[0] == [1.0] * 6  # without the column
    assert verify(texts, reward=spec)[0] == [2.0 + 0.5 * len(text) for text in texts]
    with pytest.raises(KeyError):
        verify(["a"], reward=["gsm8k:3"])  # not in row_specs


@pytest.mark.parametrize("bad, says", [
    ("gsm9k", "'gsm9k': unknown reward 'gsm9k'; known: gsm8k.*"),
    (0.5, "0.5 is no text such as math:1,format:0.1"),
    ("MY:code", "'.*my.py:code': another reward is named 'code' too"),
])
def test_a_row_spec_that_cannot_be_used_is_named_in_one_line(my, bad, says):
    bad = bad.replace("MY", str(my)) if isinstance(bad, str) else bad
    with pytest.raises(ValueError, match=f"^column 'reward'[,:] {says}$"):
        rewards.Verifier("code", allow_unsafe_code=True, row_specs=["format", bad])


def test_columns_are_checked_in_the_rows_that_a_function_judges():
    rows = [{"question": "q", "answer": "7", "tests": None, "reward": None, "prompt_ids": [1]},
            {"question": "q", "answer": None, "tests": ["assert True"], "reward": "code"}]
    with rewards.Verifier("gsm8k", allow_unsafe_code=True, row_specs=["code"]) as verify:
        verify.check_columns(rows, "x.jsonl")
        with pytest.raises(ValueError, match=(
                "^reward code: it reads the column 'tests', which x.jsonl does not have in the "
                "rows with this reward .it has question, ")):
            verify.check_columns([rows[0], rows[0] | {"reward": "code"}], "x.jsonl")
        with pytest.raises(ValueError, match="^reward gsm8k: it reads the column 'answer', "):
            verify.check_columns([rows[1], rows[1] | {"reward": None}], "x.jsonl")
