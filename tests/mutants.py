"""Draws random mutants of the code and reports which of them no test notices.

    make mutants                                     coverage of the whole suite, then 300 mutants
    python tests/mutants.py --n 300 --seed 0         the mutants, with the coverage that is there

Cosmic Ray changes one place: an operator, a number, a comparison, a condition. A place is drawn evenly from
those of FILES, then one of its changes. A copy of the repository with the mutant is tested in a forked child
(torch, TRL and vLLM are imported once, here). It runs the tests that reach the changed line, the quickest
first, up to --seconds of them. `coverage.db` and `durations.xml` tell which they are; `make mutants` writes
them. Prints a line per mutant and, for those that survived, the change: each may be the same program (say
why) or a gap in the tests.
"""
import argparse
import ast
import contextlib
import difflib
import os
import random
import shutil
import tempfile
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mutations

ROOT = Path(__file__).resolve().parents[1]
FILES = ["nano_rlvr.py", "rewards.py", "data.py", *(f"runtime/{name}.py" for name in (
    "attention", "credit", "evaluation", "flops", "guard", "head", "packing", "rehearsal", "stats",
    "tokens"))]
COVERAGE, DURATIONS = ROOT / ".pytest_cache/coverage.db", ROOT / ".pytest_cache/durations.xml"
COPIED = ("*.md", "*.py", "*.ini", "*.toml", "*.txt", "runtime/*", "verify/*", "tests/*", "bench/*",
          "examples/*", "docs/*", "models/tiny/*", "tests/vectors/*", "learn/*", "bench/results/*", "notebooks/*.ipynb")


def places(source):
    """Every place of a source text that can be changed: lists of (line, operator, occurrence)."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names
    tree, found = get_ast(source), {}
    for name in sorted(operator_names()):
        with contextlib.suppress(TypeError):  # an operator that needs arguments of its own
            operator, occurrence = get_operator(name)(), 0
            for node in ast_nodes(tree):
                for start, _ in operator.mutation_positions(node):
                    family = name.rsplit("_", 1)[0]
                    found.setdefault((start, family), []).append((start[0], operator, occurrence))
                    occurrence += 1
    return list(found.values())


def draw(n, seed):
    """n mutants: (file, line, changed source). Annotations and docstrings are left alone."""
    from cosmic_ray.mutating import mutate_code
    rng, everywhere = random.Random(seed), []
    for file in FILES:
        everywhere += [(file, place) for place in places((ROOT / file).read_text())]
    mutants = []
    for file, place in rng.sample(everywhere, len(everywhere)):
        source = (ROOT / file).read_text()
        line, operator, occurrence = rng.choice(place)
        changed = mutate_code(source, operator, occurrence)
        with contextlib.suppress(SyntaxError):
            if without_annotations(changed) != without_annotations(source):
                mutants.append((file, line, changed))
        if len(mutants) == n:
            break
    return mutants


def without_annotations(source):
    """The syntax tree of a source text, as text, without annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def tests_by_line():
    """{file: {line: {tests}}} and {test: seconds}, of the tests that passed in the last run of the suite."""
    import coverage
    data = coverage.CoverageData(str(COVERAGE))
    data.read()
    seconds, by_line = {}, {}
    for case in xml.etree.ElementTree.parse(DURATIONS).iter("testcase"):
        if any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped")):
            continue
        path = case.get("classname").replace(".", "/") + ".py"
        seconds[f"{path}::{case.get('name')}"] = float(case.get("time"))
    for file in FILES:
        contexts = data.contexts_by_lineno(str(ROOT / file))
        by_line[file] = {line: {c.split("|")[0] for c in found if c} & seconds.keys()
                         for line, found in contexts.items()}
    return by_line, seconds


def tests_of(file, line, by_line):
    """The tests that reach a line; of a line that runs at import, those that reach the function below it, or
    the file."""
    lines = by_line[file]
    if lines.get(line):
        return lines[line]
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= node.end_lineno:
            return set().union(*(lines.get(n, ()) for n in range(line, node.end_lineno + 1)))
    return set().union(*lines.values())


def judge(mutant, folder, core, by_line, seconds, most):
    """(what caught the mutant or "", number of tests that ran)."""
    file, line, changed = mutant
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    (folder / file).write_text(changed)
    chosen, total = [], 0.0
    for test in sorted(tests_of(file, line, by_line), key=seconds.get):
        total += seconds[test]
        if total > most and chosen:
            break
        chosen.append(test)
    if not chosen:
        return "", 0
    name = mutations.first_failure(folder, chosen, {core}, limit=120 + 5 * most)
    shutil.rmtree(folder)
    return name, len(chosen)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    mutants, (by_line, seconds) = draw(args.n, args.seed), tests_by_line()
    mutations.import_libraries()
    cores, survivors = sorted(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(cores)) as threads:
        free = list(cores)

        def run(i):
            core = free.pop()
            result = judge(mutants[i], Path(temporary) / str(i), core, by_line, seconds, args.seconds)
            free.append(core)
            return result

        for (file, line, changed), (name, tests) in zip(mutants, threads.map(run, range(len(mutants)))):
            print(f"{file}:{line}: {name or f'**nothing** of {tests} tests'}", flush=True)
            if not name:
                before = (ROOT / file).read_text().splitlines()
                lines = list(difflib.unified_diff(before, changed.splitlines(), lineterm="", n=0))[2:]
                survivors.append((file, line, [x for x in lines if x[0] in "+-"]))
    for file, line, lines in survivors:
        print(f"\n{file}:{line}\n" + "\n".join(lines))
    print(f"\n{args.n - len(survivors)} of {args.n} caught")


if __name__ == "__main__":
    main()
