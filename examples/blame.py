"""Blame: which completions of which steps made a held-out answer right, or wrong?

    OMP_NUM_THREADS=1 python -m examples.blame runs/a --question 5

The steps --first to --last of the run (default: all) are made again, and compared with its records
bit for bit. Each rollout gets a score: by how much its part of the gradients moved the log-prob of
the answer that the last evaluation recorded, to first order. The --check 10 largest are compared
with replays without them.

First order: a rollout's gradient, from a pack of its own, times the derivative of the log-prob by
the gradient of its step. AdamW's moments carry a gradient into all later steps; `sensitivities`
follows it there. Three scores: "end" takes the gradient of the log-prob after the last step;
"fixed" does so, too, but holds AdamW's divisor and the clipping of the norm fixed; "path" also
holds them fixed, and takes the gradient of the log-prob before each step, as TracIn does
(arXiv:2002.08484). Scores "path" sum to the change of the log-prob. Scores "end" sum to about 0,
because AdamW's step stays the same if all gradients are doubled. None of the three knows that other
weights sample other tokens and have other gradients in the later steps.
"""
import contextlib
import copy
import functools
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr

import nano_rlvr as nr
from bench import common, diff, replay
from runtime import stop, trainer
from runtime.batch import collate, flatten
from runtime.messages import RunError

BETA1, EPS = 0.9, 1e-8  # of AdamW in nano_rlvr.start_deepspeed
NAMES = ("end", "fixed", "path")  # the scores
CHARTS = [("Scores of the rollouts of a step", "nats of the answer's log-prob, to first order",
           "helped|harmed|largest", {}, "")]


# ---- the replay

def take(run):
    """A snapshot of the trainer before the update of a step: weights, moments, progress."""
    tensors = {}
    for name, p in trainer.trained_parameters(run.policy).items():
        tensors[name] = {kind: trainer.get_tensor(p, kind).clone() for kind in trainer.KINDS}
    count = max(int(s["step"]) for s in trainer.adamw_states(run.policy))
    progress = dict(vars(run.checkpoints.progress))
    return SimpleNamespace(tensors=tensors, adamw_step=count, progress=progress, groups=[])


def put(run, snapshot):
    """Takes the trainer back to a snapshot. vLLM gets its weights when the loop begins."""
    for name, p in trainer.trained_parameters(run.policy).items():
        for kind, tensor in snapshot.tensors[name].items():
            trainer.set_tensor(p, kind, tensor)
    for state in trainer.adamw_states(run.policy):
        state["step"] = state["step"] * 0 + snapshot.adamw_step
    vars(run.checkpoints.progress).update(snapshot.progress)


def go_on(run, end, see=lambda step, groups: None, policy_loss=nr.policy_loss):
    """The script's loop from the step of the trainer to `end`. see(step, groups): gets the groups
    of each step before its update, and may change them."""
    def collect_rollouts(run, step):
        if step == end:
            raise replay.Enough
        split, sampled = nr.collect_rollouts(run, step)
        see(step, sampled)
        return split, sampled

    with contextlib.suppress(replay.Enough):
        nr.train(run, collect_rollouts=collect_rollouts, policy_loss=policy_loss)


def record(run, end):
    """Goes on to `end`. -> {step: snapshot} with the step's groups, lr and clipping; the last one,
    of `end`, has none of these."""
    snapshots = {}

    def see(step, groups):
        snapshots[step] = take(run)
        snapshots[step].groups = groups

    go_on(run, end, see)
    for row in run.log.rows:
        if row["step"] in snapshots:
            norm = row["grad_norm"] + 1e-6  # as DeepSpeed clips
            snapshot = snapshots[row["step"]]
            snapshot.lr = row["lr"]
            snapshot.clip = min(1.0, (run.cfg.max_grad_norm or norm) / norm)
    snapshots[end] = take(run)
    return snapshots


def check_weights(source, snapshots):
    """How many checkpoints of the run have the tensors of the snapshots. RunError: one differs."""
    saved = [step for step in diff.checkpoints(source) if step in snapshots]
    for step in saved:
        for name, tensors in snapshots[step].tensors.items():
            kept = load_file(source / f"step-{step}/trainer/{name}.safetensors")
            if not all(torch.equal(tensors[kind], kept[kind]) for kind in trainer.KINDS):
                raise RunError(f"the replay is not the run: step {step}, weights of {name}")
    return len(saved)


# ---- first order

def flat(snapshot, kind):
    """All values of a kind in one vector: (N,)."""
    parts = [tensors[kind].flatten() for tensors in snapshot.tensors.values()]
    return torch.cat(parts).double()  # (N,)


def gradient(run, loss):
    """The gradient of a loss, apart from that of the optimizer: (N,)."""
    parameters = trainer.trained_parameters(run.policy).values()
    parts = torch.autograd.grad(loss, list(parameters))
    return torch.cat([part.flatten() for part in parts])  # (N,)


def logprobs(run, answers):
    """The log-prob of each answer, a list."""
    return list(map(sum, trainer.token_logps(run.policy, answers, run.cfg)))


def answer_gradient(run, answer):
    """The gradient of the log-prob of an answer: (N,)."""
    logp, _ = run.policy.module(collate([answer], layout=run.cfg.layout))  # (R,)
    return gradient(run, logp.sum()).double()  # (N,)


def sensitivities(slopes, moments, steps, beta2, is_fixed=False):
    """The derivative of sum_k slopes_k . (AdamW's step k) by the gradient of each step: (N,) each.

    slopes: (N,) per step. moments: (first, second), (N,) each, before the first step and after each
    step. steps: per step its learning rate, AdamW's count (from 1) and the factor of the clipping.
    is_fixed: AdamW's divisor and this factor count as constants."""
    by_first = by_second = torch.zeros_like(slopes[0])  # (N,) derivatives by the moments
    found = []
    for k in reversed(range(len(steps))):
        lr, count, clip = steps[k]
        first, second = moments[k + 1]  # (N,), (N,)
        root = (second / (1 - beta2**count)).sqrt()  # (N,)
        rate = -lr / (1 - BETA1**count) / (root + EPS)  # (N,) d step / d first moment
        bend = -rate * first / (root + EPS) / (2 * root * (1 - beta2**count))  # (N,)
        by_first = slopes[k] * rate + BETA1 * by_first  # (N,)
        by_second = slopes[k] * bend.nan_to_num(0, 0, 0) + beta2 * by_second  # (N,)
        whole = (first - BETA1 * moments[k][0]) / (1 - BETA1)  # (N,) the step's gradient
        s = (1 - BETA1) * by_first  # (N,)
        if not is_fixed:
            s = s + 2 * (1 - beta2) * whole * by_second  # (N,)
        if clip < 1 and not is_fixed:  # a clipped gradient keeps its length
            unit = whole / whole.norm()  # (N,)
            s = s - unit * (unit @ s)  # (N,)
        found.append((clip * s).float())
    return found[::-1]


def rollout_gradients(run, snapshot):
    """Yields (number, gradient (N,)) of each rollout that the step trained: its part of the loss.
    The trainer must be at the snapshot."""
    for i, r in enumerate(flatten(snapshot.groups)):
        if r.weight:
            batch = collate([r], layout=run.cfg.layout)
            nr.store_fixed_logps(run.policy, run.ref, [batch], run.cfg)
            logp, batch.entropy = run.policy.module(batch)  # (R,), (R,)
            loss, _ = nr.policy_loss(logp, batch.old, batch.ref, batch, run.cfg)  # ()
            yield i, gradient(run, loss)  # (N,)


def vectors(run, snapshots, answer, names=NAMES):
    """{name of a score: (N,) per step}: times a rollout's gradient they are its score."""
    *steps, end = snapshots.values()
    moments = [(flat(s, "exp_avg"), flat(s, "exp_avg_sq")) for s in snapshots.values()]
    settings = [(s.lr, s.adamw_step + 1, s.clip) for s in steps]
    path = []
    if "path" in names:
        for snapshot in steps:
            put(run, snapshot)
            path.append(answer_gradient(run, answer))
    put(run, end)
    last = [answer_gradient(run, answer)] * len(steps)
    slopes = {"end": last, "fixed": last, "path": path}
    return {name: sensitivities(slopes[name], moments, settings, run.cfg.beta2, name != "end")
            for name in names}


def scores(run, snapshots, wanted):
    """{(step, rollout): (a score for each of `wanted`,)}; wanted: lists with (N,) per step."""
    found = {}
    for k, step in enumerate(list(snapshots)[:-1]):
        put(run, snapshots[step])
        matrix = torch.stack([of[k] for of in wanted])  # (wanted, N)
        for i, g in rollout_gradients(run, snapshots[step]):
            found[step, i] = (matrix @ g).tolist()
    return found


# ---- exact

def without(run, snapshots, chosen, is_sampled=True):
    """Replays from the step of the rollouts `chosen`, pairs (step, number) of one step, to the end,
    without their part of its gradient. is_sampled False: without their rewards, too: then the
    others of the group have other advantages."""
    step, end = chosen[0][0], max(snapshots)
    dropped = []

    def see(now, groups):
        if now == step:
            rollouts = flatten(groups)
            dropped.extend(rollouts[i] for _, i in chosen)
        for r in dropped:
            r.reward = r.reward if is_sampled else None

    def policy_loss(logp, old, ref, batch, cfg):
        batch = copy.copy(batch)
        is_dropped = [any(r is other for other in dropped) for r in batch.rollouts]
        mask = torch.tensor(is_dropped)[batch.sequence_ids]  # (R,)
        batch.weight = batch.weight.masked_fill(mask, 0.0)  # (R,)
        return nr.policy_loss(logp, old, ref, batch, cfg)

    sizes = run.log.sizes()
    put(run, snapshots[step])
    go_on(run, end, see, policy_loss)
    run.log.cut_back(sizes)


def is_right(run, example):
    """Whether the greedy completion of a question is right."""
    greedy = run.sample(run.llm, [example["prompt_ids"]], 1, 0.0, run.cfg.max_tokens,
                        examples=[example])
    nr.score(greedy, [example], run.verifier)
    return nr.stats.is_right(greedy[0])


# ---- the run

def blame(run, args):
    """A train function: the replay, the scores, the checks, lines and a page."""
    source, folder = args.run, run.log.folder
    [answer] = replay.answers_of(source, [args.question], run.cfg, run.eval_set,
                                 run.llm.get_tokenizer())
    go_on(run, args.first)
    snapshots = record(run, args.last + 1)
    lines = [replay.proof(source, folder, args.start),
             f"weights and moments of {check_weights(source, snapshots)} checkpoints: equal"]
    example = run.eval_set[args.question]
    verdict = "right" if is_right(run, example) else "wrong"
    [after] = logprobs(run, [answer])
    wanted = vectors(run, snapshots, answer)
    put(run, snapshots[args.first])
    [before] = logprobs(run, [answer])
    found = scores(run, snapshots, list(wanted.values()))
    total = sum(values[-1] for values in found.values())
    lines.append(f"question {args.question}: {example['question']!r}, answer {answer.text!r}, is "
                 f"{verdict}; its log-prob went from {before:.3f} to {after:.3f}, the scores "
                 f"'path' of {len(found)} rollouts sum to {total:+.3f}")
    lines += check(run, snapshots, found, answer, example, after, args.check)
    out = folder.with_suffix(".html")
    replay.write_page({folder: per_step(found)}, CHARTS, lines, out)
    print(*lines, f"page: {out}", sep="\n")


def check(run, snapshots, found, answer, example, after, most):
    """Lines with the largest scores beside replays without these rollouts."""
    run.eval_set = [example]  # evaluations change no weight: the others would cost time
    largest = sorted(found, key=lambda key: -abs(found[key][0]))[:most]
    rows, exact = [], []
    for key in largest:
        r = flatten(snapshots[key[0]].groups)[key[1]]
        effects = []
        for is_sampled in (True, False):
            without(run, snapshots, [key], is_sampled)
            effects.append(after - logprobs(run, [answer])[0])
        exact.append(effects)
        numbers = [f"{x:+.5f}" for x in (*found[key], *effects)]
        rows.append([*key, r.reward, f"{r.advantages[0]:+.2f}", repr(r.text)[:60], *numbers,
                     "right" if is_right(run, example) else "wrong"])
    head = ["step", "rollout", "reward", "advantage", "completion", *NAMES,
            "exact: without its gradient", "exact: never sampled", "then the answer is"]
    lines = [common.table(head, rows)]
    for name, firsts in zip(NAMES, zip(*(found[key] for key in largest))):
        ranks = [spearmanr(firsts, seconds).statistic for seconds in zip(*exact)]
        lines.append(f"rank correlation of {name} with exact: {ranks[0]:+.2f} without its gradient,"
                     f" {ranks[1]:+.2f} never sampled")
    return lines


def per_step(found):
    """{metric: points of the page}: sums of the positive and negative scores, and the largest."""
    points = {"helped": [], "harmed": [], "largest": []}
    for step in sorted({step for step, _ in found}):
        values = [x[0] for (now, _), x in found.items() if now == step]
        helped = sum(x for x in values if x > 0)
        for name, x in zip(points, (helped, sum(values) - helped, max(values, key=abs))):
            points[name].append([step, x, x, x])
    return points


def start(args, train):
    """Replays the run in <run>-<name of the train function>, with train(run, args) as the loop."""
    cfg = nr.parse_config(["--resume", str(args.run)])
    args.last = cfg.steps - 1 if args.last is None else args.last
    if not 0 <= args.first <= args.last < cfg.steps:
        raise ValueError(f"--first {args.first} --last {args.last}: the run has {cfg.steps} steps")
    if cfg.epochs * cfg.minibatches > 1 or common.read_config(args.run)["world"] > 1:
        raise ValueError("blame needs a run of one process with one update per step")
    args.start = replay.start_of(args.run, args.first)
    folder = args.run.with_name(f"{args.run.name}-{train.__name__}")
    replay.fork(args.run, args.start, folder)
    flags = ["--resume", str(folder), *"--save_every -1 --wandb off".split()]
    nr.main(flags, functools.partial(train, args=args))


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path)
    for name, default in {"question": 0, "first": 0, "last": None, "check": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.run = args.run.resolve()
    with stop.with_one_line(ValueError, OSError):
        start(args, blame)
