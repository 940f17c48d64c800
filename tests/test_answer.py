"""The reward `math` against a second opinion, and on any text. Tables are in adversarial.txt."""
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pairs
import rewards
from examples.math_reward import same_math

PIECES = st.sampled_from([
    *"0123456789+-*/^_=<>(){}[],.!|%$&~'°√∛²⁻₈½¾∞π·×÷−–≤∈∪±", "\\", " ", "\n", "\0", "\ud800", "٣",
    "x", "n", "i", "I", "e", "A", "25_8", "1A_{16}", "_{", "^{", "^-3", "1e-05", "2 3/4", "20!",
    "0.\\overline{3}", "\\bar{6}", "\\frac", "\\frac{1}{2}", "\\sqrt{", "\\sqrt[3]{", "\\text{",
    "\\text{ and }", "\\mathrm{e}", "\\times 10^{-19}", "\\pi", "\\infty", "\\pm", "\\le", "\\cup",
    "\\binom{6}{3}", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "\\{", "\\}", "\\left(",
    "\\right)", "\\%", "^\\circ", "\\sin", "\\log_2", "\\sum_{i=1}^n", "\\int", "pigs", " and ",
    "oo"])
LATEX = st.lists(PIECES, min_size=1, max_size=8).map("".join)


@pytest.fixture(scope="module")
def verify():
    with rewards.Verifier("math", timeout=5.0) as made:
        yield made


def test_math_agrees_with_intervals_of_120_digits():
    """Of the pairs of pairs.py, which runs thousands of them."""
    assert len(pairs.KINDS) == 10
    wrong = [pair for pair in pairs.pairs(120, seed=1) if same_math(*pair[1:3]) is not pair[3]]
    assert wrong == []


def test_the_second_opinion_knows_equal_and_unequal_pairs_of_each_kind():
    found = Counter((kind, equal) for kind, _, _, equal in pairs.pairs(400))
    assert min(found[kind, equal] for kind in pairs.KINDS for equal in (True, False)) >= 5


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LATEX, LATEX), min_size=20, max_size=20))
def test_any_gold_and_any_answer_get_a_verdict_or_a_reason_for_none(verify, drawn):
    """None is for a gold answer that cannot be read or for a comparison that takes too long."""
    golds, answers = zip(*drawn)
    texts = [f"<answer>{answer}</answer>" for answer in answers]
    values, _, metrics = verify(texts, answer=list(golds))
    assert metrics["reward/crashes"] == 0 and set(values) <= {0.0, 1.0, None}
    unread, *_ = verify([""] * len(texts), answer=list(golds))
    for value, of_empty in zip(values, unread):
        assert value is not None or of_empty is None or metrics["reward/timeouts"]
    # an answer is equal to itself, if it can be read and is marked as it stands
    same, *_ = verify([f"<answer>{gold}</answer>" for gold in golds], answer=list(golds))
    plain = [not set("<#\\") & set(gold) and gold.strip() for gold in golds]
    assert all(value in (1.0, None) for value, simple in zip(same, plain) if simple)
