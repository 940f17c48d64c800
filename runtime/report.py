"""The report of one or several runs: one HTML file with charts and rollouts; it needs no network.

    python -m runtime.report runs/a                        writes runs/a/report.html, as a run does
    python -m runtime.report runs/a runs/b --out ab.html   several runs in one report
    python -m runtime.report runs/a runs/b --out ab.png    only their accuracy and length

Runs that differ only in the seed are one line: the mean, with the 95 % t interval over the seeds
as a band. matplotlib draws the charts as SVG with text and CSS colours: no script to load, sharp
at any size, dark mode. Rollouts: at most 2,000, see shown(). docs/report.md says how to read it.
"""
import argparse
import base64
import gzip
import html
import io
import itertools
import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean

from runtime import folder
from runtime.stats import mean_interval

TEMPLATE = Path(__file__).with_suffix(".html")
SAME_BUT_SEED = folder.FREE - {"data", "eval_data"} | {"seed"}  # may differ between runs of a line
LIMIT = 2000  # rollouts in a report
QUESTIONS = 1000  # of the evaluation, the first ones, are shown
STAGES = ("rollout", "reward", "update", "sync")
# colours for matplotlib, and for the page, where they depend on the theme
TEXT, GRID, LINES = "#000000", "#0000f0", [f"#0000{i:02x}" for i in range(1, 9)]
COLORS = {TEXT: "var(--text)", GRID: "var(--grid)"}
COLORS |= {color: f"var(--c{i})" for i, color in enumerate(LINES)}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "lines.linewidth": 1.3,
         "axes.grid": True, "axes.edgecolor": GRID, "grid.color": GRID, "grid.linewidth": 0.5,
         "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
         "figure.facecolor": "none", "xtick.major.size": 0, "ytick.major.size": 0}


# ---- files of a run

def read(folder, name="metrics.jsonl"):
    """metrics.jsonl of a run folder -> list of dicts, one per line; NaN becomes None.

    name: another file with a JSON object per line; [] if it is not there. A last line that is cut
    off, as a killed run leaves it, is skipped with a note on stderr. Raises ValueError for any
    other line that is no JSON object with a step, OSError if the file cannot be read.
    """
    path, rows = Path(folder) / name, []
    if name != "metrics.jsonl" and not path.exists():
        return rows
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as e:  # no JSON, no UTF-8
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not a line of JSON ({e})") from e
            print(f"note: {path}:{number} is cut off: skipped", file=sys.stderr)
            break
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"{path}:{number}: no object with a step")
        rows.append(row)
    return rows


def read_run(path):
    """A run folder as a dict. Raises ValueError or OSError, with one line, if it is none."""
    path = Path(path)
    try:
        text, rows = (path / "config.json").read_bytes(), read(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        missing = Path(e.filename).name
        raise ValueError(f"{path} is not the folder of a run: it has no {missing}") from None
    try:
        about = json.loads(text)
        config = dict(about["config"])
        1 / config["samples"], 1 / max(1, config["steps"])
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as e:
        raise ValueError(f"{path}/config.json is not as a run writes it ({e!r})") from None
    name = path.resolve().name
    return {"path": path, "name": name, "about": about, "config": config, "rows": rows}


def lines_of(runs):
    """{label: runs that differ only in the seed}. The label has the flags in which lines differ."""
    lines, labelled = {}, {}
    for run in runs:
        flags = {name: x for name, x in run["config"].items() if name not in SAME_BUT_SEED}
        lines.setdefault(json.dumps(flags, sort_keys=True), []).append(run)
    first, *others = map(json.loads, lines)
    differ = [name for name in first if any(flags.get(name) != first[name] for flags in others)]
    for line in lines.values():
        notes = [f"{name} {line[0]['config'].get(name)}" for name in differ]
        notes += [f"{len(line)} seeds"] * (len(line) > 1)
        labelled[line[0]["name"] + f" ({', '.join(notes)})" * bool(notes)] = line
    return labelled


def stage_seconds(rows, stages=STAGES):
    """Seconds of these stages in rows of metrics; by default the loop's, without the evaluation."""
    return sum(row.get(f"seconds/{stage}", 0.0) for row in rows for stage in stages)


# ---- rollouts

def shown(step, rollouts, samples, steps, limit=LIMIT):
    """The rollouts of a step that the report shows, in groups of `samples`; [] in most steps.

    Every k-th of the run's `steps` is shown, with the smallest power of two as k that gives at most
    `limit` rollouts. Because it is a power of two, a report with a smaller limit shows some of the
    same steps, those whose tokens have numbers.
    """
    rollouts = rollouts[:max(1, limit // samples) * samples]
    k = 1
    while k < steps and math.ceil(steps / k) * len(rollouts) > limit:
        k *= 2
    return rollouts if step % k == 0 else []


def numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; None = it was not sampled.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's
    log-prob; advantage, unless all tokens have the same. Two digits, at most five decimals.
    before, after: the trainer's log-probs of the sampled tokens.
    """
    logps = itertools.compress(r.vllm_logps, r.sampled)  # of the sampled tokens
    columns = {"logp": before, "change": [y - x for x, y in zip(before, after)],
               "gap": [x - y for x, y in zip(before, logps)]}
    if len(set(r.advantages)) > 1:
        columns["advantage"] = itertools.compress(r.advantages, r.sampled)
    lists = {"text": texts(r.completion, tokenizer)}
    for name, column in columns.items():
        rounded = iter([float(f"{round(x, 5):.2g}") for x in column])
        lists[name] = [next(rounded) if sampled else None for sampled in r.sampled]
    return lists


def texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the
    last one has its text and the others have none."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        first = max(0, start - 1)  # alone, SentencePiece would drop the space before a word
        before, text = (tokenizer.decode(ids[first:i]) for i in (start, end))
        is_part = text.endswith("\ufffd") and end < min(start + 4, len(ids))  # 4 bytes at most
        found.append("" if is_part else text[len(before):])
        start = start if is_part else end
    return found


def rollouts(run, limit):
    """The rollouts for the page, each with the number of its group in the step."""
    samples, by_step = run["config"]["samples"], {}
    for r in read(run["path"], "rollouts.jsonl"):
        by_step.setdefault(r["step"], []).append(r)
    return [r | {"group": i // samples} for step, rows in by_step.items()
            for i, r in enumerate(shown(step, rows, samples, run["config"]["steps"], limit))]


def questions(answers):
    """The questions of the evaluation, with the answers of the first and the last time."""
    steps = sorted({a["step"] for a in answers})
    if len(steps) < 2:
        return {"steps": [], "questions": []}
    steps = [steps[0], steps[-1]]
    first, last = ([a for a in answers if a["step"] == step][:QUESTIONS] for step in steps)
    rows = []
    for before, after in zip(first, last):
        pair = [[bool(a["right"]), a["completion"], a["finish"]] for a in (before, after)]
        rows.append([before["question"], before["answer"], *pair])
    return {"steps": steps, "questions": rows}


# ---- charts

def figure(**args):
    """A matplotlib Figure. Raises ValueError if matplotlib cannot be imported.

    Without pyplot, whose backend a notebook needs for its own plots.
    """
    try:
        from matplotlib import figure
    except ImportError as e:
        raise ValueError(f"curve.png and report.html: {e}: pip install matplotlib") from e
    return figure.Figure(layout="constrained", **args)


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl; no None."""
    get = key if callable(key) else lambda row: row.get(key)
    return {row["step"]: get(row) for row in rows if get(row) is not None}


def draw(axis, lines, key, style="-", low=None, high=None, **look):
    """A line per label: a metric, or its mean over the seeds with its interval.

    low, high: the metrics with the interval of a single run.
    """
    for i, (label, runs) in enumerate(lines.items()):
        values = [series(run["rows"], key) for run in runs]
        steps = sorted(set.intersection(*map(set, values)))
        mean, band = [values[0][step] for step in steps], []
        if len(runs) > 1:
            mean, *band = zip(*(mean_interval([x[step] for x in values]) for step in steps))
        elif low:
            band = [[row[name] for row in runs[0]["rows"] if key in row] for name in (low, high)]
        marker = "o" if low else ""
        axis.plot(steps, mean, style, color=f"C{i}", marker=marker, ms=3, label=label, **look)
        if band and not key.startswith("mismatch/"):  # which has a logarithmic scale
            axis.fill_between(steps, *band, color=f"C{i}", alpha=0.2, lw=0)


def draw_curve(folders, out, labels=None):
    """Writes a figure with two panels and one line per run.

    Left: held-out greedy accuracy with its interval; thin: mean reward of the training samples.
    Right: mean completion length in tokens.
    """
    labels = labels or [Path(path).name for path in folders]
    lines = {label.replace("$", r"\$"): [{"rows": read(path)}]  # "$" would begin a formula
             for label, path in zip(labels, folders)}
    fig = figure(figsize=(10, 3.6))
    left, right = fig.subplots(1, 2)
    draw(left, lines, "reward/mean", lw=0.8, alpha=0.5)
    draw(left, lines, "eval/accuracy", "-", "eval/low", "eval/high")
    draw(right, lines, "completion/length")
    left.set(xlabel="step", ylabel="accuracy (thin: training reward)", ylim=(-0.02, None))
    right.set(xlabel="step", ylabel="tokens per completion", ylim=(0, None))
    right.legend(fontsize=8)
    fig.savefig(out, dpi=120)


def draw_stages(axis, runs):
    """Seconds per stage, stacked, mean of the seeds. Dashed: the update's FLOPs at peak speed."""
    trained = [[row for row in run["rows"] if "mfu" in row] for run in runs]
    steps, seconds, bound = [], [], []
    for rows in zip(*trained):  # a row of each seed
        steps.append(rows[0]["step"])
        seconds.append([stage_seconds(rows, [stage]) / len(rows) for stage in STAGES])
        bound.append(fmean(row["mfu"] * row["seconds/update"] for row in rows))
    if steps:
        axis.stackplot(steps, *zip(*seconds), alpha=0.75, step="mid", lw=0)
        axis.plot(steps, bound, color=TEXT, lw=1, ls="--")


def svg(draw, *args, percent=False, **axes):
    """A chart as text: draw(axis, *args) into an axis with these properties."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator, PercentFormatter
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": matplotlib.cycler(color=LINES)}):
        fig = figure(figsize=(4.2, 2.4))
        axis = fig.subplots()
        draw(axis, *args)
        if percent:
            axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set(xlabel="step", **axes)
        file = io.StringIO()
        fig.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue().partition("<svg")[2]  # HTML needs no namespaces and no metadata
    text = re.sub(r"<metadata>.*?</metadata>| xmlns\S*=\"\S*\"", "", "<svg" + text, flags=re.S)
    return re.sub("|".join(COLORS), lambda m: COLORS[m[0]], text)


SHARE, FROM_ZERO = dict(percent=True, ylim=(-0.02, 1.02)), dict(ylim=(0, None))
CHARTS = [  # title, caption, arguments of draw() for each metric, properties of the axis
    ("Reward", "mean of the step's completions", [["reward/mean"]], {}),
    ("Held-out accuracy", "greedy; band: 95 % interval",
     [["eval/accuracy", "-", "eval/low", "eval/high"]], SHARE),
    ("KL to the starting model", "mean per token", [["kl"]], {}),
    ("Entropy", "nats, mean per token", [["entropy"]], FROM_ZERO),
    ("Length", "tokens per completion", [["completion/length"]], FROM_ZERO),
    ("Truncated and flat",
     "share of completions cut off (solid), of groups with equal rewards (dashed)",
     [["completion/truncated"], ["group/flat", "--"]], SHARE),
    ("Mismatch", "trainer against vLLM: mean |difference| of log-probs (solid), largest (dotted)",
     [["mismatch/mean_abs"], ["mismatch/max", ":"]], dict(yscale="log"))]


def charts(lines):
    """The charts as HTML, those that the runs have numbers for."""
    def plot(axis, metrics):
        for arguments in metrics:
            draw(axis, lines, *arguments)
        if axis.collections:  # scaled to the lines: the interval of two seeds would flatten them
            values = [y for line in axis.lines for y in line.get_ydata()]
            margin = 0.15 * (max(values) - min(values)) or 0.1
            axis.set_ylim(min(values) - margin, max(values) + margin)

    found = {key for runs in lines.values() for run in runs for row in run["rows"] for key in row}
    figures = [(title, caption, svg(plot, metrics, **axes))
               for title, caption, metrics, axes in CHARTS if metrics[0][0] in found]
    stages = " ".join(swatch(i) + stage for i, stage in enumerate(STAGES))
    stages += "<br>dashed: the update's bound, its FLOPs at the device's peak speed"
    for label, runs in lines.items() if "mfu" in found else ():
        title = "Seconds per step" + f": {html.escape(label)}" * (len(lines) > 1)
        figures.append((title, stages, svg(draw_stages, runs)))
    return "\n".join(f"<figure><figcaption><b>{title}</b><br>{caption}</figcaption>{image}</figure>"
                     for title, caption, image in figures)


def swatch(i):
    """A square in the colour of line i, as HTML."""
    return f"<span class=swatch style='--c: {COLORS[LINES[i % len(LINES)]]}'></span>"


def summary(lines):
    """A table with a row per line: accuracy before and after, steps, seconds, command. As HTML."""
    rows = ["<tr><th>run<th>accuracy before<th>after<th>steps<th>time"]
    for i, (label, runs) in enumerate(lines.items()):
        evals = [list(series(run["rows"], "eval/accuracy").values()) for run in runs]
        accuracy = ["–", "–"]  # before, after
        if all(evals):
            accuracy = [f"{fmean(run[at] for run in evals):.1%}" for at in (0, -1)]
        seconds = sum(stage_seconds(run["rows"], [*STAGES, "evaluate"]) for run in runs) / len(runs)
        steps = max((row["step"] for row in runs[0]["rows"]), default=0)
        cells = [label, *accuracy, str(steps), f"{seconds:.0f} s"]
        about = {"command": "", "commit": "", "device": ""} | runs[0]["about"]
        where = "{command} (commit {commit}, {device})".format(**about)
        rows.append(f"<tr><td>{swatch(i)}{'<td>'.join(map(html.escape, cells))}\n"
                    f"<tr class=quiet><td colspan={len(cells)}>{html.escape(where)}")
    return "\n".join(rows)


# ---- the page

def write(folders, out):
    """Writes the report of these run folders. Raises ValueError with one line if one is no run."""
    runs = list(map(read_run, folders))
    lines = lines_of(runs)
    data = [{"name": run["name"], **questions(read(run["path"], "eval.jsonl")),
             "rollouts": rollouts(run, LIMIT // len(runs))} for run in runs]
    # base64 has no "<": the browser reads no text of a model as HTML
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode(), 6, mtime=0)).decode()
    texts = {"TITLE": html.escape(", ".join(lines)), "SUMMARY": summary(lines),
             "CHARTS": charts(lines), "DATA": packed}
    # in one pass: a run may have one of these names
    page = re.sub("@@(TITLE|SUMMARY|CHARTS|DATA)@@", lambda m: texts[m[1]], TEMPLATE.read_text())
    Path(out).write_text(page)


def main(argv):
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of one run")
    args = parser.parse_args(argv)
    if len(args.runs) > 1 and not args.out:
        parser.error("several runs need --out")
    out = args.out or Path(args.runs[0]) / "report.html"
    (draw_curve if out.suffix == ".png" else write)(args.runs, out)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"report: {e}")
    except (KeyError, TypeError) as e:
        sys.exit(f"report: metrics.jsonl, rollouts.jsonl or eval.jsonl is damaged ({e!r})")
