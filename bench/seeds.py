"""A command of nano_rlvr with several seeds: means, intervals over the seeds, curves with a band.

    python -m bench.seeds --out runs/lr --setting low="--lr 1e-5" --setting high="--lr 1e-4" -- \\
        python nano_rlvr.py --steps 20 --eval_every 5

The command is what follows `--`: any command that takes the flags of nano_rlvr.py, also torchrun.
Each `--setting label=flags` adds flags to it. The runs are <out>/<label>-<seed>/, with a log beside
them. Repeat the command after an interruption: a finished run is kept, another one continues at its
last checkpoint. The results are <out>/seeds.md, .json and .png.

The interval is Student's t interval of the mean, 95 %: mean +- t(n - 1) * s / sqrt(n) over n seeds.
It is about the seed only: all runs answer the same held-out questions. The last column compares a
setting with the first one, seed by seed: an interval without 0 is a difference that these seeds
show, even where the intervals of the two means overlap.
"""
import math
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from bench import common
from bench.common import read, series
from runtime.report.curve import figure

PANELS = {"held-out accuracy": "eval/accuracy", "reward of the training samples": "reward/mean",
          "tokens per completion": "completion/length"}
# beginnings of metrics that are shares, unless a value is above 1 (eval/length, a larger reward)
SHARES = ("eval/", "reward/", "completion/truncated", "clip_ratio", "group/zero_std")
# Student's t: 95 % of the values lie in +- T[degrees of freedom - 1]
T = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)


def mean_interval(values):
    """(mean, low, high): 95 % t interval of the mean of at least two values. With more than 11 it
    is a little too wide."""
    t = T[min(len(values), 11) - 2]
    mean, half = fmean(values), t * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def own_flags(command):
    """The flags between a script, or `-m` and a module, and --seed: what the runs of a setting have
    in common."""
    return re.split(r"\.py |-m [\w.]+ ", command.partition("--seed ")[0])[-1].strip()


def finished(folder, command):
    """Whether a run is finished. Raises ValueError if the folder has a run with other flags."""
    if not (folder / "config.json").exists():
        return False
    about = common.read_config(folder)
    if own_flags(about["command"]) != own_flags(" ".join(command)):
        raise ValueError(f"{folder} is a run of `{about['command']}`; choose another --out")
    rows = read(folder) if (folder / "metrics.jsonl").exists() else []
    return bool(rows) and rows[-1]["step"] == about["config"]["steps"]


def run_all(settings, seeds, out, jobs=1, keep_weights=True):
    """Runs what is not finished. -> {label: [folder of each seed]}.
    settings: {label: command as a list}. "{seed}" in it becomes the seed: with jobs 1, a setting
    can begin with the weights of an earlier one, --model <out>/<label>-{seed}/final.
    jobs: so many runs at a time, each on one core; 1: one
    after the other, on all cores. keep_weights: False deletes checkpoints and final/ of a run when
    it has finished. Raises ValueError if a run fails."""
    out, folders, waiting = Path(out).resolve(), {}, []
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:  # all settings of a seed before the next seed: a part of the table is early
        for label, command in settings.items():
            name = re.sub(r"\W+", "-", label).strip("-") + f"-{seed}"
            folders.setdefault(label, []).append(out / name)
            words = [word.replace("{seed}", str(seed)) for word in command]
            words += ["--seed", str(seed), "--out", str(out), "--name", name, "--resume"]
            if not finished(out / name, words):
                waiting.append((out / name, words))
    cores = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:jobs]:
        cores.put(core)

    def start(folder, command):
        core = cores.get()
        pinned = ["taskset", "-c", str(core)] if jobs > 1 else []
        print(f"{time.strftime('%H:%M:%S')}  {folder.name}", flush=True)
        with open(f"{folder}.log", "a") as file:
            done = subprocess.run([*pinned, *command], stdout=file, stderr=file)
        cores.put(core)
        if done.returncode:
            raise ValueError(f"{folder.name} failed; look at {folder}.log")
        if not keep_weights:
            for weights in (*folder.glob("step-*"), folder / "final"):
                shutil.rmtree(weights)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        for future in [pool.submit(start, *run) for run in waiting]:
            try:
                future.result()
            except ValueError:
                pool.shutdown(cancel_futures=True)
                raise
    return folders


def share(x):
    return f"{min(max(x, 0.0), 1.0):.1%}"  # the ends of an interval may lie outside 0 to 100 %


def number(x):
    return f"{x:.1f}"


def at(key, step=-1):
    """The value of a metric at a step (-1: at its last one), of the rows of a run."""
    def value(rows):
        values = series(rows, key)
        return values[step if step >= 0 else max(values)]
    return value


def late(key, steps=0):
    """The mean of a metric over the last steps of the rows of a run (0: over all)."""
    return lambda rows: fmean(list(series(rows, key).values())[-steps:])


def cell(values, form, to="–"):
    """The mean over the seeds, with its interval if they differ."""
    mean, low, high = mean_interval(values)
    return form(mean) + (f" ({form(low)}{to}{form(high)})" if low < high else "")


def before_and_after(first_row):
    """The columns of the table, {title: (value of the rows of a run, format)}: the first and the
    last evaluation."""
    keys = ["eval/accuracy", *(key for key in first_row if key.startswith("eval/mean@"))]
    names = {"eval/accuracy": "greedy", "eval/length": "tokens"}
    return {f"{names.get(key, key.removeprefix('eval/'))} {when}":
            (at(key, step), number if key == "eval/length" else share)
            for key in [*keys, "eval/length"] for when, step in (("before", 0), ("after", -1))}


def against_the_first(results):
    """A cell per setting: by how many percent points its last greedy accuracy is above that of the
    first setting with the same seed, the mean over the seeds and its interval."""
    lasts = [[at("eval/accuracy")(rows) for rows in of] for of in results.values()]
    cells = [""]
    for last in lasts[1:]:
        points = [100 * (x - first) for x, first in zip(last, lasts[0], strict=True)]
        cells.append(cell(points, "{:+.1f}".format, " to "))
    return cells


def draw(results, panels, path):
    """One panel per metric: the mean over the seeds with its interval as a band, which ends where
    no value can be: below 0, or above 1 of a share. A dot is an evaluation.
    results: {label: [rows of each seed]}; panels: see report."""
    height = 1 if len(panels) <= 3 else 2
    width = math.ceil(len(panels) / height)
    fig = figure(figsize=(4.2 * width, 3.4 * height))
    axes = fig.subplots(height, width, squeeze=False)
    for axis, (title, key) in zip(axes.flat, panels.items()):
        every = [x for rows in sum(results.values(), []) for x in series(rows, key).values()]
        lowest = 0 if min(every) >= 0 else -math.inf
        highest = 1 if str(key).startswith(SHARES) and max(every) <= 1 else math.inf
        for i, (label, runs) in enumerate(results.items()):
            values = [series(rows, key) for rows in runs]
            steps = sorted(set.intersection(*map(set, values)))
            intervals = [mean_interval([x[step] for x in values]) for step in steps]
            mean, *band = np.array(intervals).T
            band = np.clip(band, lowest, highest)
            dot, dashes = "o" if str(key).startswith("eval/") else "", ("-", "--", "-.", ":")[i % 4]
            axis.plot(steps, mean, dot + dashes, color=f"C{i}", ms=4, lw=1.2, label=label)
            axis.fill_between(steps, *band, color=f"C{i}", alpha=0.15, lw=0)
        bottom, top = axis.get_ylim()
        axis.set(xlabel="step", title=title, ylim=(max(bottom, lowest), min(top, highest + 0.02)))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=144)


def report(folders, out, columns=None, panels=PANELS):
    """Writes the table (.md), the numbers (.json) and the curves (.png) of finished runs. A cell is
    the mean over the seeds, with its interval if the seeds differ.

    folders: {label: [folder of each seed]}. out: path without suffix. columns: {title: (value of
    the rows of a run, format)}. panels: {title: key, or function of a row}."""
    results = {label: [read(folder) for folder in of] for label, of in folders.items()}
    everyone, runs = sum(folders.values(), []), []
    first_row = next(iter(results.values()))[0][0]
    about = common.describe([common.read_config(folder) for folder in everyone])
    conditions = (f"{len(everyone) // len(folders)} seeds per row; in brackets the 95 % t interval "
                  f"of the mean over the seeds. Held out: {first_row['eval/n']} questions, the "
                  f"same for all runs. {about}.")
    standard, lines = before_and_after(first_row), []
    columns = columns or standard
    for label, of in results.items():
        lines.append([label, *(cell([value(rows) for rows in of], form)
                               for value, form in columns.values())])
        for rows in of:
            curves = {title: list(series(rows, key).items()) for title, key in panels.items()}
            runs.append({"setting": label, "series": curves,
                         "evaluations": [row for row in rows if "eval/n" in row]})
    head = ["run", *columns]
    if columns is standard and len(results) > 1:
        head.append(f"points above {next(iter(results))}")
        lines = [[*line, last] for line, last in zip(lines, against_the_first(results))]
    table = common.table(head, lines)
    common.write(out, f"{table}\n\n{conditions}", {"conditions": conditions, "runs": runs})
    draw(results, panels, f"{out}.png")


def main(argv):
    """Raises ValueError with one line."""
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="number of seeds per setting")
    add("--out", type=Path, default=common.ROOT / "runs/seeds", help="folder of the runs")
    add("--setting", action="append", metavar="LABEL=FLAGS", help="added to the command")
    add("command", nargs="*", help="after --")
    args = parser.parse_args(argv)
    if not args.command:
        raise ValueError("a command after -- is needed")
    if args.seeds < 2:
        raise ValueError("an interval needs --seeds 2 or more")
    settings = [s.partition("=")[::2] for s in args.setting or ["run="]]
    commands = {label: [*args.command, *shlex.split(flags)] for label, flags in settings}
    report(run_all(commands, range(args.seeds), args.out), args.out.resolve() / "seeds")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"seeds: {e}")
