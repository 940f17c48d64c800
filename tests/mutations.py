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
import ast
import contextlib
import difflib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COVERAGE, DURATIONS = ROOT / ".pytest_cache/coverage.db", ROOT / ".pytest_cache/durations.xml"
PRODUCT = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/*.py", "runtime/*.html", "verify/*.py",
           "examples/*.py")  # where faults are planted
DRAWN = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/batch.py", "runtime/evaluation.py",
         "runtime/guard.py", "runtime/model.py", "runtime/shape.py", "runtime/stats.py")
COPIED = ("*.md", "*.py", "*.ini", "*.toml", "*.txt", "runtime/*", "verify/*", "tests/**/*",
          "bench/**/*", "examples/*", "learn/**/*", "docs/*", "models/tiny/*", "notebooks/*.ipynb")


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


def mutants(n, seed):
    """n random mutants: (description, file, changed text). Annotations and docstrings stay."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names
    places = {}  # (file, position, kind) -> [(operator, occurrence)]
    for file in DRAWN:
        tree = get_ast((ROOT / file).read_text())
        for name in sorted(operator_names()):
            with contextlib.suppress(TypeError):  # an operator that needs arguments of its own
                operator, occurrence = get_operator(name)(), 0
                for node in ast_nodes(tree):
                    for start, _ in operator.mutation_positions(node):
                        key = file, start, name.rsplit("_", 1)[0]
                        places.setdefault(key, []).append((operator, occurrence))
                        occurrence += 1
    rng = random.Random(seed)
    for key in rng.sample(sorted(places), len(places)):
        file, (line, _), _ = key
        source = (ROOT / file).read_text()
        changed = mutate_code(source, *rng.choice(places[key]))
        with contextlib.suppress(SyntaxError):
            if n and without_annotations(changed) != without_annotations(source):
                n -= 1
                yield f"{file}:{line}", file, changed


def without_annotations(source):
    """The syntax tree of a source text, as text, without annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def changed_lines(file, changed):
    """Numbers, in the file as it is, of the lines that differ or after which some are new."""
    before = (ROOT / file).read_text().splitlines()
    blocks = difflib.SequenceMatcher(None, before, changed.splitlines(), False).get_opcodes()
    return {i + 1 for kind, start, end, *_ in blocks if kind != "equal"
            for i in range(start if end > start else start - 1, max(start, end))}


class Coverage:
    """Which tests reach a line, and how long they take: of the last run of the suite."""

    def __init__(self):
        import coverage
        self.data, self.seconds = coverage.CoverageData(str(COVERAGE)), {}
        self.data.read()
        for case in xml.etree.ElementTree.parse(DURATIONS).iter("testcase"):
            if all(case.find(outcome) is None for outcome in ("failure", "error", "skipped")):
                path = case.get("classname").replace(".", "/") + ".py"
                self.seconds[f"{path}::{case.get('name')}"] = float(case.get("time"))

    def tests(self, file, lines, most):
        """Tests that reach one of the lines, by file, the quickest file first: `most` seconds."""
        contexts = self.data.contexts_by_lineno(str(ROOT / file))
        by_line = {line: {c.split("|")[0] for c in found} & self.seconds.keys()
                   for line, found in contexts.items()}
        found = set().union(*(by_line.get(line, ()) for line in lines))
        if not found and file.endswith(".py"):  # lines that run at import: the function around them
            for node in ast.walk(ast.parse((ROOT / file).read_text())):
                if not isinstance(node, ast.FunctionDef):
                    continue
                own = range(node.lineno - 1, node.end_lineno + 1)
                if min(lines) in own:
                    found = set().union(*(by_line.get(line, ()) for line in own))
        if not found:  # a page, or a table that everything reads
            stem = Path(file).stem
            found = set().union(*by_line.values()) | {
                test for test in self.seconds if f"test_{stem}.py" in test}
        by_file = {}
        for test in self.seconds:  # in the order of their files
            if test in found:
                by_file.setdefault(test.split("::")[0], []).append(test)
        cheapest = sorted(by_file.values(), key=lambda tests: sum(map(self.seconds.get, tests)))
        chosen, total = [], 0.0
        for test in sum(cheapest, []):
            total += self.seconds[test]
            if chosen and total > most:
                break
            chosen.append(test)
        return chosen


def copy(folder):
    """Copies what the tests need into a folder."""
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


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


class FirstFailure:
    """A pytest plugin. `name`: the first test that fails, or that a file could not be collected."""

    def __init__(self):
        self.name = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.name = "cannot be collected"


def first_failure(folder, tests, core, limit):
    """The first test that fails in a copy, "" if all pass. In a forked child; limit: seconds."""
    reading, writing = os.pipe()
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
        first = FirstFailure()
        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", *tests], plugins=[first])
        name = first.name or ("" if code == 0 else f"pytest ended with {int(code)}")
        os.write(writing, name.encode())
        os._exit(0)
    os.close(writing)
    begin, name = time.monotonic(), ""
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() - begin > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            name = "does not end"
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left
    with os.fdopen(reading) as pipe:
        return name or pipe.read()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    changes = list(mutants(args.random, args.seed) if args.random else planted())
    changes = [change for change in changes if " ".join(args.words) in change[0]]
    if args.dry:
        sys.exit()
    coverage, begin = Coverage(), time.time()
    import_libraries()
    cores = sorted(os.sched_getaffinity(0))
    free, missed = list(cores), []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(cores)) as threads:
        def run(number, file, changed, tests):
            folder = Path(temporary) / str(number)
            core = free.pop()
            copy(folder)
            (folder / file).write_text(changed)
            name = first_failure(folder, tests, core, limit=120 + 5 * args.seconds)
            shutil.rmtree(folder)
            free.append(core)
            return name

        chosen = [coverage.tests(file, changed_lines(file, changed), args.seconds)
                  for _, file, changed in changes]
        every = sorted(set().union(*chosen), key=list(coverage.seconds).index)
        unchanged = (ROOT / "data.py").read_text()
        if not args.words and (name := run("plain", "data.py", unchanged, every)):
            sys.exit(f"without any change: {name}")
        names = threads.map(
            lambda i: run(i, *changes[i][1:], chosen[i]) if chosen[i] else "", range(len(changes)))
        print("| change | caught by |\n|---|---|")
        for (what, file, changed), tests, name in zip(changes, chosen, names):
            by = f"`{name}`" if name else f"**nothing** of {len(tests)}"
            print(f"| {what} | {by} |", flush=True)
            if not name:
                missed.append((what, file, changed))
    for what, file, changed in missed:
        lines = difflib.unified_diff(
            (ROOT / file).read_text().splitlines(), changed.splitlines(), lineterm="", n=0)
        print(f"\n{what}\n" + "\n".join(list(lines)[2:]))
    print(f"\n{len(changes) - len(missed)} of {len(changes)} caught, {time.time() - begin:.0f} s")
    sys.exit(bool(missed) and not args.random)


if __name__ == "__main__":
    main()
