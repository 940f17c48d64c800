"""The four models of RLHF in one run: policy, reference, critic, reward model (arXiv:2203.02155).

    python -m examples.four_models --steps 20      the bundled model; flags of nano_rlvr.py work

    model       what it is for                                  it takes part in
    policy      answers; PPO's clip, four updates per batch     sampling, update
    reference   the starting model; the KL to it is in the      update: a forward pass
                reward of each token, with an adaptive beta
    critic      predicts the reward before each token           update: it is trained, too
    reward      learned from pairs of answers before the run,   reward: a forward pass
                a share of them the wrong way

The parts are those of ppo.py and reward_model.py. GRPO with a verifier keeps the first and perhaps
the second. Here four things can go wrong, and each has its metrics: reward_model/agreement;
critic/explained; ppo/kl_penalty and ppo/beta; clip_ratio, approxkl and entropy. reward/mean is the
score, which PPO maximises, and reward/gsm8k what is right. One process.
"""
import argparse

import nano_rlvr as nr
from examples import ppo, reward_model
from runtime.messages import RunError

TARGET = 1.0  # nats of KL per completion, which beta seeks


def train(run, own):
    """PPO on the scores of a reward model."""
    collect_rollouts = reward_model.scored_rollouts(run, own.questions, own.noise)
    critic = ppo.Critic(run.cfg, lam=0.95, clip_value=0.2, whiten_rewards=True)
    controller = ppo.AdaptiveKL(run.cfg.kl_coef, TARGET)
    ppo.train(run, critic, controller, collect_rollouts)


def make_sampler(cfg):
    """The script's sampler, if the KL has a weight: before the engines load."""
    if not cfg.kl_coef:
        raise RunError("examples/four_models.py needs --kl_coef above 0, where beta begins")
    return nr.Sampler(cfg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--noise", type=float, default=0.25)
    own, argv = parser.parse_known_args()
    fixed = "--kl_coef 0.05 --minibatches 4".split()
    nr.main([*fixed, *argv], lambda run: train(run, own), make_sampler)
