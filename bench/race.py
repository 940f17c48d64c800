"""Many seeds of which the poor ones stop early, and how well an early step ranks the end.

    python -m bench.race --seeds 6 --at 10 --keep 2 -- python nano_rlvr.py --eval_every 10
    python -m bench.race --measure --at 10 --key reward/mean runs/lab/GRPO-*

The first command runs each seed up to its evaluation at step --at, where SIGTERM stops it with a
checkpoint. The --keep seeds with the best --key there continue. A second call continues, too. The
best of several seeds, chosen by its own score, is too good on average: the ranking is no result.
Run the winner's setting again with other seeds, or evaluate the winner on other questions.

The second command looks at finished runs that had no race: the rank correlation (Spearman) of the
early and the last value, whether the best at the early step is the best in the end, and what the
race loses: the last value of the best run minus that of the run that the race would choose.
"""
import os
import subprocess
import sys
import time
from pathlib import Path

from scipy.stats import spearmanr

from bench import common, seeds
from bench.common import read, series

POLL = 1.0  # seconds between two looks at a run


def value_at(folder, key, step):
    """The value of a metric at a step, or at the last step before it. None before the first."""
    values = series(rows_of(folder), key)
    steps = [x for x in values if x <= step]
    return values[max(steps)] if steps else None


def rows_of(folder):
    """The metrics of a run, [] before its first step."""
    return read(folder) if (folder / "metrics.jsonl").exists() else []


def has_reached(folder, step):
    rows = rows_of(folder)
    return bool(rows) and rows[-1]["step"] >= step


def run_until(folder, command, step):
    """Runs a command until its metrics have this step, then stops it: it writes a checkpoint."""
    with open(f"{folder}.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and not has_reached(folder, step):
            time.sleep(POLL)
        if process.poll() is None:
            process.terminate()
        process.wait()
    if not has_reached(folder, step):
        raise ValueError(f"{folder.name} failed; look at {folder}.log")


def race(command, numbers, out, at, keep, key):
    """Runs all seeds to step `at` and the best `keep` to the end -> [(early value, folder)], the
    best first."""
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    ranking = []
    for number in numbers:
        folder = out / f"run-{number}"
        if not has_reached(folder, at):
            flags = ["--seed", str(number), "--out", str(out), "--name", folder.name, "--resume"]
            run_until(folder, [*command, *flags], at)
        ranking.append((value_at(folder, key, at), folder))
    ranking.sort(reverse=True)
    best = [int(folder.name.rpartition("-")[2]) for _, folder in ranking[:keep]]
    seeds.run_all({"run": command}, best, out)
    return ranking


def agreement(early, late):
    """(Spearman's rank correlation, whether the first is the best of both, what the race loses)."""
    chosen = early.index(max(early))
    loss = max(late) - late[chosen]
    return spearmanr(early, late).statistic, loss == 0, loss


def main(argv):
    """Raises ValueError with one line."""
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=6, help="number of seeds at the start")
    add("--at", type=int, default=10, help="step of the choice; the command evaluates there")
    add("--keep", type=int, default=2, help="seeds that run to the end")
    add("--key", default="eval/accuracy", help="metric of the choice")
    add("--last", default="eval/mean@4", help="with --measure: metric of the end")
    add("--out", type=Path, default=common.ROOT / "runs/race", help="folder of the runs")
    add("--measure", action="store_true", help="look at finished runs: their folders follow")
    add("words", nargs="+", help="the command, after --, or the folders")
    args = parser.parse_args(argv)
    if args.measure:
        folders = [Path(word) for word in args.words if os.path.isdir(word)]
        early = [value_at(folder, args.key, args.at) for folder in folders]
        late = [value_at(folder, args.last, float("inf")) for folder in folders]
        correlation, is_best, loss = agreement(early, late)
        same = "the same" if is_best else "not the same"
        print(f"{len(folders)} runs: {args.key} at step {args.at} and {args.last} at the end have "
              f"a rank correlation of {correlation:.2f}; the best is {same}; the choice loses "
              f"{loss:.3f}")
        return
    ranking = race(args.words, range(args.seeds), args.out, args.at, args.keep, args.key)
    for place, (value, folder) in enumerate(ranking):
        end = "stopped"
        if place < args.keep:
            last = value_at(folder, args.key, float("inf"))
            end = f"{last:.3f} at the end"
        print(f"{folder.name:12s} {value:.3f} at step {args.at}   {end}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"race: {e}")
