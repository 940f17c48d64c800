"""Where does a training step go? The seconds of each stage of a real run, against their bound.

    python bench/step.py                           the bundled model: a minute on 2 idle cores
    python bench/step.py --runs runs/a runs/b --out gpu
                                                   finished runs: bench/gpu.sh calls this

Writes bench/results/<out>.md and .json. Finished runs need --keep_rollouts of at least prompts *
samples: bench/roofline.py computes the bound from the lengths of all completions of a step and from
the rates of this machine, which are measured first. Figures are medians over the steps after the
first. On a CPU, another process on the same cores makes the stages slower than they are.
"""
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import common  # puts the repository on sys.path
import nano_rlvr as nr
import roofline
from runtime import log
from runtime.flops import ModelShape

FLAGS = ("--steps 5 --save_every 0 --eval_every 1000000 --eval_size 1 "
         "--keep_rollouts 1000000").split()
SUMMARY = ("run", *log.STAGES, "step", "bound", "step / bound", "tokens/s", "MFU of the update",
           "peak GiB", "mean tokens")


def groups_by_step(folder, samples):
    """rollouts.jsonl of a run -> {step: [(prompt tokens, [tokens of each completion])]}."""
    rollouts = defaultdict(list)
    for row in common.read(folder, "rollouts.jsonl"):
        rollouts[row["step"]].append((row["prompt_tokens"], row["tokens"]))
    return {step: [(rows[i][0], [tokens for _, tokens in rows[i:i + samples]])
                   for i in range(0, len(rows), samples)] for step, rows in rollouts.items()}


def analyse(folder, device):
    """(metrics, {stage: {part: bound in seconds}}) of a run: medians over the steps after the first.

    Raises ValueError with one line if the run has no second step, several ranks or not all of its
    rollouts.
    """
    about, rows = common.read_config(folder), common.read(folder)
    cfg = nr.Config(**about["config"])
    steps = [row for row in rows if "mfu" in row and row["step"]]
    if not steps:
        raise ValueError(f"{folder}: the run ended before its second step")
    if about["world"] > 1:
        raise ValueError(f"{folder}: a run of {about['world']} processes: only one is supported")
    groups, shape, bounds = groups_by_step(folder, cfg.samples), ModelShape.of(cfg.model), []
    for row in steps:
        lengths = groups.get(row["step"], [])
        if sum(sum(tokens) for _, tokens in lengths) != row["tokens"]:
            raise ValueError(f"{folder}: rollouts.jsonl has not all completions of step "
                             f"{row['step']}: use --keep_rollouts of at least prompts * samples")
        bounds.append(roofline.bounds(cfg, shape, lengths, device))
    metrics = {name: median(row[name] for row in steps) for name in steps[0]}
    return metrics | {"peak": log.peak(rows)}, {
        stage: {part: median(b[stage][part] for b in bounds) for part in parts}
        for stage, parts in bounds[0].items()}


def table(metrics, bounds):
    """The stages of one run, each with its parts, as Markdown."""
    rows, sums = [], {stage: sum(parts.values()) for stage, parts in bounds.items()}
    stages = [(stage, metrics[f"seconds/{stage}"], sums.get(stage, 0.0)) for stage in log.STAGES]
    for name, seconds, bound in [*stages, ("step", log.stage_seconds([metrics]), sum(sums.values()))]:
        share = f"{bound / seconds:.0%}" if bound else "-"
        rows.append([f"**{name}**", f"{seconds:.3f}", f"{bound:.3f}", share])
        rows += [[f"– {part}", "", f"{x:.3f}", ""] for part, x in bounds.get(name, {}).items() if x]
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
                     f"{m['mfu']:.1%}", f"{m['peak']:.2f}", f"{m['completion/length']:.0f}"])
        config = common.read_config(folder)["config"]
        tables.append(f"**{folder.name}**: {config['model']}, {config['prompts']} prompts x "
                      f"{config['samples']} completions of at most {config['max_tokens']} tokens, "
                      f"{m['tokens']:,.0f} tokens per step\n\n{table(m, bounds)}")
        numbers[folder.name] = {"config": config, "metrics": m, "bounds": bounds}
    link = "no link" if math.isinf(device.link) else f"{device.link / 1e9:.1f} GB/s link"
    notes = ("Medians over the steps after the first. share: bound / seconds; at 100% no program "
             f"could be faster on this machine. Measured rates of {device.name}: "
             f"{device.matmul / 1e9:,.0f} GFLOP/s in matrix products, {device.memory / 1e9:,.1f} "
             f"GB/s memory, {link}; vLLM's engine: {device.python * 1e6:.0f} µs of Python per token "
             "with the bundled model.")
    text = [common.table(SUMMARY, rows), *tables, *failed, notes, conditions]
    common.write(out, "\n\n".join(text), {"device": device._asdict(), "runs": numbers})


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--runs", nargs="+", type=Path, help="finished runs: nothing is trained")
    parser.add_argument("--out", default="step", help="of the results, or an absolute path")
    args, conditions = parser.parse_args(argv), common.conditions()
    # in a process of its own, which frees its memory
    device = roofline.Device(*common.run_apart("roofline.py", "--measure"))
    with tempfile.TemporaryDirectory() as folder:
        if not args.runs:
            args.runs = [Path(folder, "run")]
            common.train(args.runs[0], *FLAGS)
        report(args.runs, device, args.out, conditions)


if __name__ == "__main__":
    main(sys.argv[1:])
