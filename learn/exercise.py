"""Exercises: copies of the repository in which you write a function again. See learn/exercises.md.

    python -m learn.exercise                   lists them
    python -m learn.exercise 3                 makes exercises/3/, a copy with an empty function
    python -m learn.exercise --grade           grades the copies in exercises/, a line of JSON each
    python -m learn.exercise --grade ann/3     grades the copies in these folders
    python -m learn.exercise --prove           no test passes in such copies, and all pass here
"""
import ast
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

from tests import mutations

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "exercises"
LIMIT = 300  # seconds that the tests of an exercise may take
EXERCISES = {  # number -> (functions to write, test files); learn/exercises.md has all else
    1: ("nano_rlvr.py:k3", "vectors"),
    2: ("nano_rlvr.py:group_advantages", "vectors"),
    3: ("nano_rlvr.py:surrogate_objective", "vectors"),
    4: ("nano_rlvr.py:token_weights", "vectors"),
    5: ("nano_rlvr.py:policy_loss", "vectors"),
    6: ("nano_rlvr.py:importance_weight", "vectors"),
    7: ("runtime/batch.py:fill_packs", "math"),
    8: ("runtime/batch.py:packed_input", "savings"),
    9: ("runtime/head.py:chunk_backward runtime/head.py:HeadLogps.backward", "precision"),
    10: ("rewards.py:countdown_reward rewards.py:_evaluate", "rewards"),
    11: ("nano_rlvr.py:group_advantages", "vectors"),
    12: ("examples/process_rewards.py:steps_reward examples/process_rewards.py:set_advantages",
         "vectors process_rewards"),
    13: ("runtime/stats.py:pass_at_k runtime/stats.py:majority_vote", "math stats"),
    14: ("data.py:batch_at", "data"),
    15: ("runtime/sync.py:checksum", "sampler"),
    16: ("runtime/engine.py:Sampler.reload_weights runtime/sync.py:SentWeights.check", "sampler"),
}


def page():
    """{number: [title, difficulty, minutes, what comes before it, text]} of the exercises."""
    text = (ROOT / "learn/exercises.md").read_text()
    sections = re.findall(
        r"^## (\d+)\. (.+)\n\n\*(easy|medium|hard), (\d+) minutes, after (.+)\*\n"
        r"((?:[^#\n].*\n|\n)+)", text, re.M)
    return {int(number): parts for number, *parts in sections}


def functions(number):
    """[(file, name)] of the functions to write."""
    return [tuple(function.split(":")) for function in EXERCISES[number][0].split()]


def tests_of(number):
    """Arguments of pytest for the tests of an exercise."""
    files = [f"tests/test_{name}.py" for name in EXERCISES[number][1].split()]
    return [*files, "-m", f"exercise_{number}"]


def docstrings(number):
    """{function or class: docstring} of the code on the page. The product's tell the answer."""
    text = page()[number][-1]
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.S))
    result = {}
    for node in ast.parse(code).body:
        result[node.name] = ast.get_source_segment(code, node.body[0])
    return result


def replaced(source, name, text, docstring=False):
    """Source code with a text in place of the body of a function, or of a docstring."""
    node = ast.parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", "") == part)
    old = node.body[:1]
    if not docstring:
        has_docstring = ast.get_docstring(node) is not None
        old = node.body[has_docstring:]
    first = old[0].lineno - 1
    last = old[-1].end_lineno
    indent = " " * old[0].col_offset
    lines = source.splitlines(keepends=True)
    lines[first:last] = [f"{indent}{text}\n"]
    return "".join(lines)


def make(number, folder):
    """A copy of the repository in a folder, with empty functions. A student's files there stay."""
    files = sorted({file for file, _ in functions(number)})
    kept = {file: (folder / file).read_bytes() for file in files if (folder / file).exists()}
    try:
        mutations.copy(folder, files)
        for file, name in functions(number):
            source = (folder / file).read_text()
            outer = name.split(".")[0]
            if outer in docstrings(number):
                source = replaced(source, outer, docstrings(number)[outer], docstring=True)
            body = f'raise NotImplementedError("write {name} in {file}")'
            (folder / file).write_text(replaced(source, name, body))
    finally:  # also if it is interrupted
        for file, written in kept.items():
            (folder / file).write_bytes(written)


def run_tests(number, folder, limit=LIMIT):
    """(tests that pass, tests that ran, message) of an exercise in a copy."""
    report = folder / "report.xml"
    core = min(os.sched_getaffinity(0))
    options = ["--maxfail=0", "--tb=line", f"--junitxml={report}"]
    ended = mutations.first_failure(folder, tests_of(number) + options, core, limit)
    if ended.endswith("with -9"):
        return 0, 0, f"stopped after {limit} seconds: does a loop not end?"
    cases = []
    if report.exists():  # a file that cannot be imported is a case without a class name
        tree = xml.etree.ElementTree.parse(report)
        cases = [case for case in tree.iter("testcase") if case.get("classname")]
    if not cases:
        log = (folder / "log").read_text()
        errors = re.findall(r"^E +(.+)", log, re.M)
        return 0, 0, (errors or [ended or "no test ran"])[-1]
    faults = []
    for case in cases:
        for fault in case:
            if fault.tag in ("failure", "error", "skipped"):
                message = fault.get("message").split("\n")[0]
                faults.append(f"{case.get('name')}: {message}")
    passed = len(cases) - len(faults)
    return passed, len(cases), faults[0] if faults else "all tests pass"


def grade(folder, limit=LIMIT):
    """The result of a student's copy, whose name is the number of the exercise, as a dict. Only the
    files of the functions are taken from it: the tests and all else are the repository's."""
    number = int(folder.name)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "copy")
        empty = Path(temporary, "empty")
        for file, _ in functions(number):
            if (folder / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / file, copy / file)
        make(number, copy)
        points, tests, message = run_tests(number, copy, limit)
        if not tests:  # none ran: the number is that of the empty functions
            make(number, empty)
            _, tests, _ = run_tests(number, empty)
    title = page()[number][0]
    return {
        "folder": os.path.relpath(folder),
        "exercise": number,
        "title": title,
        "points": points,
        "of": tests,
        "message": message,
    }


def prove():
    """Shows that the tests pass on the solutions and fail on empty functions, or exits with 1."""
    unproven = []
    for number, (title, *_) in page().items():
        with tempfile.TemporaryDirectory() as temporary:
            solution = Path(temporary, "solution")
            empty = Path(temporary, "empty")
            mutations.copy(solution)
            make(number, empty)
            right, tests, message = run_tests(number, solution)
            passed, _, error = run_tests(number, empty)
        if not right == tests > 0 == passed or "NotImplementedError: write" not in error:
            unproven.append(number)
        print(f"exercise {number}, {title}: {right} of {tests} tests pass on the solution "
              f"({message}), {passed} on empty functions ({error})", flush=True)
    sys.exit(f"not proven: {unproven}" if unproven else 0)


def copies_to_grade(folders):
    """The paths of these copies, or of all. Exits with one line if there is none."""
    copies = [Path(folder).resolve() for folder in folders]
    if not folders:
        copies = [FOLDER / str(number) for number in EXERCISES]
        copies = [copy for copy in copies if copy.exists()]
    if not copies:
        sys.exit(f"no copy of an exercise in {FOLDER}")
    for folder in copies:
        if not folder.is_dir() or folder.name not in map(str, EXERCISES):
            sys.exit(f"{folder}: not a folder with the number of an exercise as its name")
    return copies


def print_all():
    for number, (title, difficulty, minutes, *_) in page().items():
        print(f"{number:2}  {title:26} {difficulty:6} {minutes:>3} min  {EXERCISES[number][0]}")


def print_how_to_test(number, folder):
    title = page()[number][0]
    tests = " ".join(tests_of(number))
    print(f"exercise {number}, {title}: write {EXERCISES[number][0]}\n"
          f"    cd {os.path.relpath(folder)}\n    {sys.executable} -m pytest -x -q -rN "
          f"--tb=line {tests}")


def main(word="", *folders):
    if ROOT.parent.name == FOLDER.name:
        sys.exit("this is a copy for an exercise: first `cd ../..`")
    if word in ("--prove", "--grade"):
        copies = copies_to_grade(folders) if word == "--grade" else []
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger prints
            mutations.import_libraries()
        if word == "--prove":
            prove()
        for folder in copies:
            print(json.dumps(grade(folder)), flush=True)
    elif word in map(str, EXERCISES):
        folder = FOLDER / word
        make(int(word), folder)
        print_how_to_test(int(word), folder)
    else:
        print_all()
        sys.exit(f"no exercise {word!r}" if word else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
