"""Changes the code, one place at a time, and reports which test notices each change.

    make mutations                              coverage of the suite, then all planted faults
    make mutants                                coverage of the suite, then 300 random mutants
    python tests/mutations.py leave-one-out     the faults whose description has these words
    python tests/mutations.py --random 300      mutants drawn by Cosmic Ray, with --seed
    python tests/mutations.py --dry             no tests: can every fault be planted?

The planted faults are in faults.txt: kinds of mistakes that were made or are easily made. A mutant
changes an operator, a number, a comparison or a condition. A copy of the repository with the change
is tested in a forked child (torch, TRL and vLLM are imported once, here). It runs the test that
noticed this change the last time, then those that reach the changed lines, the quickest files
first, up to --seconds of them: see .pytest_cache. If none of them fails, a second child runs the
others. At the end all tests that noticed a change run without one.
Prints a line per change and the diff of those that no test noticed: a gap, or the same program (say
why). Exits with 1 if a planted fault is not noticed, or if a test fails without a change."""
import argparse
import ast
import bisect
import contextlib
import difflib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NOTICED = ROOT / ".pytest_cache/noticed.json"  # {description of a change: the test that failed}
PRODUCT = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/*.py", "runtime/report/*",
           "runtime/verify/*.py",
           "examples/*.py")  # where faults are planted
DRAWN = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/batch.py", "runtime/evaluation.py",
         "runtime/guard.py", "runtime/head.py", "runtime/memory.py", "runtime/model.py",
         "runtime/stats.py", "runtime/stop.py")
JUDGES = ("rewards.py", "examples/code_reward.py",
          "runtime/verify/*.py")  # they also run in processes that coverage does not see
OWN = {"runtime/engine.py": "sampler", "runtime/vllm_patches.py": "families"}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "wandb", "exercises",
                                  "smollm2")  # a model of 269 MB


def planted():
    """(description, file, its text with the fault) of each fault: "# description", lines "- text",
    "+ replacement". The text must occur once in PRODUCT or, after "@ file", in that file."""
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
    """Lines of a diff, numbers of the lines that differ or that have new ones beside them."""
    before = (ROOT / file).read_text().splitlines()
    diff = list(difflib.unified_diff(before, changed.splitlines(), lineterm="", n=0))[2:]
    numbers = set()
    for start, count in re.findall(r"^@@ -(\d+),?(\d*)", "\n".join(diff), re.M):
        length = int(count or 1) or 2  # 0: new lines only, between two old ones
        numbers |= {*range(int(start), int(start) + length)}
    return diff, numbers


def uses(file, line):
    """The lines of a file that use a name which the module defines in this line."""
    tree = ast.parse((ROOT / file).read_text())
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.lineno <= line <= node.end_lineno:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    loaded = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.lineno for node in loaded if node.id in names}


class Coverage:
    """Which tests reach a line, and how long they take: of the last run of the suite."""

    def __init__(self):
        import coverage
        self.data = coverage.CoverageData(str(ROOT / ".pytest_cache/coverage.db"))
        self.data.read()
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", ROOT / "tests"]
        listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
        there = set(listed.splitlines())
        self.seconds = {}  # test -> seconds, of those that passed and are still there
        for case in ElementTree.parse(ROOT / ".pytest_cache/durations.xml").iter("testcase"):
            test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
            if test in there and not len(case):  # it has no failure, error or skipped inside
                self.seconds[test] = float(case.get("time"))

    def tests(self, file, lines):
        """Tests of the module and those that reach a line, by file, the quickest file first."""
        by_line = {line: {context.split("|")[0] for context in found} & self.seconds.keys()
                   for line, found in self.data.contexts_by_lineno(str(ROOT / file)).items()}
        found = set().union(*(by_line.get(line, ()) for line in lines))
        if not found:  # it runs at import: the lines that use the name that it defines
            using = uses(file, min(lines))
            found = set().union(*(by_line.get(line, ()) for line in using))
        if not found:  # the next line of a test
            later = (by_line[line] for line in sorted(by_line) if line > min(lines))
            found = next(filter(None, later), found)
        # for shared fixtures and processes of their own, which coverage does not see
        own = f"tests/test_{OWN.get(file, Path(file).stem)}.py"
        if any(fnmatch(file, pattern) for pattern in JUDGES):
            own = "tests/test_rewards.py"
        found = found | {test for test in self.seconds if own in test}
        of_files = Counter()  # file -> seconds of its tests
        for test in found:
            of_files[test.split("::")[0]] += self.seconds[test]
        return sorted((test for test in self.seconds if test in found),
                      key=lambda test: of_files[test.split("::")[0]])

    def split(self, tests, most):
        """The first tests, about `most` seconds of them, and the others."""
        totals = list(itertools.accumulate(map(self.seconds.get, tests)))
        first = max(1, bisect.bisect_right(totals, most))
        return tests[:first], tests[first:]


def copy(folder, shown=()):
    """Copies the repository, without what runs leave in it. shown: the files that git sees there,
    those that a student changes."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    if shown:
        lines = ["*", "!*/", *(f"!/{file}" for file in (".gitignore", *shown))]
        (folder / ".gitignore").write_text("\n".join(lines) + "\n")


def import_libraries():
    """Once for all forked children."""
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    sys.dont_write_bytecode = True
    for name in ("datasets", "deepspeed", "hypothesis", "pytest", "tyro", "vllm.sampling_params",
                 "transformers.models.qwen2.modeling_qwen2", "trl.trainer.grpo_trainer",
                 "trl.trainer.rloo_trainer"):
        importlib.import_module(name)


def first_failure(folder, tests, core, limit):
    """The first test that fails in a copy, "" if all pass. In a forked child, on one core; after
    `limit` seconds it is killed: "pytest ended with -9"."""
    child = os.fork()
    if not child:
        os.setsid()
        os.sched_setaffinity(0, {core})
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        libraries = [p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p]
        sys.path[:] = [str(folder / "tests"), str(folder), *libraries]
        import pytest
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", *tests])
        sys.stdout.flush()
        os._exit(code)
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
    parser = argparse.ArgumentParser(usage=__doc__)
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
        if not tests:
            return ""
        core = free.pop()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy(folder)
            (folder / file).write_text(changed)
            limit = 120 + 5 * sum(map(coverage.seconds.get, tests))
            name = first_failure(folder, tests, core, limit)
        free.append(core)
        return name

    last_time = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}

    def noticed(change, tests):
        what, *change = change
        known = [test for test in tests if test == last_time.get(what)]
        first, others = coverage.split(tests, args.seconds)
        return run(*change, known) or run(*change, first) or run(*change, others)

    chosen = [coverage.tests(file, difference(file, changed)[1]) for _, file, changed in changes]
    missed = []
    failed = set()  # tests that noticed a change
    with ThreadPoolExecutor(len(free)) as threads:
        names = threads.map(noticed, changes, chosen)
        print("| change | caught by |\n|---|---|")
        for (what, *change), tests, name in zip(changes, chosen, names):
            by = f"`{name}`" if name else f"**nothing** of {len(tests)}"
            print(f"| {what} | {by} |", flush=True)
            if name in tests:
                failed.add(name)
                last_time[what] = name
                NOTICED.write_text(json.dumps(last_time))
            if not name:
                missed.append("\n".join([what, *difference(*change)[0]]))
    print("", *missed, sep="\n\n")
    without_change = [test for test in coverage.seconds if test in failed]
    if name := run("data.py", (ROOT / "data.py").read_text(), without_change):
        sys.exit(f"without any change: {name}")
    print(f"\n{len(changes) - len(missed)} of {len(changes)} caught, {time.time() - begin:.0f} s")
    sys.exit(bool(missed) and not args.random)


if __name__ == "__main__":
    main()
