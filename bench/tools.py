"""Does a model that mostly guesses find out that calling Python pays? One row and one curve per seed.

    python bench/tools.py            12 minutes on one core; writes bench/results/tools.md and .png
    python bench/tools.py --seeds 0

Makes the model of examples/tool_model.py once, then trains it with FLAGS and each seed.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from runtime import curve, log  # noqa: E402

FLAGS = """--template chat --rollout examples/python_tool.py:python_rollout
    --rewards gsm8k,examples/python_tool.py:tool_calls:0 --steps 16 --prompts 16 --samples 16
    --max_prompt 32 --max_tokens 64 --lr 3e-4 --kl_coef 0 --eval_every 4 --eval_size 128
    --save_every 0 --keep_rollouts 256""".split()


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/tools")
    args = parser.parse_args()
    model = Path(args.out).resolve() / "model"
    if not (model / "test.jsonl").exists():
        subprocess.run([sys.executable, "examples/tool_model.py", "--out", model], check=True, cwd=ROOT)
    for seed in args.seeds:
        data = ["--data", model / "train.jsonl", "--eval_data", model / "test.jsonl"]
        run = ["--out", model.parent, "--name", str(seed), "--seed", str(seed)]
        command = [sys.executable, "nano_rlvr.py", "--model", model, *data, *run, *FLAGS]
        subprocess.run(command, check=True, cwd=ROOT)
    report([model.parent / str(seed) for seed in args.seeds])


def report(folders):
    """Writes the table and the curve of finished runs to bench/results/."""
    lines, commits = [], set()
    for folder in folders:
        rows, about = curve.read(folder), json.loads((folder / "config.json").read_text())
        commits.add(about["commit"])
        evals = [row for row in rows if "eval/accuracy" in row]
        train = [row for row in rows if "reward/tool_calls" in row]
        if not lines:
            steps = [row["step"] for row in evals]
            lines = [f"| seed | | {' | '.join(f'step {step}' for step in steps)} | training |",
                     "|---" * (len(steps) + 3) + "|"]
        calls = {row["step"]: f"{row['reward/tool_calls']:.2f}" for row in train}
        calls[steps[-1]] = "–"  # nothing is sampled after the last update
        accuracy = [f"{row['eval/accuracy']:.1%}" for row in evals]
        lengths = [f"{row['eval/length']:.1f}" for row in evals]
        seconds = f"{log.stage_seconds(rows):.0f} s"
        for name, cells in (("accuracy", accuracy), ("calls per sample", [calls[s] for s in steps]),
                            ("sampled tokens", lengths)):
            lines.append(f"| {folder.name} | {name} | {' | '.join(cells)} | {seconds} |")
            seconds = ""
    for folder in folders:
        read = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
        first = [r["parts"] for r in read if r["step"] == 0]
        called = [p["gsm8k"] for p in first if p["tool_calls"]]
        guessed = [p["gsm8k"] for p in first if not p["tool_calls"]]
        lines += ["", f"seed {folder.name}, step 0: {len(called) / len(first):.1%} of {len(first)} samples "
                      f"call; right: {fmean(called):.1%} of these, {fmean(guessed):.1%} of the others"]
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    commits = ", ".join(sorted(commits))
    lines += ["", f"commit {commits}, {about['device']}, {versions}; `python bench/tools.py`"]
    results = ROOT / "bench/results"
    (results / "tools.md").write_text("\n".join(lines) + "\n")
    curve.draw(folders, results / "tools.png", [f"seed {folder.name}" for folder in folders])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
