"""A reward for programs: 1 if the program of a completion passes its tests, which run in a jail.

    python nano_rlvr.py --data my.jsonl --answer_key none --rewards examples/code_reward.py:code

A row of my.jsonl has `question` and `tests`. ALLOW_UNSAFE_CODE=1 in the environment runs the
programs without isolation, where jail.py cannot build a jail.
"""
import ast
import itertools
import json
import os
import re
import sys
import textwrap
import time
import warnings

from examples import jail
from rewards import after_thinking, each, final_answer

OPENING = re.compile(r"```[ \t]{0,9}([\w+-]{0,20})[^\n`]{0,99}\n")
FENCE = re.compile(r"\n?```")
FENCE_ALONE = re.compile(r"\n?^[ \t]{0,99}`{3,9}[ \t]{0,9}$", re.M)  # on its line
MOST_FENCES = 100  # in a text with more fences each one counts
PYTHON = ("python", "python3", "py")


def parsed(source):
    """ast.parse, which here also reads integers of more than 4,300 digits."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of "\d"
            return ast.parse(source)
    finally:
        sys.set_int_max_str_digits(limit)


def is_program(source):
    """Whether Python can parse the text."""
    try:
        parsed(textwrap.dedent(source))
        return True
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a null byte
        return False


def end_of_program(text):
    """The match of the fence that ends the program at the start of the text, None without a fence.

    It is alone on its line, and Python can parse what is before it: a fence in a docstring or in a
    comment ends no program. If there is no such fence, the first one counts.
    """
    for end in itertools.islice(FENCE_ALONE.finditer(text), MOST_FENCES // 5):
        if is_program(text[:end.start()]):
            return end
    return FENCE.search(text)


def fenced_blocks(text):
    """[(language in lower case, code)] of a Markdown text. Blocks of every language: the end of a
    bash block must not start a Python block.
    """
    blocks = []
    few = text.count("```") <= MOST_FENCES
    while opening := OPENING.search(text):
        language = opening[1].lower()
        text = text[opening.end():]
        may_be_python = few and language in ("", *PYTHON)
        end = end_of_program(text) if may_be_python else FENCE.search(text)
        if not end:
            break
        blocks.append((language, text[:end.start()]))
        text = text[end.end():]
    return blocks


def program_of(text):
    """The Python program of a completion: its last fenced block after </think>, else <answer>.
    A block without a language may be what the program prints; it counts if none says Python.

    >>> program_of("<think>```python\\n1\\n```</think> Here:\\n```python\\nprint(2)\\n```")
    'print(2)'
    """
    text = after_thinking(text)
    blocks = fenced_blocks(text)
    programs = [code for language, code in blocks if language in PYTHON]
    programs = programs or [code for language, code in blocks if not language]
    if programs:
        return textwrap.dedent(programs[-1])  # it may stand below an item of a list
    return final_answer(text) if "<answer>" in text else None


def lines_of(text):
    return [line.rstrip() for line in text.rstrip().splitlines()]


def modules_of(tree):
    """Names of the top-level modules that a parsed text imports."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return {module.partition(".")[0] for module in modules}


def has_known_form(test):
    """Whether `code` can run the test. A text must have an assert that is reached."""
    if isinstance(test, dict):
        return test.keys() == {"input", "output"} and set(map(type, test.values())) == {str}
    if not isinstance(test, str):
        return False
    tree = parsed(test)
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    return asserts and not isinstance(tree.body[-1], (ast.FunctionDef, ast.ClassDef))


def known_tests(tests):
    """`tests` as a list, if each is of a form that `code` runs. Others, such as those of APPS
    ({"inputs": [...], "outputs": [...]}) or a `check` that nobody calls, raise ValueError. So does
    a test that imports what programs do not have.
    """
    tests = json.loads(tests) if isinstance(tests, str) else tests
    for test in tests if isinstance(tests, list) else [tests]:
        if not has_known_form(test):
            raise ValueError(f"the form of a test is unknown: {test!r:.200}; write a list of "
                             """{"input": text, "output": text} or of texts with assert""")
        if isinstance(test, str):
            importable = {*sys.stdlib_module_names, "program", *jail.installed_packages()}
            if missing := modules_of(parsed(test)) - importable:
                raise ValueError(f"a test imports {min(missing)}, which is not in the jail (it has "
                                 f"Python's library, {', '.join(jail.PACKAGES)}): {test!r:.200}")
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
    program = program_of(text)
    passed = []
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


def check(**settings):
    """Raises RuntimeError where no jail can be built. Notes the packages that are not there."""
    jail.check()
    missing = [name for name in jail.PACKAGES if name not in jail.installed_packages()]
    if missing and os.environ.get("RANK", "0") == "0":
        print(f"note: programs cannot import {', '.join(missing)}: not installed here",
              file=sys.stderr)


code.check = check  # before the workers are forked
code.reads_gold = True  # a row whose tests are unknown is found at the start
