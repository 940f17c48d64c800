"""Where does a training step go? The seconds of each stage of a real run, against their bound.

    python nano_rlvr.py --steps 5 --save_every 0 --keep_rollouts 512 --name step
    python -m bench.step runs/step

Writes bench/results/step.md and .json (--out). The runs need --keep_rollouts of at least prompts *
samples: bench/roofline.py computes the bound from the lengths of all completions of a step and from
the rates of this machine, which are measured first. Figures are medians over the steps after the
first. On a CPU, another process on the same cores makes the stages slower than they are.
"""
import json
import math
import sys
from pathlib import Path
from statistics import median

import torch

import nano_rlvr as nr
from bench import common, roofline
from runtime import log, memory
from runtime.memory import ModelShape

SUMMARY = ("run", *log.STAGES, "step", "bound", "step / bound", "tokens/s", "MFU of the update",
           "peak GiB", "update GiB", "planned GiB", "mean tokens")


def groups_of(rows, samples):
    """Rows of rollouts.jsonl -> [(prompt tokens, [tokens of each completion])]."""
    groups = [rows[i:i + samples] for i in range(0, len(rows), samples)]
    return [(group[0]["prompt_tokens"], [r["tokens"] for r in group]) for group in groups]


def analyse(folder, device):
    """(metrics, {stage: {part: bound in seconds}}) of a run: medians over the steps after the
    first. Raises ValueError if it has no second step, several ranks or not all of its rollouts."""
    about, rows = common.read_config(folder), common.read(folder)
    cfg = nr.Config(**about["config"])
    steps = [row for row in rows if "mfu" in row and row["step"]]
    if not steps or about["world"] > 1:
        raise ValueError(f"{folder}: needs a run of one process with two steps or more")
    rollouts, shape, bounds = common.read(folder, "rollouts.jsonl"), ModelShape.of(cfg.model), []
    for row in steps:
        of_step = [r for r in rollouts if r["step"] == row["step"]]
        if sum(r["tokens"] for r in of_step) != row["tokens"]:
            raise ValueError(f"{folder}: rollouts.jsonl has not all completions of step "
                             f"{row['step']}: use --keep_rollouts of at least prompts * samples")
        bounds.append(roofline.bounds(cfg, shape, groups_of(of_step, cfg.samples), device))
    metrics = {name: median(row[name] for row in steps) for name in steps[0]}
    return metrics | {"peak": log.peak(rows)}, {
        stage: {part: median(b[stage][part] for b in bounds) for part in parts}
        for stage, parts in bounds[0].items()}


def planned(folder):
    """GiB that the memory plan of a run gives its update: its peak should be below."""
    cfg = nr.Config(**common.read_config(folder)["config"])
    parts = memory.step_bytes(cfg, ModelShape.of(cfg.model), torch.cuda.is_available())
    return parts["total"][1] / memory.GIB


def table(metrics, bounds):
    """The stages of one run, each with its parts, as Markdown."""
    rows, sums = [], {stage: sum(parts.values()) for stage, parts in bounds.items()}
    lines = [(stage, metrics[f"seconds/{stage}"], sums.get(stage, 0.0)) for stage in log.STAGES]
    lines.append(("step", log.stage_seconds([metrics]), sum(sums.values())))
    for name, seconds, bound in lines:
        share = f"{bound / seconds:.0%}" if bound else "-"
        rows.append([f"**{name}**", f"{seconds:.3f}", f"{bound:.3f}", share])
        parts = bounds.get(name, {})
        rows += [[f"– {part}", "", f"{x:.3f}", ""] for part, x in parts.items() if x]
    return common.table(["stage", "seconds", "bound", "share"], rows)


def report(folders, device, out, conditions):
    """Writes the tables of runs. A run that cannot be analysed is named."""
    rows, tables, numbers, failed = [], [], {}, []
    for folder in folders:
        try:
            m, bounds = analyse(folder, device)
        except (ValueError, OSError) as e:
            failed.append(f"Failed: {e}")
            continue
        bound = sum(sum(parts.values()) for parts in bounds.values())
        seconds = [m[f"seconds/{stage}"] for stage in log.STAGES] + [log.stage_seconds([m])]
        rows.append([folder.name, *(f"{x:.2f}" for x in seconds), f"{bound:.2f}",
                     f"{seconds[-1] / bound:.1f}", f"{m['tokens_per_second']:.0f}",
                     f"{m['mfu']:.1%}", f"{m['peak']:.2f}", f"{m['memory/update']:.2f}",
                     f"{planned(folder):.2f}", f"{m['completion/length']:.0f}"])
        config = common.read_config(folder)["config"]
        tables.append(f"**{folder.name}**: {config['model']}, {config['prompts']} prompts x "
                      f"{config['samples']} completions of at most {config['max_tokens']} tokens, "
                      f"{m['tokens']:,.0f} tokens per step\n\n{table(m, bounds)}")
        numbers[folder.name] = {"config": config, "metrics": m, "bounds": bounds}
    link = "no link" if math.isinf(device.link) else f"{device.link / 1e9:.1f} GB/s link"
    notes = ("Medians over the steps after the first. share: bound / seconds; at 100% no program "
             f"could be faster on this machine. Measured rates of {device.name}: "
             f"{device.matmul / 1e9:,.0f} GFLOP/s in matrix products, {device.memory / 1e9:,.1f} "
             f"GB/s memory, {link}; vLLM's engine: {device.python * 1e6:.0f} µs of Python per "
             "token with the bundled model"
             + "".join(f", {name} {x * 1e6:.1f}" for name, x in (device.parts or {}).items()) + ".")
    text = [common.table(SUMMARY, rows), *tables, *failed, notes, conditions]
    common.write(out, "\n\n".join(text), {"device": device._asdict(), "runs": numbers})


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", default="step", help="of the results, or an absolute path")
    parser.add_argument("--device", type=Path, help="what bench.roofline --measure printed")
    args, conditions = parser.parse_args(argv), common.conditions()
    # in a process of its own, which frees its memory
    rates = (json.loads(args.device.read_text()) if args.device
             else common.run_apart("roofline", "--measure"))
    device = roofline.Device(*rates)
    report(args.runs, device, args.out, conditions)


if __name__ == "__main__":
    main(sys.argv[1:])
