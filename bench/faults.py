"""Faults and bad inputs: what becomes of each. A table per subcommand, in bench/results/faults_<name>.md.

    python bench/faults.py inputs    every case of tests/bad_inputs.py: one clear line, in how many seconds
"""
import statistics
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

from common import ROOT

sys.path.append(str(ROOT / "tests"))

import bad_inputs  # noqa: E402


def inputs():
    """Each bad input must end in one line or a usage error, write nothing, and load no vLLM."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = list(bad_inputs.run_all(Path(folder)))
    total = time.perf_counter() - start
    lines = ["| group | cases | one clear line | median seconds | slowest | which |", "|---" * 6 + "|"]
    groups = [(name, list(rows)) for name, rows in groupby(results, key=lambda row: row[0].group)]
    for name, rows in [*groups, ("all", results)]:
        passed = sum(not wrong for _, wrong, _, _ in rows)
        seconds = [seconds for *_, seconds in rows]
        slowest = max(rows, key=lambda row: row[-1])[0].id
        lines.append(f"| {name} | {len(rows)} | {passed} | {statistics.median(seconds):.2f} | "
                     f"{max(seconds):.2f} | `{slowest}` |")
    lines += ["", f"In one process, {total:.0f} s in all. The slowest ones import a library first."]
    lines += [f"- {case.group}, {case.id}: {wrong}" for case, wrong, *_ in results if wrong]
    return "\n".join(lines), all(not wrong for _, wrong, *_ in results)


COMMANDS = {"inputs": inputs}

if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in COMMANDS]:
        sys.exit(__doc__)
    table, passed = COMMANDS[sys.argv[1]]()
    print(table)
    about = f"# {COMMANDS[sys.argv[1]].__doc__}\n\nMade by `python bench/faults.py {sys.argv[1]}`.\n\n"
    (ROOT / f"bench/results/faults_{sys.argv[1]}.md").write_text(about + table + "\n")
    sys.exit(not passed)
