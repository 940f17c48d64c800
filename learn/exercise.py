"""Exercises: copies of the repository in which you write a function again. See learn/exercises.md.

    python learn/exercise.py          lists them
    python learn/exercise.py 3        makes exercises/3/, a copy without the bodies of its functions
    python learn/exercise.py --prove  every test fails in such a copy and passes here
"""
import ast
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import mutations  # noqa: E402

SCRIPT, BATCH, STATS = "nano_rlvr.py", "runtime/batch.py", "runtime/stats.py"
MODEL, SAMPLER = "runtime/model.py", "runtime/sampler.py"
EXERCISES = {  # number -> (title, functions to write, as file:name)
    1: ("k3", [f"{SCRIPT}:k3"]),
    2: ("advantages", [f"{SCRIPT}:group_advantages"]),
    3: ("the clip in quadrants", [f"{SCRIPT}:gated_objective"]),
    4: ("the weight of a token", [f"{SCRIPT}:token_weights"]),
    5: ("the loss", [f"{SCRIPT}:policy_loss"]),
    6: ("two engines, two log-probs", [f"{SCRIPT}:importance"]),
    7: ("packs", [f"{BATCH}:pack"]),
    8: ("one row without padding", [f"{BATCH}:collate"]),
    9: ("the head's backward pass", [f"{MODEL}:chunk_backward", f"{MODEL}:HeadLogps.backward"]),
    10: ("a verifier", ["rewards.py:countdown_reward", "rewards.py:_evaluate"]),
    11: ("MaxRL", [f"{SCRIPT}:group_advantages"]),
    12: ("process rewards", ["rewards.py:steps_reward", f"{BATCH}:set_advantages"]),
    13: ("pass@k and the majority", [f"{STATS}:pass_at_k", f"{STATS}:majority_vote"]),
    14: ("data without state", ["data.py:batch_at"]),
    15: ("a checksum of weights", [f"{SAMPLER}:checksum"]),
    16: ("the broken sync", [f"{SAMPLER}:Sampler.load", f"{SAMPLER}:SentWeights.check"]),
}
# number -> names of the test files with its tests, where they are not the test vectors
TESTS = {7: "math", 8: "savings", 9: "precision", 10: "rewards",
         12: "vectors process_rewards", 13: "math stats", 14: "data", 15: "sampler",
         16: "sampler"}


def tests_of(number):
    """Arguments of pytest that select the tests of an exercise."""
    names = TESTS.get(number, "vectors").split()
    return [*(f"tests/test_{name}.py" for name in names), "-m", f"exercise_{number}"]


def without_body(source, name):
    """Source code in which only the docstring is left of the body of a function or Class.method."""
    node = ast.parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", "") == part)
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    start = first.end_lineno if has_docstring else first.lineno - 1  # lines before it stay
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:start], " " * first.col_offset + "raise NotImplementedError\n",
                    *lines[node.end_lineno:]])


def make(number, folder):
    """A copy of the repository in a folder, without the bodies of the functions of an exercise."""
    mutations.copy(folder)
    for function in EXERCISES[number][1]:
        file, name = function.split(":")
        path = folder / file
        path.write_text(without_body(path.read_text(), name))


def fails(folder, numbers):
    """The first test of these exercises that fails in a copy, "" if all pass."""
    core = min(os.sched_getaffinity(0))
    found = (mutations.first_failure(folder, tests_of(n), core, limit=600) for n in numbers)
    return next(filter(None, found), "")


def prove():
    """Shows that the tests pass in a plain copy and fail in each exercise. Exits with 1 if not."""
    mutations.import_libraries()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        mutations.copy(folder / "plain")
        unproven = bool(test := fails(folder / "plain", EXERCISES))
        print("solutions:", test or "all tests pass", flush=True)
        for number, (title, _) in EXERCISES.items():
            stub = folder / str(number)
            make(number, stub)
            test = fails(stub, [number])
            proven = "::" in test and "NotImplementedError" in (stub / "log").read_text()
            unproven += not proven
            result = "fails until it is written" if proven else f"NOT PROVEN: {test}"
            print(f"exercise {number}, {title}: {result}", flush=True)
    sys.exit(bool(unproven))


def main(word=""):
    if word == "--prove":
        prove()
    if not word.isdigit() or int(word) not in EXERCISES:
        for number, (title, functions) in EXERCISES.items():
            print(f"{number:2}  {title:27} {', '.join(functions)}")
        sys.exit(f"no exercise {word!r}" if word else 0)
    folder = ROOT / "exercises" / word
    if folder.exists():
        sys.exit(f"{folder} exists already: continue there, or delete it to begin again")
    make(int(word), folder)
    title, functions = EXERCISES[int(word)]
    print(f"exercise {word}, {title}: write {' and '.join(functions)}\n"
          f"    cd {os.path.relpath(folder)}\n"
          f"    {sys.executable} -m pytest {' '.join(tests_of(int(word)))}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
