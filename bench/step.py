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
    groups = []
    for start in range(0, len(rows), samples):
        group = rows[start:start + samples]
        lengths = [row["tokens"] for row in group]
        groups.append((group[0]["prompt_tokens"], lengths))
    return groups


def analyse(folder, device):
    """(metrics, {stage: {part: bound in seconds}}) of a run: medians over the steps after the
    first. Raises ValueError if it has no second step, several ranks or not all of its rollouts."""
    about = common.read_config(folder)
    rows = common.read(folder)
    cfg = nr.Config(**about["config"])
    steps = [row for row in rows if "mfu" in row and row["step"]]
    if not steps or about["world"] > 1:
        raise ValueError(f"{folder}: needs a run of one process with two steps or more")
    rollouts = common.read(folder, "rollouts.jsonl")
    shape = ModelShape.of(cfg.model)
    bounds_of_steps = []
    for row in steps:
        completions = [r for r in rollouts if r["step"] == row["step"]]
        if sum(r["tokens"] for r in completions) != row["tokens"]:
            raise ValueError(f"{folder}: rollouts.jsonl has not all completions of step "
                             f"{row['step']}: use --keep_rollouts of at least prompts * samples")
        groups = groups_of(completions, cfg.samples)
        bounds_of_steps.append(roofline.bounds(cfg, shape, groups, device))
    metrics = {}
    for name in steps[0]:
        metrics[name] = median(row[name] for row in steps)
    metrics["peak"] = log.peak(rows)
    return metrics, medians(bounds_of_steps)


def medians(bounds_of_steps):
    """{stage: {part: seconds}} of each step -> the same, with the median over the steps."""
    result = {}
    for stage, parts in bounds_of_steps[0].items():
        result[stage] = {}
        for part in parts:
            result[stage][part] = median(bounds[stage][part] for bounds in bounds_of_steps)
    return result


def planned(folder):
    """GiB that the memory plan of a run gives its update: its peak should be below."""
    cfg = nr.Config(**common.read_config(folder)["config"])
    parts = memory.step_bytes(cfg, ModelShape.of(cfg.model), torch.cuda.is_available())
    return parts["total"][1] / memory.GIB


def table(metrics, bounds):
    """The stages of one run, each with its parts, as Markdown."""
    sums = {stage: sum(parts.values()) for stage, parts in bounds.items()}
    lines = []
    for stage in log.STAGES:
        lines.append((stage, metrics[f"seconds/{stage}"], sums.get(stage, 0.0)))
    lines.append(("step", log.stage_seconds([metrics]), sum(sums.values())))
    rows = []
    for name, seconds, bound in lines:
        share = f"{bound / seconds:.0%}" if bound else "-"
        rows.append([f"**{name}**", f"{seconds:.3f}", f"{bound:.3f}", share])
        for part, least in bounds.get(name, {}).items():
            if least:
                rows.append([f"– {part}", "", f"{least:.3f}", ""])
    return common.table(["stage", "seconds", "bound", "share"], rows)


def summary_row(folder, metrics, bound):
    """The cells under SUMMARY of one run. bound: in seconds, of the whole step."""
    step = log.stage_seconds([metrics])
    seconds = [metrics[f"seconds/{stage}"] for stage in log.STAGES]
    return [
        folder.name,
        *(f"{x:.2f}" for x in seconds),
        f"{step:.2f}",
        f"{bound:.2f}",
        f"{step / bound:.1f}",
        f"{metrics['tokens_per_second']:.0f}",
        f"{metrics['mfu']:.1%}",
        f"{metrics['peak']:.2f}",
        f"{metrics['memory/update']:.2f}",
        f"{planned(folder):.2f}",
        f"{metrics['completion/length']:.0f}",
    ]


def notes_on(device):
    """What the tables mean, and the rates that were measured."""
    link = "no link"
    if device.link < math.inf:
        link = f"{device.link / 1e9:.1f} GB/s link"
    python = [f"{device.python * 1e6:.0f} µs of Python per token with the bundled model"]
    for name, seconds in (device.parts or {}).items():
        python.append(f"{name} {seconds * 1e6:.1f}")
    return ("Medians over the steps after the first. share: bound / seconds; at 100% no program "
            f"could be faster on this machine. Measured rates of {device.name}: "
            f"{device.matmul / 1e9:,.0f} GFLOP/s in matrix products, {device.memory / 1e9:,.1f} "
            f"GB/s memory, {link}; vLLM's engine: {', '.join(python)}.")


def report(folders, device, out, conditions):
    """Writes the tables of runs. A run that cannot be analysed is named."""
    rows = []
    tables = []
    numbers = {}
    failed = []
    for folder in folders:
        try:
            metrics, bounds = analyse(folder, device)
        except (ValueError, OSError) as e:
            failed.append(f"Failed: {e}")
            continue
        bound = sum(sum(parts.values()) for parts in bounds.values())
        rows.append(summary_row(folder, metrics, bound))
        config = common.read_config(folder)["config"]
        tables.append(f"**{folder.name}**: {config['model']}, {config['prompts']} prompts x "
                      f"{config['samples']} completions of at most {config['max_tokens']} tokens, "
                      f"{metrics['tokens']:,.0f} tokens per step\n\n{table(metrics, bounds)}")
        numbers[folder.name] = {"config": config, "metrics": metrics, "bounds": bounds}
    text = [common.table(SUMMARY, rows), *tables, *failed, notes_on(device), conditions]
    common.write(out, "\n\n".join(text), {"device": device._asdict(), "runs": numbers})


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", default="step", help="of the results, or an absolute path")
    parser.add_argument("--device", type=Path, help="what bench.roofline --measure printed")
    args = parser.parse_args(argv)
    conditions = common.conditions()
    if args.device:
        rates = json.loads(args.device.read_text())
    else:  # in a process of its own, which frees its memory
        rates = common.run_apart("roofline", "--measure")
    device = roofline.Device(*rates)
    report(args.runs, device, args.out, conditions)


if __name__ == "__main__":
    main(sys.argv[1:])
