"""examples/ppo.py: GAE as linear equations, the critic, and its loop."""
import random
from unittest.mock import MagicMock

import pytest
import torch

import nano_rlvr as nr
import ppo
from conftest import close, fixed_rollouts, float64, judged, make_config

# ---- GAE


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


# ---- the critic


@pytest.fixture
def critic(group):
    """A critic whose values are not 0, in float64."""
    with float64():
        torch.manual_seed(0)
        critic = ppo.Critic(make_config(), minibatches=3, lam=0.7)
        torch.nn.init.normal_(critic.head.weight)
        yield critic


@torch.no_grad()
def values_of(critic, rollout):
    """(R,) values before each token of a completion, from a pass of this sequence alone."""
    row = torch.tensor([rollout.prompt + rollout.completion])
    hidden = critic.decoder(input_ids=row, use_cache=False).last_hidden_state[0]  # (L, H)
    return critic.head(hidden[len(rollout.prompt) - 1:-1])[:, 0]


def test_advantages_are_normalised_gae_and_the_targets_are_gae_plus_the_values(critic, tokenizer):
    rollouts = fixed_rollouts(tokenizer)
    rollouts[0].steps = [(1, 0.5), (len(rollouts[0].completion), 0.25)]  # a reward per step
    rollouts[1].kl = 2.0
    batches = critic.assign_advantages(rollouts)
    critic.decoder.set_attn_implementation("eager")
    wanted = {}  # id(rollout) -> GAE
    for i, batch in enumerate(batches):
        values = [values_of(critic, r) for r in rollouts[i::3]]
        for r, v in zip(rollouts[i::3], values):
            rewards = [0.0] * (len(v) - 1) + [r.reward - critic.cfg.kl_coef * r.kl]
            if r is rollouts[0]:
                rewards[-1] = 0.25
                rewards[0] += 0.5
            wanted[id(r)] = torch.tensor(ppo.gae(rewards, v.tolist(), 1.0, 0.7))
        close(batch.values, torch.cat(values))
        close(batch.returns, torch.cat([wanted[id(r)] for r in rollouts[i::3]]) + batch.values)
    wanted = torch.cat([wanted[id(r)] for r in rollouts])  # (tokens,)
    normalised = (wanted - wanted.mean()) / (wanted.std(correction=0) + 1e-4)
    close(nr.collate(rollouts).advantage, normalised)  # each token has its own in the loss


def test_the_critic_starts_at_0_and_learns_to_predict_the_reward(group, tokenizer):
    rollouts = fixed_rollouts(tokenizer, groups=2)
    critic = ppo.Critic(make_config(), lr=1e-3, minibatches=1)
    batches = critic.assign_advantages(rollouts)
    assert not any(batch.values.any() for batch in batches)
    critic.update(batches * 30)
    with torch.no_grad():
        error = torch.cat([critic(batch) - batch.returns for batch in batches])  # (tokens,)
    assert error.square().mean() < 0.2 * torch.cat([batch.returns for batch in batches]).var()


# ---- the loop


def test_a_short_run_trains_policy_and_critic(group, tokenizer, monkeypatch, tmp_path):
    cfg = make_config(eval_size=16, eval_every=2, kl_coef=0.1, kl_in="reward", epochs=2,
                      minibatches=2, mismatch_bound=1e9, out=str(tmp_path), name="x")
    monkeypatch.setattr(nr, "rollout", lambda llm, prompts, n, *_, **__: fixed_rollouts(
        tokenizer, groups=len(prompts), n=n))
    verify = judged(lambda texts, columns: [float(i % 3 == 0) for i in range(len(texts))])
    train_set, eval_set = nr.data.load_splits(cfg, tokenizer)
    log, policy = nr.Log(cfg, tokenizer), nr.make_policy(cfg)
    checkpoints = nr.Checkpoints(cfg, log)
    checkpoints.restore(policy)
    before, critic = [p.detach().clone() for p in policy.parameters()], ppo.Critic(cfg)
    ppo.train(nr.Run(cfg, train_set, eval_set, verify, log, checkpoints, MagicMock(), policy,
                     nr.make_reference(cfg)), critic)
    assert any((a != b).any() for a, b in zip(before, policy.parameters()))
    assert critic.head.weight.any()
    assert ["eval/accuracy" in row for row in log.rows] == [True, False, True]
    assert ["critic/explained" in row for row in log.rows] == [True, True, False]
    assert log.rows[0]["kl"] == 0 != log.rows[1]["kl"]
    assert (tmp_path / "x/step-2/model.safetensors").exists()
