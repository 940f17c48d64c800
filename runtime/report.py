"""The report of one or several runs: one HTML file with charts and rollouts; it needs no network.

    python -m runtime.report runs/a                        writes runs/a/report.html, as a run does
    python -m runtime.report runs/a runs/b --out ab.html   several runs in one report
    python -m runtime.report runs/a runs/b --out ab.png    only reward, accuracy and length

A run is a line; bench/seeds.py has means over seeds. matplotlib draws the charts as SVG with text:
no script to load, sharp at any size. At most 2,000 rollouts of a run are shown, see shown().
docs/report.md says how to read the report.
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

from runtime.shape import first_line

TEMPLATE = Path(__file__).with_suffix(".html")
LIMIT = 2000  # rollouts of a run
QUESTIONS = 1000  # of the evaluation, the first ones, are shown
STAGES = ("rollout", "reward", "update", "sync")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "lines.linewidth": 1.3,
         "axes.grid": True, "axes.edgecolor": "0.8", "grid.color": "0.8", "grid.linewidth": 0.5,
         "axes.facecolor": "none", "figure.facecolor": "none"}


# ---- files of a run

def read(folder, name="metrics.jsonl"):
    """A file of a run with a JSON object per line -> list of dicts, [] if there is no such file.

    NaN becomes None. A last line that is cut off, as a killed run leaves it, is skipped with a note
    on stderr. Raises ValueError for any other line that is no JSON object with a step.
    """
    path, rows = Path(folder) / name, []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            int(row["step"])
        except (ValueError, RecursionError, TypeError, KeyError) as e:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: no line of JSON with a step ({e!r})") from e
            print(f"note: {path}:{number} is cut off: skipped", file=sys.stderr)
            break
        rows.append(row)
    return rows


def read_run(path):
    """A run folder as a dict."""
    path = Path(path)
    about = json.loads((path / "config.json").read_text())
    return {"path": path, "name": path.resolve().name, "about": about, "config": about["config"],
            "rows": read(path)}


def stage_seconds(rows, stages=STAGES):
    """Seconds of these stages in rows of metrics; by default the loop's, without the evaluation."""
    return sum(row.get(f"seconds/{stage}", 0.0) for row in rows for stage in stages)


def series(rows, key):
    """{step: value} of a metric, or of a function of a row, in rows of metrics.jsonl; no None."""
    get = key if callable(key) else lambda row: row.get(key)
    return {row["step"]: get(row) for row in rows if get(row) is not None}


# ---- rollouts

def shown(step, rollouts, samples, steps):
    """The rollouts of a step that the report shows, in groups of `samples`; [] in most steps.

    They are those of every k-th of the run's `steps`, with the smallest k that gives at most LIMIT.
    """
    rollouts = rollouts[:max(1, LIMIT // samples) * samples]
    most = max(1, LIMIT // max(1, len(rollouts)))  # steps
    k = max(1, math.ceil(steps / most))
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


def rollouts(run):
    """The rollouts for the page, each with the number of its group in the step."""
    samples, by_step = run["config"]["samples"], {}
    for r in read(run["path"], "rollouts.jsonl"):
        by_step.setdefault(r["step"], []).append(r)
    return [r | {"group": i // samples} for step, rows in by_step.items()
            for i, r in enumerate(shown(step, rows, samples, run["config"]["steps"]))]


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
    """A matplotlib Figure. Without pyplot, whose backend a notebook needs for its own plots."""
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **args)


def draw(axis, runs, key, style="-"):
    """A line per run; the accuracy has its interval as a band."""
    is_accuracy = key == "eval/accuracy"
    for i, run in enumerate(runs):
        values = series(run["rows"], key)
        axis.plot(values.keys(), values.values(), style, color=f"C{i}", ms=3,
                  marker="o" if is_accuracy else "",
                  label=run["name"].replace("$", r"\$"))  # "$" would begin a formula
        if is_accuracy:
            band = [series(run["rows"], name).values() for name in ("eval/low", "eval/high")]
            axis.fill_between(list(values), *map(list, band), color=f"C{i}", alpha=0.2, lw=0)


def draw_stages(axis, run):
    """Seconds per stage, stacked. Dashed: the update's FLOPs at peak speed."""
    rows = [row for row in run["rows"] if "mfu" in row]
    if rows:
        steps = [row["step"] for row in rows]
        seconds = [[stage_seconds([row], [stage]) for row in rows] for stage in STAGES]
        axis.stackplot(steps, *seconds, alpha=0.75, step="mid", lw=0)
        bound = [row["mfu"] * row["seconds/update"] for row in rows]
        axis.plot(steps, bound, color="black", lw=1, ls="--")


def write_curve(runs, out):
    """Writes a picture: reward, held-out accuracy and tokens per completion, a line per run."""
    fig = figure(figsize=(12, 3.6))
    keys = ("reward/mean", "eval/accuracy", "completion/length")
    for axis, key in zip(fig.subplots(1, 3), keys):
        draw(axis, runs, key)
        axis.set(xlabel="step", title=key)
    axis.legend(fontsize=8)
    fig.savefig(out, dpi=120)


SHARE, FROM_ZERO = dict(ylim=(-0.02, 1.02)), dict(ylim=(0, None))
CHARTS = [  # title, caption, {metric: style of its line}, properties of the axis
    ("Reward", "mean of the step's completions", {"reward/mean": "-"}, {}),
    ("Held-out accuracy", "greedy; band: 95 % interval", {"eval/accuracy": "-"}, SHARE),
    ("KL to the starting model", "mean per token", {"kl": "-"}, {}),
    ("Entropy", "nats, mean per token", {"entropy": "-"}, FROM_ZERO),
    ("Length", "tokens per completion", {"completion/length": "-"}, FROM_ZERO),
    ("Truncated and flat",
     "share of completions cut off (solid), of groups with equal rewards (dashed)",
     {"completion/truncated": "-", "group/flat": "--"}, SHARE),
    ("Mismatch", "trainer against vLLM: mean |difference| of log-probs (solid), largest (dotted)",
     {"mismatch/mean_abs": "-", "mismatch/max": ":"}, dict(yscale="log"))]


def charts(runs):
    """The charts as HTML, those that the runs have numbers for."""
    import matplotlib
    found = {key for run in runs for row in run["rows"] for key in row}
    figures = []
    with matplotlib.rc_context(STYLE):
        for title, caption, metrics, axes in CHARTS:
            if metrics.keys() <= found:
                axis = figure(figsize=(4.2, 2.4)).subplots()
                for key, style in metrics.items():
                    draw(axis, runs, key, style)
                figures.append(to_html(axis, title, caption, **axes))
        stages = " ".join(swatch(i) + stage for i, stage in enumerate(STAGES))
        stages += "<br>dashed: the update's bound, its FLOPs at the device's peak speed"
        for run in runs if "mfu" in found else ():
            axis = figure(figsize=(4.2, 2.4)).subplots()
            draw_stages(axis, run)
            title = f"Seconds per step: {html.escape(run['name'])}"
            figures.append(to_html(axis, title, stages))
    return "\n".join(figures)


def to_html(axis, title, caption, **properties):
    """A chart with its caption. properties: of the axis."""
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="step", **properties)
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    axis.figure.savefig(file, format="svg", metadata=nothing)
    image = "<svg" + file.getvalue().partition("<svg")[2]
    return f"<figure><figcaption><b>{title}</b><br>{caption}</figcaption>{image}</figure>"


def swatch(i):
    """A square in the colour of line i, as HTML."""
    from matplotlib.colors import to_hex
    return f"<span class=swatch style='background: {to_hex(f'C{i}')}'></span>"


def summary(runs):
    """A table with a row per run: accuracy before and after, steps, seconds, command. As HTML."""
    rows = ["<tr><th>run<th>accuracy before<th>after<th>steps<th>time"]
    for i, run in enumerate(runs):
        about, evals = run["about"], list(series(run["rows"], "eval/accuracy").values())
        accuracy = ["–", "–"]  # before, after
        if evals:
            accuracy = [f"{evals[at]:.1%}" for at in (0, -1)]
        seconds = stage_seconds(run["rows"], [*STAGES, "evaluate"])
        steps = max((row["step"] for row in run["rows"]), default=0)
        cells = [run["name"], *accuracy, str(steps), f"{seconds:.0f} s"]
        where = ", ".join(about[name] for name in ("command", "commit", "device") if name in about)
        rows.append(f"<tr><td>{swatch(i)}{'<td>'.join(map(html.escape, cells))}\n"
                    f"<tr class=quiet><td colspan={len(cells)}>{html.escape(where)}")
    return "\n".join(rows)


# ---- the page

def write(folders, out):
    """Writes the report of these run folders, or only the curve if `out` ends in .png."""
    runs = list(map(read_run, folders))
    if Path(out).suffix == ".png":
        return write_curve(runs, out)
    data = [{"name": run["name"], "rollouts": rollouts(run),
             **questions(read(run["path"], "eval.jsonl"))} for run in runs]
    # base64 has no "<": the browser reads no text of a model as HTML
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode(), 6, mtime=0)).decode()
    texts = {"TITLE": html.escape(", ".join(run["name"] for run in runs)),
             "SUMMARY": summary(runs), "CHARTS": charts(runs), "DATA": packed}
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
    try:
        write(args.runs, out)
    except Exception as e:  # a damaged file can raise anything
        sys.exit(f"report: {', '.join(args.runs)}: damaged, or not the folder of a run "
                 f"({first_line(e)})")
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
