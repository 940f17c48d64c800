"""Shared by bench/ and learn/: paths, tables, processes of their own, results."""
import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from runtime.records import read, series  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
TINY = str(ROOT / "models/tiny")
SCRIPT = [sys.executable, str(ROOT / "nano_rlvr.py")]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def parser(doc):
    """An argument parser whose --help is the docstring of a module as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw, allow_abbrev=False)


def table(head, rows):
    """A Markdown table."""
    lines = []
    for row in (head, *rows):
        cells = [str(cell).replace("|", r"\|") for cell in row]
        text = " | ".join(cells)
        lines.append(f"| {text} |")
    lines.insert(1, f"|{'---|' * len(head)}")
    return "\n".join(lines)


def module(file):
    """The name under which `python -m` runs a file: "bench/step.py" -> "bench.step"."""
    return str(file).removesuffix(".py").replace("/", ".")


def run_apart(bench, *arguments, launcher=(sys.executable,), **environment):
    """Runs a bench in a process of its own. Returns the last line it prints, parsed as JSON."""
    command = [str(word) for word in (*launcher, "-m", f"bench.{bench}", *arguments)]
    variables = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    last_line = done.stdout.strip().splitlines()[-1]
    return json.loads(last_line)


def describe(abouts, load=""):
    """One line: commits, machine, versions and the command of this process."""
    first = abouts[0]
    commits = {about["commit"] for about in abouts} - {""}
    commit = ", ".join(sorted(commits))
    versions = ", ".join(f"{name} {v}" for name, v in first["versions"].items())
    script = Path(sys.argv[0]).resolve()
    name = script.name
    if script.is_relative_to(ROOT):
        name = module(script.relative_to(ROOT))
    command = " ".join(["python -m", name, *sys.argv[1:]])
    date = time.strftime("%Y-%m-%d")
    return f"commit {commit}, {first['device']}, {load}{versions}; `{command}`, {date}"


def conditions(*packages):
    """One line. To be called before the measurement, which adds to the load."""
    from runtime.log import provenance
    load = os.getloadavg()[0]
    return describe([provenance(*packages)], f"load {load:.1f} before, ")


def without_versions(text):
    """Text with conditions, for a page. The file of numbers beside the page has the versions."""
    return re.sub(r", python [^;\n]*", "", text)


def read_config(folder):
    """config.json of a run: its flags and the conditions of its start."""
    return json.loads((Path(folder) / "config.json").read_text())


def write(name, text, numbers):
    """Prints the text and writes it (.md) and the numbers (.json) to bench/results/.

    name: of the two files, without suffix; an absolute path is another folder."""
    path = RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if "conditions" in numbers:
        text = without_versions(text)
    Path(f"{path}.md").write_text(text + "\n")
    Path(f"{path}.json").write_text(json.dumps(numbers, indent=1))
    print(text)
