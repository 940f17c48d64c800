"""Replays of a finished run: examples/what_if.py and examples/blame.py share this.

A run follows from its flags. So it can be made again from a checkpoint, or from step 0, and proof()
says whether the replay is the run. Equal bits need one thread: OMP_NUM_THREADS=1.
"""
import html
import os
import shutil
import tempfile
from types import SimpleNamespace

import torch

from bench import common, diff
from examples.sft import as_rollout
from runtime import checkpoint, trainer
from runtime.log import LOGS
from runtime.messages import RunError
from runtime.report import page

KEEP_ALL = "--save_every 1 --keep 100000 --wandb off".split()  # the weights before every step
SEEN = "what_if.jsonl"  # in the folder of a branch: what is shown of each step


class Enough(Exception):
    """Ends a replay after its last step: another --steps would change the learning rate."""


def start_of(run, step):
    """The step of the newest whole checkpoint of a run at or before a step; 0 is the start.

    Prints which flag would have kept one."""
    for saved in reversed(checkpoint.on_disk(run)):
        if saved <= step and not checkpoint.damage(run / f"step-{saved}"):
            return saved
    if step:
        print(f"no checkpoint at or before step {step}: --save_every {step} --keep 1000 would have "
              "kept one. The replay begins at step 0.", flush=True)
    return 0


def fork(run, step, folder):
    """Copies a run up to its checkpoint of this step into a new folder, in which it continues.

    An old folder of this name is deleted. Step 0 has no checkpoint: the copy begins there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = ["config.json", "inputs.sha256"]
    if step:
        shutil.copytree(run / f"step-{step}", folder / f"step-{step}")
        names += LOGS
    for name in names:
        shutil.copy(run / name, folder)


def on_disk(tensors, folder):
    """A dict or list of tensors, read from a file without a name. The system may take the memory of
    such tensors for other things, because it can read the file again."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        torch.save(tensors, file.name)
        return torch.load(file.name, mmap=True)


def take(run):
    """A snapshot of the trainer before the update of a step: weights, moments, progress."""
    snapshot = {}
    for name, p in trainer.trained_parameters(run.policy).items():
        tensors = {kind: trainer.get_tensor(p, kind) for kind in trainer.KINDS}
        snapshot[name] = on_disk(tensors, run.log.folder)
    counts = [int(state["step"]) for state in trainer.adamw_states(run.policy)]
    return SimpleNamespace(
        tensors=snapshot,
        adamw_step=max(counts),
        progress=dict(vars(run.checkpoints.progress)),
        groups=[])


def put(run, snapshot):
    """Takes the trainer back to a snapshot. vLLM gets its weights when the loop begins."""
    for name, p in trainer.trained_parameters(run.policy).items():
        for kind, tensor in snapshot.tensors[name].items():
            trainer.set_tensor(p, kind, tensor)
    for state in trainer.adamw_states(run.policy):
        state["step"] = state["step"] * 0 + snapshot.adamw_step
    vars(run.checkpoints.progress).update(snapshot.progress)


def proof(run, replay, start):
    """A line that says how much of a replay, which began at step `start`, the run has recorded.

    Raises RunError with the first value that is not equal bit for bit."""
    recorded = diff.values(run)
    made = diff.values(replay)
    steps = [step for step in made if step >= start and step in recorded]
    for found in diff.differences(run, replay):
        if found.step in steps or found.stage == "weights":
            raise RunError(f"the replay is not the run: {diff.where(found)}. Equal bits need "
                           "OMP_NUM_THREADS=1 in both, the same machine, versions and code")
    if not steps:
        return "the run has no record of the replayed steps: nothing is proved"
    count = sum(len(made[step]) for step in steps)
    saved = diff.checkpoints(run).keys() & diff.checkpoints(replay).keys()
    kept = sum(step > start for step in saved)
    return (f"the replay is the run: {count:,} values of steps {min(steps)} to {max(steps)} and "
            f"the weights of {kept} checkpoints are equal bit for bit")


def answers_of(run, questions, cfg, eval_set, tokenizer):
    """Held-out answers as the last evaluation of a run recorded them, as Rollouts.

    questions: their numbers. Raises RunError if there is no such question."""
    rows = common.read(run, "eval.jsonl")
    rows = [row for row in rows if row["step"] == rows[-1]["step"]]
    if not 0 <= min(questions) <= max(questions) < len(rows):
        raise RunError(f"{run} has {len(rows)} held-out answers, which are numbered from 0")
    return [as_rollout(eval_set[i], rows[i]["completion"], tokenizer, cfg.template)
            for i in questions]


def first_token(rows, others):
    """Where the samples of two branches part, as text: step, rollout, place, both tokens."""
    for row, other in zip(rows, others):
        pairs = zip(row["tokens"], other["tokens"])
        for i, (one, two) in enumerate(pairs):
            if one == two:
                continue
            place = len(os.path.commonprefix([one, two]))
            first, second = ((*tokens, "no token")[place] for tokens in (one, two))
            return f"step {row['step']}, rollout {i}, token {place}: {first!r} | {second!r}"
    return "none"


def compare(unchanged, changed, watched):
    """-> (lines for the screen, {folder of a branch: {metric: points for the page}}).

    In the table "a → b" is the unchanged branch's value and the changed one's."""
    rows = common.read(unchanged, SEEN)
    others = common.read(changed, SEEN)
    first = next(diff.differences(unchanged, changed), None)
    where = diff.where(first) if first else "none"
    names = [f"answer {i}" for i in watched]
    head = ["before step", "weights apart", "accuracy"]
    head += [f"log-prob of {name}" for name in names]
    table = []
    points = {unchanged: {}, changed: {}}
    for row, other in zip(rows, others):
        step = row["step"]
        saved = f"step-{step}"
        _, apart = diff.weights(unchanged / saved, changed / saved) or ("", 0.0)
        accuracies = f"{row['accuracy']:.1%} → {other['accuracy']:.1%}"
        cells = [step, f"{apart:.2e}", accuracies]
        for x, y in zip(row["logps"], other["logps"]):
            cells.append(f"{x:.4f} → {y:.4f}")
        table.append(cells)
        add_points(points[unchanged], step, row, 0.0, names)
        add_points(points[changed], step, other, apart, names)
    lines = [
        f"first difference: {where}",
        f"first token that differs: {first_token(rows, others)}",
        common.table(head, table),
    ]
    return lines, points


def add_points(points, step, row, distance, names):
    """Adds a step of a branch to its {metric: points for the page}."""
    values = {"accuracy by step": row["accuracy"], "distance": distance}
    values |= zip(names, row["logps"])
    for name, value in values.items():
        points.setdefault(name, []).append([step, value, value, value])


def write_page(points, charts, lines, out):
    """The report of some runs, with lines and charts of ours before its own.

    points: {folder of a run: {metric: [[step, value, low, high], ...]}}. charts: as page.CHARTS."""
    runs = list(map(page.read_run, points))
    for run, more in zip(runs, points.values()):
        run["metrics"] |= more
    told = html.escape("\n".join(lines))
    place = '<div id="verdict">'
    out.write_text(page.page(runs, more=charts).replace(place, f"<pre>{told}</pre>{place}", 1))
