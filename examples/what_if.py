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
    ("Distance of the weights", "relative to their norm", "distance", page.FROM_ZERO, "")]


def change(run, step, sampled, args):
    """Changes the rewards or the completions of the chosen rollouts of a step, in place."""
    chosen = flatten(sampled) if args.group is None else sampled[args.group]
    if args.rollout is not None:
        chosen = [chosen[args.rollout]]
    if args.redraw is not None:
        cfg = run.cfg
        draw, i = divmod(args.group, cfg.prompts)
        number = step * (1 + cfg.resample) + draw
        example = data.batch_at(run.train_set, number, cfg.prompts, cfg.seed)[i]
        seed = data.request_seed(args.redraw, step, draw, i)
        chosen[:] = run.sample(
            run.llm, [example["prompt_ids"]], cfg.samples, cfg.temperature, cfg.max_tokens,
            [seed], examples=[example], top_p=cfg.top_p)
        nr.score(chosen, [example], run.verifier, step)
    elif args.drop or args.reward is not None:
        for r in chosen:
            r.reward = args.reward  # None is "no reward": in no mean, and not trained


def branch(run, args):
    """The script's loop up to the step args.end, with the change, and a row of SEEN per step."""
    tokenizer = run.llm.get_tokenizer()
    answers = replay.answers_of(args.run, args.watch, run.cfg, run.eval_set, tokenizer)

    def look(step, sampled=()):
        logps = trainer.token_logps(run.policy, answers, run.cfg)
        metrics, _ = evaluation.evaluate(run, nr.score)
        row = {"step": step, "accuracy": metrics["eval/accuracy"], "logps": list(map(sum, logps)),
               "tokens": [tokenizer.convert_ids_to_tokens(r.completion) for r in flatten(sampled)]}
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
        for i, (one, two) in enumerate(zip(row["tokens"], other["tokens"])):
            if one != two:
                place = len(os.path.commonprefix([one, two]))
                ends = [repr((*tokens, "no token")[place]) for tokens in (one, two)]
                return f"step {row['step']}, rollout {i}, token {place}: {' | '.join(ends)}"
    return "none"


def compare(unchanged, changed, watched):
    """-> (lines for the screen, {folder of a branch: {metric: points for the page}})."""
    rows, others = (common.read(folder, SEEN) for folder in (unchanged, changed))
    first = next(diff.differences(unchanged, changed), None)
    lines = [f"first difference: {diff.where(first) if first else 'none'}",
             f"first token that differs: {first_token(rows, others)}"]
    names = [f"answer {i}" for i in watched]
    table, points = [], {unchanged: {}, changed: {}}
    for row, other in zip(rows, others):
        saved = f"step-{row['step']}"
        apart = (diff.weights(unchanged / saved, changed / saved) or ("", 0.0))[1]
        pairs = [f"{x:.4f} | {y:.4f}" for x, y in zip(row["logps"], other["logps"])]
        accuracies = f"{row['accuracy']:.1%} | {other['accuracy']:.1%}"
        table.append([row["step"], f"{apart:.2e}", accuracies, *pairs])
        for folder, seen, x in ((unchanged, row, 0.0), (changed, other, apart)):
            shown = {"accuracy by step": seen["accuracy"], "distance": x}
            shown |= zip(names, seen["logps"])
            for name, y in shown.items():
                points[folder].setdefault(name, []).append([row["step"], y, y, y])
    head = ["before step", "weights apart", "accuracy", *(f"log-prob of {x}" for x in names)]
    return [*lines, common.table(head, table)], points


def checked(args, flags):
    """The words of the one cause. Raises ValueError for what cannot be asked."""
    cfg = nr.parse_config(["--resume", str(args.run)])
    args.end = min(args.step + args.more, cfg.steps)
    words = ["--drop"] * args.drop
    for name, most in (("rollout", cfg.prompts * cfg.samples), ("group", cfg.prompts)):
        if (i := getattr(args, name)) is not None:
            words += [f"--{name}", str(i)]
            if not 0 <= i < most * (1 + cfg.resample):
                raise ValueError(f"--{name} {i}: a step has the numbers 0 to {most - 1}")
    for name in ("reward", "redraw"):
        if (x := getattr(args, name)) is not None:
            words += [f"--{name}", f"{x:g}"]
    kinds = {word for word in words if word.startswith("--")}
    causes = [{who, how} for who in ("--rollout", "--group") for how in ("--reward", "--drop")]
    if (kinds or not flags) and (flags or kinds not in [*causes, {"--group", "--redraw"}]):
        raise ValueError("choose one cause: --rollout or --group with --reward or --drop, --group "
                         "with --redraw, or flags of the script")
    if not 0 <= args.step < cfg.steps or common.read_config(args.run)["world"] > 1:
        raise ValueError(f"--step {args.step}: a run of one process has steps 0 to {cfg.steps - 1}")
    return words or flags


def main(args, flags):
    """Runs both branches and shows what differs."""
    cause = checked(args, flags)
    out = args.run.with_name(f"{args.run.name}-what-if")
    name = re.sub(r"\W+", "-", f"step {args.step} {' '.join(cause)}")
    unchanged, changed = out / "unchanged", out / name
    start = replay.start_of(args.run, args.step)
    own = [args.run, "--step", args.step, "--end", args.end, "--watch", *args.watch]
    for source, at, folder, more in ((args.run, start, unchanged, []),
                                     (unchanged, args.step, changed, cause)):
        replay.fork(source, at, folder)
        print(f"{folder}: steps {at} to {args.end} ...", flush=True)
        words = [*own, *more, "--resume", folder, *replay.KEEP_ALL, *["--resume_force"] * len(more)]
        with Path(f"{folder}.log").open("w") as log:
            command = [sys.executable, "-m", "examples.what_if", *map(str, words)]
            done = subprocess.run(command, stdout=log, stderr=log)
        if done.returncode:
            last = Path(log.name).read_text().splitlines()[-1]
            raise RunError(f"{last.removeprefix('nano_rlvr: ')} ({log.name})")
        if folder == unchanged:
            lines = [replay.proof(args.run, unchanged, start)]
            print(*lines, flush=True)
    found, points = compare(unchanged, changed, args.watch)
    lines += [f"changed in step {args.step}: {' '.join(cause)}", *found]
    replay.write_page(points, CHARTS, lines, Path(f"{changed}.html"))
    print(*lines[1:], f"page: {changed}.html", sep="\n")


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
