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

PANELS = {
    "held-out accuracy": "eval/accuracy",
    "reward of the training samples": "reward/mean",
    "tokens per completion": "completion/length",
}
# beginnings of metrics that are shares, unless a value is above 1 (eval/length, a larger reward)
SHARES = ("eval/", "reward/", "completion/truncated", "clip_ratio", "group/zero_std")
# Student's t: 95 % of the values lie in +- T[degrees of freedom - 1]
T = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)


def mean_interval(values):
    """(mean, low, high): 95 % t interval of the mean of at least two values. With more than 11 it
    is a little too wide."""
    n = len(values)
    t = T[min(n, 11) - 2]
    mean = fmean(values)
    half = t * stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


def own_flags(command):
    """The flags between a script, or `-m` and a module, and --seed: what the runs of a setting have
    in common."""
    before, _, _ = command.partition("--seed ")
    *_, flags = re.split(r"\.py |-m [\w.]+ ", before)
    return flags.strip()


def finished(folder, command):
    """Whether a run is finished. Raises ValueError if the folder has a run with other flags."""
    if not (folder / "config.json").exists():
        return False
    about = common.read_config(folder)
    if own_flags(about["command"]) != own_flags(" ".join(command)):
        raise ValueError(f"{folder} is a run of `{about['command']}`; choose another --out")
    rows = read(folder)  # [] without metrics
    steps = about["config"]["steps"]
    return bool(rows) and rows[-1]["step"] == steps


def run_all(settings, seeds, out, jobs=1, keep_weights=True):
    """Runs what is not finished. -> {label: [folder of each seed]}.
    settings: {label: command as a list}. "{seed}" in it becomes the seed: with jobs 1, a setting
    can begin with the weights of an earlier one, --model <out>/<label>-{seed}/final.
    jobs: so many runs at a time, each on one core; 1: one
    after the other, on all cores. keep_weights: False deletes checkpoints and final/ of a run when
    it has finished. Raises ValueError if a run fails."""
    out = Path(out).resolve()
    folders = {}
    waiting = []
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:  # all settings of a seed before the next seed: a part of the table is early
        for label, command in settings.items():
            short = re.sub(r"\W+", "-", label).strip("-")
            name = f"{short}-{seed}"
            folder = out / name
            folders.setdefault(label, []).append(folder)
            words = [word.replace("{seed}", str(seed)) for word in command]
            words += ["--seed", str(seed)]
            words += ["--out", str(out), "--name", name, "--resume"]
            if not finished(folder, words):
                waiting.append((folder, words))
    cores = queue.SimpleQueue()
    available = sorted(os.sched_getaffinity(0))
    for core in available[:jobs]:
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
        futures = [pool.submit(start, *run) for run in waiting]
        for future in futures:
            try:
                future.result()
            except ValueError:
                pool.shutdown(cancel_futures=True)
                raise
    return folders


def share(x):
    inside = min(max(x, 0.0), 1.0)  # the ends of an interval may lie outside
    return f"{inside:.1%}"


def number(x):
    return f"{x:.1f}"


def at(key, step=-1):
    """The value of a metric at a step (-1: at its last one), of the rows of a run."""
    def value(rows):
        values = series(rows, key)
        which = step if step >= 0 else max(values)
        return values[which]
    return value


def late(key, steps=0):
    """The mean of a metric over the last steps of the rows of a run (0: over all)."""
    def value(rows):
        values = list(series(rows, key).values())
        return fmean(values[-steps:])
    return value


def cell(values, form, to="–"):
    """The mean over the seeds, with its interval if they differ. A dash if a run does not measure
    it."""
    if any(map(math.isnan, values)):
        return "–"
    mean, low, high = mean_interval(values)
    if not low < high:
        return form(mean)
    return f"{form(mean)} ({form(low)}{to}{form(high)})"


def before_and_after(first_row):
    """The columns of the table, {title: (value of the rows of a run, format)}: the first and the
    last evaluation."""
    names = {"eval/accuracy": "greedy"}  # key: title
    for key in first_row:
        if key.startswith("eval/mean@"):
            names[key] = key.removeprefix("eval/")
    names["eval/length"] = "tokens"
    columns = {}
    for key, name in names.items():
        form = number if key == "eval/length" else share
        columns[f"{name} before"] = at(key, 0), form
        columns[f"{name} after"] = at(key), form
    return columns


def against_the_first(results):
    """A cell per setting: by how many percent points its last greedy accuracy is above that of the
    first setting with the same seed, the mean over the seeds and its interval."""
    accuracy = at("eval/accuracy")
    first, *others = [list(map(accuracy, of)) for of in results.values()]
    cells = [""]
    for last in others:
        points = []
        for before, after in zip(first, last, strict=True):
            points.append(100 * (after - before))
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
        draw_panel(axis, results, key)
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=144)


def draw_panel(axis, results, key):
    """The curves of one metric."""
    every = []
    for rows in sum(results.values(), []):
        every += series(rows, key).values()
    is_share = str(key).startswith(SHARES) and max(every) <= 1
    lowest = 0 if min(every) >= 0 else -math.inf
    highest = 1 if is_share else math.inf
    dot = "o" if str(key).startswith("eval/") else ""
    dashes = ("-", "--", "-.", ":")
    for i, (label, runs) in enumerate(results.items()):
        values = [series(rows, key) for rows in runs]
        steps = sorted(set.intersection(*map(set, values)))
        intervals = []
        for step in steps:
            of_seeds = [x[step] for x in values]
            intervals.append(mean_interval(of_seeds))
        mean, *band = np.array(intervals).T
        low, high = np.clip(band, lowest, highest)
        line = dot + dashes[i % 4]
        axis.plot(steps, mean, line, color=f"C{i}", ms=4, lw=1.2, label=label)
        axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.15, lw=0)
    bottom, top = axis.get_ylim()
    axis.set(ylim=(max(bottom, lowest), min(top, highest + 0.02)))


def report(folders, out, columns=None, panels=PANELS):
    """Writes the table (.md), the numbers (.json) and the curves (.png) of finished runs. A cell is
    the mean over the seeds, with its interval if the seeds differ.

    folders: {label: [folder of each seed]}. out: path without suffix. columns: {title: (value of
    the rows of a run, format)}. panels: {title: key, or function of a row}."""
    results = {label: list(map(read, of)) for label, of in folders.items()}
    everyone = sum(folders.values(), [])
    first_row = next(iter(results.values()))[0][0]
    about = common.describe([common.read_config(folder) for folder in everyone])
    conditions = (f"{len(everyone) // len(folders)} seeds per row; in brackets the 95 % t interval "
                  f"of the mean over the seeds. Held out: {first_row['eval/n']} questions, the "
                  f"same for all runs. {about}.")
    is_standard = columns is None
    columns = columns or before_and_after(first_row)
    lines = []
    runs = []
    for label, of in results.items():
        line = [label]
        for value, form in columns.values():
            line.append(cell(list(map(value, of)), form))
        lines.append(line)
        for rows in of:
            curves = {title: list(series(rows, key).items()) for title, key in panels.items()}
            evaluations = [row for row in rows if "eval/n" in row]
            runs.append({"setting": label, "series": curves, "evaluations": evaluations})
    head = ["run", *columns]
    if is_standard and len(results) > 1:
        head.append(f"points above {next(iter(results))}")
        for line, last in zip(lines, against_the_first(results)):
            line.append(last)
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
    commands = {}
    for setting in args.setting or ["run="]:
        label, _, flags = setting.partition("=")
        commands[label] = [*args.command, *shlex.split(flags)]
    folders = run_all(commands, range(args.seeds), args.out)
    report(folders, args.out.resolve() / "seeds")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"seeds: {e}")
