"""Which process this is, and sums and lists over all processes: a world of size 1 or more."""
import datetime
import os
import socket
import time

import torch


class RunError(RuntimeError):
    """Ends a run. Its text is the line that main() prints: what happened and what to do."""


def local_world_size():
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# The cores of the machine, divided by its processes. Read here, before vLLM pins threads.
CORES = max(1, len(os.sched_getaffinity(0)) // local_world_size())


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
    if "RANK" not in os.environ:  # without these variables DeepSpeed looks for MPI
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    timeout = datetime.timedelta(minutes=timeout)
    c10d = torch.distributed.distributed_c10d  # else DeepSpeed's and vLLM's groups wait 30 minutes
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timeout)


_engine_group = None  # the ranks that share a vLLM engine with this one; None = no others


def share_engine(ranks):
    """Ranks 0 to ranks - 1 share a vLLM engine, the next ones the second, and so on. Collective."""
    global _engine_group
    if ranks > 1:
        _engine_group, _ = torch.distributed.new_subgroups(ranks)


def engine_rank():
    """Number of this rank among those that share its vLLM engine, from 0."""
    return _engine_group.rank() if _engine_group else 0


def engine_gather(item):
    """The items of the ranks that share this rank's vLLM engine. Collective among them."""
    return all_gather([item], _engine_group) if _engine_group else [item]


_waited = 0.0  # seconds in all_gather


def all_gather(items, group=None):
    """The lists of all ranks, or of those of a process group, concatenated in rank order."""
    global _waited
    if world_size() == 1:
        return list(items)
    lists = [None] * torch.distributed.get_world_size(group)
    start = time.perf_counter()  # until the slowest rank is here, and all have the items
    torch.distributed.all_gather_object(lists, items, group)
    _waited += time.perf_counter() - start
    return [item for part in lists for item in part]


def all_sum(*values):
    """Sums of numbers over all ranks, in double precision: a list with one float per argument."""
    return [float(sum(column)) for column in zip(*all_gather([values]))]


def mean_wait():
    """Seconds in all_gather and all_sum since the last call, mean over the ranks. Collective."""
    global _waited
    [total], _waited = all_sum(_waited), 0.0
    return total / world_size()


def print_once(text, file=None):
    """print() on rank 0 only."""
    if rank() == 0:
        print(text, file=file)
