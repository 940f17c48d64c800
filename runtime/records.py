"""The files of a run: writing them safely and reading them. Importing this is quick."""
import hashlib
import json
import os
import re
import sys
from pathlib import Path

STAGES = ("rollout", "reward", "update", "sync")


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


def stage_seconds(rows, stages=STAGES):
    """Seconds of these stages in rows of metrics; by default the loop's, without the evaluation."""
    return sum(row.get(f"seconds/{stage}", 0.0) for row in rows for stage in stages)
