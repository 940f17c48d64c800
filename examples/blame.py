"""Blame: which completions of which steps made a held-out answer right, or wrong?

    OMP_NUM_THREADS=1 python -m examples.blame runs/a --question 5 [--first 0] [--last 19]

The run is made again from its newest checkpoint at or before --first, and compared with its records
bit for bit. Then each rollout of these steps gets a score: the change of the log-prob of the answer
by this rollout, to first order. The largest --check 10 are compared with replays without them.

First order: the update of step k moves the log-prob of the answer by a_k . step_k, with a_k its
gradient before the update. AdamW's step is a function of its moments, and these of all gradients so
far. So the score of a rollout of step t is s_t . (its part of the gradient), where s_t is found
from the last step back (`sensitivities`). Adam's divisor depends on the gradient too: "fixed" leaves
this out. Neither knows that other weights sample other tokens and give other gradients later.
TracIn (arXiv:2002.08484) is this for SGD, without momentum.
"""
import contextlib
import functools
import html
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from scipy.stats import spearmanr

import nano_rlvr as nr
from bench import common, replay
from runtime import stop, trainer
from runtime.batch import collate, flatten
from runtime.report import page


@dataclass
class Snapshot:
    """The trainer before the update of a step."""
    tensors: dict  # {name of a parameter: {kind of trainer.KINDS: tensor}}
    adamw_step: int
    progress: dict
    lr: float = 0.0
    clip: float = 1.0  # what the clipping of the gradient's norm multiplied it with
    groups: list = field(default_factory=list)  # as trained: advantages and weights are filled


def take(run):
    """The Snapshot of the policy as it is."""
    tensors = {}
    for name, p in trainer.trained_parameters(run.policy).items():
        tensors[name] = {kind: trainer.get_tensor(p, kind).clone() for kind in trainer.KINDS}
    steps = [int(s["step"]) for s in trainer.adamw_states(run.policy)]
    return Snapshot(tensors, max(steps), dict(vars(run.checkpoints.progress)))


def put(run, snapshot):
    """Takes the policy back to a Snapshot. vLLM gets its weights when the loop begins."""
    for name, p in trainer.trained_parameters(run.policy).items():
        for kind, tensor in snapshot.tensors[name].items():
            trainer.set_tensor(p, kind, tensor)
    for state in trainer.adamw_states(run.policy):
        state["step"] = state["step"] * 0 + snapshot.adamw_step
    vars(run.checkpoints.progress).update(snapshot.progress)


def go_on(run, end, before=lambda step, sampled: None):
    """The script's loop from the present step up to `end`. before(step, sampled): is called with
    the groups of each step, which it may change."""
    def collect_rollouts(run, step):
        if step == end:
            raise replay.Enough
        split, sampled = nr.collect_rollouts(run, step)
        before(step, sampled)
        return split, sampled

    with contextlib.suppress(replay.Enough):
        nr.train(run, collect_rollouts=collect_rollouts)


# ---- first order

def flat(run, kind, snapshot):
    """All values of a kind in one vector: (N,)."""
    names = trainer.trained_parameters(run.policy)
    return torch.cat([snapshot.tensors[name][kind].flatten() for name in names]).double()  # (N,)


def gradient(policy, loss):
    """The gradient of a loss, not summed into that of the optimizer: (N,)."""
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    parts = torch.autograd.grad(loss, parameters)
    return torch.cat([part.flatten() for part in parts])  # (N,)


def sensitivities(answer_gradients, moments, lrs, beta2, eps=1e-8, beta1=0.9):
    """d log-prob / d gradient of each step, through all later steps of AdamW: a list of (N,).

    answer_gradients: (N,) per step. moments: (first, second) of AdamW, (N,) each, before the first
    step and after each. lrs: (learning rate, number of AdamW's step from 1) per step.
    -> pairs (with the divisor's own change, with a fixed divisor)."""
    by_first = by_second = torch.zeros_like(answer_gradients[0])  # (N,)
    found = []
    for k in reversed(range(len(lrs))):
        lr, t = lrs[k]
        first, second = moments[k + 1]  # (N,), (N,)
        root = (second / (1 - beta2**t)).sqrt()  # (N,)
        slope = -lr / (1 - beta1**t) / (root + eps)  # (N,) d weight / d first moment
        bend = -slope * first / (root + eps) / 2 / root.clamp(min=1e-30) / (1 - beta2**t)  # (N,)
        by_first = answer_gradients[k] * slope + beta1 * by_first  # (N,)
        by_second = answer_gradients[k] * bend + beta2 * by_second  # (N,)
        total = (first - beta1 * moments[k][0]) / (1 - beta1)  # (N,) the step's gradient
        fixed = (1 - beta1) * by_first  # (N,)
        found.append((fixed + 2 * (1 - beta2) * total * by_second, fixed))
    return found[::-1]


def rollout_gradients(run, snapshot):
    """Yields (number in the step, gradient (N,)) of each trained rollout: its part of the loss."""
    cfg = run.cfg
    for i, r in enumerate(flatten(snapshot.groups)):
        if r.weight:
            batch = collate([r], layout=cfg.layout)
            nr.store_fixed_logps(run.policy, run.ref, [batch], cfg)
            logp, batch.entropy = run.policy.module(batch)  # (R,), (R,)
            loss, _ = nr.policy_loss(logp, batch.old, batch.ref, batch, cfg)  # ()
            yield i, gradient(run.policy, loss)  # (N,)


def scores(run, snapshots, answers, first):
    """{(step, rollout): [a score per answer]} with the divisor's change, and with it fixed.

    snapshots: of the steps from `first` on, and one after the last."""
    moments = [(flat(run, "exp_avg", s), flat(run, "exp_avg_sq", s)) for s in snapshots]
    lrs = [(s.lr, s.adamw_step + 1) for s in snapshots[:-1]]
    slopes = [[] for _ in answers]  # of each answer: its gradients, (N,) each
    for snapshot in snapshots[:-1]:
        put(run, snapshot)
        for answer, of in zip(answers, slopes):
            logp, _ = run.policy.module(collate([answer], layout=run.cfg.layout))  # (R,)
            of.append(gradient(run.policy, logp.sum()).double())  # (N,)
    found = [sensitivities(of, moments, lrs, run.cfg.beta2) for of in slopes]
    exact, fixed = {}, {}
    for k, snapshot in enumerate(snapshots[:-1]):
        put(run, snapshot)
        matrices = []
        for column in range(2):
            rows = [of[k][column] for of in found]
            matrices.append(torch.stack(rows).float() * snapshot.clip)  # (answers, N)
        for i, g in rollout_gradients(run, snapshot):
            exact[first + k, i], fixed[first + k, i] = (m @ g for m in matrices)  # (answers,) each
    return exact, fixed


# ---- exact

def without(run, snapshots, first, end, answers, chosen):
    """The log-probs of the answers after step end - 1 of a replay in which the rollouts `chosen`,
    pairs (step, number), have no reward. They must be of one step. A list."""
    step = chosen[0][0]

    def drop(now, sampled):
        if now == step:
            rollouts = flatten(sampled)
            for _, i in chosen:
                rollouts[i].reward = None

    put(run, snapshots[step - first])
    go_on(run, end, drop)
    return logprobs(run, answers)


def logprobs(run, answers):
    return list(map(sum, trainer.token_logps(run.policy, answers, run.cfg)))
