"""Find the bug: a copy of the repository with one of the faults of tests/faults.txt, unseen.

    python -m learn.find_the_bug            plants a fault in exercises/bug/
    python -m learn.find_the_bug clip       one of this topic (--topics lists them)
    python -m learn.find_the_bug --hint     names the file and the function
    python -m learn.find_the_bug --check    runs its quick tests: which one fails, if any
    python -m learn.find_the_bug --reveal   shows the fault, or that you have repaired it
"""
import ast
import difflib
import os
import random
import sys
from pathlib import Path

from tests import mutations

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "exercises" / "bug"
REPAIRED = "no difference: it is repaired"
QUICK = [f"tests/test_{name}.py" for name in (  # of the tests that notice most of the faults
    "vectors", "variants", "precision", "math", "stats", "guard", "savings", "evaluation", "trl",
    "rewards")]


def plant(folder, topic=""):
    """Plants a random fault of a topic, the word before the colon in its description."""
    faults = [fault for fault in mutations.planted() if fault[0].startswith(topic)]
    if not faults:
        sys.exit(f"no topic {topic!r}: python -m learn.find_the_bug --topics lists them")
    _, file, changed = random.choice(faults)
    mutations.copy(folder, mutations.PRODUCT)
    (folder / file).write_text(changed)


def hint(folder):
    """File and function of the first line that differs from the repository's, "" if none does."""
    for file in dict.fromkeys(file for _, file, _ in mutations.planted()):
        _, numbers = mutations.difference(file, (folder / file).read_text())
        if numbers:
            tree = ast.parse((ROOT / file).read_text() if file.endswith(".py") else "")
            around = [node.name for node in ast.walk(tree) if hasattr(node, "name")
                      and node.lineno <= min(numbers) <= node.end_lineno]
            return f"{file}, {'.'.join(around) or 'outside of functions'}"
    return ""


def reveal(folder):
    """Lines that say how the copy differs from the repository, and which fault that is."""
    faults = list(mutations.planted())
    for file in dict.fromkeys(file for _, file, _ in faults):
        right, copied = (ROOT / file).read_text(), (folder / file).read_text()
        yield from difflib.unified_diff(copied.splitlines(), right.splitlines(),
                                        f"exercises/bug/{file}", file, n=0, lineterm="")
        yield from (what for what, planted, changed in faults
                    if planted == file and changed == copied)


def main(word=""):
    if word == "--topics":
        topics = [what.partition(":")[0] for what, *_ in mutations.planted()]
        print("\n".join(f"{topics.count(topic):3} {topic}" for topic in sorted(set(topics))))
    elif word in ("--check", "--hint", "--reveal") and not FOLDER.exists():
        sys.exit("no bug is planted: python -m learn.find_the_bug")
    elif word == "--check":
        mutations.import_libraries()
        core = min(os.sched_getaffinity(0))
        found = (mutations.first_failure(FOLDER, [file], core, limit=600) for file in QUICK)
        print(next(filter(None, found), "all quick tests pass; `pytest tests` runs the others"))
    elif word == "--hint":
        print(hint(FOLDER) or REPAIRED)
    elif word == "--reveal":
        print("\n".join(reveal(FOLDER)) or REPAIRED)
    elif FOLDER.exists():
        sys.exit(f"{FOLDER} exists already: continue there, or delete it to begin again")
    else:
        plant(FOLDER, word)
        print("One place in exercises/bug/ is wrong. Read, run, repair it there. Then:\n"
              "    python -m learn.find_the_bug --hint     names the file and the function\n"
              "    python -m learn.find_the_bug --check    runs its quick tests (minutes)\n"
              "    python -m learn.find_the_bug --reveal   shows the fault, or that it is repaired")


if __name__ == "__main__":
    main(*sys.argv[1:2])
