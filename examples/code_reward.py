"""A reward for programs: 1 if the program of a completion passes its tests, which run in a jail.

    python nano_rlvr.py --data my.jsonl --answer_key none --rewards examples/code_reward.py:code

A row of my.jsonl has `question` and `tests`. ALLOW_UNSAFE_CODE=1 in the environment runs the
programs without isolation, where jail.py cannot build a jail.
"""
import ast
import json
import re
import textwrap
import time

from examples import jail
from rewards import after_thinking, each, final_answer

FENCE = re.compile(r"```[ \t]{0,9}([\w+-]{0,20})[^\n`]{0,99}\n(.*?)\n?```", re.S)


def program_of(text):
    """The Python program of a completion: its last fenced block after </think>, else <answer>.
    A block without a language may be what the program prints; it counts if none says Python.

    >>> program_of("<think>```python\\n1\\n```</think> Here:\\n```python\\nprint(2)\\n```")
    'print(2)'
    """
    text = after_thinking(text)
    # blocks of every language: the end of a bash block must not start a Python block
    blocks = [(language.lower(), code) for language, code in FENCE.findall(text)]
    programs = [code for language, code in blocks if language in ("python", "python3", "py")]
    programs = programs or [code for language, code in blocks if not language]
    if programs:
        return textwrap.dedent(programs[-1])  # it may stand below an item of a list
    return final_answer(text) if "<answer>" in text else None


def lines_of(text):
    return [line.rstrip() for line in text.rstrip().splitlines()]


def known_tests(tests):
    """`tests` as a list, if each is of a form that `code` runs. Others, such as those of APPS
    ({"inputs": [...], "outputs": [...]}) or a `check` that nobody calls, raise ValueError."""
    tests = json.loads(tests) if isinstance(tests, str) else tests
    for test in tests if isinstance(tests, list) else [tests]:
        if isinstance(test, str):
            lines = ast.parse(test).body
            asserts = any(isinstance(node, ast.Assert) for line in lines for node in ast.walk(line))
            known = asserts and not isinstance(lines[-1], (ast.FunctionDef, ast.ClassDef))
        else:
            known = isinstance(test, dict) and test.keys() == {"input", "output"} and all(
                isinstance(text, str) for text in test.values())
        if not known:
            raise ValueError(f"the form of a test is unknown: {test!r:.200}; write a list of "
                             """{"input": text, "output": text} or of texts with assert""")
    return tests


@each
def code(text, tests, timeout=5.0):
    """1.0 if the program passes every test, else 0.0; None without tests. ValueError for others.

    `tests` is a list, or its JSON text. A test is either {"input": "2 3", "output": "5"}, standard
    input and output, compared line by line without spaces at line ends, or "assert add(2, 3) == 5",
    Python that runs after the program. All tests of a completion share 0.9 * timeout seconds; a
    program that needs longer fails. Raises RuntimeError where no jail can be built.
    """
    end = time.monotonic() + 0.9 * timeout
    tests = known_tests(tests)
    if not tests:
        return None
    asserts = [test for test in tests if isinstance(test, str)]
    pairs = [test for test in tests if not isinstance(test, str)]
    program, passed = program_of(text), []
    if not program:
        return 0.0
    if asserts:
        passed += jail.run_asserts(program, asserts, 0.9 * timeout)
    if pairs:
        outputs = jail.run_program(
            program, [pair["input"] for pair in pairs], end - time.monotonic())
        for output, pair in zip(outputs, pairs):
            passed.append(output is not None and lines_of(output) == lines_of(pair["output"]))
    return float(all(passed))


code.check = lambda **settings: jail.check()  # before the workers are forked
code.reads_gold = True  # a row whose tests are unknown is found at the start
