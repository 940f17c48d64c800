"""The curve of a run, a picture: reward, held-out accuracy and tokens per completion."""
METRICS = ("reward/mean", "eval/accuracy", "completion/length")


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl; no None."""
    values = {}
    for row in rows:
        value = key(row) if callable(key) else row.get(key)
        if value is not None:
            values[row["step"]] = value
    return values


def figure(**args):
    """A matplotlib Figure. Without pyplot, whose backend a notebook needs for its own plots."""
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **args)


def points(rows, metric):
    """[step, value, low, high] for each number of a metric; only an accuracy has an interval."""
    low, high = {}, {}
    if metric.endswith("accuracy"):
        prefix = metric.removesuffix("accuracy")
        low = series(rows, f"{prefix}low")
        high = series(rows, f"{prefix}high")
    numbers = []
    for step, value in series(rows, metric).items():
        if isinstance(value, (int, float)):  # a metric of the user may be text
            lowest = low.get(step, value)
            highest = high.get(step, value)
            rounded = [float(f"{x:.4g}") for x in (value, lowest, highest)]
            numbers.append([step, *rounded])
    return numbers


def write_curve(runs, out):
    """Writes a picture: reward, held-out accuracy and tokens per completion, a line per run."""
    fig = figure(figsize=(12, 3.6))
    for axis, metric in zip(fig.subplots(1, 3), METRICS):
        axis.set(xlabel="step", title=metric)
        for i, run in enumerate(runs):
            _draw(axis, run, metric, f"C{i}")
    axis.legend(fontsize=8)
    fig.savefig(out, dpi=144)


def _draw(axis, run, metric, color):
    """Draws the line of one run, with the band of its intervals."""
    numbers = run["metrics"].get(metric, [])
    steps, values, low, high = zip(*numbers) if numbers else ([], [], [], [])
    axis.plot(
        steps, values,
        color=color,
        marker="o" if low != values else "",
        ms=3,
        label=run["name"].replace("$", r"\$"))  # "$" would begin a formula
    axis.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
