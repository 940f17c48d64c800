"""Does the default run learn, from any seed, and for the right reason? Runs it with seeds 0, 1, 2 and once with random rewards.

    python bench/learn.py            25 minutes on 2 cores; writes bench/results/learn.md, learn.json and learn.png

Held-out accuracy is measured on 512 questions that neither the cold start nor RL has seen: greedy, and the mean of 8 samples at
temperature 1. In the control run every completion is rewarded by a coin: what it gains is not owed to verification.
"""
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.curve import draw, read  # noqa: E402
from tools.runlog import stage_seconds  # noqa: E402

RUNS = {f"seed {s}": ["--seed", str(s)] for s in (0, 1, 2)} | {"control: random rewards": ["--rewards", "gsm8k:0,random:1"]}


def main():
    out, folders = Path(tempfile.mkdtemp()), []
    for i, flags in enumerate(RUNS.values()):
        folders.append(out / str(i))
        subprocess.run([sys.executable, ROOT / "nano_rlvr.py", "--out", out, "--name", str(i), "--eval_n", "8", "--eval_every", "25"] + flags, check=True)
    report(folders)


def report(folders, labels=tuple(RUNS)):
    """Table, numbers and curve of finished runs into bench/results/."""
    results, lines = [], ["| run | greedy before | greedy after | mean@8 before | mean@8 after | tokens before | tokens after | training |",
                          "|---|---|---|---|---|---|---|---|"]
    for label, folder in zip(labels, folders):
        rows, about = read(folder), json.loads((folder / "config.json").read_text())
        evals = [m for m in rows if "eval/accuracy" in m]
        b, a = evals[0], evals[-1]
        seconds = stage_seconds(rows)
        results.append({"run": label, **about, "before": b, "after": a, "training_seconds": seconds,
                        "rewards": [m["reward/mean"] for m in rows if "reward/mean" in m]})
        lines.append(f"| {label} | {b['eval/accuracy']:.1%} ({b['eval/low']:.1%}–{b['eval/high']:.1%}) "
                     f"| **{a['eval/accuracy']:.1%}** ({a['eval/low']:.1%}–{a['eval/high']:.1%}) | {b['eval/mean@8']:.1%} | **{a['eval/mean@8']:.1%}** "
                     f"| {b['eval/length']:.1f} | {a['eval/length']:.1f} | {seconds:.0f} s |")
    conditions = (f"commit {', '.join(sorted({r['commit'] for r in results}))}, {about['device']}, "
                  + ", ".join(f"{name} {v}" for name, v in about["versions"].items()) + f"; `python bench/learn.py`, {time.strftime('%Y-%m-%d')}")
    results_folder, table = ROOT / "bench/results", "\n".join(lines)
    results_folder.mkdir(exist_ok=True)
    (results_folder / "learn.md").write_text(f"{table}\n\nHeld-out: 512 questions, 95 % interval in brackets. {conditions}.\n")
    (results_folder / "learn.json").write_text(json.dumps({"conditions": conditions, "runs": results}, indent=1))
    draw(folders, results_folder / "learn.png", labels)
    print(table, conditions, sep="\n\n")


if __name__ == "__main__":
    main()
