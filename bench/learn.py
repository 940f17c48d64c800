"""Does the default run learn, from any seed, and for the right reason? Runs it with seeds 0, 1, 2 and once with random rewards.

    python bench/learn.py            25 minutes on 2 cores; writes bench/results/learn.md, learn.json and learn.png

Held-out accuracy is measured on 512 questions that neither the cold start nor RL has seen: greedy, and the mean of 8 samples at
temperature 1. In the control run every completion is rewarded by a coin: what it gains is not owed to verification.
"""
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.curve import draw, read  # noqa: E402

RUNS = {f"seed {s}": ["--seed", str(s)] for s in (0, 1, 2)} | {"control: random rewards": ["--rewards", "gsm8k:0,random:1"]}


def main():
    out, results, folders = Path(tempfile.mkdtemp()), [], []
    for i, (label, flags) in enumerate(RUNS.items()):
        start = time.time()
        subprocess.run([sys.executable, ROOT / "nano_rlvr.py", "--out", out, "--name", str(i), "--eval_n", "8", "--eval_every", "10"] + flags, check=True)
        total, folder = time.time() - start, out / str(i)
        rows = read(folder)
        evals = [m for m in rows if "eval/accuracy" in m]
        seconds = {stage: sum(m.get(f"seconds/{stage}", 0) for m in rows) for stage in ("rollout", "reward", "update", "sync", "evaluate")}
        results.append({"run": label, "flags": flags, "before": evals[0], "after": evals[-1], "wall_seconds": total, "stage_seconds": seconds,
                        "rewards": [m["reward/mean"] for m in rows if "reward/mean" in m]})
        folders.append(folder)
    about = json.loads((folders[0] / "config.json").read_text())
    conditions = (f"commit {about['commit']}, {platform.machine()}, {os.cpu_count()} cores, no GPU, "
                  + ", ".join(f"{name} {v}" for name, v in about["versions"].items()) + f"; `python bench/learn.py`, {time.strftime('%Y-%m-%d')}")
    lines = ["| run | greedy before | greedy after | mean@8 before | mean@8 after | tokens before | tokens after | training | whole run |", "|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        (b, a), s = (r["before"], r["after"]), r["stage_seconds"]
        lines.append(f"| {r['run']} | {b['eval/accuracy']:.1%} ({b['eval/low']:.1%}–{b['eval/high']:.1%}) | **{a['eval/accuracy']:.1%}** ({a['eval/low']:.1%}–{a['eval/high']:.1%}) "
                     f"| {b['eval/mean@8']:.1%} | **{a['eval/mean@8']:.1%}** | {b['eval/length']:.1f} | {a['eval/length']:.1f} "
                     f"| {sum(s.values()) - s['evaluate']:.0f} s | {r['wall_seconds']:.0f} s |")
    results_folder = ROOT / "bench/results"
    results_folder.mkdir(exist_ok=True)
    table = "\n".join(lines)
    (results_folder / "learn.md").write_text(f"{table}\n\nHeld-out: 512 questions, 95 % interval in brackets. {conditions}.\n")
    (results_folder / "learn.json").write_text(json.dumps({"conditions": conditions, "runs": results}, indent=1))
    draw(folders, results_folder / "learn.png", list(RUNS))
    print(table, conditions, sep="\n\n")


if __name__ == "__main__":
    main()
