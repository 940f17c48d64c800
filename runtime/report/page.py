"""The page of a report: charts, tables and rollouts, which page.html draws.

At most 2,000 rollouts of a run are shown, see tokens.shown.
"""
import base64
import gzip
import html
import json
import re
import time
from pathlib import Path

from runtime.records import STAGES, read, replaced, stage_seconds
from runtime.report.curve import points, series, write_curve
from runtime.report.tokens import shown

TEMPLATE = Path(__file__).with_suffix(".html")
QUESTIONS = 1000  # of the evaluation, the first ones, are shown


def check_regular(folder):
    """Raises ValueError if a folder has a file, such as a pipe, whose reading may never end."""
    for path in Path(folder).rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is no regular file: reading it may never end")


def read_run(path):
    """A run folder as a dict."""
    check_regular(path)
    path = Path(path)
    about, rows = json.loads((path / "config.json").read_text()), read(path)
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: points(rows, name) for name in names if name != "step"}
    return {"path": path, "name": path.resolve().name, "about": about, "config": about["config"],
            "rows": rows, "metrics": {name: found[name] for name in found if found[name]}}


def rollouts(run):
    """The rollouts for the page, each with the number of its group in the step."""
    samples, by_step = run["config"]["samples"], {}
    for r in read(run["path"], "rollouts.jsonl"):
        by_step.setdefault(r["step"], []).append(r)
    return [r | {"group": i // samples} for step, rows in by_step.items()
            for i, r in enumerate(shown(step, rows, samples, run["config"]["steps"]))]


def questions(answers):
    """The questions of the evaluation: the answers of the first and the last time, and which
    evaluations had a right one."""
    by_step = {}
    for a in answers:
        by_step.setdefault(a["step"], []).append(a)
    if len(by_step) < 2:
        return {"steps": [], "questions": []}
    asked, rows = list(zip(*(by_step[step] for step in sorted(by_step)))), []
    for times in asked[:QUESTIONS]:
        pair = [[bool(a["right"]), a["completion"], a["finish"]] for a in (times[0], times[-1])]
        rows.append([times[0]["question"], times[0]["answer"], *pair,
                     [bool(a["right"]) for a in times]])
    return {"steps": sorted(by_step), "n": len(asked), "questions": rows}


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


def charts(runs):
    """The charts for the page, a dict each: those that the runs have numbers for."""
    keys, found = dict.fromkeys(name for run in runs for name in run["metrics"]), []
    for title, caption, pattern, how, hint in CHARTS:
        metrics = [key for key in keys if re.fullmatch(pattern, key)]
        if len(metrics) >= how.get("least", 1):
            found.append({"title": title, "caption": caption, "metrics": metrics, "hint": hint,
                          **how})
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

def write(folders, out, live=0):
    """Writes the report of these run folders, or only the curve if `out` ends in .png.

    live: the seconds after which a browser reads it again, because the run goes on; 0: never."""
    runs = list(map(read_run, folders))
    if len({run["name"] for run in runs}) < len(runs):  # the page finds a run by its name
        for i, run in enumerate(runs):
            run["name"] = f"{i}: {run['path']}"
    with replaced(Path(out)) as part:
        if part.suffix == ".png":
            write_curve(runs, part)
        else:
            part.write_text(page(runs, live), errors="backslashreplace")  # a path need not be UTF-8


def page(runs, live=0):
    """The text of the page."""
    data = {"live": [live, time.time()] if live else [], "charts": charts(runs), "runs": [
        {"name": run["name"], "config": run["config"], "rollouts": rollouts(run),
         "metrics": run["metrics"],
         **questions(read(run["path"], "eval.jsonl"))} for run in runs]}
    # base64 has no "<": the browser reads no text of a model as HTML
    text = json.dumps(data, allow_nan=False)  # a browser cannot read NaN
    packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    texts = {"TITLE": html.escape(", ".join(run["name"] for run in runs)),
             "SUMMARY": summary(runs), "SETTINGS": settings(runs), "DATA": packed}
    # in one pass: a run may have one of these names
    return re.sub("@@(TITLE|SUMMARY|SETTINGS|DATA)@@", lambda m: texts[m[1]], TEMPLATE.read_text())
