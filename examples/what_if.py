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
import re
import subprocess
import sys
from pathlib import Path

import data
import nano_rlvr as nr
from bench import common, replay
from runtime import evaluation, stop, trainer
from runtime.batch import flatten
from runtime.messages import RunError
from runtime.report import page

CHARTS = [
    ("Log-prob of held-out answers", "nats, of the whole answer", "answer .*", {}, ""),
    ("Accuracy before each step", "greedy, held out", "accuracy by step", page.SHARE, ""),
    ("Distance of the weights", "relative to their norm", "distance", page.FROM_ZERO, ""),
]


def change(run, step, sampled, args):
    """Changes the rewards or the completions of the chosen rollouts of a step, in place."""
    if args.redraw is not None:
        redraw(run, step, sampled[args.group], args)
        return
    chosen = []
    if args.rollout is not None:
        chosen = [flatten(sampled)[args.rollout]]
    if args.group is not None:
        chosen = sampled[args.group]
    for r in chosen:
        r.reward = args.reward  # None with --drop: "no reward" is in no mean, and not trained


def redraw(run, step, group, args):
    """Samples a group again, with another seed, in place."""
    cfg = run.cfg
    draw, i = divmod(args.group, cfg.prompts)
    number = step * (1 + cfg.resample) + draw
    example = data.batch_at(run.train_set, number, cfg.prompts, cfg.seed)[i]
    seed = data.request_seed(args.redraw, step, draw, i)
    prompts = [example["prompt_ids"]]
    group[:] = run.rollout(
        run.llm,
        prompts,
        cfg.samples,
        cfg.temperature,
        cfg.max_tokens,
        [seed],
        examples=[example],
        top_p=cfg.top_p)
    nr.score(group, [example], run.verifier, step)


def branch(run, args):
    """The script's loop up to the step args.end, with the change; a row of replay.SEEN per step."""
    tokenizer = run.llm.get_tokenizer()
    answers = replay.answers_of(args.run, args.watch, run.cfg, run.eval_set, tokenizer)

    def look(step, sampled=()):
        logps = trainer.token_logps(run.policy, answers, run.cfg)
        metrics, _ = evaluation.evaluate(run, nr.score)
        tokens = [tokenizer.convert_ids_to_tokens(r.completion) for r in flatten(sampled)]
        row = {
            "step": step,
            "accuracy": metrics["eval/accuracy"],
            "logps": list(map(sum, logps)),
            "tokens": tokens,
        }
        with (run.log.folder / replay.SEEN).open("a") as file:
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


def cause_parser():
    """Reads the cause. Flags of the script are left over."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rollout", type=int)
    where.add_argument("--group", type=int)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--reward", type=float)
    what.add_argument("--drop", action="store_true")
    what.add_argument("--redraw", type=int)
    return parser


def check(args, flags, cfg, ranks):
    """Raises ValueError for what cannot be asked."""
    groups = cfg.prompts * (1 + cfg.resample)
    if ranks > 1 or not 0 <= args.step < cfg.steps:
        raise ValueError(f"--step {args.step}: a run of one process has steps 0 to {cfg.steps - 1}")
    for name, count in {"rollout": groups * cfg.samples, "group": groups}.items():
        number = getattr(args, name)
        if number is not None and not 0 <= number < count:
            raise ValueError(f"--{name} {number}: a step has the numbers 0 to {count - 1}")
    has_place = args.rollout is not None or args.group is not None
    has_change = args.drop or args.reward is not None or args.redraw is not None
    has_flags = bool(flags)
    can_redraw = args.redraw is None or args.group is not None
    if has_place != has_change or has_place == has_flags or not can_redraw:
        raise ValueError("choose one cause: --rollout or --group with --reward or --drop, --group "
                         "with --redraw, or flags of the script")


def main(args, cause):
    """Runs both branches and shows what differs."""
    out = args.run.with_name(f"{args.run.name}-what-if")
    name = re.sub(r"\W+", "-", f"step {args.step} {' '.join(cause)}")
    unchanged = out / "unchanged"
    changed = out / name
    start = replay.start_of(args.run, args.step)
    make_branch(args, args.run, start, unchanged)
    proof = replay.proof(args.run, unchanged, start)
    print(proof, flush=True)
    make_branch(args, unchanged, args.step, changed, *cause, "--resume_force")
    found, points = replay.compare(unchanged, changed, args.watch)
    lines = [proof, f"changed in step {args.step}: {' '.join(cause)}", *found]
    replay.write_page(points, CHARTS, lines, Path(f"{changed}.html"))
    print(*lines[1:], f"page: {changed}.html", sep="\n")


def make_branch(args, source, start, folder, *cause):
    """Forks a run at a step and goes on to args.end, in a process of its own."""
    replay.fork(source, start, folder)
    print(f"{folder}: steps {start} to {args.end} ...", flush=True)
    words = [args.run, "--step", args.step, "--end", args.end, "--watch", *args.watch]
    words += [*cause, "--resume", folder, *replay.KEEP_ALL]
    command = [sys.executable, "-m", "examples.what_if", *map(str, words)]
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
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)  # of a branch
    args, cause = parser.parse_known_args()
    args, flags = cause_parser().parse_known_args(cause, args)
    args.run = args.run.resolve()
    if args.end is not None:
        nr.main(flags, functools.partial(branch, args=args))
    else:
        with stop.with_one_line(ValueError, OSError):
            cfg = nr.parse_config(["--resume", str(args.run)])
            check(args, flags, cfg, common.read_config(args.run)["world"])
            args.end = min(args.step + args.more, cfg.steps)
            main(args, cause)
