"""Table of the runs of bench/gpu.sh: python bench/gpu_table.py RUNS SHAPE. Medians over the steps after the first."""
import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tools.curve import read  # noqa: E402
from tools.runlog import peak, stage_seconds  # noqa: E402

BOUND = {"whole": 14.6, "whole-kl": 20.2}  # seconds on an H200: decoding at full memory bandwidth, products at full speed


def main(runs, shape):
    lines = ["| run | rollout s | update s | sync s | step s | of the H200 bound | tokens/s | MFU of the update | peak GiB | mean tokens |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for folder in sorted((f.parent for f in runs.glob("*/metrics.jsonl")), key=lambda folder: folder.stat().st_mtime):
        rows = read(folder)
        steps, about = [m for m in rows if "mfu" in m and m["step"]], json.loads((folder / "config.json").read_text())
        if not steps:
            continue  # it did not get that far
        of = {name: median(m[name] for m in steps) for name in steps[0]}
        total = stage_seconds([of])
        bound = f"{total / BOUND[folder.name]:.2f}" if folder.name in BOUND and "H200" in about["device"] else "-"
        lines.append(f"| {folder.name} | {of['seconds/rollout']:.2f} | {of['seconds/update']:.2f} | {of['seconds/sync']:.2f} | {total:.2f} | {bound} "
                     f"| {of['tokens_per_second']:.0f} | {of['mfu']:.1%} | {peak(rows):.2f} | {of['completion/length']:.0f} |")
    config = about["config"]
    conditions = (f"Random weights, shape {shape}, {config['prompts']} x {config['samples']} completions up to {config['max_tokens']} tokens; commit "
                  f"{about['commit']}, {about['device']}, " + ", ".join(f"{name} {v}" for name, v in about["versions"].items()) + ".")
    text = "\n".join(lines) + f"\n\n{conditions}\n"
    print(text)
    if shape != "tiny":
        (ROOT / "bench/results/gpu.md").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
