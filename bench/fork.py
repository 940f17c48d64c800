"""Fork a run at a checkpoint: what does one group of samples change in the ten steps after it?

    OMP_NUM_THREADS=1 python -m bench.fork --at runs/a/step-20 [--group 3] [--more 10]

The run continues twice from this checkpoint: in runs/a-whole as it was, and in runs/a-without with
one group left out of the first step. Flags of the script count for both.
"""
import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import nano_rlvr as nr
from bench import diff
from runtime import checkpoint, ranks, records, stop
from runtime.messages import RunError


def fork(saved, folder):
    """Copies a run up to its checkpoint `saved` into a new folder, in which it can be resumed."""
    shutil.copytree(saved, folder / saved.name)
    for name in ("config.json", "inputs.sha256", "metrics.jsonl", "rollouts.jsonl", "eval.jsonl"):
        shutil.copy(saved.parent / name, folder)


def without(split, group):
    """The groups to train on per minibatch, but for one: this object, not one that equals it."""
    return [[other for other in part if other is not group] for part in split]


def train(run, step, number):
    """The script's loop, but this step does not train the group with this number."""
    def collect_rollouts(run, now):
        split, sampled = nr.collect_rollouts(run, now)
        if now != step:
            return split, sampled
        less = without(split, sampled[number])
        if less == split:
            raise RunError(f"--group {number} is not trained: all its rewards are equal")
        return less, sampled

    nr.train(run, collect_rollouts=collect_rollouts)


def both(saved, number, more, argv):
    """Makes the two forks and prints what the group has changed."""
    if problem := checkpoint.damage(saved):
        raise ValueError(f"--at {saved} is no whole checkpoint of a run ({problem})")
    run, step = saved.parent, int(saved.name.removeprefix("step-"))
    flags = [*argv, "--steps", str(step + more), "--resume_force", "--resume"]
    if not 0 <= number < (most := nr.parse_config([*flags, str(run)]).prompts):  # checks the flags
        raise ValueError(f"--group {number}: a step has the groups 0 to {most - 1}")
    whole, less = (run.with_name(f"{run.name}-{arm}") for arm in ("whole", "without"))
    for folder, own in ((whole, []), (less, ["--drop", str(step), str(number)])):
        fork(saved, folder)
        subprocess.run([sys.executable, "-m", "bench.fork", *own, *flags, folder], check=True)
    print(*diff.answer(whole, less), sep="\n")
    for folder in (whole, less):
        rows = records.read(folder)
        reward = fmean([row["reward/mean"] for row in rows if row["step"] >= step and "lr" in row])
        print(f"{folder.name}: mean reward of the {more} steps {reward:.3f}, "
              f"accuracy after them {rows[-1]['eval/accuracy']:.1%}")
    end = whole / f"step-{step + more}"
    apart, moved = (diff.weights(end, other)[1] for other in (less / end.name, saved))
    print(f"distance of the two forks' weights: {apart / moved:.1%} of the way of the first fork")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--at", type=Path)
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--more", type=int, default=10)
    parser.add_argument("--drop", type=int, nargs=2, default=(-1, 0))  # step, group: of one fork
    own, argv = parser.parse_known_args()
    if ranks.world_size() > 1:
        sys.exit("nano_rlvr: bench/fork.py runs in one process: leave out torchrun")
    if not own.at:
        nr.main(argv, lambda run: train(run, *own.drop))
    else:
        with stop.with_one_line(ValueError, OSError, subprocess.CalledProcessError):
            both(own.at.resolve(), own.group, own.more, argv)
