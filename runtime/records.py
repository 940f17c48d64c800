"""The files of a run: writing them safely, reading them, numbers per token, the curve.

Importing this is quick: neither torch nor matplotlib is imported with it.
"""
import hashlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path

LIMIT = 2000  # rollouts of a run in its report
SHARE = 32  # one of so many rollouts gets numbers per token, which take two forward passes
STAGES = ("rollout", "reward", "update", "sync")


# ---- files

def to_json(about):
    """JSON for a file of the run, without passwords in URLs."""
    return re.sub(r"(?<=://)[^/@\s\"]+@", "***@", json.dumps(about, indent=1))


def sync(path):
    """Returns when a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(path):
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read(folder, name="metrics.jsonl"):
    """A file of a run with a JSON object per line -> list of dicts, [] if there is no such file.

    NaN becomes None. A last line that is cut off, as a killed run leaves it, is skipped with a note
    on stderr. Raises ValueError for any other line that is no JSON object with a step.
    """
    path, rows = Path(folder) / name, []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            int(row["step"])
        except (ValueError, RecursionError, TypeError, KeyError) as e:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: no line of JSON with a step ({e!r})") from e
            print(f"note: {path}:{number} is cut off: skipped", file=sys.stderr)
            break
        rows.append(row)
    return rows


def read_run(path):
    """A run folder as a dict."""
    path = Path(path)
    about = json.loads((path / "config.json").read_text())
    return {"path": path, "name": path.resolve().name, "about": about, "config": about["config"],
            "rows": read(path)}


def stage_seconds(rows, stages=STAGES):
    """Seconds of these stages in rows of metrics; by default the loop's, without the evaluation."""
    return sum(row.get(f"seconds/{stage}", 0.0) for row in rows for stage in stages)


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl; no None."""
    get = key if callable(key) else lambda row: row.get(key)
    return {row["step"]: get(row) for row in rows if get(row) is not None}


# ---- tokens

def shown(step, rollouts, samples, steps):
    """The rollouts of a step that the report shows, in groups of `samples`: those of every k-th of
    the run's `steps`, with the smallest k that gives at most LIMIT; [] in the other steps."""
    rollouts = rollouts[:max(1, LIMIT // samples) * samples]
    most = max(1, LIMIT // max(1, len(rollouts)))  # steps
    k = max(1, math.ceil(steps / most))
    return rollouts if step % k == 0 else []


def numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; None = it was not sampled.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's
    log-prob; advantage, unless all tokens have the same. Two digits, at most five decimals.
    before, after: the trainer's log-probs of the sampled tokens.
    """
    logps = itertools.compress(r.vllm_logps, r.sampled)  # of the sampled tokens
    columns = {"logp": before, "change": [y - x for x, y in zip(before, after)],
               "gap": [x - y for x, y in zip(before, logps)]}
    if len(set(r.advantages)) > 1:
        columns["advantage"] = itertools.compress(r.advantages, r.sampled)
    lists = {"text": texts(r.completion, tokenizer)}
    for name, column in columns.items():
        rounded = iter([float(f"{round(x, 5):.2g}") for x in column])
        lists[name] = [next(rounded) if sampled else None for sampled in r.sampled]
    return lists


def texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the
    last one has its text and the others have none."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        first = max(0, start - 1)  # alone, SentencePiece would drop the space before a word
        before, text = (tokenizer.decode(ids[first:i]) for i in (start, end))
        is_part = text.endswith("\ufffd") and end < min(start + 4, len(ids))  # 4 bytes at most
        found.append("" if is_part else text[len(before):])
        start = start if is_part else end
    return found


# ---- the curve

def figure(**args):
    """A matplotlib Figure. Without pyplot, whose backend a notebook needs for its own plots."""
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **args)


def points(run, metric):
    """[step, value, low, high] for each value of a metric; only an accuracy has an interval."""
    values, low, high = (series(run["rows"], re.sub("accuracy$", end, metric))
                         for end in ("accuracy", "low", "high"))
    return [[step, *(float(f"{x:.4g}") for x in (y, low.get(step, y), high.get(step, y)))]
            for step, y in values.items()]


def write_curve(runs, out):
    """Writes a picture: reward, held-out accuracy and tokens per completion, a line per run."""
    fig = figure(figsize=(12, 3.6))
    keys = ("reward/mean", "eval/accuracy", "completion/length")
    for axis, key in zip(fig.subplots(1, 3), keys):
        axis.set(xlabel="step", title=key)
        for i, run in enumerate(runs):
            steps, values, low, high = zip(*points(run, key)) if points(run, key) else ([],) * 4
            axis.plot(steps, values, color=f"C{i}", marker="o" if low != values else "", ms=3,
                      label=run["name"].replace("$", r"\$"))  # "$" would begin a formula
            axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.2, lw=0)
    axis.legend(fontsize=8)
    fig.savefig(out, dpi=144)
