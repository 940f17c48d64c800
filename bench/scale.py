"""Seconds and peak memory of one optimizer update as the batch or the model grows.

    python bench/scale.py            6 minutes on 2 idle cores

Writes bench/results/scale.md, .json and .png (scale-gpu.* on CUDA). Four axes: number of rollouts,
length of the completions, vocabulary, layers. Time should be linear in tokens. Memory should depend
neither on the number of rollouts nor on tokens x vocabulary: a forward pass takes --pack_tokens
tokens (fixed here), and its LM head a fixed number of logits. Each point is `bench/update.py --side
packed` in a process of its own.
"""
import math
import statistics
import tempfile

import common  # puts the repository on sys.path
import random_model
from runtime import curve
from update import CUDA

if CUDA:
    HIDDEN = 896
    BASE = dict(layers=24, vocab=151936, sequences=128, max_tokens=3000, pack_tokens=16384)
else:
    HIDDEN = 128
    BASE = dict(layers=2, vocab=32768, sequences=64, max_tokens=750, pack_tokens=4096)
HALF = {"sequences": BASE["sequences"] // 2}
AXES = {"rollouts": [{"sequences": BASE["sequences"] * i // 2} for i in (1, 2, 3, 4)],
        "completion length": [{"max_tokens": BASE["max_tokens"] * i // 4} for i in (2, 4, 6, 8)],
        "vocabulary": [{"vocab": 151936 * i // 4} | HALF for i in (1, 2, 3, 4)],
        "layers": [{"layers": BASE["layers"] * i} | HALF for i in (1, 2, 3, 4)]}
X = {"vocabulary": "vocab", "layers": "layers"}  # what is on the x axis; tokens on the other two
COLUMNS = ("axis", "rollouts", "vocabulary", "tokens", "--pack_tokens", "seconds", "tokens/s",
           "peak memory above idle")


def measure(layers, vocab, sequences, max_tokens, pack_tokens):
    """One point, in a process of its own: a dict."""
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(folder, random_model.sizes(HIDDEN, layers, vocab))
        run = common.run_apart(
            "update.py", "--side", "packed", "--model", folder, "--vocab", vocab, "--sequences",
            sequences, "--max_tokens", max_tokens, "--pack_tokens", pack_tokens)
    return {"seconds": run["seconds"], "tokens": run["tokens"],
            "gib": (run["peak"] - run["idle"]) / 2**30}


def fit(x, y):
    """Least squares y = a + b x -> a, b, R^2."""
    b, a = statistics.linear_regression(x, y)
    return a, b, statistics.correlation(x, y) ** 2


def exponent(x, y):
    """The slope in a log-log plot: 1 if y is proportional to x, 0 if it does not depend on it."""
    return fit([math.log(v) for v in x], [math.log(v) for v in y])[1]


def draw(axes, path):
    fig = curve.figure(figsize=(14, 3.2))
    for panel, (name, rows) in zip(fig.subplots(1, len(axes)), axes.items()):
        x, seconds, gib = ([row[key] for row in rows] for key in ("x", "seconds", "gib"))
        a, b, r2 = fit(x, seconds)
        panel.plot(x, seconds, "o", color="C0")
        panel.plot([0, max(x)], [a, a + b * max(x)], color="C0", lw=1,
                   label=f"seconds, linear fit (R² {r2:.4f})")
        panel.plot([], [], "s--", color="C1", label="peak memory above idle, GiB")
        panel.set(title=name, xlabel=name if name in X else "tokens in the update", xlim=(0, None),
                  ylim=(0, 1.5 * max(seconds)))
        right = panel.twinx()
        right.plot(x, gib, "s--", color="C1", ms=4, lw=1)
        right.set_ylim(0, 2 * max(row["gib"] for rows in axes.values() for row in rows))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="upper left")
    fig.savefig(path, dpi=120)


def main():
    name, conditions = "scale-gpu" if CUDA else "scale", common.conditions()
    axes, points, slopes = {}, [], []
    for axis, changes in AXES.items():
        axes[axis] = rows = []
        for change in changes:
            row = BASE | change
            row |= measure(**row)
            row["x"] = row[X.get(axis, "tokens")]
            rows.append(row)
            counts = [f"{row[key]:,}" for key in ("sequences", "vocab", "tokens", "pack_tokens")]
            points.append([axis, *counts, f"{row['seconds']:.2f}",
                           f"{row['tokens'] / row['seconds']:,.0f}", f"{row['gib']:.2f} GiB"])
            print(*points[-1], flush=True)
        x, seconds, gib = ([row[key] for row in rows] for key in ("x", "seconds", "gib"))
        slopes.append([axis, f"{fit(x, seconds)[2]:.4f}", f"{exponent(x, seconds):.2f}",
                       f"{exponent(x, gib):.2f}"])
    head = ["axis", "seconds = a + b x: R²", "exponent of seconds", "exponent of memory"]
    notes = ("x is the vocabulary or the number of layers on the axis of that name, else tokens; an "
             "exponent (slope in log-log) is 1 if something is proportional to x, 0 if it does not "
             f"depend on it. Random Qwen2, hidden {HIDDEN}, {BASE['layers']} layers except on that "
             "axis.")
    parts = [common.table(COLUMNS, points), common.table(head, slopes), notes, conditions]
    common.write(name, "\n\n".join(parts), {"conditions": conditions, "axes": axes})
    draw(axes, common.RESULTS / f"{name}.png")


if __name__ == "__main__":
    common.parser(__doc__).parse_args()
    main()
