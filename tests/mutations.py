"""Changes the code, one place at a time, and reports which test notices each change.

    make mutations                              coverage of the suite, then all planted faults
    make mutants                                coverage of the suite, then 300 random mutants
    python tests/mutations.py leave-one-out     the faults whose description has these words
    python tests/mutations.py --random 300      mutants drawn by Cosmic Ray, with --seed
    python tests/mutations.py --dry             no tests: can every fault be planted?

The planted faults are in faults.txt: kinds of mistakes that were made or are easily made. A mutant
changes an operator, a number, a comparison or a condition. A copy of the repository with the change
is tested in a forked child (torch, TRL and vLLM are imported once, here). It runs the tests that
reach the changed lines, the quickest files first, up to --seconds of them; coverage.db and
durations.xml in .pytest_cache tell which they are. Prints a line per change and the diff of those
that no test noticed: a gap, or the same program (say why). Exits with 1 if a planted fault is not
noticed, or if a test fails without a change.
"""
import argparse
import contextlib
import difflib
import itertools
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / ".pytest_cache"  # what the run of the suite has left
PRODUCT = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/*.py", "runtime/*.html", "verify/*.py",
           "examples/*.py")  # where faults are planted
DRAWN = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/batch.py", "runtime/evaluation.py",
         "runtime/guard.py", "runtime/model.py", "runtime/shape.py", "runtime/stats.py")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "wandb", "exercises")


def planted():
    """(description, file, its text with the fault) of each fault in faults.txt.

    A fault there is a line "# description", lines "- text" and lines "+ replacement". The text must
    occur once in all PRODUCT files or, after a line "@ file", in that file.
    """
    texts = {str(path.relative_to(ROOT)): path.read_text()
             for pattern in PRODUCT for path in ROOT.glob(pattern)}
    for block in (ROOT / "tests/faults.txt").read_text().rstrip("\n").split("\n\n"):
        lines = block.split("\n")
        what, where, old, new = (
            "\n".join(line[2:] for line in lines if line[0] == mark) for mark in "#@-+")
        files = [file for file, text in texts.items() if old in text and where in ("", file)]
        if len(files) != 1 or texts[files[0]].count(old) != 1:
            sys.exit(f"{what}: its text must occur once, it is in {files}:\n{old}")
        yield what, files[0], texts[files[0]].replace(old, new)


def mutants(seed):
    """Random mutants: (description, file, changed text)."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import WorkDB, use_db
    places = {}  # (file, (line, column)) -> its mutations
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init([ROOT / file for file in DRAWN], database, {})
        for item in database.work_items:
            [found] = item.mutations
            places.setdefault((found.module_path, found.start_pos), []).append(found)
    rng = random.Random(seed)
    for path, position in rng.sample(sorted(places), len(places)):
        chosen = rng.choice(places[path, position])
        operator = get_operator(chosen.operator_name)()
        changed = mutate_code(path.read_text(), operator, chosen.occurrence)
        file = str(path.relative_to(ROOT))
        with contextlib.suppress(SyntaxError):
            compile(changed, file, "exec")
            yield f"{file}:{position[0]}", file, changed


def difference(file, changed):
    """Lines of a diff, and numbers of the lines of the file that differ or after which some are
    new."""
    before = (ROOT / file).read_text().splitlines()
    diff = list(difflib.unified_diff(before, changed.splitlines(), lineterm="", n=0))[2:]
    numbers = set()
    for start, count in re.findall(r"^@@ -(\d+),?(\d*)", "\n".join(diff), re.M):
        numbers |= {*range(int(start), int(start) + max(1, int(count or 1)))}
    return diff, numbers


class Coverage:
    """Which tests reach a line, and how long they take: of the last run of the suite."""

    def __init__(self):
        import coverage
        self.data = coverage.CoverageData(str(MEASURED / "coverage.db"))
        self.data.read()
        self.seconds = {}  # test -> seconds, of those that passed, in the order of their files
        for case in xml.etree.ElementTree.parse(MEASURED / "durations.xml").iter("testcase"):
            if all(case.find(outcome) is None for outcome in ("failure", "error", "skipped")):
                path = case.get("classname").replace(".", "/") + ".py"
                self.seconds[f"{path}::{case.get('name')}"] = float(case.get("time"))

    def tests(self, file, lines, most):
        """Tests that reach one of the lines, by file, the quickest file first: `most` seconds."""
        contexts = self.data.contexts_by_lineno(str(ROOT / file))
        by_line = {line: {context.split("|")[0] for context in found} & self.seconds.keys()
                   for line, found in contexts.items()}
        found = set().union(*(by_line.get(line, ()) for line in lines))
        for line in sorted(by_line):
            if not found and line > min(lines):  # it runs at import: the next line of a test
                found = by_line[line]
        if not found:  # a page
            found = {test for test in self.seconds if f"test_{Path(file).stem}.py" in test}
        of_files = Counter()  # file -> seconds of its tests
        for test in found:
            of_files[test.split("::")[0]] += self.seconds[test]
        ordered = [test for test in self.seconds if test in found]
        ordered.sort(key=lambda test: of_files[test.split("::")[0]])
        totals = itertools.accumulate(map(self.seconds.get, ordered))
        return [test for test, total in zip(ordered, totals)
                if test == ordered[0] or total <= most]


def copy(folder, shown=()):
    """Copies the repository into a folder, without what runs leave in it. shown: the files of the
    copy that git sees, those that a student changes."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    if shown:
        lines = ["*", "!*/", *(f"!/{file}" for file in (".gitignore", *shown))]
        (folder / ".gitignore").write_text("\n".join(lines) + "\n")


def import_libraries():
    """Once for all forked children."""
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    sys.dont_write_bytecode = True
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import tyro  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: F401
    from vllm import SamplingParams  # noqa: F401


def run_tests(folder, tests, core):
    """Runs these tests of a copy on one core, up to the first that fails, and ends the process."""
    os.setsid()
    os.sched_setaffinity(0, {core})
    log = open(folder / "log", "w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.chdir(folder)
    libraries = [p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p]
    sys.path[:] = [str(folder / "tests"), str(folder), *libraries]
    import pytest
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", *tests])
    sys.stdout.flush()
    os._exit(code)


def first_failure(folder, tests, core, limit):
    """The first test that fails in a copy, "" if all pass. In a forked child; limit: seconds,
    after which it is killed: "pytest ended with -9"."""
    child = os.fork()
    if not child:
        run_tests(folder, tests, core)
    timer = threading.Timer(limit, os.killpg, (child, signal.SIGKILL))
    timer.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    timer.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left
    if not code:
        return ""
    summary = (folder / "log").read_text().rpartition("short test summary info")[2]
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", summary, re.M)
    return failed[1] if failed else f"pytest ended with {code}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    drawn = itertools.islice(mutants(args.seed), args.random) if args.random else planted()
    changes = [change for change in drawn if " ".join(args.words) in change[0]]
    if args.dry or not changes:
        sys.exit(None if changes else f"no change is called {args.words}")
    coverage, begin = Coverage(), time.time()
    import_libraries()
    free = sorted(os.sched_getaffinity(0))  # cores

    def run(file, changed, tests):
        """The first test that fails with this change, "" if none."""
        core = free.pop()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy(folder)
            (folder / file).write_text(changed)
            name = first_failure(folder, tests, core, limit=120 + 5 * args.seconds)
        free.append(core)
        return name

    diffs, lines = zip(*(difference(file, changed) for _, file, changed in changes))
    chosen = [coverage.tests(change[1], numbers, args.seconds)
              for change, numbers in zip(changes, lines)]
    every = [test for test in coverage.seconds if any(test in tests for tests in chosen)]
    if not args.words and (name := run("data.py", (ROOT / "data.py").read_text(), every)):
        sys.exit(f"without any change: {name}")
    missed = []
    with ThreadPoolExecutor(len(free)) as threads:
        names = threads.map(lambda change, tests: run(*change[1:], tests) if tests else "",
                            changes, chosen)
        print("| change | caught by |\n|---|---|")
        for (what, *_), diff, tests, name in zip(changes, diffs, chosen, names):
            by = f"`{name}`" if name else f"**nothing** of {len(tests)}"
            print(f"| {what} | {by} |", flush=True)
            if not name:
                missed.append("\n".join([what, *diff]))
    print("", *missed, sep="\n\n")
    print(f"\n{len(changes) - len(missed)} of {len(changes)} caught, {time.time() - begin:.0f} s")
    sys.exit(bool(missed) and not args.random)


if __name__ == "__main__":
    main()
