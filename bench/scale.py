"""Seconds and peak memory of one optimizer update as the batch or the model grows.

    python bench/scale.py            6 minutes on 2 idle cores

Writes bench/results/scale.md, scale.json and scale.png (scale-gpu.* on CUDA). Four axes: number of rollouts,
length of the completions, vocabulary, layers. Time should be linear in tokens. Memory should depend neither
on the number of rollouts nor on tokens x vocabulary: a forward pass takes --pack_tokens tokens (fixed here),
and its LM head a fixed number of logits. Each point is a separate process; it runs the same update once
before as a warm-up.
"""
import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

import common  # puts the repository on sys.path
import nano_rlvr as nr
from bench import random_model
from runtime import dist

if common.CUDA:
    BASE = dict(hidden=896, layers=24, vocab=151936, sequences=128, max_tokens=3000, pack_tokens=16384)
else:
    BASE = dict(hidden=128, layers=2, vocab=32768, sequences=64, max_tokens=750, pack_tokens=4096)
AXES = {"rollouts": [{"sequences": BASE["sequences"] * i // 2} for i in (1, 2, 3, 4)],
        "completion length": [{"max_tokens": BASE["max_tokens"] * i // 4} for i in (2, 4, 6, 8)],
        "vocabulary": [{"vocab": 151936 * i // 4, "sequences": BASE["sequences"] // 2} for i in (1, 2, 3, 4)],
        "layers": [{"layers": BASE["layers"] * i, "sequences": BASE["sequences"] // 2} for i in (1, 2, 3, 4)]}
X = {"vocabulary": "vocab", "layers": "layers"}  # what is on the x axis; tokens on the other two
COLUMNS = ("axis", "rollouts", "vocabulary", "tokens", "--pack_tokens", "seconds", "tokens/s",
           "peak memory above idle")


def one(model, sequences, max_tokens, pack_tokens, vocab, **_):
    """Measures one point in this process and prints the result as JSON."""
    dist.init_process_group()
    cfg = common.make_config(model, pack_tokens=pack_tokens)
    engine = nr.make_policy(cfg)

    def split(rollouts):
        return nr.pack(rollouts, pack_tokens)

    for _ in range(2):  # the first one is the warm-up
        result = common.measure(engine, split, common.make_rollouts(sequences, max_tokens, vocab), cfg)
    print(json.dumps(result))


def fit(x, y):
    """Least squares y = a + b x -> a, b, R^2."""
    b, a = statistics.linear_regression(x, y)
    return a, b, statistics.correlation(x, y) ** 2


def draw(axes, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, panels = plt.subplots(1, len(axes), figsize=(14, 3.2), constrained_layout=True)
    for panel, (name, rows) in zip(panels, axes.items()):
        x = [r["x"] for r in rows]
        a, b, r2 = fit(x, [r["seconds"] for r in rows])
        panel.plot(x, [r["seconds"] for r in rows], "o", color="C0")
        line = f"seconds, linear fit (R² {r2:.4f})"
        panel.plot([0, max(x)], [a, a + b * max(x)], color="C0", lw=1, label=line)
        panel.plot([], [], "s--", color="C1", label="peak memory above idle, GiB")
        panel.set(title=name, xlabel=name if name in X else "tokens in the update", xlim=(0, None),
                  ylim=(0, 1.5 * max(r["seconds"] for r in rows)))
        right = panel.twinx()
        right.plot(x, [r["gib"] for r in rows], "s--", color="C1", ms=4, lw=1)
        right.set_ylim(0, 2 * max(r["gib"] for rows in axes.values() for r in rows))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="upper left")
    fig.savefig(out, dpi=120)


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--point", help=argparse.SUPPRESS)  # measure this point in this process
    args = parser.parse_args()
    if args.point:
        return one(**json.loads(args.point))

    name, conditions, axes = "scale-gpu" if common.CUDA else "scale", common.conditions(), {}
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    slopes = ["| axis | seconds = a + b x: R² | exponent of seconds | exponent of memory |",
              "|---" * 4 + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for axis, changes in AXES.items():
            axes[axis] = rows = []
            for change in changes:
                point = BASE | change
                model = Path(folder) / f"{point['vocab']}-{point['layers']}"
                if not model.exists():
                    size = random_model.sizes(point["hidden"], point["layers"], point["vocab"])
                    random_model.make(model, size)
                row = point | common.run_apart(__file__, "--point", json.dumps(point | {"model": str(model)}))
                row |= {"gib": (row["peak"] - row["idle"]) / 2**30, "x": row[X.get(axis, "tokens")]}
                rows.append(row)
                counts = [f"{row[name]:,}" for name in ("sequences", "vocab", "tokens", "pack_tokens")]
                cells = [axis, *counts, f"{row['seconds']:.2f}", f"{row['tokens'] / row['seconds']:,.0f}",
                         f"{row['gib']:.2f} GiB"]
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], file=sys.stderr)
            x, seconds, gib = ([row[name] for row in rows] for name in ("x", "seconds", "gib"))
            log_x, log_seconds, log_gib = ([math.log(v) for v in values] for values in (x, seconds, gib))
            r2, exponents = fit(x, seconds)[2], [fit(log_x, log_y)[1] for log_y in (log_seconds, log_gib)]
            slopes.append(f"| {axis} | {r2:.4f} | {exponents[0]:.2f} | {exponents[1]:.2f} |")
    notes = ("x is the vocabulary or the number of layers on the axis of that name, else tokens; an exponent "
             "(slope in log-log) is 1 if something is proportional to x, 0 if it does not depend on it. "
             f"Random Qwen2, hidden {BASE['hidden']}, {BASE['layers']} layers except on that axis.")
    lines += ["", *slopes, "", notes, "", f"{conditions}; `python bench/scale.py`"]
    common.write(name, "\n".join(lines), {"conditions": conditions, "axes": axes})
    draw(axes, common.ROOT / f"bench/results/{name}.png")


if __name__ == "__main__":
    main()
