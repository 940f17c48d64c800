"""Which process this is, and sums and lists over all processes: a world of size 1 or more."""
import datetime
import functools
import itertools
import os
import sys

import torch

from runtime.messages import plain


def local_world_size():
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# The cores of the machine, divided by its processes. Read before vLLM pins threads. On a Mac 1.
CORES = max(1, len(getattr(os, "sched_getaffinity", lambda _: [0])(0)) // local_world_size())


def rank():
    """Number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def device():
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def init_process_group(timeout=10.0):
    """Joins torchrun's process group, or creates a group of one. DeepSpeed and vLLM reuse it. A
    collective call raises an error if a rank does not answer for `timeout` minutes."""
    if "RANK" not in os.environ:  # DeepSpeed and vLLM read these; gloo's network is the machine
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device())
    timeout = datetime.timedelta(minutes=timeout)
    c10d = torch.distributed.distributed_c10d  # else DeepSpeed's and vLLM's groups wait 30 minutes
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    if not torch.distributed.is_initialized():
        # one process needs no store that others reach: torch's listens on all networks
        store = torch.distributed.HashStore() if world_size() == 1 else None
        torch.distributed.init_process_group(
            backend, timeout=timeout, store=store, rank=rank(), world_size=world_size())


def all_gather(items):
    """The lists of all ranks, concatenated in rank order."""
    if world_size() == 1:
        return list(items)
    lists = [None] * world_size()
    torch.distributed.all_gather_object(lists, items)
    return list(itertools.chain.from_iterable(lists))


def all_sum(*values):
    """Sums of numbers over all ranks, in double precision: a list with one float per argument."""
    columns = zip(*all_gather([values]))
    return [float(sum(column)) for column in columns]


def offset(count):
    """The sum of the counts of the ranks before this one. Collective."""
    return sum(all_gather([count])[:rank()])


def print_once(text, file=None):
    """Prints plain(text) on rank 0 only."""
    if rank() == 0:
        print(plain(text), file=file)


print_each_once = functools.cache(print_once)


def note(text):
    """Prints a note on rank 0, to stderr."""
    print_once(f"note: {text}", sys.stderr)
