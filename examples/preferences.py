"""Losses on preference pairs beside DPO: IPO, SimPO, ORPO and KTO, on pairs that a verifier makes.

    python -m examples.preferences --loss simpo --steps 20      flags of nano_rlvr.py work

A pair is the first right and the first wrong sample of a prompt. y has |y| tokens; in a pair, w is
right and l is wrong; r(y) = beta (log pi(y) - log ref(y)), as in examples/dpo.py.

    dpo     -log sigmoid(r(w) - r(l))                                          arXiv:2305.18290
    ipo     ((r(w) - r(l)) / beta - 1 / (2 beta))^2: a finite gap is enough    arXiv:2310.12036
    simpo   -log sigmoid(beta (log pi(w)/|w| - log pi(l)/|l|) - gamma)         arXiv:2405.14734
    orpo    -log pi(w)/|w| - beta log sigmoid(log odds(w) - log odds(l)),      arXiv:2403.07691
            odds = p / (1 - p) with p = exp(log pi(y)/|y|): SFT and preference in one
    kto     1 - sigmoid(r(w) - z) + 1 - sigmoid(z - r(l)); z: beta times the   arXiv:2402.01306
            KL, here the mean of all r, at least 0. It needs verdicts, no pairs

A loss depends on the policy through log pi(y) only, so its gradient is a policy gradient: the
advantage of y is minus the derivative by log pi(y). A batch of rollouts gives one optimizer step.
"""
import argparse
import dataclasses

import torch
from torch.nn.functional import logsigmoid

import nano_rlvr as nr
from examples.dpo import checked_sampler, choose_pairs
from runtime import ranks, trainer
from runtime.trainer import on_device

GAMMA = 0.5  # SimPO's margin
BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}  # without --beta
NEED_REFERENCE = ("dpo", "ipo", "kto")


def gap_of(pairs):
    """(pairs, 2) -> the first of each pair minus the second (pairs,)."""
    first, second = pairs.T  # (pairs,), (pairs,)
    return first - second  # (pairs,)


def preference_loss(name, logp, ref, lengths, beta):
    """Log-probs of pairs (pairs, 2), right and wrong, and their lengths -> losses (pairs,)."""
    reward = beta * (logp - ref)  # (pairs, 2)
    mean = logp / lengths  # (pairs, 2)
    if name == "dpo":
        return -logsigmoid(gap_of(reward))  # (pairs,)
    if name == "ipo":
        gap = gap_of(logp - ref)  # (pairs,)
        return (gap - 1 / (2 * beta))**2  # (pairs,)
    if name == "simpo":
        gap = beta * gap_of(mean)  # (pairs,)
        return -logsigmoid(gap - GAMMA)  # (pairs,)
    if name == "orpo":
        log_odds = mean - torch.log1p(-mean.exp())  # (pairs, 2)
        preference = -logsigmoid(gap_of(log_odds))  # (pairs,)
        return -mean[:, 0] + beta * preference  # (pairs,)
    # kto
    z = reward.mean().clamp(min=0).detach()  # ()
    signs = reward.new_tensor([1.0, -1.0])  # (2,)
    values = torch.sigmoid(signs * (reward - z))  # (pairs, 2)
    return (1 - values).sum(1)  # (pairs,)


def log_probs(model, rollouts, cfg):
    """The log-probs of whole completions (B,). Collective."""
    sums = [sum(logps) for logps in trainer.token_logps(model, rollouts, cfg)]
    return torch.tensor(sums)  # (B,)


def assign_pairs(groups, policy, ref, own, cfg):
    """Fills the advantages: the policy gradient is then that of the mean loss. Collective.

    A token has the weight 1 / (N max_tokens) for N rollouts with a reward, which the advantages
    make up for. Returns metrics."""
    chosen, judged = choose_pairs(groups)
    pairs = len(chosen) // 2
    total, sequences = ranks.all_sum(pairs, judged)
    lengths = [float(r.length) for r in chosen]
    lengths = torch.tensor(lengths)  # (2 pairs,)
    logp = log_probs(policy, chosen, cfg)  # (2 pairs,)
    logp.requires_grad_()
    of_ref = torch.zeros_like(logp)  # (2 pairs,)
    if own.loss in NEED_REFERENCE:
        with on_device(ref):
            of_ref = log_probs(ref, chosen, cfg)  # (2 pairs,)
    shaped = [x.view(pairs, 2) for x in (logp, of_ref, lengths)]  # (pairs, 2) each
    losses = preference_loss(own.loss, *shaped, own.beta)  # (pairs,)
    loss = losses.sum()  # ()
    loss.backward()
    scale = sequences * cfg.max_tokens / max(1, total)
    for r in nr.flatten(groups):
        r.advantages = [0.0] * len(r.completion)
    for r, slope in zip(chosen, logp.grad.tolist()):
        r.advantages = [-scale * slope] * len(r.completion)
    [loss] = ranks.all_sum(loss.item())
    return {"preference/pairs": total, "preference/loss": loss / max(1, total)}


def train(run, own):
    """nano_rlvr's loop with these advantages. The memory plan does not count the reference."""
    kl_coef = float(own.loss in NEED_REFERENCE)  # with 0 there is no reference
    cfg = dataclasses.replace(run.cfg, kl_coef=kl_coef, lora_rank=0)
    ref = nr.make_reference(cfg)

    def assign_advantages(groups, cfg, running_mean):
        run.metrics |= assign_pairs(groups, run.policy, ref, own, cfg)
        return running_mean

    nr.train(run, assign_advantages=assign_advantages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--loss", choices=BETA, default="simpo")
    parser.add_argument("--beta", type=float, default=0.0)  # 0: that of BETA
    own, argv = parser.parse_known_args()
    own.beta = own.beta or BETA[own.loss]
    fixed = "--aggregate constant --kl_coef 0 --correction none".split()
    nr.main(
        [*fixed, *argv],
        lambda run: train(run, own),
        lambda cfg: checked_sampler(cfg, own.beta))
