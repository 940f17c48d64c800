"""How a run ends early: after a signal with a checkpoint, after a failure with one line.

Signals: Ctrl-C, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP (a lost terminal). The first stops
the run before its next step. The same signal again, two seconds later or more, ends it at once.
"""
import contextlib
import ctypes
import os
import shlex
import signal
import sys
import time
import traceback

import torch

from runtime import memory, ranks
from runtime.messages import RunError, plain

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME = 2.0  # seconds in which a repeated signal is the same: torchrun repeats the terminal's
received, received_at = 0, 0.0  # the first signal and its time


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
