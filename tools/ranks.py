"""Which process this is, and sums and lists over all of them. One process is a world of one: nothing else changes."""
import os
import socket

import torch
import torch.distributed as dist


def rank():
    return int(os.environ.get("RANK", 0))


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def device():
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")


def launch():
    """Joins the process group that torchrun describes, or a group of one. DeepSpeed and vLLM both find it in place."""
    if "RANK" not in os.environ:  # without these DeepSpeed looks for MPI
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def all_sum(*values):
    """Sums of numbers over the ranks (list of float, in double precision)."""
    total = torch.tensor(values, dtype=torch.float64)
    if world() > 1:
        dist.all_reduce(total)
    return total.tolist()


def all_gather(items):
    """The lists of all ranks, one after the other."""
    parts = [items]
    if world() > 1:
        dist.all_gather_object(parts := [None] * world(), items)
    return [item for part in parts for item in part]
