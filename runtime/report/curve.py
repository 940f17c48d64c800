"""The curve of a run, a picture: reward, held-out accuracy and tokens per completion."""
METRICS = ("reward/mean", "eval/accuracy", "completion/length")


def figure(**args):
    """A matplotlib Figure. Without pyplot, whose backend a notebook needs for its own plots."""
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **args)


def write_curve(runs, out):
    """Writes a picture: reward, held-out accuracy and tokens per completion, a line per run."""
    fig = figure(figsize=(12, 3.6))
    panels = fig.subplots(1, 3)
    for axis, metric in zip(panels, METRICS):
        axis.set(xlabel="step", title=metric)
        for i, run in enumerate(runs):
            _draw(axis, run, metric, f"C{i}")
    axis.legend(fontsize=8)
    fig.savefig(out, dpi=144)


def _draw(axis, run, metric, color):
    """Draws the line of one run, with the band of its intervals."""
    numbers = run["metrics"].get(metric)
    if not numbers:
        axis.plot([], [], color=color, label=label_of(run))
        return
    steps, values, low, high = zip(*numbers)
    axis.plot(
        steps, values,
        color=color,
        marker="o" if low != values else "",
        ms=3,
        label=label_of(run))
    axis.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)


def label_of(run):
    return run["name"].replace("$", r"\$")  # "$" would begin a formula
