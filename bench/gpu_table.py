"""Table of the runs of bench/gpu.sh: medians over the steps after the first.

    python bench/gpu_table.py RUNS SHAPE
"""
import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from runtime import curve, log  # noqa: E402

# seconds per step on an H200, if decoding took the full memory bandwidth and matrix products the peak FLOP/s
BOUND = {"whole": 14.6, "whole-kl": 20.2}
COLUMNS = ("run", "rollout s", "update s", "sync s", "step s", "of the H200 bound", "tokens/s",
           "MFU of the update", "peak GiB", "mean tokens")


def main(runs, shape):
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    folders = [path.parent for path in runs.glob("*/metrics.jsonl")]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
        rows, about = curve.read(folder), json.loads((folder / "config.json").read_text())
        steps = [row for row in rows if "mfu" in row and row["step"]]
        if not steps:
            continue  # the run ended before its second step
        m = {name: median(row[name] for row in steps) for name in steps[0]}
        total = log.stage_seconds([m])
        bound = BOUND.get(folder.name) if "H200" in about["device"] else None
        seconds = [f"{m[f'seconds/{stage}']:.2f}" for stage in ("rollout", "update", "sync")]
        cells = [folder.name, *seconds, f"{total:.2f}", f"{total / bound:.2f}" if bound else "-",
                 f"{m['tokens_per_second']:.0f}", f"{m['mfu']:.1%}", f"{log.peak(rows):.2f}",
                 f"{m['completion/length']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    config = about["config"]
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    size = f"{config['prompts']} x {config['samples']} completions up to {config['max_tokens']} tokens"
    machine = f"commit {about['commit']}, {about['device']}, {versions}"
    conditions = f"Random weights, shape {shape}, {size}; {machine}."
    text = "\n".join(lines) + f"\n\n{conditions}\n"
    print(text)
    if shape != "tiny":
        (ROOT / "bench/results/gpu.md").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
