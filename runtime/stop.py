"""How a run ends before its last step: after a signal with a checkpoint, after a failure with one line.

Signals: Ctrl-C, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP (a lost terminal). The first stops the run
before its next step. The same signal again, two seconds later or more, ends the process at once.
"""
import contextlib
import ctypes
import errno
import io
import os
import resource
import signal
import sys
import time
import traceback

import torch

from runtime import dist, memory
from runtime.dist import RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME = 2.0  # seconds in which a repeated signal counts as the first: torchrun repeats what the terminal sent
received, received_at = None, 0.0  # the first signal and its time
in_loop = False  # whether there is a state to save


class Stopped(Exception):
    """A signal has asked the run to stop. The state is that before the current step."""


def _handle(number, frame):
    global received, received_at
    if received is None:
        received, received_at = number, time.monotonic()
        name = signal.Signals(number).name
        text = (f"nano_rlvr: {name}: the run stops after this step; the same signal again ends it at once\n"
                if in_loop else f"nano_rlvr: {name} before the first step\n")
        if dist.rank() == 0:
            with contextlib.suppress(OSError):  # nobody reads
                os.write(2, text.encode())  # a handler must not print(): it may have interrupted one
        if not in_loop:
            raise SystemExit(128 + number)
    elif number == received and time.monotonic() - received_at > SAME:
        os._exit(128 + number)


@contextlib.contextmanager
def on_signals():
    """Handles signals in this block. If torchrun has started this process and dies, that is a SIGTERM too."""
    global received, in_loop
    received, in_loop = None, False
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    before = {number: signal.signal(number, _handle) for number in SIGNALS
              if signal.getsignal(number) is not signal.SIG_IGN}  # ignored on purpose: nohup, a job with &
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check():
    """Raises Stopped, on all ranks, if one of them got a signal. Collective; called before each step."""
    if any(dist.all_gather([received is not None])):
        raise Stopped


@contextlib.contextmanager
def with_checkpoint(checkpoints):
    """The loop runs in this block. If a signal stops it, it is saved; the exit code is then 128 + signal."""
    global in_loop
    in_loop = True
    try:
        yield
    except Stopped:
        checkpoints.save()
        checkpoints.wait()
        number, step = max(dist.all_gather([received or 0])), checkpoints.progress.step
        dist.print_once(f"nano_rlvr: stopped by {signal.Signals(number).name} at step {step}; continue with: "
                        f"python nano_rlvr.py --resume {checkpoints.folder}; its charts so far: "
                        f"python -m runtime.report {checkpoints.folder}", file=sys.stderr)
        raise SystemExit(128 + number) from None


def is_lost_rank(e):
    """Whether an exception says that another rank has ended or does not answer."""
    return isinstance(e, torch.distributed.DistError) or "/gloo/" in str(e)  # NCCL; gloo's source file


def write_traceback(folder):
    """Writes the traceback of the current exception to <folder>/errors/. Returns text that names the file."""
    path = folder / "errors" / f"rank-{dist.rank()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
    except OSError as e:
        return f" (its traceback cannot be written: {e.strerror})"
    return f" (traceback: {path})"


@contextlib.contextmanager
def with_one_line(*kinds, cfg=None, folder=None):
    """Ends the process with one line, on one rank, for RunError, exceptions of these kinds and a lost rank.

    With cfg: also for too little memory, with the flags to change. With folder, that of the run: each rank
    writes its traceback to <folder>/errors/rank-k.txt, and the line names the file. The exit code is 1.
    """
    try:
        yield
    except Exception as e:
        where = write_traceback(folder) if folder else ""
        if memory.is_out_of_memory(e) and cfg:
            line = memory.advice(e, cfg)
        elif "Too many open files" in str(e):  # also from gloo
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            line = f"nano_rlvr: {limit} open files are too few: raise the limit, ulimit -n"
        elif isinstance(e, OSError) and e.errno == errno.ENOSPC and not e.filename:  # a semaphore
            line = "nano_rlvr: /dev/shm is full: make room there (docker run --shm-size)"
        elif is_lost_rank(e):
            line = "nano_rlvr: another rank has ended, or has not answered for --timeout minutes"
        elif isinstance(e, (RunError, *kinds)):
            line = f"nano_rlvr: {e}"
        else:
            raise
        if dist.rank() > 0:
            time.sleep(3)  # if rank 0 failed too, it has printed the line, and torchrun has sent a signal
        raise SystemExit(1 if dist.rank() > 0 and received else line + where) from None


def keep_printing():
    """print() continues when nobody reads the output any more, as after `| head -3`."""
    class Pipe(io.FileIO):
        def write(self, data):
            try:
                return super().write(data)
            except OSError:  # a closed pipe, a lost terminal, a full disk
                return len(data)

    if sys.stdout is sys.__stdout__ is not None:  # not replaced by a notebook or a test, not closed
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = io.BufferedWriter(Pipe(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(stream, "utf-8", "backslashreplace", line_buffering=True))
