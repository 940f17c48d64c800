"""The report of one or several runs: a single HTML file with charts and rollouts, which needs no network.

    python -m runtime.report runs/a                        writes runs/a/report.html, as the end of a run does
    python -m runtime.report runs/a runs/b --out ab.html   several runs in one report

Runs that differ only in the seed are one line: the mean, with the 95 % t interval over the seeds as a band.
matplotlib draws the charts as SVG with text and CSS colours: no new dependency, no script to load, sharp at
any size, dark mode. Rollouts: at most 2,000, see choose(). docs/report.md says how to read it.
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
SAME_BUT_SEED = folder.FREE - {"data", "eval_data"} | {"seed"}  # fields in which runs of one line may differ
QUESTIONS = 1000  # of the evaluation, the first ones, are shown
STAGES = ("rollout", "reward", "update", "sync")
TEXT, GRID, LINES = "#000000", "#0000f0", [f"#0000{i:02x}" for i in range(1, 9)]  # for matplotlib ...
COLORS = {TEXT: "var(--text)", GRID: "var(--grid)",  # ... and for the page, where they depend on the theme
          **{color: f"var(--c{i})" for i, color in enumerate(LINES)}}
SVG = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "axes.edgecolor": GRID,
       "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
       "grid.linewidth": 0.5, "lines.linewidth": 1.3, "xtick.major.size": 0, "ytick.major.size": 0,
       "figure.facecolor": "none", "axes.facecolor": "none"}
LIMIT = 2000


# ---- files of a run

def read(folder, name="metrics.jsonl", only=b"", **options):
    """metrics.jsonl of a run folder -> list of dicts, one per line: every step, and the last evaluation.
    name: another file with a JSON object per line. only: keep the lines that contain these bytes. options:
    passed to json.loads.

    A last line that is cut off, as a killed run leaves it, is skipped with a note on stderr. Raises
    ValueError for any other line that is no JSON object with a step, OSError if the file cannot be read.
    """
    path, rows = Path(folder) / name, []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            if only in line:
                row = json.loads(line, **options)
                if not isinstance(row, dict) or type(row.get("step")) is not int:
                    raise ValueError(f"{path}:{number}: no object with a step")
                if name == "metrics.jsonl" and any(isinstance(x, (str, list, dict)) for x in row.values()):
                    raise ValueError(f"{path}:{number}: a metric is no number")
                rows.append(row)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not a line of JSON ({e})") from e
            print(f"note: {path}:{number} is cut off: skipped", file=sys.stderr)
    return rows


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl. None = no value."""
    get = key if callable(key) else lambda row: row.get(key)
    return {row["step"]: get(row) for row in rows if get(row) is not None}


def figure(**args):
    """A matplotlib Figure. Raises ValueError if matplotlib cannot be imported.

    Without pyplot, whose backend a notebook needs for its own plots.
    """
    try:
        from matplotlib import figure
    except ImportError as e:
        raise ValueError(f"curve.png and report.html need matplotlib ({e}): pip install matplotlib") from e
    return figure.Figure(layout="constrained", **args)


def place(folders, out, name):
    """Where a command writes: to `out`, or else into the folder of a single run, or to a new file here.

    Raises ValueError if the command would write over a file that the user did not name.
    """
    if out or len(folders) == 1:
        return Path(out or Path(folders[0]) / name)
    if Path(name).exists():
        raise ValueError(f"{name} is here already; --out names another file")
    return Path(name)


def draw_curve(folders, out, labels=None):
    """Writes a figure with two panels and one line per run.

    Left: held-out greedy accuracy with its interval; thin: mean reward of the training samples.
    Right: mean completion length in 
    """
    fig = figure(figsize=(10, 3.6))
    left, right = fig.subplots(1, 2)
    for i, (path, label) in enumerate(zip(folders, labels or [Path(f).name for f in folders])):
        rows, color = read(path), f"C{i}"
        train = [row for row in rows if "reward/mean" in row]
        evals = [row for row in rows if "eval/accuracy" in row]
        train_steps = [row["step"] for row in train]
        eval_steps = [row["step"] for row in evals]
        low, high = ([row[name] for row in evals] for name in ("eval/low", "eval/high"))
        left.plot(train_steps, [row["reward/mean"] for row in train], color=color, lw=0.8, alpha=0.5)
        label = label.replace("$", r"\$")  # matplotlib would read a formula
        left.plot(eval_steps, [row["eval/accuracy"] for row in evals], "o-", color=color, ms=4, label=label)
        left.fill_between(eval_steps, low, high, color=color, alpha=0.15, lw=0)
        right.plot(train_steps, [row["completion/length"] for row in train], color=color, label=label)
    left.set(xlabel="step", ylabel="accuracy (thin: training reward)", ylim=(-0.02, None))
    right.set(xlabel="step", ylabel="tokens per completion", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    fig.savefig(out, dpi=120)


def spacing(steps, per_step, limit=LIMIT):
    """The smallest k with at most `limit` rollouts in every k-th of `steps` steps of `per_step` rollouts.

    >>> spacing(50, 64)
    2
    """
    return max(1, math.ceil(steps / max(1, limit // per_step)))


def kept_groups(groups, cfg):
    """The groups of this rank whose rollouts rollouts.jsonl keeps."""
    return groups[:math.ceil(cfg.keep_rollouts / cfg.samples)]


def chosen(step, groups, cfg):
    """The rollouts of a step that get numbers per token; none in most steps of a long run."""
    rollouts = [r for group in kept_groups(groups, cfg)[:max(1, LIMIT // cfg.samples)] for r in group]
    return rollouts if rollouts and step % spacing(cfg.steps, len(rollouts)) == 0 else []


def numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; two digits, at most five decimals.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's log-prob;
    advantage, unless all tokens have the same. None: the token was not sampled.
    """
    lists = {"text": texts(r.completion, tokenizer), "logp": before,
             "change": [None if x is None else y - x for x, y in zip(before, after)],
             "gap": [None if x is None else x - y for x, y in zip(before, r.vllm_logps)]}
    if len(set(r.advantages)) > 1:
        lists["advantage"] = r.advantages
    return {name: [float(f"{round(x, 5):.2g}") if isinstance(x, float) else x for x in values]
            for name, values in lists.items()}


def texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the last one has
    its text and the others have none."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        context = ids[max(0, start - 1):start]  # alone, SentencePiece would drop the space before a word
        text = tokenizer.decode(context + ids[start:end])[len(tokenizer.decode(context)):]
        if text.endswith("\ufffd") and end < min(start + 4, len(ids)):  # a character has at most 4 bytes
            found.append("")
        else:
            found.append(text)
            start = end
    return found


# ---- runs

def read_run(path):
    """A run folder as a dict. Raises ValueError or OSError, with one line, if it is none."""
    path = Path(path)
    try:
        text, rows = (path / "config.json").read_bytes(), read(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ValueError(f"{path} is not the folder of a run: it has no {Path(e.filename).name}") from None
    try:
        about = json.loads(text)
        config = {**about["config"]}
        if config["samples"] < 1:
            raise ValueError(f"samples {config['samples']}")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise ValueError(f"{path / 'config.json'} is not as a run writes it ({reason})") from None
    return {"path": path, "name": path.resolve().name, "about": about, "config": config, "rows": rows}


def lines_of(runs):
    """{label: runs that differ only in the seed}. The label names the flags in which lines differ."""
    lines, labelled = {}, {}
    for run in runs:
        fields = {name: x for name, x in run["config"].items() if name not in SAME_BUT_SEED}
        lines.setdefault(json.dumps(fields, sort_keys=True), []).append(run)
    fields = [json.loads(key) for key in lines]
    differ = [name for name in fields[0] if any(f.get(name) != fields[0][name] for f in fields)]
    for own, of in zip(fields, lines.values()):
        flags, name = ", ".join(f"{name} {own.get(name)}" for name in differ), of[0]["name"]
        if len(of) > 1:
            label = f"{flags or name.rstrip('-_0123456789')} ({len(of)} seeds)"
        else:
            label = f"{name} ({flags})" if flags else name
        labelled[label] = of
    return labelled


def choose(rollouts, samples, limit):
    """At most `limit` rollouts, in whole groups: those of every k-th step, with the smallest possible k.

    Only the steps with numbers per token count, or all if no step has them.
    """
    by_step = {}
    for r in rollouts:
        by_step.setdefault(r["step"], []).append(r)
    steps = {step: of for step, of in by_step.items() if "per_token" in of[0]} or by_step
    most = min(max(map(len, steps.values()), default=1), max(samples, limit // samples * samples))
    every = spacing(len(steps), most, limit)
    return [{**r, "group": i // samples}
            for step in sorted(steps)[::every] for i, r in enumerate(steps[step][:most])]


def read_lines(run, name, only=b""):
    """The rows of rollouts.jsonl or eval.jsonl, NaN as None; none if there is no such file."""
    there = (run["path"] / name).exists()
    return read(run["path"], name, only, parse_constant=lambda _: None) if there else []


def rollouts(run, limit):
    """The rollouts for the page. Lines without numbers per token are read only if there are no others."""
    rows = read_lines(run, "rollouts.jsonl", b'"per_token": {') or read_lines(run, "rollouts.jsonl")
    return choose(rows, run["config"]["samples"], limit)


def questions(answers):
    """The questions of the evaluation, with the answers of the first and the last time, for the page."""
    steps = sorted({a["step"] for a in answers})
    if len(steps) < 2:
        return {"steps": [], "questions": []}
    first, last = ([a for a in answers if a["step"] == step][:QUESTIONS] for step in (steps[0], steps[-1]))
    return {"steps": [steps[0], steps[-1]], "questions": [
        [a["question"], a["answer"], *([bool(x["right"]), x["completion"], x["finish"]] for x in (a, b))]
        for a, b in zip(first, last)]}


# ---- charts

def draw(axis, lines, key, style="-", low=None, high=None):
    """A line per label: a metric, or its mean over the seeds with its interval.

    low, high: the metrics with the interval of a single run.
    """
    for color, runs in zip(itertools.cycle(LINES), lines.values()):
        values = [series(run["rows"], key) for run in runs]
        steps = sorted(set.intersection(*map(set, values)))
        band = [], []
        if len(runs) > 1:
            mean, *band = zip(*(mean_interval([x[step] for x in values]) for step in steps))
        else:
            mean = [values[0][step] for step in steps]
            if low:
                band = [[row[name] for row in runs[0]["rows"] if key in row] for name in (low, high)]
        axis.plot(steps, mean, style, color=color, marker="o" if low else "", ms=3)
        if band[0] and not key.startswith("mismatch/"):  # which has a logarithmic scale
            axis.fill_between(steps, *band, color=color, alpha=0.2, lw=0)


def draw_stages(axis, runs):
    """Seconds per stage, stacked, means over the seeds. Dashed: those of the update's FLOPs at peak speed."""
    trained = [[row for row in run["rows"] if "mfu" in row] for run in runs]
    by_step = list(zip(*trained))  # a row of each seed
    if not by_step:
        return
    steps = [rows[0]["step"] for rows in by_step]
    seconds = [[fmean(row.get(f"seconds/{stage}", 0.0) for row in rows) for rows in by_step]
               for stage in STAGES]
    bound = [fmean(row["mfu"] * row["seconds/update"] for row in rows) for rows in by_step]
    axis.stackplot(steps, *seconds, colors=LINES[:len(STAGES)], alpha=0.75, step="mid", lw=0)
    axis.plot(steps, bound, color=TEXT, lw=1, ls="--")


def svg(draw, *args, **axes):
    """A chart as text: draw(axis, *args) into an axis with these properties."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator, PercentFormatter
    with matplotlib.rc_context(SVG):
        fig = figure(figsize=(4.2, 2.4))
        axis = fig.subplots()
        draw(axis, *args)
        if axes.pop("percent", False):
            axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set(xlabel="step", **axes)
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata={"Date": None})
    text = text.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>| xmlns\S*=\"\S*\"", "", text, flags=re.S)  # HTML needs neither
    return re.sub("|".join(COLORS), lambda m: COLORS[m[0]], text)


def charts(lines):
    """The charts as HTML, those that the runs have numbers for."""
    def plot(axis, *series):
        for key, *style in series:
            draw(axis, lines, key, *style)
        if axis.collections:  # the scale is that of the lines: the interval of two seeds would flatten them
            values = [y for line in axis.lines for y in line.get_ydata()]
            margin = 0.15 * (max(values) - min(values)) or 0.1
            axis.set_ylim(min(values) - margin, max(values) + margin)

    share, from_zero = dict(percent=True, ylim=(-0.02, 1.02)), dict(ylim=(0, None))
    drawn = [
        ("Reward", "mean of the step's completions", [("reward/mean",)], {}),
        ("Held-out accuracy", "greedy; band: 95 % interval",
         [("eval/accuracy", "-", "eval/low", "eval/high")], share),
        ("KL to the starting model", "mean per token", [("kl",)], {}),
        ("Entropy", "nats, mean per token", [("entropy",)], from_zero),
        ("Length", "tokens per completion", [("completion/length",)], from_zero),
        ("Truncated and flat", "share of completions cut off (solid), of groups with equal rewards (dashed)",
         [("completion/truncated",), ("group/flat", "--")], share),
        ("Mismatch", "trainer against vLLM: mean |difference| of log-probs (solid), largest (dotted)",
         [("mismatch/mean_abs",), ("mismatch/max", ":")], dict(yscale="log"))]
    found = {key for of in lines.values() for run in of for row in run["rows"] for key in row}
    figures = [(title, caption, svg(plot, *series, **axes)) for title, caption, series, axes in drawn
               if series[0][0] in found]
    stages = " ".join(swatch(i) + stage for i, stage in enumerate(STAGES))
    stages += "<br>dashed: the update's bound, its FLOPs at the device's peak speed"
    for label, runs in lines.items() if "mfu" in found else ():
        title = "Seconds per step" + (f": {html.escape(label)}" if len(lines) > 1 else "")
        figures.append((title, stages, svg(draw_stages, runs)))
    return "\n".join(f"<figure><figcaption><b>{title}</b><br>{caption}</figcaption>{image}</figure>"
                     for title, caption, image in figures)


def swatch(i):
    return f"<span class=swatch style='--c: {COLORS[LINES[i % len(LINES)]]}'></span>"


def summary(lines):
    """A table with a row per line: accuracy before and after, steps, seconds, command. As HTML."""
    def accuracy(runs, at):
        evals = [[row["eval/accuracy"] for row in run["rows"] if "eval/accuracy" in row] for run in runs]
        return f"{fmean(of[at] for of in evals):.1%}" if all(evals) else "–"

    rows = ["<tr><th>run<th>accuracy before<th>after<th>steps<th>time"]
    for i, (label, runs) in enumerate(lines.items()):
        about, last = runs[0]["about"], runs[0]["rows"][-1:]
        seconds = [row.get(f"seconds/{stage}", 0.0)
                   for run in runs for row in run["rows"] for stage in (*STAGES, "evaluate")]
        cells = [label, accuracy(runs, 0), accuracy(runs, -1), str(last[0]["step"]) if last else "0",
                 f"{sum(seconds) / len(runs):.0f} s"]
        where = f"{about.get('command', '')} (commit {about.get('commit', '')}, {about.get('device', '')})"
        rows.append(f"<tr><td>{swatch(i)}{'<td>'.join(map(html.escape, cells))}\n"
                    f"<tr class=quiet><td colspan={len(cells)}>{html.escape(where)}")
    return "\n".join(rows)


# ---- the page

def write(folders, out):
    """Writes the report of these run folders. Raises ValueError with one line if a folder is no run."""
    runs = [read_run(path) for path in folders]
    lines = lines_of(runs)
    data = [{"name": run["name"], **questions(read_lines(run, "eval.jsonl")),
             "rollouts": rollouts(run, LIMIT // len(runs))} for run in runs]
    # compressed: a long run stays small; base64 has no "<": the browser reads no text of a model as HTML
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode(), 6, mtime=0)).decode()
    texts = {"TITLE": html.escape(", ".join(lines)), "SUMMARY": summary(lines), "CHARTS": charts(lines),
             "DATA": packed}
    # in one pass: a run may have one of these names
    page = re.sub("@@(TITLE|SUMMARY|CHARTS|DATA)@@", lambda m: texts[m[1]], TEMPLATE.read_text())
    Path(out).write_text(page)


def main(argv):
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser("python -m runtime.report", description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", help="default: report.html in the folder of a single run, or here")
    args = parser.parse_args(argv)
    out = place(args.runs, args.out, "report.html")
    write(args.runs, out)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"report: {e}")
    except KeyError as e:
        sys.exit(f"report: a line of metrics.jsonl, rollouts.jsonl or eval.jsonl has no {e}")
