"""The files of a run: writing them safely, reading them, and numbers of their rows. Importing this
is quick."""
import contextlib
import hashlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path

from runtime.messages import plain

STAGES = ("rollout", "reward", "update", "sync")


@contextlib.contextmanager
def replaced(path):
    """Gives a path to write to; after the block it takes the place of `path`. Whoever reads finds
    the old file or the new one. Its name cannot be foreseen, so that no link leads elsewhere."""
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=".part") as folder:
        part = Path(folder, path.name)
        yield part
        part.replace(path)


def sync_file(path):
    """Returns when a file or folder is on the disk: its bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return os.stat(path).st_size


def sha256(path):
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def finite(number):
    """The text of a JSON number -> a float; None if it is NaN or infinite."""
    x = float(number)
    return x if math.isfinite(x) else None


def read(folder, name="metrics.jsonl"):
    """A file of a run with a JSON object per line -> list of dicts, [] if there is no such file.

    A number that is not finite becomes None. A last line that is cut off, as a killed run leaves
    it, is skipped with a note on stderr. Raises ValueError for any other line that is no JSON
    object with a step."""
    path = Path(folder) / name
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=finite, parse_float=finite)
            int(row["step"])
        except Exception as e:  # it may be anything
            if number < len(lines):
                raise ValueError(f"{path}:{number}: no line of JSON with a step ({e!r})") from e
            print(plain(f"note: {path}:{number} is cut off: skipped"), file=sys.stderr)
            break
        rows.append(row)
    return rows


def stage_seconds(rows, stages=STAGES):
    """Seconds of these stages in rows of metrics; by default the loop's, without the evaluation."""
    seconds = 0
    for row in rows:
        for stage in stages:
            seconds += row.get(f"seconds/{stage}", 0.0)
    return seconds


def peak(rows):
    """Highest peak memory of all stages in these rows of metrics, in GiB."""
    sizes = [0.0]
    for row in rows:
        sizes += [x for name, x in row.items() if name.startswith("memory/")]
    return max(sizes)


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl; no None."""
    values = {}
    for row in rows:
        value = key(row) if callable(key) else row.get(key)
        if value is not None:
            values[row["step"]] = value
    return values


def points(rows, metric):
    """[step, value, low, high] for each number of a metric; only an accuracy has an interval."""
    low, high = {}, {}
    if metric.endswith("accuracy"):
        prefix = metric.removesuffix("accuracy")
        low = series(rows, f"{prefix}low")
        high = series(rows, f"{prefix}high")
    numbers = []
    for step, value in series(rows, metric).items():
        if isinstance(value, (int, float)):  # a metric of the user may be text
            lowest = low.get(step, value)
            highest = high.get(step, value)
            rounded = [float(f"{x:.4g}") for x in (value, lowest, highest)]
            numbers.append([step, *rounded])
    return numbers
