"""What if? Changes one cause in one step of a finished run, beside the unchanged run.

    OMP_NUM_THREADS=1 python -m examples.what_if runs/a --step 12 --rollout 37 --reward 0
    ... --rollout 37 --drop      --group 4 --drop      --group 4 --redraw 7      --clip_high 0.28

The run is replayed from its newest checkpoint at or before the step, or from step 0, to --more
steps after it, and compared with its records bit for bit. Then these steps run again with the cause
changed: a reward; a rollout or group that is not trained; a group sampled with another seed; any
flag of the script but --rollout. Rollouts are numbered as in rollouts.jsonl, groups as the prompts.
--watch 0 5 names held-out answers of the last evaluation, whose log-probs are shown.
"""
import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import data
import nano_rlvr as nr
from bench import common, diff, replay
from runtime import evaluation, stop, trainer
from runtime.batch import flatten
from runtime.messages import RunError
from runtime.report import page

SEEN = "what_if.jsonl"  # in the folder of a branch: what is shown of each step
CHARTS = [
    ("Log-prob of held-out answers", "nats, of the whole answer", "answer .*", {}, ""),
    ("Accuracy before each step", "greedy, held out", "accuracy by step", page.SHARE, ""),
    ("Distance of the weights", "relative to their norm", "distance", page.FROM_ZERO, ""),
]
CAUSES = [  # what may be given together
    {"--rollout", "--reward"},
    {"--rollout", "--drop"},
    {"--group", "--reward"},
    {"--group", "--drop"},
    {"--group", "--redraw"},
]


def change(run, step, sampled, args):
    """Changes the rewards or the completions of the chosen rollouts of a step, in place."""
    if args.rollout is not None:
        chosen = [flatten(sampled)[args.rollout]]
    elif args.group is not None:
        chosen = sampled[args.group]
    else:
        return
    if args.redraw is not None:
        redraw(run, step, chosen, args)
        return
    for r in chosen:
        r.reward = args.reward  # None is "no reward": in no mean, and not trained


def redraw(run, step, group, args):
    """Samples a group again, with another seed, in place."""
    cfg = run.cfg
    draw, i = divmod(args.group, cfg.prompts)
    number = step * (1 + cfg.resample) + draw
    example = data.batch_at(run.train_set, number, cfg.prompts, cfg.seed)[i]
    seed = data.request_seed(args.redraw, step, draw, i)
    group[:] = run.sample(
        run.llm,
        [example["prompt_ids"]],
        cfg.samples,
        cfg.temperature,
        cfg.max_tokens,
        [seed],
        examples=[example],
        top_p=cfg.top_p)
    nr.score(group, [example], run.verifier, step)


def branch(run, args):
    """The script's loop up to the step args.end, with the change, and a row of SEEN per step."""
    tokenizer = run.llm.get_tokenizer()
    answers = replay.answers_of(args.run, args.watch, run.cfg, run.eval_set, tokenizer)

    def look(step, sampled=()):
        logps = trainer.token_logps(run.policy, answers, run.cfg)
        metrics, _ = evaluation.evaluate(run, nr.score)
        row = {
            "step": step,
            "accuracy": metrics["eval/accuracy"],
            "logps": list(map(sum, logps)),
            "tokens": [],
        }
        for r in flatten(sampled):
            row["tokens"].append(tokenizer.convert_ids_to_tokens(r.completion))
        with (run.log.folder / SEEN).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def collect_rollouts(run, step):
        if step == args.end:
            raise replay.Enough
        split, sampled = nr.collect_rollouts(run, step)
        if step == args.step:
            change(run, step, sampled, args)
        if step >= args.step:
            look(step, sampled)
        return split, sampled

    with contextlib.suppress(replay.Enough):
        nr.train(run, collect_rollouts=collect_rollouts)
    look(args.end)


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
    """-> (lines for the screen, {folder of a branch: {metric: points for the page}})."""
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
        accuracies = f"{row['accuracy']:.1%} | {other['accuracy']:.1%}"
        cells = [step, f"{apart:.2e}", accuracies]
        for x, y in zip(row["logps"], other["logps"]):
            cells.append(f"{x:.4f} | {y:.4f}")
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


def checked(args, flags):
    """The words of the one cause. Raises ValueError for what cannot be asked."""
    cfg = nr.parse_config(["--resume", str(args.run)])
    args.end = min(args.step + args.more, cfg.steps)
    groups = cfg.prompts * (1 + cfg.resample)
    numbers = {"rollout": groups * cfg.samples, "group": groups}
    words = ["--drop"] * args.drop
    for name, count in numbers.items():
        i = getattr(args, name)
        if i is not None:
            words += [f"--{name}", str(i)]
            if not 0 <= i < count:
                raise ValueError(f"--{name} {i}: a step has the numbers 0 to {count - 1}")
    for name in ("reward", "redraw"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", f"{value:g}"]
    kinds = {word for word in words if word.startswith("--")}
    is_flag = bool(flags) and not kinds
    is_sample = not flags and kinds in CAUSES
    if not is_flag and not is_sample:
        raise ValueError("choose one cause: --rollout or --group with --reward or --drop, --group "
                         "with --redraw, or flags of the script")
    ranks = common.read_config(args.run)["world"]
    if not 0 <= args.step < cfg.steps or ranks > 1:
        raise ValueError(f"--step {args.step}: a run of one process has steps 0 to {cfg.steps - 1}")
    return words or flags


def main(args, flags):
    """Runs both branches and shows what differs."""
    cause = checked(args, flags)
    out = args.run.with_name(f"{args.run.name}-what-if")
    name = re.sub(r"\W+", "-", f"step {args.step} {' '.join(cause)}")
    unchanged = out / "unchanged"
    changed = out / name
    start = replay.start_of(args.run, args.step)
    make_branch(args, args.run, start, unchanged)
    proof = replay.proof(args.run, unchanged, start)
    print(proof, flush=True)
    make_branch(args, unchanged, args.step, changed, *cause, "--resume_force")
    found, points = compare(unchanged, changed, args.watch)
    lines = [proof, f"changed in step {args.step}: {' '.join(cause)}", *found]
    replay.write_page(points, CHARTS, lines, Path(f"{changed}.html"))
    print(*lines[1:], f"page: {changed}.html", sep="\n")


def make_branch(args, source, start, folder, *words):
    """Forks a run at a step and goes on to args.end, in a process of its own."""
    replay.fork(source, start, folder)
    print(f"{folder}: steps {start} to {args.end} ...", flush=True)
    own = [args.run, "--step", args.step, "--end", args.end, "--watch", *args.watch]
    own += [*words, "--resume", folder, *replay.KEEP_ALL]
    command = [sys.executable, "-m", "examples.what_if", *map(str, own)]
    with Path(f"{folder}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log)
    if done.returncode:
        last = Path(log.name).read_text().splitlines()[-1]
        raise RunError(f"{last.removeprefix('nano_rlvr: ')} ({log.name})")


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--more", type=int, default=5)
    parser.add_argument("--watch", type=int, nargs="+", default=[0, 1, 2])
    for name, kind in {"rollout": int, "group": int, "reward": float, "redraw": int}.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--drop", action="store_true")
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)  # of a branch
    args, flags = parser.parse_known_args()
    args.run = args.run.resolve()
    if args.end is not None:
        nr.main(flags, functools.partial(branch, args=args))
    else:
        with stop.with_one_line(ValueError, OSError):
            main(args, flags)
