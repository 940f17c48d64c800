"""How a run ends early: after a signal with a checkpoint, after a failure with one line. What
each step checks is here too, because a step that does not pass ends the run.

Signals: Ctrl-C, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP (a lost terminal). The first stops
the run before its next step. The same signal again, two seconds later or more, ends it at once.
"""
import contextlib
import ctypes
import json
import math
import os
import shlex
import signal
import sys
import time
import traceback

import torch

from runtime import memory, ranks
from runtime.batch import flatten
from runtime.messages import RunError, plain

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME = 2.0  # seconds in which a repeated signal is the same: torchrun repeats the terminal's
MOST_SKIPPED = 3  # optimizer steps in a row
received, received_at = 0, 0.0  # the first signal and its time


# ---- signals

def _handle(number, frame):
    global received, received_at
    if not received:
        received, received_at = number, time.monotonic()
        text = (f"nano_rlvr: {signal.Signals(number).name}: the run stops before its next step; "
                "the same signal again ends it at once\n")
        with contextlib.suppress(OSError):  # nobody reads
            # a handler must not print(): it may have interrupted one
            os.write(2, text.encode() * (ranks.rank() == 0))
    elif number == received and time.monotonic() - received_at > SAME:
        os._exit(128 + number)


@contextlib.contextmanager
def on_signals():
    """Handles signals in this block. A rank also gets SIGTERM if its torchrun is killed."""
    global received
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            if before[number] is not signal.SIG_IGN:  # ignored on purpose: nohup, a job with &
                signal.signal(number, _handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        received = 0


def check(checkpoints):
    """Ends the run with a checkpoint if one of the ranks got a signal. Collective."""
    number = max(ranks.all_gather([received]))
    if number == 0:
        return
    checkpoints.save()
    line = (f"nano_rlvr: stopped by {signal.Signals(number).name} at step "
            f"{checkpoints.progress.step}")
    if checkpoints.cfg.save_every >= 0:
        again = [] if "--resume" in sys.argv else ["--resume", str(checkpoints.folder)]
        command = ["python", *sys.orig_argv[1:]]
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's own arguments are not known here
            command = "the same torchrun command".split()
        line += f"; continue with: {shlex.join([*command, *again])}"
    ranks.print_once(line, file=sys.stderr)
    raise SystemExit(128 + number)


# ---- what each step must have

def check_step(metrics, mismatch_bound, rollout=""):
    """Raises RunError if vLLM and the trainer disagree about log-probs, or for an infinite loss."""
    mismatch, loss = metrics["mismatch/mean_abs"], metrics["loss"]
    if not mismatch <= mismatch_bound:  # also when it is NaN
        user = f"--rollout {rollout} returned other ids or log-probs, or " * bool(rollout)
        raise RunError(
            f"vLLM and the trainer disagree: mean |log-prob difference| {mismatch:.2g}, bound "
            f"{mismatch_bound:.2g}. Either {user}vLLM has other weights (a sync failed), or they "
            "compute this model differently. The step was not taken; see --mismatch_bound.")
    if not math.isfinite(loss):
        raise RunError(f"the loss is {loss}; the step was not taken")


def check_scored(prefix, values, metrics, verifier):
    """Raises RunError if no completion of any rank got a reward. Collective.

    values: a number or None per completion of this rank. metrics: counts of stats.add_counts under
    prefix. verifier: has `crashes`, the last line of the first crash of each reward function."""
    total, scored = ranks.all_sum(len(values), sum(value is not None for value in values))
    if scored:
        return
    crashes = ranks.all_gather(list(verifier.crashes.values()))
    timeouts, crashed = (metrics.get(f"{prefix}/{name}", 0) for name in ("timeouts", "crashes"))
    first = f"; first crash: {crashes[0][:300]}" if crashes else ""
    raise RunError(
        f"{prefix}: none of {total:.0f} completions got a reward ({timeouts:.0f} timeouts, "
        f"{crashed:.0f} crashes, the others None){first}. Check the reward function, the columns "
        "of the data and --reward_timeout.")


def count_skipped(in_a_row, step, history, groups, folder):
    """Counts the optimizer steps in a row that were skipped; RunError after 3. history: metrics
    of the step's updates. groups: its rollouts, kept in <folder>/quarantine/ if one was skipped."""
    for metrics in history:
        in_a_row = in_a_row + 1 if metrics["skipped"] else 0
    if any(metrics["skipped"] for metrics in history):
        path = folder / "quarantine" / f"step-{step}-rank-{ranks.rank()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(vars(r)) + "\n" for r in flatten(groups)]
        path.write_text("".join(lines))
        ranks.print_once(f"note: step {step} has a gradient that is not finite; see {path}")
    if in_a_row >= MOST_SKIPPED:
        raise RunError(
            f"{in_a_row} optimizer steps in a row had a gradient that is not finite: is --lr too "
            f"high, or are rewards very large? The rollouts are in {folder / 'quarantine'}.")
    return in_a_row


# ---- failures

def is_lost_rank(e):
    """Whether an exception says that another rank has ended or does not answer."""
    lost = "/gloo/" in str(e) and "open files" not in str(e)  # gloo names its source file
    return lost or isinstance(e, torch.distributed.DistError)  # of NCCL


@contextlib.contextmanager
def with_one_line(*kinds, cfg=None, folder=None):
    """Ends the process with one line and exit code 1 for RunError, these kinds and a lost rank.

    cfg: also for too little memory, with the flags to change. folder: that of the run. Each rank
    that fails writes its traceback to <folder>/errors/rank-k.txt, which the line names."""
    try:
        yield
    except Exception as e:
        where = ""
        if folder:
            path = folder / "errors" / f"rank-{ranks.rank()}.txt"
            with contextlib.suppress(OSError):  # the disk may be full
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(traceback.format_exc(), errors="backslashreplace")
                where = f" (traceback: {path})"
        if cfg and memory.is_out_of_memory(e):
            line = f"nano_rlvr: {str(e).splitlines()[0]} To use less memory: {memory.smaller(cfg)}"
        elif is_lost_rank(e):
            line = "nano_rlvr: another rank has ended, or has not answered for --timeout minutes"
        elif isinstance(e, (RunError, *kinds)) or "open files" in str(e):  # see ulimit -n
            line = f"nano_rlvr: {e}"
        else:
            raise
        if ranks.rank() > 0:
            time.sleep(3)  # if rank 0 failed too, it prints the line, and torchrun sends a signal
        line = plain(" ".join(f"{line}{where}".splitlines()))
        raise SystemExit(1 if ranks.rank() > 0 and received else line) from None
