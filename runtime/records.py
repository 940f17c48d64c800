"""The files of a run: writing them safely, reading them, numbers of their rows and of the tokens of
the rollouts that a report shows. Importing this is quick."""
import contextlib
import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
from pathlib import Path

from runtime.messages import plain

STAGES = ("rollout", "reward", "update", "sync")
MOST_SHOWN = 2000  # rollouts of a run that a report shows
SHARE = 32  # one of so many rollouts gets numbers per token, for which a forward pass is made


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


# ---- metrics

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


# ---- rollouts, and the numbers of their tokens

def shown_rollouts(step, rollouts, samples, steps):
    """The rollouts of a step that the report shows, in groups of `samples`: those of every k-th of
    the run's `steps`, with the smallest k that gives at most MOST_SHOWN; [] in the other steps."""
    groups = max(1, MOST_SHOWN // samples)
    rollouts = rollouts[:groups * samples]
    most = max(1, MOST_SHOWN // max(1, len(rollouts)))  # steps
    k = max(1, math.ceil(steps / most))
    return rollouts if step % k == 0 else []


def token_numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; None = it was not sampled.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's
    log-prob; advantage, unless all tokens have the same. Two digits, at most five decimals.
    before, after: the trainer's log-probs of the sampled tokens.
    """
    vllm_logps = itertools.compress(r.vllm_logps, r.loss_mask)  # of the sampled tokens
    columns = {
        "logp": before,
        "change": [y - x for x, y in zip(before, after)],
        "gap": [x - y for x, y in zip(before, vllm_logps)],
    }
    if len(set(r.advantages)) > 1:
        columns["advantage"] = itertools.compress(r.advantages, r.loss_mask)
    lists = {"text": token_texts(r.completion, tokenizer)}
    for name, column in columns.items():
        values = iter(column)
        lists[name] = [two_digits(next(values)) if sampled else None for sampled in r.loss_mask]
    return lists


def two_digits(x):
    """A number with two digits and at most five decimals."""
    return float(f"{round(x, 5):.2g}")


def token_texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the
    last one has its text and the others have none."""
    pieces = []
    start = 0
    for end in range(1, len(ids) + 1):
        first = max(0, start - 1)  # alone, SentencePiece would drop the space before a word
        before = tokenizer.decode(ids[first:start])
        text = tokenizer.decode(ids[first:end])
        if text.endswith("\ufffd") and end < min(start + 4, len(ids)):  # 4 bytes at most
            pieces.append("")
        else:
            pieces.append(text[len(before):])
            start = end
    return pieces
