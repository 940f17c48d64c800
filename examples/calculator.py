"""A tool for a small language model: it writes `calc: 37 * 46`, reads 1702 and answers.

    python models/smollm2.py
    C=examples/calculator.py
    python nano_rlvr.py --model models/smollm2 --data $C:make --eval_data $C:make \\
        --template examples/calculator.txt --rollout $C:play \\
        --rewards examples/environment.py:outcome,$C:calls:0 \\
        --max_prompt 256 --max_tokens 64 --dtype bfloat16 --steps 16 --eval_every 16

The questions are the stories of examples/stories.py with numbers up to 99, too large for SmolLM2 to
compute with. The prompt shows two calls. A turn without a call ends the episode, and its last
number is the answer. The reward is 1 if the answer is right: it knows nothing of calls. A control
in which a coin rewards each episode: --rewards examples/environment.py:outcome:0,random:1
"""
import ast
import functools
import re

from examples import stories
from examples.environment import player
from rewards import _evaluate, each, right

CALL = re.compile(r"calc:\s*([\d+\-*/(). ]*)", re.A)  # what follows the expression is not read
MOST = 40  # characters of an expression
make = functools.partial(stories.make, numbers=range(21, 100))


def calculate(expression):
    """The value of an expression with + - * / ( ), as text. "error" if it has none."""
    if len(expression) > MOST:
        return "error"
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, KeyError, AttributeError):
        return "error"
    return f"{float(value):.10g}"


class Calculator:
    """An environment of examples/environment.py."""

    def reset(self, row):
        self.answer = row["answer"]
        return row["question"]

    def step(self, text):
        call = CALL.search(text)
        if call:
            return calculate(call[1]), 0.0, False
        [reward] = right([text], answer=[self.answer])
        return "", reward, True


play = player(Calculator, 4)


@each
def calls(text):
    """The number of calls, to be logged."""
    return float(len(CALL.findall(text)))
