"""The KL term of the loss by another estimator than k3.

    python -m examples.kl --kl_estimator unbiased --steps 30     flags of nano_rlvr.py work

With x = log pi - log ref of a sampled token, the term and its derivative by log pi are:

    k1        x               1          on average it does nothing: E[grad log pi] = 0
    k2        x^2 / 2         x          gradient of KL(pi || ref) of the next token
    k3        e^-x + x - 1    1 - e^-x   gradient of KL(ref || pi); what the script has
    unbiased  k3 * pi / old   x          k3's value and k2's gradient, while pi = old

The last is DeepSeek-V3.2's (arXiv:2512.02556) and TRL's default, use_bias_correction_kl. After an
update on the same samples its ratio pi / old still corrects for the token, k2 does not. None of
them is unbiased for whole completions: docs/audit.md. The log's `kl` is k3 for all of them.
"""
import argparse

import nano_rlvr as nr
from runtime import dist

ESTIMATORS = {  # (logp, ref, ratio), each (R,), -> (R,)
    "k1": lambda logp, ref, ratio: logp - ref,
    "k2": lambda logp, ref, ratio: (logp - ref)**2 / 2,
    "k3": lambda logp, ref, ratio: nr.k3(logp, ref),
    "unbiased": lambda logp, ref, ratio: ratio * nr.k3(logp, ref),  # the ratio has a gradient
}


def with_kl(estimator):
    """nano_rlvr's loss with this KL term in place of k3."""
    def policy_loss(logp, old, ref, batch, cfg):
        loss, terms = nr.policy_loss(logp, old, None, batch, cfg)
        terms["kl"] = nr.k3(logp, ref)  # (R,)
        kl = ESTIMATORS[estimator](logp, ref, terms["ratio"])  # (R,)
        return loss + cfg.kl_coef * (batch.weight * kl).sum(), terms
    return policy_loss


def make_sampler(cfg):
    """The script's sampler, unless there is no KL in the loss."""
    if not cfg.kl_coef or cfg.kl_in != "loss":
        raise dist.RunError("kl.py is about the KL in the loss: --kl_coef above 0, --kl_in loss")
    return nr.Sampler(cfg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kl_estimator", choices=ESTIMATORS, default="unbiased")
    own, argv = parser.parse_known_args()
    policy_loss = with_kl(own.kl_estimator)
    nr.main(argv, lambda run: nr.train(run, policy_loss=policy_loss), sampler=make_sampler)
