"""What does it gain to sample while the trainer takes its step (examples/async_rl.py)?

    python bench/overlap.py          5 minutes on 2 idle cores; writes bench/results/overlap.md

The reward takes 0, 1 or 4 seconds per batch, as a judge or a slow test may; it waits and computes
nothing. Seconds of a step with --lag 0 and --lag 1, in turns; the ratio is the gain. The process
that samples and the process that trains share the two cores.
"""
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import common  # puts the repository on sys.path

STEPS, FIRST = 10, 3  # steps of a run; the first ones are left out: caches, and nothing is ahead
FLAGS = ("--prompts 32 --samples 16 --eval_size 1 --eval_every 1000 --save_every 0 --kl_coef 0 "
         f"--steps {STEPS} --rewards gsm8k:1,bench/overlap.py:slow:0").split()


def slow(completions, **_):
    """A reward that takes SLOW_SECONDS for all completions together."""
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    return [0.0] * len(completions)


slow.whole_batch = True


def seconds_of_a_step(folder, lag, slow_seconds):
    """The mean over the later steps of a run."""
    name = f"lag-{lag}-{slow_seconds}"
    subprocess.run([sys.executable, "examples/async_rl.py", "--lag", str(lag), *FLAGS, "--out",
                    folder, "--name", name], check=True, cwd=common.ROOT,
                   env=os.environ | {"SLOW_SECONDS": str(slow_seconds)})
    rows = common.read(Path(folder) / name)[FIRST:STEPS]
    return fmean(sum(value for key, value in row.items() if key.startswith("seconds/"))
                 for row in rows)


def main():
    conditions, rows, numbers = common.conditions(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        for wait in (0, 1, 4):
            found = numbers[wait] = [seconds_of_a_step(folder, lag, wait) for lag in (0, 1)]
            rows.append([wait, *(f"{x:.2f}" for x in found), f"{found[0] / found[1]:.2f}"])
    head = ["seconds of the reward", "step, --lag 0", "step, --lag 1", "gain"]
    common.write("overlap", f"{common.table(head, rows)}\n\nBundled model, `{' '.join(FLAGS)}`; "
                 f"{conditions}.", numbers)


if __name__ == "__main__":
    main()
