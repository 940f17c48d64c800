"""Against the collapse of the entropy: a bonus for it, Clip-Cov, or a mean that outliers spare.

    python -m examples.entropy --bonus 0.001 --steps 30      flags of nano_rlvr.py work
    python -m examples.entropy --clip_cov 0.01 --minibatches 4
    python -m examples.entropy --gmpo --minibatches 4

--bonus c subtracts c times the entropy of each token from its loss; here it has a gradient.
--clip_cov r (arXiv:2505.22617): a share r of the tokens gets no gradient. They are drawn
from those where log-prob and advantage deviate from their means in the same direction: the
product of both deviations is between LOW and HIGH. The paper's r is 2e-4; of 2,000 tokens that
draws none. With a policy as certain as the bundled model's, a token whose log-prob is above the
mean cannot reach LOW: what is drawn are improbable tokens that are pushed down.
--gmpo (arXiv:2507.20673): the geometric mean of a sequence's ratios, each bounded on the
side to which the advantage pushes it; the bounds are wide, e^-0.4 to e^0.4.
"""
import argparse
import dataclasses
import random
from statistics import fmean

import nano_rlvr as nr
from runtime import ranks, trainer
from runtime.batch import flatten

LOW = 1.0
HIGH = 5.0


def with_bonus(coefficient, base=nr.policy_loss):
    """A loss minus coefficient * entropy."""
    def policy_loss(logp, old, ref, pack, cfg):
        loss, terms = base(logp, old, ref, pack, cfg)
        entropy = (pack.weight * pack.entropy).sum()  # ()
        return loss - coefficient * entropy, terms
    return policy_loss


def gmpo_loss(logp, old, ref, pack, cfg):
    """GMPO's loss: one ratio per sequence, from bounded log-ratios of its tokens."""
    if old is None:
        old = logp.detach()  # (R,)
    sign = pack.advantage.sign()  # (R,)
    log_ratio = logp - old  # (R,)
    bounded = sign * (sign * log_ratio).clamp(max=0.4)  # (R,) pessimistic, as PPO's minimum
    free = dataclasses.replace(
        cfg, ratio="sequence", surrogate="ppo", clip_low=1.0, clip_high=1e9, delta=0.0)
    loss, terms = nr.policy_loss(old + bounded, old, None, pack, free)
    terms["clip_ratio"] = (sign != 0) & (bounded != log_ratio)  # (R,)
    if ref is not None:  # not of the bounded log-probs
        terms["kl"] = nr.k3(logp, ref)  # (R,)
        kl = (pack.weight * terms["kl"]).sum()  # ()
        loss = loss + cfg.kl_coef * kl
    return loss, terms


def clip_cov(rollouts, logps, share, rng):
    """Sets the advantage of the tokens to 0 that Clip-Cov draws from those of all ranks. Returns
    their number. Collective: rng is in the same state on every rank.

    logps: per rollout, a list with the log-prob of each sampled token.
    """
    own = []  # (prompt, completion, its token, log-prob, advantage, rank, number of the rollout)
    for number, r in enumerate(rollouts):
        sampled = [i for i, is_sampled in enumerate(r.loss_mask) if is_sampled]
        for i, logp in zip(sampled, logps[number]):
            token = (r.prompt, r.completion, i, logp, r.advantages[i], ranks.rank(), number)
            own.append(token)
    tokens = sorted(ranks.all_gather(own))  # in an order that the number of ranks does not change
    if not tokens:
        return 0
    mean_logp = fmean(token[3] for token in tokens)
    mean = fmean(token[4] for token in tokens)
    found = []
    for _, _, i, logp, advantage, rank, number in tokens:
        covariance = (logp - mean_logp) * (advantage - mean)
        if LOW <= covariance <= HIGH:
            found.append((rank, number, i))
    most = int(share * len(tokens))
    drawn = rng.sample(found, min(len(found), most))
    for rank, number, i in drawn:
        if rank == ranks.rank():
            rollouts[number].advantages[i] = 0.0
    return len(drawn)


def train(run, own):
    """nano_rlvr's loop with these changes."""
    def assign_advantages(groups, cfg, running_mean):
        running_mean = nr.assign_advantages(groups, cfg, running_mean)
        if own.clip_cov:
            rollouts = flatten(groups)
            logps = trainer.token_logps(run.policy, rollouts, cfg)
            step = run.checkpoints.progress.step
            rng = random.Random(f"{cfg.seed}/{step}")
            run.metrics["clip_cov"] = clip_cov(rollouts, logps, own.clip_cov, rng)
        return running_mean

    base = gmpo_loss if own.gmpo else nr.policy_loss
    nr.train(
        run,
        assign_advantages=assign_advantages,
        policy_loss=with_bonus(own.bonus, base),
        skip_zero_advantages=False)  # the bonus has a gradient at advantage 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--bonus", type=float, default=0.0)
    parser.add_argument("--clip_cov", type=float, default=0.0)
    parser.add_argument("--gmpo", action="store_true")
    own, argv = parser.parse_known_args()
    nr.main(argv, lambda run: train(run, own))
