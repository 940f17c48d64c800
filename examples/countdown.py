"""The reward of Countdown: make a number from others (TinyZero's task).

    python nano_rlvr.py --task countdown --model Qwen2.5-1.5B --template r1
"""
import ast
import re
from fractions import Fraction

from data import countdown  # noqa: F401
from rewards import each, final_answer

SIGNS = {"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "−": "-", "（": "(", "）": ")",
         r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": "",
         r"\(": "", r"\)": ""}
OPERATORS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__, ast.Mult: Fraction.__mul__,
             ast.Div: Fraction.__truediv__}


@each
def countdown_reward(text, numbers, target):
    """1.0 if the final answer is an expression with each of `numbers` once and the value `target`.

    Else 0.0. "(2 + 3) * 4" or "(2 + 3) * 4 = 20", with + - * / ( ) only. The arithmetic is exact.
    """
    answer = final_answer(text) or ""
    for sign, operator in SIGNS.items():
        answer = answer.replace(sign, operator)
    answer, equals, value = (side.strip() for side in answer.strip(" $`.").partition("="))
    if equals and value != str(Fraction(target)):  # in a column with gaps 21 is 21.0
        return 0.0
    if not re.fullmatch(r"[\d+\-*/() ]{1,300}", answer, re.A):
        return 0.0
    if sorted(map(int, re.findall(r"\d+", answer))) != sorted(map(int, numbers)):
        return 0.0  # before parsing: the expression is now no larger than `numbers` allow
    try:
        return float(_evaluate(ast.parse(answer, mode="eval").body) == Fraction(target))
    except (SyntaxError, ZeroDivisionError, KeyError, AttributeError, MemoryError,
            RecursionError):
        return 0.0


def _evaluate(node):
    """The value as a Fraction. KeyError for // and **, AttributeError for a sign or call."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
