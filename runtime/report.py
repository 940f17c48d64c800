"""The report of one or several runs: one HTML file with charts and rollouts; it needs no network.

    python -m runtime.report runs/a                        writes runs/a/report.html, as a run does
    python -m runtime.report runs/a runs/b --out ab.html   several runs in one report
    python -m runtime.report runs/a runs/b --out ab.png    only reward, accuracy and length

A run is a line; bench/seeds.py has means over seeds. At most 2,000 rollouts of a run are shown, see
shown(). report.html draws what this file chooses. docs/report.md says how to read the report.
"""
import argparse
import base64
import gzip
import html
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
    """The rollouts of a step that the report shows, in groups of `samples`: those of every k-th of
    the run's `steps`, with the smallest k that gives at most LIMIT; [] in the other steps."""
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
    first, last = ([a for a in answers if a["step"] == step] for step in steps)
    rows = []
    for before, after in zip(first[:QUESTIONS], last):
        pair = [[bool(a["right"]), a["completion"], a["finish"]] for a in (before, after)]
        rows.append([before["question"], before["answer"], *pair])
    return {"steps": steps, "n": len(last), "questions": rows}


# ---- charts

def figure(**args):
    """A matplotlib Figure. Without pyplot, whose backend a notebook needs for its own plots."""
    from matplotlib.figure import Figure
    return Figure(layout="constrained", **args)


def points(run, metric):
    """[step, value, low, high] for each value of a metric; only an accuracy has an interval."""
    values, low, high = (series(run["rows"], re.sub("accuracy$", end, metric))
                         for end in ("accuracy", "low", "high"))
    return [[step, *(float(f"{x:.4g}") for x in (y, low.get(step, y), high.get(step, y)))]
            for step, y in values.items()]


def write_curve(runs, out):
    """Writes a picture: reward, held-out accuracy and tokens per completion, a line per run."""
    fig = figure(figsize=(12, 3.6))
    keys = ("reward/mean", "eval/accuracy", "completion/length")
    for axis, key in zip(fig.subplots(1, 3), keys):
        axis.set(xlabel="step", title=key)
        for i, run in enumerate(runs):
            steps, values, low, high = zip(*points(run, key)) if points(run, key) else ([],) * 4
            axis.plot(steps, values, color=f"C{i}", marker="o" if low != values else "", ms=3,
                      label=run["name"].replace("$", r"\$"))  # "$" would begin a formula
            axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.2, lw=0)
    axis.legend(fontsize=8)
    fig.savefig(out, dpi=144)


SHARE, FROM_ZERO = {"from": 0, "to": 1}, {"from": 0}
CHARTS = [  # title, caption, pattern of its metrics, how it is drawn, hint of docs/metrics.md
    ("Held-out accuracy", "greedy; band: 95 % interval", "eval/accuracy", SHARE | {"wide": True},
     "If the reward rises and this is flat, something else than right answers is rewarded: read "
     "rollouts with reward 1. If it rises with random rewards too, do not call it learning."),
    ("Reward", "mean of the step's completions", "reward/mean", FROM_ZERO,
     "Noise is normal: each step has other prompts."),
    ("Reward parts", "mean of each reward function",
     "reward/(?!(mean|std|no_verdict|timeouts|crashes)$).+", FROM_ZERO | {"least": 2},
     "If the part for the format alone rises, the model does not learn the task."),
    ("Samples of the evaluation", "mean@n: share that is right; pass@k: one or more of k are; "
     "maj@n: the most frequent answer is", r"eval/(mean|pass|maj)@\d+", SHARE,
     "These are sampled at --temperature, so they may be far below the greedy accuracy."),
    ("Accuracy by set", "greedy", "eval/.+/accuracy", SHARE, ""),
    ("Length", "mean tokens; short and long answers are mixed", "completion/length", FROM_ZERO,
     "It also rises if long answers only become more frequent. It often drops first: the model "
     "learns to end. If it keeps falling while the accuracy stays, a guess pays better than "
     "thinking. If truncated rises with it: --aggregate constant, or a larger --max_tokens."),
    ("Entropy", "nats, mean per token", "entropy", FROM_ZERO,
     "Falling is normal: RL sharpens. At about 0, if group/flat rises too: lower --lr, "
     "more --kl_coef, other questions. If it explodes and text turns into noise: lower --lr."),
    ("KL to the starting model", "nats, mean per token", "kl", {},
     "A slow rise without end is learning. A spike for a step or two is noise: one token that "
     "became much less likely is enough. If it stays, lower --lr or raise --kl_coef."),
    ("Shares", "flat: equal rewards; truncated: cut; no_verdict: no reward; clipped: no gradient",
     "group/flat|completion/truncated|reward/no_verdict|clipped", SHARE,
     "group/flat above a half is normal at the start of a hard task (take easier questions) and at "
     "the end of an easy one (take harder ones). clipped is 0 with one optimizer step per batch."),
    ("Gradient", "norm before clipping; share of skipped steps", "grad_norm|skipped", FROM_ZERO,
     "Far above 1 is normal, a rise by orders of magnitude is not. skipped: it was not finite."),
    ("Loss", "on a scale of its own", "loss", {},
     "About 0 from the first step on is normal, also while the accuracy rises: every ratio is 1, "
     "and the advantages of a group sum to 0. Its gradient is not 0. The loss says nothing."),
    ("Mismatch", "nats, |trainer's log-prob - vLLM's|", "mismatch/(mean_abs|max)", {"log": True},
     "mean_abs is normal at 0.02 to 0.03 in bf16 and below 1e-6 in fp32."),
    ("Seconds per step", "without evaluation, start and checkpoints",
     f"seconds/({'|'.join(STAGES)})", FROM_ZERO, "Other programs on the machine make it uneven."),
    ("MFU", "of the update: FLOPs / peak", "mfu", FROM_ZERO, "A busy CPU distorts it, to above 1.")]


def charts(runs):
    """The charts for the page, a dict each: those that the runs have numbers for."""
    found, several = [], len(runs) > 1
    keys = dict.fromkeys(key for run in runs for row in run["rows"] for key in row)
    for title, caption, pattern, how, hint in CHARTS:
        metrics = [key for key in keys if re.fullmatch(pattern, key)]
        lines = []
        for (i, run), (j, metric) in itertools.product(enumerate(runs), enumerate(metrics)):
            words = [run["name"]] * several + [metric] * (len(metrics) > 1 or not several)
            lines.append({"name": " ".join(words), "points": points(run, metric),
                          "color": (i if several else j) % 10, "dash": j if several else 0})
        if len(metrics) >= how.get("least", 1):
            found.append({"title": title, "caption": caption, "metrics": metrics, "lines": lines,
                          "hint": hint, "dashed": several, **how})
    return found


def settings(runs):
    """A table with a row per flag: first what differs, then what was given, last what is off."""
    rows = [[key, *(json.dumps(run["config"].get(key)) for run in runs)]
            for key in dict.fromkeys(key for run in runs for key in run["config"]) if key != "name"]
    given = {"seed", *re.findall(r"--(\w+)", str([run["about"].get("command") for run in runs]))}
    rows.sort(key=lambda x: (len({*x[1:]}) == 1, x[0] not in given, not json.loads(x[1])))
    rows.insert(0, ["", *(run["name"] for run in runs)])
    return "\n".join("<tr><td>" + "<td>".join(map(html.escape, row)) for row in rows)


def summary(runs):
    """A table with a row per run: accuracy before and after, steps, seconds, command. As HTML."""
    rows = ["<tr><th>run<th>accuracy before<th>after<th>steps<th>time of steps<th>of evaluations"]
    for i, run in enumerate(runs):
        evals = [f"{x:.1%}" for x in series(run["rows"], "eval/accuracy").values()] or ["–"]
        times = [f"{stage_seconds(run['rows'], x):.0f} s" for x in (STAGES, ["evaluate"])]
        about, last = run["about"], max((row["step"] for row in run["rows"]), default=0)
        cells = [run["name"], evals[0], evals[-1], f"{last} of {run['config']['steps']}", *times]
        where = ", ".join(about[name] for name in ("command", "commit", "device") if name in about)
        swatch = f"<span class=swatch style='background: var(--c{i % 10})'></span>"
        rows.append(f"<tr><td>{swatch}{'<td>'.join(map(html.escape, cells))}\n"
                    f"<tr class=quiet><td colspan={len(cells)}>{html.escape(where)}")
    return "\n".join(rows)


# ---- the page

def write(folders, out):
    """Writes the report of these run folders, or only the curve if `out` ends in .png."""
    runs = list(map(read_run, folders))
    if Path(out).suffix == ".png":
        return write_curve(runs, out)
    data = {"charts": charts(runs), "runs": [
        {"name": run["name"], "config": run["config"], "rollouts": rollouts(run),
         **questions(read(run["path"], "eval.jsonl"))} for run in runs]}
    # base64 has no "<": the browser reads no text of a model as HTML
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode(), 6, mtime=0)).decode()
    texts = {"TITLE": html.escape(", ".join(run["name"] for run in runs)),
             "SUMMARY": summary(runs), "SETTINGS": settings(runs), "DATA": packed}
    # in one pass: a run may have one of these names
    page = re.sub("@@(TITLE|SUMMARY|SETTINGS|DATA)@@", lambda m: texts[m[1]], TEMPLATE.read_text())
    part = Path(out).with_suffix(".part")
    part.write_text(page, errors="backslashreplace")  # a path need not be UTF-8
    part.rename(out)  # whoever reads meanwhile gets the old report or the new one


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
