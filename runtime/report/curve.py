"""The curve of a run, a picture: reward, held-out accuracy and tokens per completion."""
import re


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl; no None."""
    get = key if callable(key) else lambda row: row.get(key)
    return {row["step"]: get(row) for row in rows if get(row) is not None}


def figure(**args):
    """A matplotlib Figure. Without pyplot, whose backend a notebook needs for its own plots."""
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **args)


def points(rows, metric):
    """[step, value, low, high] for each number of a metric; only an accuracy has an interval."""
    values, low, high = (series(rows, re.sub("accuracy$", end, metric))
                         for end in ("accuracy", "low", "high"))
    return [[step, *(float(f"{x:.4g}") for x in (y, low.get(step, y), high.get(step, y)))]
            for step, y in values.items() if isinstance(y, (int, float))]  # a user's may be text


def write_curve(runs, out):
    """Writes a picture: reward, held-out accuracy and tokens per completion, a line per run."""
    fig = figure(figsize=(12, 3.6))
    keys = ("reward/mean", "eval/accuracy", "completion/length")
    for axis, key in zip(fig.subplots(1, 3), keys):
        axis.set(xlabel="step", title=key)
        for i, run in enumerate(runs):
            found = run["metrics"].get(key, [])
            steps, values, low, high = zip(*found) if found else ([],) * 4
            axis.plot(steps, values, color=f"C{i}", marker="o" if low != values else "", ms=3,
                      label=run["name"].replace("$", r"\$"))  # "$" would begin a formula
            axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.2, lw=0)
    axis.legend(fontsize=8)
    fig.savefig(out, dpi=144)
