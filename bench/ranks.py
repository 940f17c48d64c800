"""Several ranks: cost per rank before and after balancing, bytes that they exchange, and seconds on paper.

    python bench/ranks.py balance [runs/NAME/rollouts.jsonl ...]   lengths of make_rollouts, or those of runs
    python bench/ranks.py reduce                                   2 processes with gloo: 2 minutes
    python bench/ranks.py paper                                    8 GPUs and 2 nodes, from formulas alone
    python bench/ranks.py learn                                    runs of the bundled model on 1 and 2 ranks

Writes bench/results/ranks_<name>.md and .json.
"""
import gc
import json
import math
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common  # puts the repository on sys.path
import nano_rlvr as nr
from bench import plan, random_model
from runtime import dist, packing
from runtime.flops import ModelShape

RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# ---- balance


def of_run(path):
    """{step: rollouts of the lengths in a rollouts.jsonl}."""
    steps = {}
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        n, prompt = row["tokens"], [hash(row["prompt"])] * row["prompt_tokens"]
        steps.setdefault(row["step"], []).append(nr.Rollout(prompt, [0] * n, "", False, [0.0] * n))
    return list(steps.values())


def excess(parts, cost):
    """Highest cost of a rank above the mean cost, as a fraction of it: what the others wait for."""
    costs = [cost(part) for part in parts]
    return max(costs) * len(costs) / sum(costs) - 1


def balance(paths):
    shape = plan.SHAPES["Qwen2.5-1.5B"]
    sources = {f"lognormal, {n} rollouts": [common.make_rollouts(n, 3000, 151936, seed) for seed in range(10)]
               for n in (128, 512, 2048)}
    if paths:
        sources = {path: of_run(path) for path in paths}
    rows, numbers = [], {}
    for name, batches in sources.items():
        for ranks in (2, 4, 8, 16):
            before, after, added, size = [], [], [], []
            for rollouts in batches:
                groups = [rollouts[i:i + 8] for i in range(0, len(rollouts), 8)]
                share = len(groups) // ranks  # as prompts are divided when they are sampled
                if not share:
                    continue
                parts = [sum(groups[i * share:(i + 1) * share], []) for i in range(ranks)]
                divided = packing.divide(parts, shape.forward_flops)
                before.append(excess(parts, shape.forward_flops))
                after.append(excess(divided, shape.forward_flops))
                costs = [sum(map(shape.forward_flops, x)) for x in (parts, divided)]
                added.append(costs[1] / costs[0] - 1)
                size.append(len(pickle.dumps(parts)) / sum(len(r) for part in parts for r in part))
            if not before:
                continue
            mean, worst = [fmean(x) for x in (before, after, added, size)], [max(before), max(after)]
            numbers[f"{name}, {ranks} ranks"] = dict(
                zip(("before", "after", "added", "bytes"), mean), worst=worst)
            rows.append([name, ranks, *(f"{mean[i]:.1%} ({worst[i]:.1%})" for i in (0, 1)),
                         f"{mean[2]:.2%}", f"{mean[3]:.0f}"])
    return table(["lengths", "ranks", "before: mean (worst)", "after: mean (worst)", "FLOPs added",
                  "bytes sent per token"], rows), numbers


# ---- reduce


class Traffic(TorchDispatchMode):
    """Counts calls and bytes of the tensors that each collective of torch.distributed is given, by name."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            size = max(sum(x.nbytes for x in tree_leaves(arg) if torch.is_tensor(x)) for arg in args)
            self.bytes[name] = self.bytes.get(name, 0) + size
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def held():
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def worker(model):
    """One rank: updates with 1 and 4 packs in each dtype and ZeRO stage. Rank 0 prints JSON: what it sent and
    held, in bytes per parameter."""
    dist.init_process_group()
    nr.memory.BUCKET = 2**16  # small beside the model, as 2**26 is beside a large one
    found, n, engines = {}, ModelShape.of(model).parameters, []
    for dtype in ("float32", "bfloat16"):
        for stage in (1, 2, 3):
            before = held()
            cfg = common.make_config(model, zero_stage=stage, dtype=dtype, pack_tokens=64)
            engine = nr.make_policy(cfg)
            rollouts = nr.assign_token_weights(common.make_rollouts(4, 45, 4096, seed=dist.rank()), cfg)
            batches, step, at_step = [nr.collate([r]) for r in rollouts], engine.step, []
            nr.update(engine, batches, cfg)  # creates AdamW's moments

            def measured_step(step=step, at_step=at_step, before=before):
                at_step.append(held() - before)
                step()

            engine.step = measured_step
            found[f"{dtype} {stage}"] = row = {}
            for packs in (1, 4):
                with Traffic() as traffic:
                    nr.update(engine, batches[:packs], cfg)
                row[packs] = {name: size / n for name, size in traffic.bytes.items() if size > n / 100}
            row["held"] = at_step[-1] / n
            row["optimizer"] = type(engine.optimizer).__name__
            engines.append(engine)  # none is freed, so that `before` stays what it was
    if dist.rank() == 0:
        print(json.dumps(found))


def reduce():
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(folder, "small")
        done = subprocess.run([*RANKS, "worker", folder], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    rows = [[*name.split(), row["optimizer"], *(", ".join(f"{name} {x:.1f}" for name, x in row[packs].items())
                                                for packs in ("1", "4")), f"{row['held']:.1f}"]
            for name, row in found.items()]
    return table(["dtype", "ZeRO stage", "DeepSpeed's class", "sent per step with 1 pack", "with 4 packs",
                  "held before the step"], rows), found


# ---- paper

# ranks; bytes per second, each way, of the narrowest link: NVLink of a GPU, or the network of a node, which
# carries what one GPU of a ring sends
LINKS = {"8 GPUs, NVLink": (8, 450e9), "2 nodes of 8 GPUs, 400 Gb/s per node": (16, 50e9),
         "2 nodes of 8 GPUs, 8 x 400 Gb/s per node": (16, 400e9)}
PEAK, USE = 989e12, 0.4  # bf16 FLOP/s of an H100; the share of them that an update is assumed to reach
PACK = 32768  # tokens


def sent(stage, packs, ranks):
    """Bytes per parameter that a GPU sends in an optimizer step, as counted by `reduce`: bf16 for everything.

    A ring sends (ranks - 1) / ranks of a tensor per all-gather or reduce-scatter, twice that per all-reduce.
    Stages 1 and 2 reduce all gradients to all ranks and gather the new weights; stage 3 gathers the weights
    for the forward and for the backward pass.
    """
    ring, size = (ranks - 1) / ranks, 2
    return ring * size * {1: 2 + 1, 2: packs * 2 + 1, 3: packs * (2 + 1)}[stage]


def state(stage, ranks):
    """Bytes per parameter that a GPU holds: bf16 weights, fp32 gradients, fp32 weights and two moments.

    Stage 1 is DeepSpeed's BF16_Optimizer, which also keeps the last pack's gradients in bf16.
    """
    return {1: 2 + 2 + 4 + 12 / ranks, 2: 2 + (4 + 12) / ranks, 3: (2 + 4 + 12) / ranks}[stage]


def paper(prompts=64, samples=8):
    rollouts, rows = common.make_rollouts(prompts * samples, 3000, 1000), []
    for name, shape in plan.SHAPES.items():
        for link, (ranks, speed) in LINKS.items():
            packs = math.ceil(sum(map(len, rollouts)) / ranks / PACK)
            compute = 4 * shape.forward_flops(rollouts) / ranks / PEAK / USE  # with recomputed activations
            for stage in (1, 2, 3):
                size = sent(stage, packs, ranks) * shape.parameters
                rows.append([name, link, stage, f"{state(stage, ranks) * shape.parameters / 2**30:.0f}",
                             packs, f"{size / 1e9:.1f}", f"{size / speed:.2f}", f"{compute:.2f}"])
    return table(["model", "ranks", "ZeRO stage", "state per GPU, GiB", "packs", "GB sent per GPU", "seconds",
                  "seconds of compute"], rows), rows


# ---- learn

FLAGS = "--samples 8 --steps 16 --eval_size 128 --eval_every 16 --save_every 0".split()
RUNS = {  # name -> (ranks, flags)
    "1 rank": (1, ["--prompts", "16"]),
    "2 ranks, ZeRO-2": (2, ["--prompts", "16"]),
    "2 ranks, ZeRO-3, `--tp 2`": (2, "--prompts 16 --zero_stage 3 --tp 2".split()),
    "2 ranks, ZeRO-2, twice the prompts": (2, ["--prompts", "32"]),
}


def learn():
    """The same run on one rank and on two; and on two with twice the work (weak scaling)."""
    found = {}
    for name, (ranks, flags) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            launcher = RANKS[:-1] if ranks > 1 else [sys.executable]
            command = [*launcher, common.ROOT / "nano_rlvr.py", *FLAGS, *flags, "--out", folder]
            done = subprocess.run([*command, "--name", "run"], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        steps = [m for m in metrics if "reward/mean" in m]
        found[name] = dict(
            before=metrics[0]["eval/accuracy"], after=metrics[-1]["eval/accuracy"],
            first=fmean(m["reward/mean"] for m in steps[:5]),
            last=fmean(m["reward/mean"] for m in steps[-5:]),
            mismatch=max(m["mismatch/mean_abs"] for m in steps),
            rollout=median(m["seconds/rollout"] for m in steps),
            update=median(m["seconds/update"] for m in steps))
    rows = [[name, f"{x['before']:.1%}", f"{x['after']:.1%}", f"{x['first']:.3f}", f"{x['last']:.3f}",
             f"{x['mismatch']:.1e}", f"{x['rollout']:.1f}", f"{x['update']:.1f}"]
            for name, x in found.items()]
    return table(["run", "accuracy before", "after 16 steps", "reward, steps 0-4", "steps 11-15",
                  "largest mismatch", "seconds of a rollout", "of an update"], rows), found


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:] or ["--help"]
    if mode == "worker":
        worker(*arguments)
    elif mode not in ("balance", "reduce", "paper", "learn"):
        sys.exit(__doc__)
    else:
        conditions = common.conditions()
        text, numbers = {"balance": lambda: balance(arguments), "reduce": reduce, "paper": paper,
                         "learn": learn}[mode]()
        common.write(f"ranks_{mode}", f"{text}\n\n{conditions}; `python bench/ranks.py {mode}`", numbers)
