"""Where does a training step go? The seconds of each stage of a real run, against their bound.

    python bench/step.py                        the bundled model: a minute on 2 idle cores
    python bench/step.py --random_model small 128 --prompts 16 --samples 8 --max_tokens 1024 --out step_long
                                                random weights, 128 tokens per completion on average
    python bench/step.py --shape 128 2 151936 64 --prompts 8 --max_tokens 512 --out step_vocabulary
                                                hidden size, layers, vocabulary, mean tokens per completion
    python bench/step.py --runs runs/a runs/b --out gpu
                                                finished runs: bench/gpu.sh calls this

Writes bench/results/<out>.md and .json. Flags that are not listed below are nano_rlvr.py's. Finished runs
need --keep_rollouts of at least prompts * samples: the bound is computed from the lengths of all completions
of a step. The rates of this machine (matrix product, memory bandwidth, link, Python of vLLM's engine) are
measured before and after the run, and the better ones are used; bench/roofline.py has the formulas. Figures
are medians over the steps after the first. On a CPU, another process on the same cores makes the stages
slower than they are: the load before and after is reported.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
# the repository in place of this folder: both have a rewards.py
sys.path = [p for p in sys.path if Path(p).resolve() != ROOT / "bench"] + [str(ROOT)]

import nano_rlvr as nr  # noqa: E402
from bench import common, random_model, roofline  # noqa: E402
from runtime import curve, log  # noqa: E402
from runtime.flops import ModelShape  # noqa: E402

SUMMARY = ("run", "rollout", "reward", "update", "sync", "step", "bound", "step / bound", "tokens/s",
           "MFU of the update", "peak GiB", "mean tokens")
COLUMNS = ("stage", "seconds", "bound", "share", "TFLOP", "GB", "GB over the link")


def measured_device():
    """The rates of this machine, measured in a process of its own, which then leaves the memory free."""
    return roofline.Device(*common.run_apart(ROOT / "bench/roofline.py", "--measure"))


def make_model(folder, args):
    """Writes the model that the flags name; returns nano_rlvr.py's flags for it."""
    if args.shape:
        *size, mean = args.shape
        args.random_model = random_model.sizes(*size), mean
    if not args.random_model:
        return []
    shape, mean = args.random_model
    random_model.make(folder, shape, int(mean))
    return ["--model", folder, "--data", f"{folder}/questions.jsonl", "--task", "gsm8k",
            "--template", "none"]


def groups_by_step(folder, samples):
    """rollouts.jsonl of a run -> {step: [(prompt tokens, [tokens of each completion])]}."""
    rollouts = defaultdict(list)
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        rollouts[row["step"]].append((row["prompt_tokens"], row["tokens"]))
    return {step: [(rows[i][0], [tokens for _, tokens in rows[i:i + samples]])
                   for i in range(0, len(rows), samples)] for step, rows in rollouts.items()}


def analyse(folder, device):
    """Medians over the steps of a run after its first: {"run", "step": metrics, "bounds", "work", ...}.

    bounds: {stage: {part: seconds}}; work: {stage: {part: a sum of roofline.Op}}. Raises
    ValueError with one line if the run has no second step, several ranks or not all of its rollouts.
    """
    about = json.loads((folder / "config.json").read_text())
    cfg = nr.Config(**about["config"])
    rows = curve.read(folder)
    steps = [row for row in rows if "mfu" in row and row["step"]]
    if not steps:
        raise ValueError(f"{folder}: the run ended before its second step")
    if about["world"] > 1:
        raise ValueError(f"{folder}: a run of {about['world']} processes: only one is supported")
    groups, shape = groups_by_step(folder, cfg.samples), ModelShape.of(cfg.model)
    bounds, work = [], []
    for row in steps:
        lengths = groups.get(row["step"], [])
        if sum(sum(tokens) for _, tokens in lengths) != row["tokens"]:
            raise ValueError(f"{folder}: rollouts.jsonl has not all completions of step {row['step']}: "
                             "use --keep_rollouts of at least prompts * samples")
        bounds.append(roofline.bounds(cfg, shape, lengths, device))
        work.append({stage: {part: [sum(column) for column in zip(*ops)] for part, ops in parts.items()}
                     for stage, parts in roofline.stages(cfg, shape, lengths, device).items()})
    return {
        "run": folder.name, "about": about, "step": {k: median(r[k] for r in steps) for k in steps[0]},
        "bounds": {stage: {part: median(b[stage].get(part, 0.0) for b in bounds) for part in parts}
                   for stage, parts in bounds[0].items()},
        "work": {stage: {part: [median(column) for column in zip(*(w[stage][part] for w in work))]
                         for part in parts} for stage, parts in bounds[0].items()},
        "peak": log.peak(rows), "steps": len(steps)}


def table(run):
    """The stages of one run, each with its parts, as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]

    def add(name, seconds, bound, work):
        flops, size, link, _ = work
        share = f"{bound / seconds:.0%}" if seconds and bound else ""
        cells = [name, f"{seconds:.3f}" if seconds is not None else "", f"{bound:.3f}", share,
                 f"{flops / 1e12:.3g}", f"{size / 1e9:.3g}", f"{link / 1e9:.3g}"]
        lines.append(f"| {' | '.join(cells)} |")

    everything = [0] * 4
    for stage in log.STAGES:
        parts = run["bounds"].get(stage, {})
        work = [sum(column) for column in zip(*run["work"].get(stage, {}).values())] or [0] * 4
        everything = [a + b for a, b in zip(everything, work)]
        add(f"**{stage}**", run["step"][f"seconds/{stage}"], sum(parts.values()), work)
        for part, bound in parts.items():
            add(f"– {part}", None, bound, run["work"][stage][part])
    add("**step**", log.stage_seconds([run["step"]]), roofline.total(run["bounds"]), everything)
    return "\n".join(lines)


def summary(runs):
    """One line per run, as Markdown."""
    lines = [f"| {' | '.join(SUMMARY)} |", "|---" * len(SUMMARY) + "|"]
    for run in runs:
        m, bound = run["step"], roofline.total(run["bounds"])
        seconds = [m[f"seconds/{stage}"] for stage in log.STAGES] + [log.stage_seconds([m])]
        cells = [run["run"], *(f"{x:.2f}" for x in seconds), f"{bound:.2f}", f"{seconds[-1] / bound:.1f}",
                 f"{m['tokens_per_second']:.0f}", f"{m['mfu']:.1%}", f"{run['peak']:.2f}",
                 f"{m['completion/length']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("--random_model", nargs=2, metavar=("SHAPE", "MEAN"), help="a shape of bench/random_model.py")
    add("--shape", nargs=4, type=int, metavar=("HIDDEN", "LAYERS", "VOCAB", "MEAN"),
        help="a Qwen2 of any size; the hidden size is a multiple of 128")
    add("--runs", nargs="+", type=Path, help="folders of finished runs: nothing is trained")
    add("--out", default="step", help="name of the two files in bench/results, or a path without suffix")
    args, flags = parser.parse_known_args()
    if args.runs and flags:
        parser.error(f"{' '.join(flags)}: --runs trains nothing")
    load, device, runs, failed = os.getloadavg()[0], measured_device(), [], []
    with tempfile.TemporaryDirectory() as folder:
        if not args.runs:
            command = [sys.executable, ROOT / "nano_rlvr.py", *make_model(f"{folder}/model", args),
                       "--steps", "5", "--save_every", "0", "--eval_every", "1000000000",
                       "--eval_size", "1", "--keep_rollouts", "1000000000", "--out", folder,
                       "--name", "run", *flags]
            if subprocess.run(command, cwd=ROOT).returncode:
                sys.exit("bench/step.py: the run failed, see above")
        again = measured_device()
        device = device._replace(python=min(device.python, again.python), **{
            name: max(getattr(device, name), getattr(again, name)) for name in ("matmul", "memory", "link")})
        for path in args.runs or [Path(folder) / "run"]:
            try:
                runs.append(analyse(path, device))
            except (ValueError, OSError) as e:
                failed.append(f"{path.name} ({e})")
    if not runs:
        sys.exit(f"bench/step.py: no run to report: {', '.join(failed)}")

    about, config = runs[-1]["about"], runs[-1]["about"]["config"]
    commits = ", ".join(sorted({run["about"]["commit"] for run in runs}))
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    link = "no link" if math.isinf(device.link) else f"{device.link / 1e9:.1f} GB/s link"
    model = "random weights" if args.random_model else config["model"]
    if args.shape:
        model += " (hidden {}, {} layers, vocabulary {:,})".format(*args.shape)
    elif args.random_model:
        model += f" in the shape {args.random_model[0]}"
    text = "\n\n".join([
        summary(runs), *[f"**{run['run']}**: {run['step']['tokens']:,.0f} completion tokens per step, "
                         f"{run['steps']} steps\n\n{table(run)}" for run in runs],
        *[f"**Failed: {', '.join(failed)}**"] * bool(failed),
        "Medians over the steps after the first. share: bound / seconds; at 100% no program could be faster "
        f"on this machine. Measured rates: {device.matmul / 1e9:,.0f} GFLOP/s in matrix products, "
        f"{device.memory / 1e9:,.1f} GB/s memory, {link}; vLLM's engine: {device.python * 1e6:.0f} µs of "
        "Python per token, measured with the bundled model.",
        f"{model}, {config['prompts']} prompts x {config['samples']} completions of at most "
        f"{config['max_tokens']} tokens; commit {commits}, {about['device']}, {device.name}, load {load:.1f} "
        f"before and {os.getloadavg()[0]:.1f} after, {versions}; "
        f"`{' '.join(['python bench/step.py', *sys.argv[1:]])}`, {time.strftime('%Y-%m-%d')}."])
    common.write(args.out, text, {"device": device._asdict(), "failed": failed, "runs": runs})


if __name__ == "__main__":
    main()
