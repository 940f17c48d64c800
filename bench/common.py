"""Shared by the benches: paths, tables, processes of their own, results. Imports no PyTorch."""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
TINY = str(ROOT / "models/tiny")
sys.path.insert(0, str(ROOT))

from runtime.curve import read, series  # noqa: E402, F401

SCRIPT = [sys.executable, str(ROOT / "nano_rlvr.py")]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def parser(doc):
    """An argument parser whose --help is the docstring of a module as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw, allow_abbrev=False)


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def output(command, **environment):
    """Runs a command and returns what it prints. Ends this process if the command fails."""
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def run_apart(script, *arguments, launcher=(sys.executable,), **environment):
    """Runs a bench in a process of its own. Returns the last line it prints, parsed as JSON."""
    text = output([*launcher, ROOT / "bench" / script, *arguments], **environment)
    return json.loads(text.strip().splitlines()[-1])


def train(folder, *flags, launcher=(sys.executable,)):
    """A run of nano_rlvr.py into a folder. Returns its metrics, one dict per step."""
    folder = Path(folder)
    output([*launcher, SCRIPT[1], *flags, "--out", folder.parent, "--name", folder.name])
    return read(folder)


def versions(about):
    return ", ".join(f"{name} {v}" for name, v in about["versions"].items())


def command():
    """The command line of this process, with the date."""
    words = ["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return f"`{' '.join(words)}`, {time.strftime('%Y-%m-%d')}"


def conditions(*packages):
    """One line. To be called before the measurement, which adds to the load."""
    from runtime.log import provenance
    about, load = provenance(*packages), os.getloadavg()[0]
    return (f"commit {about['commit']}, {about['device']}, load {load:.1f} before, "
            f"{versions(about)}; {command()}")


def read_config(folder):
    """config.json of a run: its flags and the conditions of its start."""
    return json.loads((Path(folder) / "config.json").read_text())


def conditions_of(folders):
    """One line, from config.json of finished runs."""
    abouts = [read_config(folder) for folder in folders]
    commits = ", ".join(sorted({about["commit"] for about in abouts}))
    return f"commit {commits}, {abouts[0]['device']}, {versions(abouts[0])}; {command()}"


def write(name, text, numbers=None):
    """Prints the text and writes it (.md) and the numbers (.json) to bench/results/.

    name: of the two files, without suffix; an absolute path is another folder.
    """
    path = RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.md").write_text(text + "\n")
    if numbers is not None:
        Path(f"{path}.json").write_text(json.dumps(numbers, indent=1))
    print(text)
