"""Seconds and peak memory of one optimizer update as the batch or the model grows.

    python bench/scale.py            6 minutes on 2 idle cores

Writes bench/results/scale.md, .json and .png (scale-gpu.* on CUDA). Four axes: number of rollouts,
length of the completions, vocabulary, layers. Time should be linear in tokens. Memory should not
depend on the number of rollouts or on tokens x vocabulary: a forward pass takes --pack_tokens
tokens, and its LM head a fixed number of logits. Each point is a process of its own, see update.py.
"""
import math
import tempfile
from statistics import correlation, linear_regression

import common  # puts the repository on sys.path
import random_model
from report.curve import figure
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


def measure(layers, vocab, **flags):
    """One point: a dict."""
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(folder, random_model.sizes(HIDDEN, layers, vocab))
        argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
        argv += ["--side", "packed", "--model", folder, "--vocab", vocab]
        return common.run_apart("update.py", *argv)


def exponent(x, y):
    """The slope in a log-log plot: 1 if y is proportional to x, 0 if it does not depend on it."""
    return linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def draw(axes, path):
    """Per axis a column of two panels, {axis: rows of main}: seconds, and below it peak memory."""
    fig = figure(figsize=(12, 5))
    panels = fig.subplots(2, len(axes), sharey="row", squeeze=False)
    for column, (axis, rows) in zip(panels.T, axes.items()):
        for panel, key, unit in zip(column, ("seconds", "gib"), ("seconds", "GiB above idle")):
            panel.plot([row["x"] for row in rows], [row[key] for row in rows], "o-")
            panel.set(title=axis, xlabel=X.get(axis, "tokens"), ylabel=unit)
            panel.grid(alpha=0.3)
    for panel in panels.flat:  # after all is drawn: a row shares its range
        panel.set(xlim=(0, None), ylim=(0, None))
    fig.savefig(path, dpi=144)


def main():
    conditions, axes, points, slopes = common.conditions(), {}, [], []
    for axis, changes in AXES.items():
        axes[axis] = rows = []
        for change in changes:
            row = BASE | change
            row |= measure(**row)
            row |= {"x": row[X.get(axis, "tokens")], "gib": (row["peak"] - row["idle"]) / 2**30}
            rows.append(row)
            points.append([axis, *(f"{row[name]:,}" for name in ("sequences", "vocab", "tokens")),
                           f"{row['seconds']:.2f}", f"{row['gib']:.2f} GiB"])
            print(*points[-1], flush=True)
        x, seconds, gib = ([row[key] for row in rows] for key in ("x", "seconds", "gib"))
        slopes.append([axis, f"{correlation(x, seconds) ** 2:.4f}", f"{exponent(x, seconds):.2f}",
                       f"{exponent(x, gib):.2f}"])
    text = [common.table(["axis", "rollouts", "vocabulary", "tokens", "seconds",
                          "peak memory above idle"], points),
            common.table(["axis", "seconds = a + b x: R²", "exponent of seconds",
                          "exponent of memory"], slopes),
            "x is the vocabulary or the number of layers on the axis of that name, else tokens; an "
            "exponent (slope in log-log) is 1 if something is proportional to x, 0 if it does not "
            f"depend on it. Random Qwen2, hidden {HIDDEN}, {BASE['layers']} layers except on that "
            f"axis, --pack_tokens {BASE['pack_tokens']}.", conditions]
    name = "scale-gpu" if CUDA else "scale"
    common.write(name, "\n\n".join(text), {"conditions": conditions, "axes": axes})
    draw(axes, common.RESULTS / f"{name}.png")


if __name__ == "__main__":
    common.parser(__doc__).parse_args()
    main()
