"""DPO on verified pairs: of the samples of a prompt, a right and a wrong one are a pair.

    python -m examples.dpo [--offline] --steps 20      offline: all samples of the starting model

DPO (arXiv:2305.18290, eq. 7) minimises the mean over the pairs of -log sigmoid(margin), with

    margin = beta * [log pi(right) - log ref(right) - log pi(wrong) + log ref(wrong)].

Its gradient is -beta sigmoid(-margin) [grad log pi(right) - grad log pi(wrong)]: a policy gradient
in which a right completion has the advantage beta sigmoid(-margin), a wrong one minus that, and all
others 0. The margin is that before the step, so a batch of rollouts gives one optimizer step. Flags
that would make the gradient another one are refused.
"""
import argparse
import dataclasses
import math
from types import SimpleNamespace

import torch

import nano_rlvr as nr
from runtime import ranks, stats, trainer
from runtime.batch import flatten
from runtime.messages import RunError
from runtime.trainer import on_device

# with other values the gradient is not that of DPO's loss
FIXED = {
    "aggregate": "constant",
    "kl_coef": 0.0,
    "correction": "none",
    "ratio": "token",
    "mask_truncated": False,
    "epochs": 1,
    "minibatches": 1,
}


def checked_sampler(cfg, beta):
    """A Sampler, if the flags are those of DPO: before the engines load."""
    needed = []
    for name, value in FIXED.items():
        if getattr(cfg, name) != value:
            needed.append(f"--{name} {value}")
    if needed or cfg.samples == 1:
        raise RunError(f"dpo.py needs {' '.join(needed) or '--samples above 1'}")
    if not 0 < beta < math.inf:
        raise RunError(f"--beta {beta}: must be a number above 0")
    return nr.Sampler(cfg)


def choose_pairs(groups):
    """-> ([right, wrong, right, wrong, ...], the first of each group that has both; the number of
    rollouts with a reward)."""
    chosen = []  # right, wrong, right, wrong, ...
    judged = 0
    for group in groups:
        known = [r for r in group if r.reward is not None]
        right = [r for r in known if stats.is_right(r)]
        wrong = [r for r in known if not stats.is_right(r)]
        judged += len(known)
        if right and wrong:
            chosen += [right[0], wrong[0]]
    return chosen, judged


def assign_pairs(groups, policy, ref, beta, cfg):
    """Fills the advantages of the pairs: (first right, first wrong) of each group. Collective.

    The advantages make up for the weight of a token, 1 / (N max_tokens) for N rollouts with a
    reward: the loss is the mean over the pairs. Returns metrics.
    """
    chosen, judged = choose_pairs(groups)
    total, sequences = ranks.all_sum(len(chosen) // 2, judged)
    ours = trainer.token_logps(policy, chosen, cfg)
    with on_device(ref):
        theirs = trainer.token_logps(ref, chosen, cfg)
    ratios = [sum(a) - sum(b) for a, b in zip(ours, theirs)]
    ratios = torch.tensor(ratios)  # (2 pairs,)
    margins = beta * (ratios[::2] - ratios[1::2])  # (pairs,)
    scale = sequences * cfg.max_tokens / max(1, total)
    pushes = scale * beta * torch.sigmoid(-margins)  # (pairs,)
    for r in flatten(groups):
        r.advantages = [0.0] * len(r.completion)
    for i, push in enumerate(pushes.tolist()):
        right, wrong = chosen[2 * i:2 * i + 2]
        right.advantages = [push] * len(right.completion)
        wrong.advantages = [-push] * len(wrong.completion)
    losses = -torch.nn.functional.logsigmoid(margins)  # (pairs,)
    [loss] = ranks.all_sum(losses.sum().item())
    return {"dpo/pairs": total, "dpo/loss": loss / max(1, total)}


def train(run, beta, offline):
    """nano_rlvr's loop with these advantages. The memory plan does not count the reference."""
    cfg = dataclasses.replace(run.cfg, kl_coef=1.0, lora_rank=0)
    ref = nr.make_reference(cfg)

    def assign_advantages(groups, cfg, running_mean):
        run.metrics |= assign_pairs(groups, run.policy, ref, beta, cfg)
        return running_mean

    def collect_rollouts(run, step):
        if offline:
            run.llm.sleep()
            weights = trainer.named_weights(SimpleNamespace(module=ref))
            nr.load_weights(run.llm, weights)
        return nr.collect_rollouts(run, step)

    nr.train(run, collect_rollouts=collect_rollouts, assign_advantages=assign_advantages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--offline", action="store_true")
    own, argv = parser.parse_known_args()
    fixed = "--aggregate constant --kl_coef 0 --correction none".split()
    if own.offline:
        fixed += ["--mismatch_bound", "20"]  # log-probs of old weights
    nr.main(
        [*fixed, *argv],
        lambda run: train(run, own.beta, own.offline),
        lambda cfg: checked_sampler(cfg, own.beta))
