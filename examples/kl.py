"""The KL term of the loss by another estimator than k3, or the KL in the reward.

    python -m examples.kl --kl_estimator unbiased --steps 30     flags of nano_rlvr.py work
    python -m examples.kl --kl_in reward --algo rloo --kl_coef 0.05

--kl_in reward subtracts kl_coef (log pi - log ref), summed over the sequence, from the reward that
the advantages are computed from; the logged rewards are without it. The loss then has no KL.

With x = log pi - log ref of a sampled token, the term and its derivative by log pi are:

    k1        x               1          on average it does nothing: E[grad log pi] = 0
    k2        x^2 / 2         x          gradient of KL(pi || ref) of the next token
    k3        e^-x + x - 1    1 - e^-x   gradient of KL(ref || pi); what the script has
    unbiased  k3 * pi / old   x          k3's value and k2's gradient, while pi = old

The last is DeepSeek-V3.2's (arXiv:2512.02556) and TRL's default, use_bias_correction_kl. After an
update on the same samples its ratio pi / old still corrects for the token, k2 does not. The ratio
is that of the loss, as in TRL: only with --ratio token is the derivative x. None of them is
unbiased for whole completions: notebooks/06_exact_gradients.ipynb. The log's `kl` is k3 for all.
"""
import argparse
import dataclasses
import functools

import nano_rlvr as nr
from runtime import ranks, trainer
from runtime.batch import flatten
from runtime.messages import RunError
from runtime.trainer import on_device

ESTIMATORS = {  # (logp, ref, ratio), each (R,), -> (R,)
    "k1": lambda logp, ref, ratio: logp - ref,
    "k2": lambda logp, ref, ratio: (logp - ref)**2 / 2,
    "k3": lambda logp, ref, ratio: nr.k3(logp, ref),
    "unbiased": lambda logp, ref, ratio: ratio * nr.k3(logp, ref),  # the ratio has a gradient
}


def with_kl(estimator):
    """nano_rlvr's loss with this KL term in place of k3."""
    def policy_loss(logp, old, ref, pack, cfg):
        loss, terms = nr.policy_loss(logp, old, None, pack, cfg)
        terms["kl"] = nr.k3(logp, ref)  # (R,)
        kl = ESTIMATORS[estimator](logp, ref, terms["ratio"])  # (R,)
        mean = (pack.weight * kl).sum()  # ()
        return loss + cfg.kl_coef * mean, terms
    return policy_loss


def sequence_kls(policy, ref, rollouts, cfg):
    """Per rollout, the sum of k1 = log pi - log ref over its sampled tokens. Collective.

    Both log-probs come from the trainer, so k1 is exactly 0 while the two models are equal. With
    vLLM's, a group of equal rewards would be normalised by the noise of its kernels.
    """
    with on_device(ref):
        fixed = trainer.token_logps(ref, rollouts, cfg)
    own = trainer.token_logps(policy, rollouts, cfg)
    kls = []
    for x, y in zip(own, fixed):
        kls.append(sum(a - b for a, b in zip(x, y)))
    return kls


def assign_advantages(groups, kls, cfg, running_mean):
    """nano_rlvr's advantages of the rewards minus kl_coef times the KL of each rollout."""
    kls = iter(kls)
    penalised = []
    for group in groups:
        copies = [dataclasses.replace(r) for r in group]
        for r, kl in zip(copies, kls):
            if r.reward is not None:
                r.reward -= cfg.kl_coef * kl
        penalised.append(copies)
    running_mean = nr.assign_advantages(penalised, cfg, running_mean)
    for group, copies in zip(groups, penalised):
        for r, copy in zip(group, copies):
            r.advantages = copy.advantages
    return running_mean


def train_with_kl_in_reward(run):
    """nano_rlvr's loop without a KL in the loss: without a reference, none is computed."""
    ref = run.ref
    run.ref = None

    def with_kl(groups, cfg, running_mean):
        rollouts = flatten(groups)
        kls = sequence_kls(run.policy, ref, rollouts, cfg)
        sampled = sum(r.length for r in rollouts)
        total, tokens = ranks.all_sum(sum(kls), sampled)
        run.metrics["kl"] = total / max(tokens, 1)
        return assign_advantages(groups, kls, cfg, running_mean)

    nr.train(run, assign_advantages=with_kl)


def make_sampler(cfg):
    """The script's sampler, unless there is no KL."""
    if not cfg.kl_coef:
        raise RunError("kl.py is about the KL: --kl_coef must be above 0")
    return nr.Sampler(cfg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kl_estimator", choices=ESTIMATORS, default="unbiased")
    parser.add_argument("--kl_in", choices=("loss", "reward"), default="loss")
    own, argv = parser.parse_known_args()
    train = train_with_kl_in_reward
    if own.kl_in == "loss":
        train = functools.partial(nr.train, policy_loss=with_kl(own.kl_estimator))
    nr.main(argv, train, sampler=make_sampler)
