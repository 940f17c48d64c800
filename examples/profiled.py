"""Where the seconds of a step go: PyTorch's profiler around the rollouts and around the update.

    python -m examples.profiled --model models/smollm2 --name where

Takes two steps, and prints a table of operators for the second one: the first also pays for memory
that is touched for the first time. Flags are those of nano_rlvr.py.
"""
import sys

import torch
from torch.profiler import ProfilerActivity, profile

import nano_rlvr as nr

ROWS = 12  # of a table


def profiled(stage, function, tables):
    """The function; its last call leaves a table in tables[stage]."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def call(*args, **options):
        with profile(activities=activities) as measured:
            result = function(*args, **options)
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        tables[stage] = measured.key_averages().table(
            sort_by=order, row_limit=ROWS, max_name_column_width=40)
        return result

    return call


def train(run):
    tables, update = {}, nr.update
    nr.update = profiled("update", update, tables)
    try:
        nr.train(run, profiled("rollout and reward", nr.collect_rollouts, tables))
    finally:
        nr.update = update
    for stage, table in tables.items():
        print(f"\n{stage}, last step\n{table}")


if __name__ == "__main__":
    off = "--steps 2 --eval_every 1000000 --eval_size 1 --save_every 0".split()
    nr.main([*off, *sys.argv[1:]], train=train)
