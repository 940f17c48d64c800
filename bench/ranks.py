"""Two ranks: the bytes that ZeRO sends in a step and holds before it, in each stage.

    python -m bench.ranks       2 processes with gloo: 2 minutes

Writes bench/results/ranks_reduce.md and .json.
"""
import gc
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
            sizes = [sum(x.nbytes for x in tree_leaves(arg) if torch.is_tensor(x)) for arg in args]
            self.bytes[name] = self.bytes.get(name, 0) + max(sizes)
        return func(*args, **(kwargs or {}))


def held():
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if not isinstance(x, FakeTensor)]  # of torch.compile: no memory
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = [x.untyped_storage() for x in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def worker(model):
    """One rank: updates with 1 and 4 packs in each dtype and ZeRO stage.

    Rank 0 prints JSON: what it sent and held, in bytes per parameter.
    """
    ranks.init_process_group()
    memory.BUCKET = 2**16  # small beside the model, as 2**26 is beside a large one
    found, n, engines = {}, ModelShape.of(model).parameters, []
    for dtype, stage in [(d, s) for d in ("float32", "bfloat16") for s in (1, 2, 3)]:
        before, at_step = held(), []
        cfg = update.make_config(model, zero_stage=stage, dtype=dtype, pack_tokens=64)
        engine = nr.make_policy(cfg)
        rollouts = update.make_rollouts(4, 45, 4096, seed=ranks.rank())
        batches = [nr.collate([r]) for r in nr.assign_token_weights(rollouts, cfg)]
        nr.update(engine, batches, cfg)  # creates AdamW's moments

        def measured_step(step=engine.step, at_step=at_step, before=before):
            at_step.append(held() - before)
            step()

        engine.step = measured_step
        found[f"{dtype} {stage}"] = row = {}
        for packs in (1, 4):
            with Traffic() as traffic:
                nr.update(engine, batches[:packs], cfg)
            row[packs] = {name: x / n for name, x in traffic.bytes.items() if x > n / 100}
        row["held"] = at_step[-1] / n
        row["optimizer"] = type(engine.optimizer).__name__
        engines.append(engine)  # none is freed, so that `before` stays what it was
    if ranks.rank() == 0:
        print(json.dumps(found))


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--worker", metavar="MODEL", help="one of the two processes")
    if model := parser.parse_args(argv).worker:
        return worker(model)
    conditions, rows = common.conditions(), []
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(folder, "small")
        found = common.run_apart("ranks", "--worker", folder, launcher=common.LAUNCHER)
    for name, row in found.items():
        sent = [", ".join(f"{call} {x:.1f}" for call, x in row[packs].items())
                for packs in ("1", "4")]
        rows.append([*name.split(), row["optimizer"], *sent, f"{row['held']:.1f}"])
    head = ["dtype", "ZeRO stage", "DeepSpeed's class", "sent per step with 1 pack", "with 4 packs",
            "held before the step"]
    common.write("ranks_reduce", f"{common.table(head, rows)}\n\n{conditions}", found)


if __name__ == "__main__":
    main(sys.argv[1:])
