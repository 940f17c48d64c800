"""RLHF in small: a reward model learns from noisy pairs, and RL then maximises its score.

    python -m examples.reward_model --steps 60     the bundled model; flags of nano_rlvr.py work

Before training, the model answers --questions questions several times. A pair is a right and a
wrong answer to a question; --noise is the share of pairs in which the judge prefers the wrong one
(InstructGPT, arXiv:2203.02155: two labelers agree in 73 % of the cases). A Bradley-Terry model, a
copy of the policy with one output at the last token, learns from them:
    loss = -log sigmoid(score of the preferred answer - score of the other)

In the loop its score takes the place of the reward. reward/mean is then the score, the proxy;
reward/gsm8k, the eval metrics and DAPO's filter still say what is right. Where the score rises and
the accuracy falls, the proxy is over-optimised (Goodhart; arXiv:2210.10760). One process.
"""
import argparse
import random

import torch

import nano_rlvr as nr
from examples.ppo import Critic
from runtime import stats

EPOCHS = 4  # passes over the pairs
BATCH = 16  # pairs per step


def scores(model, rollouts):
    """(B,) of a Critic: its output before the last token of each rollout, which ends the text."""
    pack = nr.collate(rollouts)
    last = pack.lengths.cumsum(0) - 1  # (B,) index of the last sampled token of each
    return model(pack)[last]  # (B,)


def sample_pairs(run, questions, noise):
    """[(preferred, other)] of the starting model's answers; a share of them is the wrong way."""
    cfg = run.cfg
    examples = run.train_set[:questions]
    prompts = [example["prompt_ids"] for example in examples]
    seeds = [nr.data.request_seed(cfg.seed, "pairs", i) for i in range(len(prompts))]
    nr.sync_weights(run.policy, run.llm)  # wakes vLLM
    rollouts = run.rollout(run.llm, prompts, cfg.samples, cfg.temperature, cfg.max_tokens, seeds,
                          examples=examples)
    run.llm.sleep()
    nr.score(rollouts, examples, run.verifier)
    rng = random.Random(cfg.seed)
    pairs = []
    for group in nr.in_groups(rollouts, cfg.samples):
        right = [r for r in group if stats.is_right(r)]
        wrong = [r for r in group if not stats.is_right(r)]
        for pair in zip(right, wrong):
            pairs.append(pair[::-1] if rng.random() < noise else pair)
    return pairs


def fit(model, pairs):
    """Trains the reward model in place. Returns the share of the last quarter, which it has not
    seen, in which its score is higher for the preferred answer."""
    most = len(pairs) * 3 // 4
    held_out = pairs[most:]
    pairs = pairs[:most]
    for _ in range(EPOCHS):
        for start in range(0, len(pairs), BATCH):
            batch = pairs[start:start + BATCH]
            preferred, other = zip(*batch)
            gap = scores(model, preferred) - scores(model, other)  # (B,)
            loss = -torch.nn.functional.logsigmoid(gap).mean()
            model.adam.zero_grad()
            loss.backward()
            model.adam.step()
    with torch.no_grad():
        preferred, other = zip(*held_out)
        agrees = scores(model, preferred) > scores(model, other)  # (B,)
        return agrees.float().mean().item()


def scored_rollouts(run, questions, noise):
    """Trains a reward model. Returns nano_rlvr.collect_rollouts with its score as the reward."""
    model = Critic(run.cfg, lr=3e-4)
    pairs = sample_pairs(run, questions, noise)
    agreement = fit(model, pairs)
    run.log.say(f"reward model: {len(pairs)} pairs, agrees with the judge in {agreement:.0%} of "
                "those that it has not seen")

    @torch.no_grad()
    def collect_rollouts(run, step):
        minibatches, sampled = nr.collect_rollouts(run, step)
        rollouts = nr.flatten(sampled)
        for r, score in zip(rollouts, scores(model, rollouts).tolist()):
            r.reward = score
        run.metrics["reward_model/agreement"] = agreement
        return minibatches, sampled

    return collect_rollouts


def train(run, questions, noise):
    """nano_rlvr's loop with the score of a reward model as the reward."""
    nr.train(run, collect_rollouts=scored_rollouts(run, questions, noise))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--noise", type=float, default=0.25)
    own, argv = parser.parse_known_args()
    nr.main(argv, lambda run: train(run, own.questions, own.noise))
