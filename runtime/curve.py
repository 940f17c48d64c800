"""Plots metrics.jsonl of one or several runs: held-out accuracy, reward and completion length over the steps.

    python -m runtime.curve runs/a runs/b --out ab.png
"""
import argparse
import json
import sys
from pathlib import Path


def read(folder, name="metrics.jsonl", only=b"", **options):
    """metrics.jsonl of a run folder -> list of dicts, one per line: every step, and the last evaluation.
    name: another file with a JSON object per line. only: keep the lines that contain these bytes. options:
    passed to json.loads.

    A last line that is cut off, as a killed run leaves it, is skipped with a note on stderr. Raises
    ValueError for any other line that is no JSON object with a step, OSError if the file cannot be read.
    """
    path, rows = Path(folder) / name, []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            if only in line:
                row = json.loads(line, **options)
                if not isinstance(row, dict) or type(row.get("step")) is not int:
                    raise ValueError(f"{path}:{number}: no object with a step")
                if name == "metrics.jsonl" and any(isinstance(x, (str, list, dict)) for x in row.values()):
                    raise ValueError(f"{path}:{number}: a metric is no number")
                rows.append(row)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not a line of JSON ({e})") from e
            print(f"note: {path}:{number} is cut off: skipped", file=sys.stderr)
    return rows


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl. None = no value."""
    get = key if callable(key) else lambda row: row.get(key)
    return {row["step"]: get(row) for row in rows if get(row) is not None}


def figure(**args):
    """A matplotlib Figure. Raises ValueError if matplotlib cannot be imported.

    Without pyplot, whose backend a notebook needs for its own plots.
    """
    try:
        from matplotlib import figure
    except ImportError as e:
        raise ValueError(f"curve.png and report.html need matplotlib ({e}): pip install matplotlib") from e
    return figure.Figure(layout="constrained", **args)


def check_wandb(mode):
    """Raises ValueError if wandb.init could not log in `mode`, the value of --wandb. Never asks for a key."""
    if mode == "off":
        return
    try:
        import wandb
    except ImportError as e:
        raise ValueError(f"--wandb {mode}: {e}: pip install wandb, or use --wandb off") from e
    problem = ""
    if mode == "online":
        try:
            problem = "" if wandb.login(prompt=False) else "no API key"
        except wandb.errors.Error as e:
            problem = str(e).splitlines()[0]
    if problem:
        raise ValueError(f"--wandb online: {problem}: run `wandb login`, set WANDB_API_KEY, or use "
                         "--wandb offline and `wandb sync` later")


def place(folders, out, name):
    """Where a command writes: to `out`, or else into the folder of a single run, or to a new file here.

    Raises ValueError if the command would write over a file that the user did not name.
    """
    if out or len(folders) == 1:
        return Path(out or Path(folders[0]) / name)
    if Path(name).exists():
        raise ValueError(f"{name} is here already; --out names another file")
    return Path(name)


def draw(folders, out, labels=None):
    """Writes a figure with two panels and one line per run.

    Left: held-out greedy accuracy with its interval; thin: mean reward of the training samples.
    Right: mean completion length in tokens.
    """
    fig = figure(figsize=(10, 3.6))
    left, right = fig.subplots(1, 2)
    for i, (folder, label) in enumerate(zip(folders, labels or [Path(f).name for f in folders])):
        rows, color = read(folder), f"C{i}"
        train = [row for row in rows if "reward/mean" in row]
        evals = [row for row in rows if "eval/accuracy" in row]
        train_steps = [row["step"] for row in train]
        eval_steps = [row["step"] for row in evals]
        low, high = ([row[name] for row in evals] for name in ("eval/low", "eval/high"))
        left.plot(train_steps, [row["reward/mean"] for row in train], color=color, lw=0.8, alpha=0.5)
        label = label.replace("$", r"\$")  # matplotlib would read a formula
        left.plot(eval_steps, [row["eval/accuracy"] for row in evals], "o-", color=color, ms=4, label=label)
        left.fill_between(eval_steps, low, high, color=color, alpha=0.15, lw=0)
        right.plot(train_steps, [row["completion/length"] for row in train], color=color, label=label)
    left.set(xlabel="step", ylabel="accuracy (thin: training reward)", ylim=(-0.02, None))
    right.set(xlabel="step", ylabel="tokens per completion", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    fig.savefig(out, dpi=120)


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", help="default: curve.png in the folder of a single run, or here")
    args = parser.parse_args()
    try:
        draw(args.runs, place(args.runs, args.out, "curve.png"))
    except (ValueError, OSError) as e:
        sys.exit(f"curve: {e}")
    except KeyError as e:
        sys.exit(f"curve: a line of metrics.jsonl has no {e}")
