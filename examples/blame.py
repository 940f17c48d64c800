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

import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr

import nano_rlvr as nr
from bench import common, diff, replay
from runtime import stop, trainer
from runtime.batch import collate, flatten
from runtime.messages import RunError

BETA1, EPS = 0.9, 1e-8  # of AdamW in nano_rlvr.start_deepspeed
PART = 2**22  # values of a vector that are in float64 at a time
NAMES = ("end", "fixed", "path")  # the scores
TITLE = "Scores of the rollouts of a step"
UNIT = "nats of the answer's log-prob, to first order"
CHARTS = [(TITLE, UNIT, "helped|harmed|largest", {}, "")]


# ---- the replay

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
        snapshots[step] = replay.take(run)
        snapshots[step].groups = groups

    go_on(run, end, see)
    for row in run.log.rows:
        if row["step"] in snapshots:
            norm = row["grad_norm"] + 1e-6  # as DeepSpeed clips
            snapshot = snapshots[row["step"]]
            snapshot.lr = row["lr"]
            snapshot.clip = min(1.0, (run.cfg.max_grad_norm or norm) / norm)
    snapshots[end] = replay.take(run)
    return snapshots


def check_weights(source, snapshots):
    """How many checkpoints of the run have the tensors of the snapshots. RunError: one differs."""
    saved = [step for step in diff.checkpoints(source) if step in snapshots]
    for step in saved:
        for name, tensors in snapshots[step].tensors.items():
            kept = load_file(source / f"step-{step}/trainer/{name}.safetensors")
            for kind in trainer.KINDS:
                if not torch.equal(tensors[kind], kept[kind]):
                    raise RunError(f"the replay is not the run: step {step}, {kind} of {name}")
    return len(saved)


# ---- first order

# A vector of all weights is a list of parts, (n,) each. So only parts are made in float64. All
# vectors but a rollout's gradient lie on disk, because their memory is many times the model's.

def split(tensors):
    """The values of some tensors as a vector: parts of at most PART values."""
    parts = []
    for tensor in tensors:
        parts += tensor.flatten().split(PART)
    return parts


def moments_of(snapshot):
    """AdamW's first and second moment of a snapshot, two vectors."""
    moments = []
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors = [of[kind] for of in snapshot.tensors.values()]
        moments.append(split(tensors))
    return moments


def gradient(run, loss):
    """The gradient of a loss, apart from that of the optimizer: a vector."""
    parameters = trainer.trained_parameters(run.policy).values()
    return split(torch.autograd.grad(loss, list(parameters)))


def logprobs(run, answers):
    """The log-prob of each answer, a list."""
    of_tokens = trainer.token_logps(run.policy, answers, run.cfg)
    return list(map(sum, of_tokens))


def answer_gradient(run, answer):
    """The gradient of the log-prob of an answer: a vector."""
    pack = collate([answer], layout=run.cfg.layout)
    logp, _ = run.policy.module(pack)  # (R,)
    return replay.on_disk(gradient(run, logp.sum()), run.log.folder)


def gradient_of_step(moments, k, i):
    """Part i of the gradient that AdamW has got in step k: (n,)."""
    befores, _ = moments[k]
    firsts, _ = moments[k + 1]
    before = befores[i].double()  # (n,)
    first = firsts[i].double()  # (n,)
    return (first - BETA1 * before) / (1 - BETA1)  # (n,)


def part_sensitivities(i, slopes, moments, steps, beta2, is_fixed):
    """Yields (k, part i of the derivative by the gradient of step k, without the clipping), from
    the last step to the first. The arguments: see sensitivities."""
    by_first = 0.0  # the derivative by the first moment, then (n,)
    by_second = 0.0  # and by the second
    for k in reversed(range(len(steps))):
        lr, count, _ = steps[k]
        firsts, seconds = moments[k + 1]
        first = firsts[i].double()  # (n,)
        second = seconds[i].double()  # (n,)
        slope = slopes[k][i].double()  # (n,)
        # the bias of both moments, as AdamW corrects it
        unbias_first = 1 - BETA1**count
        unbias_second = 1 - beta2**count
        root = (second / unbias_second).sqrt()  # (n,)
        divisor = root + EPS  # (n,)
        rate = -lr / unbias_first / divisor  # (n,) d step / d first moment
        bend = -rate * first / divisor / (2 * root * unbias_second)  # (n,) d step / d second
        bend = bend.nan_to_num(0, 0, 0)  # (n,) where the gradient was always 0
        by_first = slope * rate + BETA1 * by_first  # (n,)
        by_second = slope * bend + beta2 * by_second  # (n,)
        by_gradient = (1 - BETA1) * by_first  # (n,)
        if not is_fixed:
            whole = gradient_of_step(moments, k, i)  # (n,)
            by_gradient += 2 * (1 - beta2) * whole * by_second  # (n,)
        yield k, by_gradient


def sensitivities(slopes, moments, steps, beta2, is_fixed=False):
    """The derivative of sum_k slopes_k . (AdamW's step k) by the gradient of each step: a vector
    per step, in float32.

    slopes: a vector per step. moments: first and second, before the first step and after each step.
    steps: per step its learning rate, AdamW's count (from 1) and the factor of the clipping.
    is_fixed: AdamW's divisor and this factor count as constants."""
    count = len(slopes[0])
    found = [[None] * count for _ in steps]
    for i in range(count):
        for k, part in part_sensitivities(i, slopes, moments, steps, beta2, is_fixed):
            found[k][i] = part.float()  # (n,)
    for k, (_, _, clip) in enumerate(steps):
        if clip < 1 and not is_fixed:
            keep_length(found[k], moments, k)
        for part in found[k]:
            part *= clip  # (n,)
    return found


def keep_length(vector, moments, k):
    """Takes away, in place, what lies along the gradient of step k: clipped, it keeps its length.
    """
    along = 0.0
    square = 0.0
    for i, part in enumerate(vector):
        whole = gradient_of_step(moments, k, i)  # (n,)
        along += whole @ part.double()
        square += whole @ whole
    for i, part in enumerate(vector):
        part -= gradient_of_step(moments, k, i) * (along / square)  # (n,)


def rollout_gradients(run, snapshot):
    """Yields (number, gradient) of each rollout that the step trained: its part of the loss.
    The trainer must be at the snapshot."""
    for i, r in enumerate(flatten(snapshot.groups)):
        if r.weight:
            pack = collate([r], layout=run.cfg.layout)
            nr.store_fixed_logps(run.policy, run.ref, [pack], run.cfg)
            logp, pack.entropy = run.policy.module(pack)  # (R,), (R,)
            loss, _ = nr.policy_loss(logp, pack.old, pack.ref, pack, run.cfg)  # ()
            yield i, gradient(run, loss)


def vectors(run, snapshots, answer, names=NAMES):
    """{name of a score: a vector per step}: times a rollout's gradient they are its score."""
    *steps, end = snapshots.values()
    moments = list(map(moments_of, snapshots.values()))
    settings = [(s.lr, s.adamw_step + 1, s.clip) for s in steps]
    path = []
    if "path" in names:
        for snapshot in steps:
            replay.put(run, snapshot)
            path.append(answer_gradient(run, answer))
    replay.put(run, end)
    last = [answer_gradient(run, answer)] * len(steps)
    slopes = {"end": last, "fixed": last, "path": path}
    found = {}
    for name in names:
        is_fixed = name != "end"
        found[name] = []
        for vector in sensitivities(slopes[name], moments, settings, run.cfg.beta2, is_fixed):
            found[name].append(replay.on_disk(vector, run.log.folder))
    return found


def dot(vector, other):
    total = 0.0
    for a, b in zip(vector, other):
        total += (a @ b).item()
    return total


def scores(run, snapshots, wanted):
    """{(step, rollout): (a score for each of `wanted`,)}; wanted: lists with a vector per step."""
    found = {}
    for k, step in enumerate(list(snapshots)[:-1]):
        replay.put(run, snapshots[step])
        for i, g in rollout_gradients(run, snapshots[step]):
            found[step, i] = [dot(vectors[k], g) for vectors in wanted]
    return found


# ---- exact

def without(run, snapshots, chosen, is_sampled=True, share=1.0):
    """Replays from the step of the rollouts `chosen`, pairs (step, number) of one step, to the end.

    share: of the gradient of these rollouts, so much is left out. is_sampled False: their rewards
    are left out, too, and the others of the group have other advantages."""
    step, end = chosen[0][0], max(snapshots)
    dropped = []

    def see(now, groups):
        if now == step:
            rollouts = flatten(groups)
            dropped.extend(rollouts[i] for _, i in chosen)
        if not is_sampled:
            for r in dropped:
                r.reward = None

    def policy_loss(logp, old, ref, pack, cfg):
        pack = copy.copy(pack)
        names = set(map(id, dropped))
        is_dropped = [id(r) in names for r in pack.rollouts]
        mask = torch.tensor(is_dropped)[pack.sequence_ids]  # (R,)
        pack.weight = pack.weight * (1 - share * mask)  # (R,)
        return nr.policy_loss(logp, old, ref, pack, cfg)

    sizes = run.log.sizes()
    replay.put(run, snapshots[step])
    go_on(run, end, see, policy_loss)
    run.log.cut_back(sizes)


def is_right(run, example):
    """Whether the greedy completion of a question is right."""
    prompts = [example["prompt_ids"]]
    [greedy] = run.rollout(run.llm, prompts, 1, 0.0, run.cfg.max_tokens, examples=[example])
    nr.score([greedy], [example], run.verifier)
    return nr.stats.is_right(greedy)


# ---- the run

def blame(run, args):
    """A train function: the replay, the scores, the checks, lines and a page."""
    source = args.run
    folder = run.log.folder
    tokenizer = run.llm.get_tokenizer()
    [answer] = replay.answers_of(source, [args.question], run.cfg, run.eval_set, tokenizer)
    go_on(run, args.first)
    snapshots = record(run, args.last + 1)
    proof = replay.proof(source, folder, args.start)
    count = check_weights(source, snapshots)
    example = run.eval_set[args.question]
    verdict = "right" if is_right(run, example) else "wrong"
    [after] = logprobs(run, [answer])
    wanted = vectors(run, snapshots, answer)
    replay.put(run, snapshots[args.first])
    [before] = logprobs(run, [answer])
    found = scores(run, snapshots, list(wanted.values()))
    total = sum(values[-1] for values in found.values())
    lines = [
        proof,
        f"weights and moments of {count} checkpoints: equal",
        f"question {args.question}: {example['question']!r}, answer {answer.text!r}, is {verdict}; "
        f"its log-prob went from {before:.3f} to {after:.3f}, the scores 'path' of {len(found)} "
        f"rollouts sum to {total:+.3f}",
    ]
    lines += check(run, snapshots, found, answer, example, after, args.check)
    out = folder.with_suffix(".html")
    replay.write_page({folder: per_step(found)}, CHARTS, lines, out)
    print(*lines, f"page: {out}", sep="\n")


def check(run, snapshots, found, answer, example, after, most):
    """Lines with the largest scores beside replays without these rollouts."""
    run.eval_set = [example]  # evaluations change no weight: the others would cost time
    by_size = sorted(found, key=lambda key: abs(found[key][0]), reverse=True)
    largest = by_size[:most]
    rows = []
    no_gradient = []  # exact effects
    no_sample = []
    for step, number in largest:
        key = step, number
        r = flatten(snapshots[step].groups)[number]
        without(run, snapshots, [key])
        [left] = logprobs(run, [answer])
        no_gradient.append(after - left)
        without(run, snapshots, [key], is_sampled=False)
        [left] = logprobs(run, [answer])
        no_sample.append(after - left)
        verdict = "right" if is_right(run, example) else "wrong"
        numbers = list(found[key])
        numbers.append(no_gradient[-1])
        numbers.append(no_sample[-1])
        advantage = f"{r.advantages[0]:+.2f}"
        text = repr(r.text)[:60]
        cells = [step, number, r.reward, advantage, text]
        for x in numbers:
            cells.append(f"{x:+.5f}")
        cells.append(verdict)
        rows.append(cells)
    head = ["step", "rollout", "reward", "advantage", "completion", *NAMES,
            "exact: without its gradient", "exact: never sampled", "then the answer is"]
    lines = [common.table(head, rows)]
    for i, name in enumerate(NAMES):
        estimates = [found[key][i] for key in largest]
        one = spearmanr(estimates, no_gradient).statistic
        two = spearmanr(estimates, no_sample).statistic
        lines.append(f"rank correlation of {name} with exact: {one:+.2f} without its gradient, "
                     f"{two:+.2f} never sampled")
    return lines


def per_step(found):
    """{metric: points of the page}: sums of the positive and negative scores, and the largest."""
    points = {"helped": [], "harmed": [], "largest": []}
    ends = {}  # step -> the scores "end" of its rollouts
    for (step, _), of_rollout in found.items():
        ends.setdefault(step, []).append(of_rollout[0])
    for step, values in sorted(ends.items()):
        positive = [x for x in values if x > 0]
        helped = sum(positive)
        harmed = sum(values) - helped
        largest = max(values, key=abs)
        for name, x in zip(points, (helped, harmed, largest)):
            points[name].append([step, x, x, x])
    return points


def start(args, train):
    """Replays the run in <run>-<name of the train function>, with train(run, args) as the loop."""
    cfg = nr.parse_config(["--resume", str(args.run)])
    if args.last is None:
        args.last = cfg.steps - 1
    if not 0 <= args.first <= args.last < cfg.steps:
        raise ValueError(f"--first {args.first} --last {args.last}: the run has {cfg.steps} steps")
    ranks = common.read_config(args.run)["world"]
    updates = cfg.epochs * cfg.minibatches
    if updates > 1 or ranks > 1:
        raise ValueError("blame needs a run of one process with one update per step")
    args.start = replay.start_of(args.run, args.first)
    folder = args.run.with_name(f"{args.run.name}-{train.__name__}")
    replay.fork(args.run, args.start, folder)
    flags = ["--resume", str(folder), *"--save_every -1 --wandb off".split()]
    nr.main(flags, functools.partial(train, args=args))


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--question", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int)
    parser.add_argument("--check", type=int, default=10)
    args = parser.parse_args()
    args.run = args.run.resolve()
    with stop.with_one_line(ValueError, OSError):
        start(args, blame)
