"""Several ranks: cost per rank before and after balancing, bytes exchanged, seconds on paper.

    python -m bench.ranks balance    the lengths of update.make_rollouts
    python -m bench.ranks reduce     2 processes with gloo: 2 minutes
    python -m bench.ranks paper      8 GPUs and 2 nodes, from formulas alone

Writes bench/results/ranks_<name>.md and .json.
"""
import gc
import json
import math
import pickle
import sys
import tempfile
from statistics import fmean

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nano_rlvr as nr
from bench import plan, random_model, update
from measure import common
from runtime import dist, memory
from runtime.batch import divide
from runtime.shape import ModelShape


def excess(costs):
    """Highest cost of a rank above the mean, as a fraction of it: what the others wait for."""
    return max(costs) / fmean(costs) - 1


def balance_one(rollouts, ranks, cost):
    """(excess before, after, cost added, bytes sent per token) for one batch."""
    share = len(rollouts) // ranks  # as prompts are divided when they are sampled
    parts = [rollouts[i * share:(i + 1) * share] for i in range(ranks)]
    before = [cost(part) for part in parts]
    after = [cost(part) for part in divide(parts, cost)]
    tokens = sum(map(len, rollouts))
    sent = len(pickle.dumps(parts)) / tokens
    return excess(before), excess(after), sum(after) / sum(before) - 1, sent


def balance():
    cost, rows = plan.SHAPES["Qwen2.5-1.5B"].forward_flops, []
    for n in (128, 512, 2048):
        batches = [update.make_rollouts(n, 3000, 151936, seed) for seed in range(10)]
        for ranks in (2, 4, 8, 16):
            before, after, added, sent = zip(*(balance_one(b, ranks, cost) for b in batches))
            rows.append([f"lognormal, {n} rollouts", ranks,
                         f"{fmean(before):.1%} ({max(before):.1%})",
                         f"{fmean(after):.1%} ({max(after):.1%})",
                         f"{fmean(added):.2%}", f"{fmean(sent):.0f}"])
    return ["lengths", "ranks", "before: mean (worst)", "after: mean (worst)", "FLOPs added",
            "bytes sent per token"], rows, rows


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
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = [x.untyped_storage() for x in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def worker(model):
    """One rank: updates with 1 and 4 packs in each dtype and ZeRO stage.

    Rank 0 prints JSON: what it sent and held, in bytes per parameter.
    """
    dist.init_process_group()
    memory.BUCKET = 2**16  # small beside the model, as 2**26 is beside a large one
    found, n, engines = {}, ModelShape.of(model).parameters, []
    for dtype, stage in [(d, s) for d in ("float32", "bfloat16") for s in (1, 2, 3)]:
        before, at_step = held(), []
        cfg = update.make_config(model, zero_stage=stage, dtype=dtype, pack_tokens=64)
        engine = nr.make_policy(cfg)
        rollouts = update.make_rollouts(4, 45, 4096, seed=dist.rank())
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
    if dist.rank() == 0:
        print(json.dumps(found))


def reduce():
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(folder, "small")
        found = common.run_apart("ranks", "worker", folder, launcher=common.LAUNCHER)
    rows = []
    for name, row in found.items():
        sent = [", ".join(f"{call} {x:.1f}" for call, x in row[packs].items())
                for packs in ("1", "4")]
        rows.append([*name.split(), row["optimizer"], *sent, f"{row['held']:.1f}"])
    return ["dtype", "ZeRO stage", "DeepSpeed's class", "sent per step with 1 pack", "with 4 packs",
            "held before the step"], rows, found


# ranks; bytes per second, each way, of the narrowest link: NVLink of a GPU, or the network of a
# node, which carries what one GPU of a ring sends
LINKS = {"8 GPUs, NVLink": (8, 450e9), "2 nodes of 8 GPUs, 400 Gb/s per node": (16, 50e9),
         "2 nodes of 8 GPUs, 8 x 400 Gb/s per node": (16, 400e9)}
PEAK, USE = 989e12, 0.4  # bf16 FLOP/s of an H100; the share that an update is assumed to reach
PACK = 32768  # tokens


def sent(stage, packs, ranks):
    """Bytes per parameter that a GPU sends in an optimizer step, as counted by `reduce`, in bf16.

    A ring sends (ranks - 1) / ranks of a tensor per all-gather or reduce-scatter, twice that per
    all-reduce. Stages 1 and 2 reduce all gradients to all ranks and gather the new weights; stage 3
    gathers the weights for the forward and for the backward pass.
    """
    ring, size = (ranks - 1) / ranks, 2
    return ring * size * {1: 2 + 1, 2: packs * 2 + 1, 3: packs * (2 + 1)}[stage]


def state(stage, ranks):
    """Bytes per parameter that a GPU holds: bf16 weights, fp32 gradients, weights, two moments.

    Stage 1 is DeepSpeed's BF16_Optimizer, which also keeps the last pack's gradients in bf16.
    """
    return {1: 2 + 2 + 4 + 12 / ranks, 2: 2 + (4 + 12) / ranks, 3: (2 + 4 + 12) / ranks}[stage]


def paper():
    rollouts, rows = update.make_rollouts(512, 3000, 1000), []
    tokens = sum(map(len, rollouts))
    for name, shape in plan.SHAPES.items():
        flops = 4 * shape.forward_flops(rollouts)  # with recomputed activations
        for link, (ranks, speed) in LINKS.items():
            packs = math.ceil(tokens / ranks / PACK)
            compute = flops / ranks / PEAK / USE
            for stage in (1, 2, 3):
                size = sent(stage, packs, ranks) * shape.parameters
                held = state(stage, ranks) * shape.parameters / 2**30
                rows.append([name, link, stage, f"{held:.0f}", packs, f"{size / 1e9:.1f}",
                             f"{size / speed:.2f}", f"{compute:.2f}"])
    return ["model", "ranks", "ZeRO stage", "state per GPU, GiB", "packs", "GB sent per GPU",
            "seconds", "seconds of compute"], rows, rows


BENCHES = {"balance": balance, "reduce": reduce, "paper": paper}


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("bench", choices=[*BENCHES, "worker"])
    parser.add_argument("model", nargs="?", help="of a worker; `reduce` starts them")
    args = parser.parse_args(argv)
    if args.bench == "worker":
        return worker(args.model)
    conditions, (head, rows, numbers) = common.conditions(), BENCHES[args.bench]()
    common.write(f"ranks_{args.bench}", f"{common.table(head, rows)}\n\n{conditions}", numbers)


if __name__ == "__main__":
    main(sys.argv[1:])
