"""Seconds and peak memory of one optimizer update (ours) as the batch grows: more rollouts, longer completions, a larger vocabulary, more layers.

    python bench/scale.py            6 minutes on 2 idle cores; writes bench/results/scale.md, scale.json and scale.png (scale-gpu.* on CUDA)

Time should be linear in tokens. Memory should not depend on the number of rollouts, nor on tokens x vocabulary: a forward pass takes
--pack_tokens tokens (fixed here), its LM head a fixed number of logits. Each point is a process of its own; the same update has run
once before, as a warm-up.
"""
import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import common  # first: it finds nano_rlvr

import nano_rlvr as nr

BASE = (dict(hidden=896, layers=24, vocab=151936, sequences=128, max_tokens=3000, pack_tokens=16384) if common.CUDA else
        dict(hidden=128, layers=2, vocab=32768, sequences=64, max_tokens=750, pack_tokens=4096))
AXES = {"rollouts": [{"sequences": BASE["sequences"] * i // 2} for i in (1, 2, 3, 4)],
        "completion length": [{"max_tokens": BASE["max_tokens"] * i // 4} for i in (2, 4, 6, 8)],
        "vocabulary": [{"vocab": 151936 * i // 4, "sequences": BASE["sequences"] // 2} for i in (1, 2, 3, 4)],
        "layers": [{"layers": BASE["layers"] * i, "sequences": BASE["sequences"] // 2} for i in (1, 2, 3, 4)]}
X = {"vocabulary": "vocab", "layers": "layers"}


def one(model, sequences, max_tokens, pack_tokens, vocab, **_):
    """A point, in this process."""
    nr.launch()
    cfg = common.make_config(model, pack_tokens=pack_tokens)
    engine = nr.make_policy(cfg)

    def split(rollouts):
        return nr.pack(rollouts, pack_tokens)

    for _ in range(2):  # the second one counts
        result = common.measure(engine, split, common.make_rollouts(sequences, max_tokens, vocab), cfg)
    print(json.dumps(result))


def fit(x, y):
    """Least squares y = a + b x -> a, b, R^2."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    b = sum((p - mx) * (q - my) for p, q in zip(x, y)) / sum((p - mx) ** 2 for p in x)
    rest = sum((q - my - b * (p - mx)) ** 2 for p, q in zip(x, y))
    return my - b * mx, b, 1 - rest / sum((q - my) ** 2 for q in y)


def draw(axes, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, panels = plt.subplots(1, len(axes), figsize=(14, 3.2), constrained_layout=True)
    for panel, (name, rows) in zip(panels, axes.items()):
        x = [r["x"] for r in rows]
        a, b, r2 = fit(x, [r["seconds"] for r in rows])
        panel.plot(x, [r["seconds"] for r in rows], "o", color="C0")
        panel.plot([0, max(x)], [a, a + b * max(x)], color="C0", lw=1, label=f"seconds, linear fit (R² {r2:.4f})")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        return one(**json.loads(args.point))

    name, conditions, axes = "scale-gpu" if common.CUDA else "scale", common.conditions(), {}
    lines = ["| axis | rollouts | vocabulary | tokens | packs' budget | seconds | tokens/s | peak memory above idle |", "|---|---|---|---|---|---|---|---|"]
    slopes = ["| axis | seconds = a + b x: R² | exponent of seconds | exponent of memory |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for axis, changes in AXES.items():
            axes[axis] = rows = []
            for change in changes:
                point = BASE | change
                model = Path(folder) / f"{point['vocab']}-{point['layers']}"
                if not model.exists():
                    common.make_model(model, point["hidden"], point["layers"], point["vocab"])
                row = point | common.in_a_process(__file__, "--point", json.dumps(point | {"model": str(model)}))
                row |= {"gib": (row["peak"] - row["idle"]) / 2**30, "x": row[X.get(axis, "tokens")]}
                rows.append(row)
                lines.append(f"| {axis} | {row['sequences']} | {row['vocab']:,} | {row['tokens']:,} | {row['pack_tokens']:,} "
                             f"| {row['seconds']:.2f} | {row['tokens'] / row['seconds']:,.0f} | {row['gib']:.2f} GiB |")
                print(lines[-1], file=sys.stderr)
            x, log_x = [r["x"] for r in rows], [math.log(r["x"]) for r in rows]
            slopes.append(f"| {axis} | {fit(x, [r['seconds'] for r in rows])[2]:.4f} | {fit(log_x, [math.log(r['seconds']) for r in rows])[1]:.2f} "
                          f"| {fit(log_x, [math.log(r['gib']) for r in rows])[1]:.2f} |")
    lines += ["", *slopes, "", "x is the vocabulary or the number of layers on its axis, else tokens; an exponent (slope in log-log) is 1 where something is proportional to x, "
              f"0 where it does not depend on it. Qwen2 with random weights, hidden {BASE['hidden']}, {BASE['layers']} layers but on the axis of that name.", "",
              f"{conditions}; `python bench/scale.py`"]
    common.write(name, "\n".join(lines), {"conditions": conditions, "axes": axes})
    draw(axes, common.ROOT / f"bench/results/{name}.png")


if __name__ == "__main__":
    main()
