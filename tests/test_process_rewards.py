"""Rewards per step and rewards per row: what `steps` gives, how Verifier adds it, who judges a row."""
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import rewards
from conftest import ROOT
from verify import verifier

# -------------------------------------------------------------------------------- the reward `steps`

REAL = [  # completions of the bundled model: (question, text, the totals that end a step with their values)
    ("16+16-3-17+10+18", "<think></think><answer>38</answer>", [("</answer>", 0)]),
    ("13-2-3-1+6-13", "<think></think><answer>0</answer>", [("</answer>", 1)]),  # a right guess
    ("11+8-4", "<think>11+8=19\n19-4=15</think><answer>15</answer>",
     [("=19", 1), ("=15", 1), ("</answer>", 1)]),
    ("4+15+2+18+3+4", "<think>4+15=18\n18+2=20\n20+18=38\n38+3=41\n41+4=45</think><answer>45</answer>",
     [("=18", 0), ("=20", 0), ("=38", 0), ("=41", 0), ("=45", 0), ("</answer>", 0)]),
    ("12+15+3-20", "<think>12+15=27\n27+3=30\n30-20=10</think><answer>0</answer>",
     [("=27", 1), ("=30", 1), ("=10", 1), ("</answer>", 0)]),  # totals right, answer wrong
    ("11-8+16+19+16", "<think>11-8=3\n3+16=19\n19+19=38\n38+16=54</think><answer>53</answer>",
     [("=3", 1), ("=19", 1), ("=38", 1), ("=54", 1), ("</answer>", 0)]),
    # the left side does not count; a total after a wrong one may be right again
    ("17-5+19-4+14", "<think>17-5=</think><answer>41</answer>", [("17-5=", 0), ("</answer>", 1)]),
    ("10+15-8", "<think>10+15=26\n25-8=17</think><answer>17</answer>",
     [("=26", 0), ("=17", 1), ("</answer>", 1)]),
    ("4+15+2+18", "<think>4+15=19\n18+2=+2\n19+18=39</think><answer>44</answer>",
     [("4+15=19", 1), ("18+2=", 0), ("=39", 1), ("</answer>", 0)]),
    ("14+12+4-11", "<think>14+12=26\n26+4=30\n30-11=1X9</think><answer>19</answer>",
     [("=26", 1), ("=30", 1), ("=1X9", 0), ("</answer>", 1)]),
    ("2-2+18", "<think>2-2=0\n0+18=\ufffd18</think><answer>\ufffd18</answer>",
     [("=0", 1), ("0+18=", 0), ("</answer>", 1)]),
    # one total too many
    ("17-10-4+17", "<think>17-1\ufffd<think>17-10=7\n7-4=3\n3+17=20\n20+17=20</think><answer>20</answer>",
     [("=7", 1), ("=3", 1), ("=20", 1), ("+17=20", 0), ("</answer>", 1)]),
    ("9+18-16", "<think>9+18=27<think>9-16=11", [("=27", 1), ("=11", 0)]),  # cut off: no answer, 0
]


@pytest.mark.parametrize("question, text, wanted", REAL, ids=[text for _, text, _ in REAL])
def test_steps_judges_running_totals_and_the_answer(question, text, wanted):
    (steps,) = rewards.steps_reward([text], question=[question])
    assert [value for _, value in steps] == [value for _, value in wanted]
    assert all(text[:end].endswith(tail) for (end, _), (tail, _) in zip(steps, wanted))
    assert steps[-1][0] == len(text)
    # spaces in the question, TRL's messages and an equal answer change nothing
    message = [{"role": "assistant", "content": text}]
    assert rewards.steps_reward([message], question=" ".join(question), answer=["?"]) == [steps]


def test_steps_has_no_verdict_for_a_question_that_is_no_sum_and_0_for_an_empty_text():
    questions = ["Why?", "2*3", "", "5", "2+", "+2+3", "9" * 5000 + "+1", "1+2"]
    assert rewards.steps_reward([""] * 8, question=questions) == [None] * 7 + [0.0]
    assert rewards.steps_reward(["3"], question="1+2") == [[(1, 1.0)]]


def worked_out(question, change=None):
    """The completion that the bundled model was taught, with the total of index `change` off by one."""
    first, *terms = map(int, re.findall(r"[+-]?\d+", question))
    totals = list(itertools.accumulate([first, *terms]))
    lines = [f"{a}{x:+d}={b + (i == change)}" for i, (a, x, b) in enumerate(zip(totals, terms, totals[1:]))]
    return f"<think>{chr(10).join(lines)}</think><answer>{totals[-1]}</answer>"


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False))
def test_steps_gives_1_to_every_step_of_a_right_derivation_and_0_to_the_one_that_is_changed(rng):
    question = data.arithmetic(rng)["question"]
    n = len(re.findall(r"\d+", question)) - 1
    (steps,) = rewards.steps_reward([worked_out(question)], question=question)
    assert [value for _, value in steps] == [1.0] * (n + 1)
    k = rng.randrange(n)
    (steps,) = rewards.steps_reward([worked_out(question, change=k)], question=question)
    assert [value for _, value in steps] == [float(i != k) for i in range(n + 1)]


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "=", "3", "6", "1+2", "-", " ",
                          "\n", ".", "None", "٣", "½", "\ud800", "\0", "answer is", "9" * 30])


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(max_size=50), st.lists(PIECES, max_size=20).map("".join)))
def test_steps_of_any_text_are_steps_and_only_as_many_are_right_as_the_sum_has(text):
    (value,) = rewards.steps_reward([text], question="1+2+3")
    assert (value == 0.0) == (text == "")
    if text:
        assert verifier._checked(value, text) == value and {x for _, x in value} <= {0.0, 1.0}
        assert sum(x for _, x in value) <= 3


# -------------------------------------------------------------------------------- Verifier adds steps

FUNCTIONS = """
import asyncio, os
import numpy as np
from rewards import each
def letters(completions, **_):  # a step per letter: 1 if it is upper case
    return [[(i + 1, float(c.isupper())) for i, c in enumerate(text)] for text in completions]
def halves(completions, **_):
    return [[(len(c) // 2, 1.0), (len(c), -1.0)] for c in completions]
def size(completions, **_):
    return [float(len(c)) for c in completions]
def one(completions, **_):
    return [1.0] * len(completions)
async def later(completions, **_):
    await asyncio.sleep(0)
    return [[(1, 2.0)]] * len(completions)
def batch(completions, index, correct=None, **_):
    correct = correct or [-1] * len(index)
    return [[(1, float(i)), (2, float(c)), (3, float(len(index)))] for i, c in zip(index, correct)]
batch.whole_batch = True
@each
def by_each(text, goal):
    return [(1, 1.0), (len(text), 0.5)] if goal else None
def never(completions, **_):
    raise KeyError("never")
def code(completions, **_):
    return [0.0]
def kinds(completions, **_):
    text = completions[0] if isinstance(completions[0], str) else completions[0][0]["content"]
    kind, _, _ = text.partition(" ")
    nan, inf, n = float("nan"), float("inf"), len(text)
    return [{"empty": [], "tuple": ((1, 1), (2, 0)), "list": [[1, True]], "whole": [(n, 1.0)],
             "numpy": [(np.int64(3), np.float32(2))], "none": None, "number": 0.25,
             "zero": [(0, 1.0)], "negative": [(-1, 1.0)], "long": [(n + 1, 1.0)],
             "equal": [(2, 1.0), (2, 1.0)], "falls": [(3, 1.0), (2, 1.0)], "float": [(2.0, 1.0)],
             "text": [("2", 1.0)], "nan": [(2, nan)],
             "inf": [(2, 1.0), (3, inf)], "nothing": [(2, None)], "one": [(2,)],
             "three": [(2, 1.0, 1.0)], "bare": [1.0], "pair": (2, 1.0), "deep": [[(2, 1.0)]],
             "dict": {2: 1.0}, "huge": [(2, 10 ** 400)]}[kind]]
"""


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "my.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def judge(my):
    """judge("letters:2,size", texts, **columns) -> (rewards, parts, metrics), from one pool."""
    specs = ["letters", "letters:2,halves:0.5", "letters:2,size:0.5", "size:0.5,letters:-1", "letters:0",
             "letters:0,size", "size:0,letters", "letters:0,halves:1", "later,size", "letters,batch:0.5",
             "batch", "by_each,size:2", "letters,never", "kinds:2", "kinds:0.5,size:0.1",
             "kinds:0,size"]
    full = {spec: ",".join(f"{my}:{part}" for part in spec.split(",")) for spec in specs}
    with rewards.Verifier(f"{my}:one", workers=2, row_specs=full.values()) as verify:
        yield lambda spec, texts, **columns: verify(texts, reward=[full[spec]] * len(texts), **columns)


@pytest.mark.parametrize("spec, wanted", [  # of the text "aBcD"
    ("letters", [(1, 0), (2, 1), (3, 0), (4, 1)]),
    ("letters:2,halves:0.5", [(1, 0), (2, 2 + 0.5), (3, 0), (4, 2 - 0.5)]),
    ("letters:2,size:0.5", [(1, 0), (2, 2), (3, 0), (4, 2 + 0.5 * 4)]),  # a number is a step at the end
    ("size:0.5,letters:-1", [(1, 0), (2, -1), (3, 0), (4, 2 - 1)]),
    ("letters:0", 0.0),  # without weight: no steps, only the part
    ("letters:0,size", 4.0),
    ("size:0,letters", [(1, 0), (2, 1), (3, 0), (4, 1)]),
    ("letters:0,halves:1", [(2, 1), (4, -1)]),
    ("later,size", [(1, 2), (4, 4)]),
    ("letters,batch:0.5", [(1, 0), (2, 1 + 0.5 * 0.5), (3, 0.5 * 1), (4, 1)]),  # correct: letters' mean
    ("batch", [(1, 0), (2, -1), (3, 1)]),
    ("by_each,size:2", [(1, 1), (4, 0.5 + 2 * 4)]),
    ("letters,never", None),
])
def test_steps_and_numbers_are_weighted_and_added_where_they_end(judge, spec, wanted):
    (value,), parts, _ = judge(spec, ["aBcD"], goal="x")
    assert value == wanted and type(value) is type(wanted)
    means = {"letters": [0.5], "halves": [0], "size": [4], "later": [2], "by_each": [0.75], "never": [None]}
    named = [part.partition(":")[0] for part in spec.split(",")]
    assert all(parts[name] == means[name] for name in named if name in means)
    assert all(parts[name] == [None] for name in parts if name not in named)


def test_one_batch_may_hold_steps_numbers_and_no_verdicts(judge):
    texts = ["whole", "none", "number", "empty", "tuple", "list", "numpy"]
    values, parts, metrics = judge("kinds:2", texts)
    assert values == [[(5, 2.0)], None, 0.5, None, [(1, 2.0), (2, 0.0)], [(1, 2.0)], [(3, 4.0)]]
    assert parts["kinds"] == [1.0, None, 0.25, None, 0.5, 1.0, 2.0] and not any(metrics.values())
    values, _, _ = judge("kinds:0.5,size:0.1", texts)  # only where there are steps does the number become one
    assert values[:3] == [[(5, 0.5 + 0.1 * 5)], 0.1 * 4, 0.5 * 0.25 + 0.1 * 6] and values[3] == 0.1 * 5
    values, _, _ = judge("kinds:0,size", texts)
    assert values == [float(len(text)) for text in texts]


def test_an_empty_completion_has_numbers_but_no_steps(judge):
    assert judge("letters", [""])[0] == [None]
    assert judge("letters:2,size:0.5", [""])[0] == [0.0]


MALFORMED = ["zero", "negative", "long", "equal", "falls", "float", "text", "nan", "inf", "nothing", "one",
             "three", "bare", "pair", "deep", "dict", "huge"]


def test_malformed_steps_are_crashes_with_a_reason(judge):
    texts = [kind + " ......" for kind in MALFORMED]
    values, parts, metrics = judge("kinds:0.5,size:0.1", texts)
    assert values == [None] * len(MALFORMED) == parts["kinds"]
    assert metrics == {"reward/timeouts": 0.0, "reward/crashes": len(MALFORMED)}


@pytest.mark.parametrize("value, says", [
    ([(0, 1.0)], r"ValueError: returned \[\(0, 1.0\)\]: the ends of the steps must rise within 1..len"),
    ([(2, 1.0), (5, float("inf"))], r"here 5, and their values must be finite"),
    ([1.0], r"TypeError: returned \[1.0\]: a step must be \(end, value\), an int and a number"),
    ((1, 1.0), "a step must be"), ([(2.0, 1.0)], "a step must be"),
])
def test_the_reason_says_what_a_step_is(value, says):
    text = verifier._call(lambda completions: [value], ["aBcDe"], {})
    assert isinstance(text, str) and re.search(says, text.splitlines()[-1])


def test_the_example_in_the_docs_gives_the_steps_that_they_name(tmp_path):
    page = (ROOT / "docs/data_and_rewards.md").read_text()
    (code,) = re.findall(r"```python\n(# my_steps.py.*?)```", page, re.S)
    (tmp_path / "my_steps.py").write_text(code)
    text = "It is 6*12.\n" + "x" * 61 + "\n#### 72"
    with rewards.Verifier(f"gsm8k:1,{tmp_path}/my_steps.py:short_lines:0.1", workers=1) as verify:
        assert verify([text, ""], answer=["72"] * 2)[0] == [[(12, 0.1), (74, 0.0), (81, 0.1 + 1)], 0.0]


def test_ends_count_the_characters_of_the_text_also_in_a_message(my):
    with rewards.Verifier(f"{my}:kinds,{my}:one", workers=1, messages=True) as verify:
        values, _, metrics = verify(["whole text", "long text"])
    assert values == [[(10, 2.0)], None] and metrics["reward/crashes"] == 1


STEPS = st.dictionaries(st.integers(1, 9), st.integers(-4, 4), min_size=1).map(lambda d: sorted(d.items()))


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), STEPS | st.integers(-4, 4)), min_size=1))
def test_what_a_character_gets_is_the_weighted_sum_of_what_each_function_gives_it(given_values):
    """A character gets the values of the steps that end at or after it. All numbers are exact in binary."""
    def later(value, at):
        return sum(x for end, x in value if end > at) if isinstance(value, list) else value
    value = verifier._weighted(given_values, "123456789")
    has_steps = any(weight and isinstance(v, list) for weight, v in given_values)
    assert isinstance(value, list) == has_steps
    if has_steps:
        assert verifier._checked(value, "123456789") == value
    for at in range(9 if has_steps else 1):
        assert later(value, at) == sum(weight * later(v, at) for weight, v in given_values)


# -------------------------------------------------------------------------------- a reward per row


def test_each_row_is_judged_by_its_own_spec_alone(my):
    specs = [None, "gsm8k:2,format:0.5", "", f"format,{my}:size:0.1", "gsm8k:2,format:0.5", f"{my}:letters"]
    texts = ["<answer>7</answer>", "7", "8", "abcd", "<think>x</think><answer>7</answer>", "aB"]
    with rewards.Verifier("gsm8k:1", workers=2, row_specs=specs) as verify:
        values, parts, metrics = verify(texts, answer=["7"] * 6, reward=specs)
        assert values == [1.0, 2.0, 0.0, 0.1 * 4, 2.5, [(1, 0.0), (2, 1.0)]] and not any(metrics.values())
        assert parts == {"gsm8k": [1, 1, 0, None, 1, None], "format": [None, 0, None, 0, 1, None],
                         "size": [None, None, None, 4, None, None], "letters": [None] * 5 + [0.5]}
        assert verify.weights_of(None) == verify.weights_of("") == verify.weights_of() == {"gsm8k": 1.0}
        assert list(verify.weights_of(specs[3]).items()) == [("format", 1.0), ("size", 0.1)]
        # without the column, or with one spec for all rows
        assert verify(texts, answer=["7"] * 6)[0] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
        assert verify(texts[:2], answer=["7"] * 2, reward=specs[1])[0] == [2.0, 2.0]
        for unknown in "gsm8k:3", 0.5, ["gsm8k"], {}:
            with pytest.raises(ValueError, match="^column 'reward': .* was not in row_specs at the start$"):
                verify(texts[:1], answer=["7"], reward=[unknown])


def test_a_function_is_called_for_its_own_rows_only(my, capfd):
    other = f"{my}:one"
    with rewards.Verifier(f"{my}:never", workers=1, row_specs=[other]) as verify:
        values, parts, metrics = verify(["a", "b", "c"], reward=[other, None, other])
    assert values == [1.0, None, 1.0] and metrics["reward/crashes"] == 1
    assert "'b'" in capfd.readouterr().err


def test_a_row_waits_only_for_its_own_functions(my, tmp_path):
    """Functions that wait for a network run in a second pool."""
    (tmp_path / "net.py").write_text(
        "def asks(completions, **_):\n    return [len(completions) + 1.0]\nasks.waits = True\n")
    both = f"{tmp_path}/net.py:asks,{my}:size:0.5"
    with rewards.Verifier(f"{my}:size", workers=1, row_specs=[both]) as verify:
        assert verify(["ab", "cd"], reward=[None, both])[0] == [2.0, 3.0]


def test_whole_batch_functions_see_the_completions_of_their_spec_only(my):
    a, b, c = f"{my}:size,{my}:batch", f"{my}:batch", f"{my}:size"
    with rewards.Verifier(a, workers=1, row_specs=[b, c]) as verify:
        values, parts, _ = verify(["aaaa", "bbb", "ccc", "ddd"], reward=[None, b, c, b])
    # index, correct (-1: no other function in the spec), number of completions; size is a step at the end
    assert values == [[(1, 0), (2, 4), (3, 1), (4, 4)], [(1, 1), (2, -1), (3, 2)], 3.0,
                      [(1, 3), (2, -1), (3, 2)]]
    assert parts == {"size": [4, None, 3, None], "batch": [5 / 3, 2 / 3, None, 4 / 3]}


@pytest.mark.parametrize("bad, says", [
    ("gsm9k", "^column 'reward', 'gsm9k': unknown reward 'gsm9k'; known: gsm8k"),
    ("gsm8k:x", "^column 'reward', 'gsm8k:x': reward 'gsm8k:x': 'x' is not a weight"),
    ("nowhere.py:f", "^column 'reward', 'nowhere.py:f': reward file 'nowhere.py' does not exist$"),
    ("format,\n", r"^column 'reward', 'format,\\n': unknown reward ''"),
    (" ", "^column 'reward', ' ': unknown reward ''"),
    (0.5, "^column 'reward': 0.5 is no text such as math:1,format:0.1$"),
    (["gsm8k"], "^column 'reward': .* is no text such as"),
    ("MY:code", "^column 'reward', '.*my.py:code': another reward is named 'code' too$"),
])
def test_a_row_spec_that_cannot_be_used_is_named_in_one_line(my, bad, says):
    bad = bad.replace("MY", str(my)) if isinstance(bad, str) else bad
    with pytest.raises(ValueError, match=says) as caught:
        rewards.Verifier("code", allow_unsafe_code=True, row_specs=["format", bad])
    assert "\n" not in str(caught.value)


def test_columns_are_checked_in_the_rows_that_a_function_judges():
    rows = [{"question": "q", "answer": "7", "tests": None, "reward": None, "prompt_ids": [1]},
            {"question": "q", "answer": None, "tests": ["assert True"], "reward": "code"}]
    with rewards.Verifier("gsm8k", allow_unsafe_code=True, row_specs=["code", "countdown"]) as verify:
        verify.check_columns(rows, "x.jsonl")
        verify.check_columns(rows[:1], "x.jsonl")
        with pytest.raises(ValueError, match=r"^column 'reward', code: it reads the column 'tests', which "
                                             r"x.jsonl does not have in the rows with this reward \(it has "
                                             r"question, answer, reward\)$"):
            verify.check_columns([rows[0], rows[0] | {"reward": "code"}], "x.jsonl")
        with pytest.raises(ValueError, match="^--rewards gsm8k: it reads the column 'answer', which x.jsonl "
                                             "does not have in the rows with this reward"):
            verify.check_columns([rows[1], rows[1] | {"reward": None}], "x.jsonl")


def test_unreadable_gold_answers_are_counted_in_the_rows_that_a_function_judges():
    said = []
    rows = [{"answer": "7" if i % 4 else "none", "reward": None} for i in range(8)]
    rows += [{"answer": "north", "reward": "format"}] * 8
    with rewards.Verifier("gsm8k", row_specs=["format"]) as verify:
        verify.count_unreadable(rows, notify=said.append)
        verify.count_unreadable(rows, notify=said.append, at_most=4)
        with pytest.raises(ValueError, match="^reward gsm8k: none of 8 answers can be read"):
            verify.count_unreadable([row | {"answer": "?", "reward": None} for row in rows[:8]] + rows[8:])
    end = "and their completions get no verdict; one is 'none'"
    assert said == [f"reward gsm8k: 2 of 8 answers cannot be read, {end}",
                    f"reward gsm8k: 2 of 4 answers cannot be read (an even sample of 8), {end}"]
