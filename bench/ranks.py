"""Two ranks: the bytes that ZeRO sends in a step and holds before it, in each stage.

    python -m bench.ranks       2 processes with gloo: 2 minutes

Writes bench/results/ranks_reduce.md and .json.
"""
import gc
import itertools
import json
import sys
import tempfile

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nano_rlvr as nr
from bench import common, random_model, update
from runtime import memory, ranks
from runtime.memory import ModelShape


class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that each collective of torch.distributed gets, by name."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            sizes = map(tensor_bytes, args)
            self.bytes[name] = self.bytes.get(name, 0) + max(sizes)
        return func(*args, **(kwargs or {}))


def tensor_bytes(tree):
    """Bytes of the tensors in nested lists."""
    tensors = [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]
    return sum(tensor.nbytes for tensor in tensors)


def held():
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if not isinstance(x, FakeTensor)]  # of torch.compile: no memory
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = [x.untyped_storage() for x in tensors]
    bytes_at = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(bytes_at.values())


def worker(model):
    """One rank: updates with 1 and 4 packs in each dtype and ZeRO stage.

    Rank 0 prints JSON: what it sent and held, in bytes per parameter.
    """
    ranks.init_process_group()
    memory.BUCKET = 2**16  # small beside the model, as 2**26 is beside a large one
    parameters = ModelShape.of(model).parameters
    rows = {}
    engines = []  # none is freed, so that `before` stays what it was
    for dtype, stage in itertools.product(("float32", "bfloat16"), (1, 2, 3)):
        before = held()
        cfg = update.make_config(model, zero_stage=stage, dtype=dtype, pack_tokens=64)
        engine = nr.make_policy(cfg)
        engines.append(engine)
        rows[f"{dtype} {stage}"] = measure(engine, cfg, before, parameters)
    if ranks.rank() == 0:
        print(json.dumps(rows))


def measure(engine, cfg, before, parameters):
    """What updates with 1 and 4 packs send, and hold beyond `before`, in bytes per parameter."""
    rollouts = update.make_rollouts(4, 45, 4096, seed=ranks.rank())
    packs = [nr.collate([r]) for r in nr.assign_token_weights(rollouts, cfg)]
    nr.update(engine, packs, cfg)  # creates AdamW's moments
    at_step = []
    step = engine.step

    def measured_step():
        at_step.append(held() - before)
        step()

    engine.step = measured_step
    row = {"optimizer": type(engine.optimizer).__name__}
    for count in (1, 4):
        with Traffic() as traffic:
            nr.update(engine, packs[:count], cfg)
        per_parameter = {name: x / parameters for name, x in traffic.bytes.items()}
        row[count] = {name: x for name, x in per_parameter.items() if x > 0.01}
    row["held"] = at_step[-1] / parameters
    return row


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--worker", metavar="MODEL", help="one of the two processes")
    if model := parser.parse_args(argv).worker:
        return worker(model)
    conditions = common.conditions()
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(folder, "small")
        measured = common.run_apart("ranks", "--worker", folder, launcher=common.LAUNCHER)
    rows = []
    for name, row in measured.items():
        sent = [calls_as_text(row[count]) for count in ("1", "4")]
        rows.append([*name.split(), row["optimizer"], *sent, f"{row['held']:.1f}"])
    head = ["dtype", "ZeRO stage", "DeepSpeed's class", "sent per step with 1 pack", "with 4 packs",
            "held before the step"]
    common.write("ranks_reduce", f"{common.table(head, rows)}\n\n{conditions}", measured)


def calls_as_text(calls):
    return ", ".join(f"{name} {size:.1f}" for name, size in calls.items())


if __name__ == "__main__":
    main(sys.argv[1:])
