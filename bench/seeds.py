"""A command of nano_rlvr with several seeds: means, intervals over the seeds, and curves with a band.

    python bench/seeds.py               README's table: 5 seeds of the default run and of a control
    python bench/seeds.py --out runs/lr --setting low="--lr 1e-5" --setting high="--lr 1e-4" -- \\
        python nano_rlvr.py --steps 20 --eval_every 5
    python bench/seeds.py --race ...    stops runs that fall behind; writes no table

The command is what follows `--`: any command that takes the flags of nano_rlvr.py, also torchrun. Each
`--setting label=flags` adds flags to it; without one there is one setting. The runs are
<out>/<label>-<seed>/, their output is in <label>-<seed>.log. A run that was interrupted continues at its last
checkpoint, and a finished one is kept: repeat the command after any interruption. The results are in
<out>/seeds.md, .json and .png. Without a command they are in bench/results/learn.*, and it takes an hour on 2
cores; in the control a coin rewards each completion: what that gains does not come from rewards.

The interval is Student's t interval of the mean, 95 %: mean +- t(n - 1) * s / sqrt(n) over n seeds. It is
about the seed only: all runs are evaluated on the same held-out questions.

The rule of --race: a run is stopped at the first evaluation after step 0 at which the upper bound of its
accuracy (eval/high) is below the lower bound of another run (eval/low) at the same step. With --jobs 1, a run
is compared with those before it. The best of several runs, chosen by its own score, is biased upwards. A race
therefore gives no figures: it has runs of its own (race-<label>-<seed>) and only prints a ranking; the winner
has to be run again with other seeds (--first_seed).
"""
import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path = [p for p in sys.path if Path(p).resolve() != ROOT / "bench"] + [str(ROOT)]

from runtime import curve, log  # noqa: E402
from runtime.curve import series  # noqa: E402
from runtime.stats import mean_interval, t_quantile  # noqa: E402, F401

SCRIPT = [sys.executable, str(ROOT / "nano_rlvr.py")]
README_COMMAND = [*SCRIPT, *"--eval_n 8 --eval_every 25 --save_every 0".split()]
README_SETTINGS = ["default=", "control: random rewards=--rewards gsm8k:0,random:1"]
POLL = 1.0  # seconds between looks at the running processes
PANELS = {"held-out accuracy": "eval/accuracy", "reward of the training samples": "reward/mean",
          "tokens per completion": "completion/length"}


def fell_behind(own, rivals):
    """The step at which a race stops a run; None if it does not. See the rule above.

    own: {step: (low, high)} of its evaluations. rivals: the same of the other runs.
    """
    return next((step for step, (_, high) in sorted(own.items()) if step > 0
                 and any(high < rival[step][0] for rival in rivals if step in rival)), None)


# ---- runs

def read(folder):
    """Rows of metrics.jsonl of a run; none if it has not started."""
    return curve.read(folder) if (folder / "metrics.jsonl").exists() else []


def own_flags(command):
    """The flags of a command between its script and --seed: what the runs of a setting have in common."""
    return command.partition(".py ")[2].partition("--seed ")[0].strip()


def finished(folder, command):
    """Whether a run is finished. Raises ValueError if the folder has a run with other flags."""
    if not (folder / "config.json").exists():
        return False
    about, rows = json.loads((folder / "config.json").read_text()), read(folder)
    if own_flags(about["command"]) != own_flags(" ".join(command)):
        raise ValueError(f"{folder} is a run of `{about['command']}`; choose another --out")
    return bool(rows) and rows[-1]["step"] == about["config"]["steps"]


def run_all(settings, seeds, out, jobs=1, race=False):
    """Runs what is not finished, `jobs` processes at a time. -> {label: [folder of each seed]}.

    settings: {label: command as a list}. Raises ValueError if a run fails, and after all others have ended.
    """
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    folders, waiting, running, failed = {}, [], {}, []
    for seed in seeds:  # all settings of a seed before the next seed: a part of the table is there early
        for label, command in settings.items():
            name = ("race-" if race else "") + re.sub(r"\W+", "-", label).strip("-") + f"-{seed}"
            folders.setdefault(label, []).append(out / name)
            command = [*command, "--seed", str(seed), "--out", str(out), "--name", name, "--resume"]
            if not finished(out / name, command):
                waiting.append((out / name, command))
    everyone = sum(folders.values(), [])
    while waiting or running:
        while waiting and len(running) < jobs:
            folder, command = waiting.pop(0)
            if not (race and is_out(folder, everyone)):
                print(f"{time.strftime('%H:%M:%S')}  {folder.name}", flush=True)
                with open(f"{folder}.log", "a") as file:
                    running[folder] = subprocess.Popen(command, stdout=file, stderr=file)
        time.sleep(POLL)
        for folder, process in list(running.items()):
            if race and process.poll() is None and is_out(folder, everyone):
                process.terminate()  # the run writes a checkpoint; a second signal would end it without one
                process.wait()
            elif process.poll():
                failed.append(folder.name)
            if process.poll() is not None:
                del running[folder]
    if failed:
        raise ValueError(f"{', '.join(sorted(failed))} failed; look at {out}/{min(failed)}.log")
    return folders


# ---- the race

def is_out(folder, everyone):
    """The step at which a run falls behind the others; None if it does not."""
    bounds = [{row["step"]: (row["eval/low"], row["eval/high"]) for row in read(f) if "eval/low" in row}
              for f in (folder, *(f for f in everyone if f != folder))]
    return fell_behind(bounds[0], bounds[1:])


def ranking(folders):
    """Text: the last evaluation of each run of a race, those that went furthest first."""
    everyone, lines = sum(folders.values(), []), []
    for folder in everyone:
        last = [row for row in read(folder) if "eval/accuracy" in row][-1]
        out = is_out(folder, everyone)
        state = "" if out is None else f"  behind at step {out}"
        lines.append((last["step"], last["eval/accuracy"],
                      f"step {last['step']:5d}  {last['eval/accuracy']:6.1%}  {folder.name}{state}"))
    return "\n".join(text for *_, text in sorted(lines, reverse=True)) + (
        "\nA score by which a run was chosen is biased upwards: it is not a result. Run the winner again "
        "with other seeds (--first_seed) and without --race.")


# ---- the report

def share(x):
    return f"{min(max(x, 0.0), 1.0):.1%}"  # the ends of an interval may lie outside 0 to 100 %


def number(x):
    return f"{x:.1f}"


def before_and_after(runs):
    """The columns of the table, {title: (value of the rows of a run, format)}: first and last evaluation."""
    def of(key, i):
        return lambda rows: [row for row in rows if key in row][i][key]
    sampled = [(key.removeprefix("eval/"), key, share) for key in runs[0][0] if key.startswith("eval/mean@")]
    names = [("greedy", "eval/accuracy", share), *sampled, ("tokens", "eval/length", number)]
    return {f"{name} {when}": (of(key, i), form)
            for name, key, form in names for when, i in (("before", 0), ("after", -1))}


def table(results, columns):
    """A Markdown table. results: {label: [rows of each seed]}; columns: {title: (value(rows), format)}.

    A cell is the mean over the seeds with its interval, or without one where all seeds have the same value.
    """
    lines = [f"| {' | '.join(('run', *columns))} |", "|---" * (len(columns) + 1) + "|"]
    for label, runs in results.items():
        cells = []
        for value, form in columns.values():
            values = [value(rows) for rows in runs]
            mean, low, high = mean_interval(values)
            cells.append(form(mean) + (f" ({form(low)}–{form(high)})" if low < high else ""))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results, panels, path):
    """One panel per metric: the mean over the seeds with its interval as a band. A dot is an evaluation.

    results: {label: [rows of each seed]}; panels: {title: key, or a function of a row}.
    """
    height = 1 if len(panels) <= 3 else 2
    width = math.ceil(len(panels) / height)
    fig = curve.figure(figsize=(4.2 * width, 3.4 * height))
    axes = fig.subplots(height, width, squeeze=False)
    for axis, (title, key) in zip(axes.flat, panels.items()):
        for i, (label, runs) in enumerate(results.items()):
            values = [series(rows, key) for rows in runs]
            steps = sorted(set.intersection(*map(set, values)))
            mean, low, high = np.array([mean_interval([x[step] for x in values]) for step in steps]).T
            dots = "o-" if str(key).startswith("eval/") else "-"
            axis.plot(steps, mean, dots, color=f"C{i}", ms=4, lw=1.2, label=label)
            axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.15, lw=0)
        top = 1.02 if title.endswith("accuracy") else None  # the band of a share may pass 100 %
        axis.set(xlabel="step", title=title, ylim=(None, top))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=120)


def report(folders, path, command, columns=None, panels=PANELS, text=""):
    """Writes the table (.md), the numbers (.json) and the curves (.png) of finished runs to `path`.

    folders: {label: [folder of each seed]}. command: the one that makes this report.
    """
    results = {label: [read(folder) for folder in of] for label, of in folders.items()}
    columns = columns or before_and_after(next(iter(results.values())))
    about = [json.loads((f / "config.json").read_text()) for f in sum(folders.values(), [])]
    commits = ", ".join(sorted({a["commit"] for a in about}))
    versions = ", ".join(f"{name} {v}" for name, v in about[0]["versions"].items())
    first = next(iter(results.values()))
    conditions = (f"{len(first)} seeds per row; in brackets the 95 % t interval of the mean over the seeds. "
                  f"Held out: {first[0][0]['eval/n']} questions, the same for all runs. Commit {commits}, "
                  f"{about[0]['device']}, {versions}; `{command}`, {time.strftime('%Y-%m-%d')}.")
    page = "\n\n".join(part for part in (table(results, columns), text, conditions) if part)
    labelled = [(label, rows) for label, of in results.items() for rows in of]
    runs = [{"setting": label, "seed": a["config"]["seed"], "flags": own_flags(a["command"]),
             "evaluations": [{k: v for k, v in row.items() if k == "step" or k.startswith("eval/")}
                             for row in rows if "eval/n" in row],
             "series": {title: list(series(rows, key).items()) for title, key in panels.items()},
             "training_seconds": log.stage_seconds(rows)} for (label, rows), a in zip(labelled, about)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(page + "\n")
    path.with_suffix(".json").write_text(json.dumps({"conditions": conditions, "runs": runs}, indent=1))
    draw(results, panels, path.with_suffix(".png"))
    print(page)


def parse(argv):
    """Command line -> (arguments, {label: command}). Raises ValueError with one line."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds per setting")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/seeds", help="folder of the runs")
    parser.add_argument("--setting", action="append", metavar="LABEL=FLAGS", help="added to the command")
    parser.add_argument("--race", action="store_true", help="stop runs that fall behind; see above")
    own, command = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    args = parser.parse_args(own)
    args.write = args.out / "seeds"
    if not command:
        if args.setting or args.race:
            raise ValueError("--setting and --race need a command after --")
        args.write, command, args.setting = ROOT / "bench/results/learn", README_COMMAND, README_SETTINGS
    if args.seeds < (1 if args.race else 2) or args.jobs < 1:
        raise ValueError("an interval needs --seeds 2 or more; --jobs is at least 1")
    settings = [s.partition("=")[::2] for s in args.setting or ["run="]]
    return args, {label: [*command, *shlex.split(flags)] for label, flags in settings}


def main(argv):
    args, settings = parse(argv)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    folders = run_all(settings, seeds, args.out, args.jobs, args.race)
    if args.race:
        print(ranking(folders))
    else:
        report(folders, args.write, shlex.join(["python", "bench/seeds.py", *argv]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"seeds: {e}")
    except KeyboardInterrupt:  # the runs have got the signal too, and write a checkpoint
        sys.exit("seeds: interrupted; the same command continues")
