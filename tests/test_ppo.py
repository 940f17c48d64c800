"""examples/ppo.py: GAE as linear equations, and the critic. Its loop runs in notebook 03."""
import random

import pytest
import torch

import nano_rlvr as nr
from conftest import close, fixed_rollouts, float64, make_config
from examples import ppo


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.97, 0.0), (0.97, 1.0)])
def test_gae_solves_its_linear_equations(gamma, lam):
    """A = delta + gamma lam (A one token later), with V = 0 after the last token."""
    rng = random.Random(0)
    for n in (1, 2, 5, 9):
        rewards, values = ([rng.gauss(0, 1) for _ in range(n)] for _ in range(2))
        later = torch.diag(torch.ones(n - 1).double(), 1)  # (n, n) row t picks column t + 1
        r, v = torch.tensor([rewards, values], dtype=torch.float64)
        delta = r + gamma * later @ v - v  # (n,)
        a = torch.linalg.solve(torch.eye(n).double() - gamma * lam * later, delta)  # (n,)
        close(ppo.gae(rewards, values, gamma, lam), a)


@torch.no_grad()
def values_of(critic, rollout):
    """(R,) values before each token of a completion, from a pass of this sequence alone."""
    row = torch.tensor([rollout.prompt + rollout.completion])
    hidden = critic.decoder(input_ids=row, use_cache=False).last_hidden_state[0]  # (L, H)
    return critic.head(hidden[len(rollout.prompt) - 1:-1])[:, 0]


def test_advantages_are_normalised_gae_and_the_targets_are_gae_plus_the_values(group, tokenizer):
    with float64():
        torch.manual_seed(0)
        critic = ppo.Critic(make_config(), minibatches=3, lam=0.7)
        torch.nn.init.normal_(critic.head.weight)  # values that are not 0
        rollouts = fixed_rollouts(tokenizer)
        batches = critic.assign_advantages(rollouts)
        critic.decoder.set_attn_implementation("eager")
        wanted = {}  # id(rollout) -> GAE
        for i, batch in enumerate(batches):
            values = [values_of(critic, r) for r in rollouts[i::3]]
            for r, v in zip(rollouts[i::3], values):
                rewards = [0.0] * (len(v) - 1) + [r.reward]
                wanted[id(r)] = torch.tensor(ppo.gae(rewards, v.tolist(), 1.0, 0.7))
            close(batch.values, torch.cat(values))
            close(batch.returns, torch.cat([wanted[id(r)] for r in rollouts[i::3]]) + batch.values)
        wanted = torch.cat([wanted[id(r)] for r in rollouts])  # (tokens,)
        normalised = (wanted - wanted.mean()) / (wanted.std(correction=0) + 1e-4)
        close(nr.collate(rollouts).advantage, normalised)  # each token has its own in the loss
        for critic.cfg.max_grad_norm in (1.0, 0.0):  # 0 = no clipping
            before = critic.head.weight.clone()
            critic.update(batches)
            assert (critic.head.weight - before).abs().max() > 1e-4
