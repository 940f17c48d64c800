"""The page of a report: charts, tables and rollouts, which page.html draws.

At most 2,000 rollouts of a run are shown, see records.shown_rollouts.
"""
import base64
import gzip
import html
import json
import re
import time
from pathlib import Path

from runtime.records import STAGES, points, read, replaced, series, shown_rollouts, stage_seconds
from runtime.report.curve import write_curve

TEMPLATE = Path(__file__).with_suffix(".html")
QUESTIONS = 1000  # of the evaluation, the first ones, are shown


def read_run(path):
    """A run folder as a dict."""
    path = Path(path)
    provenance = json.loads((path / "config.json").read_text())
    rows = read(path)
    names = {}  # of all metrics, in the order in which they appear
    for row in rows:
        names |= row
    metrics = {}
    for name in names:
        numbers = points(rows, name)
        if numbers and name != "step":
            metrics[name] = numbers
    return {
        "path": path,
        "name": path.resolve().name,
        "provenance": provenance,
        "config": provenance["config"],
        "rows": rows,
        "metrics": metrics,
    }


def by_step(rows):
    """{step: its rows}, in the order in which the steps appear."""
    steps = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return steps


def rollouts(run):
    """The rollouts for the page, each with the number of its group in the step."""
    samples = run["config"]["samples"]
    numbered = []
    for step, rows in by_step(read(run["path"], "rollouts.jsonl")).items():
        for i, row in enumerate(shown_rollouts(step, rows, samples, run["config"]["steps"])):
            numbered.append(row | {"group": i // samples})
    return numbered


def questions(answers):
    """The questions of the evaluation: the answers of the first and the last time, and which
    evaluations had a right one."""
    evaluations = dict(sorted(by_step(answers).items()))
    if len(evaluations) < 2:
        return {"steps": [], "questions": []}
    asked = list(zip(*evaluations.values()))  # per question, its answer at each time
    rows = []
    for times in asked[:QUESTIONS]:
        first, last = times[0], times[-1]
        right = [bool(answer["right"]) for answer in times]
        rows.append([
            first["question"],
            first["answer"],
            [right[0], first["completion"], first["finish"]],
            [right[-1], last["completion"], last["finish"]],
            right,
        ])
    return {"steps": list(evaluations), "n": len(asked), "questions": rows}


# ---- charts

SHARE, FROM_ZERO = {"from": 0, "to": 1, "percent": True}, {"from": 0}
CHARTS = [  # title, caption, pattern of its metrics, how it is drawn, hint of docs/metrics.md
    ("Held-out accuracy", "greedy; band: 95 % interval", "eval/accuracy", SHARE | {"wide": True},
     "If the reward rises and this is flat, something else than right answers is rewarded: read "
     "rollouts with reward 1. If it rises with random rewards too, do not call it learning."),
    ("Reward", "mean of the step's completions", "reward/mean", FROM_ZERO,
     "Noise is normal: each step has other prompts."),
    ("Reward parts", "mean of each reward function",
     "reward/(?!(mean|std|unscored|timeouts|crashes)$).+", FROM_ZERO | {"least": 2},
     "If the part for the format alone rises, the model does not learn the task."),
    ("Samples of the evaluation", "mean@n: share that is right; pass@k: one or more of k are; "
     "maj@n: the most frequent answer is", r"eval/(mean|pass|maj)@\d+", SHARE,
     "These are sampled at --temperature, so they may be far below the greedy accuracy."),
    ("Accuracy by set", "greedy", "eval/.+/accuracy", SHARE, ""),
    ("Length", "mean tokens; short and long answers are mixed", "completion/length", FROM_ZERO,
     "It also rises if long answers only become more frequent. It often drops first: the model "
     "learns to end. If it keeps falling while the accuracy stays, a guess pays better than "
     "thinking. If truncated rises with it: --aggregate constant, or a larger --max_tokens."),
    ("Entropy", "nats, mean per token of the trained completions", "entropy", FROM_ZERO,
     "Falling is normal: RL sharpens. At about 0, if group/zero_std rises too: lower --lr, "
     "more --kl_coef, other questions. If it explodes and text turns into noise: lower --lr."),
    ("KL to the starting model", "nats, mean per token", "kl", {},
     "A slow rise without end is learning. A spike for a step or two is noise: one token that "
     "became much less likely is enough. If it stays, lower --lr or raise --kl_coef."),
    ("Shares", "zero_std: equal rewards; trained: got a pass in the update; truncated: cut; "
     "unscored: no reward; clip_ratio: clipped",
     "group/zero_std|trained|completion/truncated|reward/unscored|clip_ratio", SHARE,
     "group/zero_std above a half is normal at the start of a hard task (take easier questions) "
     "and at the end of an easy one (take harder ones). clip_ratio is 0 with one update per "
     "batch."),
    ("Gradient", "norm before clipping; share of skipped steps", "grad_norm|skipped", FROM_ZERO,
     "Far above 1 is normal, a rise by orders of magnitude is not. skipped: it was not finite."),
    ("Loss", "on a scale of its own", "loss", {},
     "About 0 from the first step on is normal, also while the accuracy rises: every ratio is 1, "
     "and the advantages of a group sum to 0. Its gradient is not 0. The loss says nothing."),
    ("Mismatch", "nats, |trainer's log-prob - vLLM's|", "mismatch/(mean_abs|max)", {"log": True},
     "mean_abs is normal at 0.02 to 0.03 in bf16 and below 1e-5 in fp32."),
    ("Seconds per step", "without evaluation, start and checkpoints",
     f"seconds/({'|'.join(STAGES)})", FROM_ZERO, "Other programs on the machine make it uneven."),
    ("MFU", "of the update: FLOPs / peak", "mfu", FROM_ZERO, "A busy CPU distorts it, to above 1.")]


def charts(runs, more=()):
    """The charts for the page, a dict each: those that the runs have numbers for. more: further
    rows of CHARTS, which come first."""
    names = {}
    for run in runs:
        names |= run["metrics"]
    drawn = []
    for title, caption, pattern, how, hint in (*more, *CHARTS):
        metrics = [name for name in names if re.fullmatch(pattern, name)]
        if len(metrics) >= how.get("least", 1):
            texts = {"title": title, "caption": caption, "metrics": metrics, "hint": hint}
            drawn.append(texts | how)
    return drawn


def settings(runs):
    """A table with a row per flag: first what differs, then what the command names, last what is
    off. As HTML."""
    flags = {}
    for run in runs:
        flags |= run["config"]
    flags.pop("name", None)
    commands = str([run["provenance"].get("command") for run in runs])
    named = {"seed", *re.findall(r"--(\w+)", commands)}
    rows = []
    for flag in flags:
        values = [json.dumps(run["config"].get(flag)) for run in runs]
        is_equal = len(set(values)) == 1
        is_off = not json.loads(values[0])
        rows.append(((is_equal, flag not in named, is_off), [flag, *values]))
    rows.sort(key=lambda row: row[0])  # rows with one key keep their order
    table = [_row(cells) for _, cells in rows]
    return "\n".join([_row(["", *(run["name"] for run in runs)]), *table])


def _row(cells):
    """A row of an HTML table."""
    return "<tr><td>" + "<td>".join(map(html.escape, cells))


def summary(runs):
    """A table with a row per run: accuracy before and after, steps, seconds, command. As HTML."""
    rows = ["<tr><th>run<th>accuracy before<th>after<th>steps<th>time of steps<th>of evaluations"]
    for i, run in enumerate(runs):
        accuracies = list(series(run["rows"], "eval/accuracy").values())
        shares = [f"{x:.1%}" for x in accuracies] or ["–"]
        last = max((row["step"] for row in run["rows"]), default=0)
        cells = [
            run["name"],
            shares[0],
            shares[-1],
            f"{last} of {run['config']['steps']}",
            f"{stage_seconds(run['rows']):.0f} s",
            f"{stage_seconds(run['rows'], ['evaluate']):.0f} s",
        ]
        provenance = run["provenance"]
        names = [name for name in ("command", "commit", "device") if name in provenance]
        origin = ", ".join(provenance[name] for name in names)
        swatch = f"<span class=swatch style='background: var(--c{i % 10})'></span>"
        rows.append(f"<tr><td>{swatch}" + "<td>".join(map(html.escape, cells)))
        rows.append(f"<tr class=quiet><td colspan={len(cells)}>{html.escape(origin)}")
    return "\n".join(rows)


# ---- the page

def write(folders, out, live=0):
    """Writes the report of these run folders, or only the curve if `out` ends in .png.

    live: the seconds after which a browser reads it again, because the run goes on; 0: never."""
    runs = list(map(read_run, folders))
    names = {run["name"] for run in runs}
    if len(names) < len(runs):  # the page finds a run by its name
        for i, run in enumerate(runs):
            run["name"] = f"{i}: {run['path']}"
    with replaced(Path(out)) as part:
        if part.suffix == ".png":
            write_curve(runs, part)
        else:
            part.write_text(page(runs, live), errors="backslashreplace")  # a path need not be UTF-8


def page(runs, live=0, more=()):
    """The text of the page. more: see charts."""
    data = {
        "live": [live, time.time()] if live else [],
        "charts": charts(runs, more),
        "runs": [_run_data(run) for run in runs],
    }
    # base64 has no "<": the browser reads no text of a model as HTML
    text = json.dumps(data, allow_nan=False)  # a browser cannot read NaN
    packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    texts = {
        "TITLE": html.escape(", ".join(run["name"] for run in runs)),
        "SUMMARY": summary(runs),
        "SETTINGS": settings(runs),
        "DATA": packed,
    }
    # in one pass: a run may have one of these names
    return re.sub(
        "@@(TITLE|SUMMARY|SETTINGS|DATA)@@", lambda match: texts[match[1]], TEMPLATE.read_text())


def _run_data(run):
    """What the page knows of a run."""
    parts = {name: run[name] for name in ("name", "config")}
    parts["rollouts"] = rollouts(run)
    parts["metrics"] = run["metrics"]
    return parts | questions(read(run["path"], "eval.jsonl"))
