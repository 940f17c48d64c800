"""Does the default run learn, with any seed, and because of its rewards?

    python bench/learn.py            25 minutes on 2 cores; writes bench/results/learn.md, .json and .png

Runs it with seeds 0, 1, 2 and once with random rewards. In the last one, the control, nothing is verified:
what it gains does not come from the rewards. Held-out accuracy is measured on 512 questions that neither the
cold start nor RL has seen: greedy, and the mean of 8 samples at temperature 1.
"""
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from runtime import curve, log  # noqa: E402

RUNS = {f"seed {s}": ["--seed", str(s)] for s in (0, 1, 2)}
RUNS["control: random rewards"] = ["--rewards", "gsm8k:0,random:1"]
COLUMNS = ("run", "greedy before", "greedy after", "mean@8 before", "mean@8 after",
           "tokens before", "tokens after", "training")


def main():
    out, folders = Path(tempfile.mkdtemp()), []
    for i, flags in enumerate(RUNS.values()):
        folders.append(out / str(i))
        command = [sys.executable, ROOT / "nano_rlvr.py", "--out", out, "--name", str(i)]
        command += ["--eval_n", "8", "--eval_every", "25", "--save_every", "0", *flags]
        subprocess.run(command, check=True)
    report(folders)


def report(folders, labels=tuple(RUNS)):
    """Writes the table, the numbers and the curve of finished runs to bench/results/."""
    results, lines = [], [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for label, folder in zip(labels, folders):
        rows, about = curve.read(folder), json.loads((folder / "config.json").read_text())
        before, *_, after = [row for row in rows if "eval/accuracy" in row]
        seconds = log.stage_seconds(rows)
        results.append({"run": label, **about, "before": before, "after": after, "training_seconds": seconds,
                        "rewards": [row["reward/mean"] for row in rows if "reward/mean" in row]})
        intervals = [f"({m['eval/low']:.1%}–{m['eval/high']:.1%})" for m in (before, after)]
        cells = [label,
                 f"{before['eval/accuracy']:.1%} {intervals[0]}",
                 f"**{after['eval/accuracy']:.1%}** {intervals[1]}",
                 f"{before['eval/mean@8']:.1%}", f"**{after['eval/mean@8']:.1%}**",
                 f"{before['eval/length']:.1f}", f"{after['eval/length']:.1f}", f"{seconds:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    commits = ", ".join(sorted({r["commit"] for r in results}))
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    date = time.strftime("%Y-%m-%d")
    conditions = f"commit {commits}, {about['device']}, {versions}; `python bench/learn.py`, {date}"
    results_folder, table = ROOT / "bench/results", "\n".join(lines)
    results_folder.mkdir(exist_ok=True)
    (results_folder / "learn.md").write_text(
        f"{table}\n\nHeld-out: 512 questions, 95 % interval in brackets. {conditions}.\n")
    numbers = {"conditions": conditions, "runs": results}
    (results_folder / "learn.json").write_text(json.dumps(numbers, indent=1))
    curve.draw(folders, results_folder / "learn.png", labels)
    print(table, conditions, sep="\n\n")


if __name__ == "__main__":
    main()
