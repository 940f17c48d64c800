"""The curve of one or several runs from their metrics.jsonl: reward, held-out accuracy and completion length by step.

    python tools/curve.py runs/a runs/b --out curve.png
"""
import argparse
import json
from pathlib import Path


def read(folder):
    """metrics.jsonl of a run folder -> list of dicts, one a step."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def draw(folders, out, labels=None):
    """Two panels, a line a run: held-out greedy accuracy (thin: reward of the training samples) and completion length."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, (top, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for i, (folder, label) in enumerate(zip(folders, labels or [Path(f).name for f in folders])):
        rows = read(folder)
        steps = [m for m in rows if "reward/mean" in m]
        evals = [m for m in rows if "eval/accuracy" in m]
        x = [m["step"] for m in evals]
        top.plot([m["step"] for m in steps], [m["reward/mean"] for m in steps], color=f"C{i}", lw=0.8, alpha=0.5)
        top.plot(x, [m["eval/accuracy"] for m in evals], "o-", color=f"C{i}", ms=4, label=label)
        top.fill_between(x, [m["eval/low"] for m in evals], [m["eval/high"] for m in evals], color=f"C{i}", alpha=0.15, lw=0)
        right.plot([m["step"] for m in steps], [m["completion/length"] for m in steps], color=f"C{i}", label=label)
    top.set(xlabel="step", ylabel="accuracy (thin: training reward)", ylim=(-0.02, None))
    right.set(xlabel="step", ylabel="tokens a completion", ylim=(0, None))
    for axis in (top, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    fig.savefig(out, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", default="curve.png")
    args = parser.parse_args()
    draw(args.runs, args.out)
