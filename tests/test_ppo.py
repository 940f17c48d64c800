"""examples/ppo.py: GAE by hand and as TRL computes it, the critic, and its loop in the real vLLM."""
import random
import sys

import pytest
import torch

import data
import nano_rlvr as nr
from conftest import ROOT, close, fixed_rollouts, float64, make_config
from rewards import Verifier

sys.path.append(str(ROOT / "examples"))
import ppo  # noqa: E402


def random_completions(seed=0, sizes=(1, 2, 5, 9)):
    rng = random.Random(seed)
    return [([rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 1) for _ in range(n)]) for n in sizes]


# ---- GAE


def test_gae_by_hand():
    """deltas from the end: 1 - 3/4 = 1/4; 9/10 * 3/4 - 1/4 = 0.425; 9/10 * 1/4 - 1/2 = -0.275. Each
    advantage is its delta plus 9/10 * 1/2 of the next one."""
    a = ppo.gae([0.0, 0.0, 1.0], [0.5, 0.25, 0.75], gamma=0.9, lam=0.5)
    close(a, [-0.275 + 0.45 * 0.5375, 0.425 + 0.45 * 0.25, 0.25])


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.97, 0.0), (0.97, 1.0)])
def test_gae_is_that_of_trls_ppo_trainer(gamma, lam):
    """TRL's PPOTrainer, which 1.16 no longer has, works on a batch padded with rewards and values of 0, with
    V = 0 after the last column. As linear equations: A = delta + gamma lam (A one token later)."""
    completions = random_completions()
    T = max(len(values) for _, values in completions)
    later = torch.diag(torch.ones(T - 1, dtype=torch.float64), 1)  # (T, T) row t picks column t + 1
    for rewards, values in completions:
        r, v = (torch.tensor([*x, *[0.0] * (T - len(x))], dtype=torch.float64) for x in (rewards, values))
        delta = r + gamma * later @ v - v  # (T,)
        a = torch.linalg.solve(torch.eye(T, dtype=torch.float64) - gamma * lam * later, delta)  # (T,)
        close(ppo.gae(rewards, values, gamma, lam), a[:len(values)])
        assert not a[len(values):].any()


def test_gae_with_lambda_1_is_the_return_minus_the_value_and_with_0_the_error_of_the_next_value():
    gamma = 0.9
    for rewards, values in random_completions(1):
        n = len(values)
        returns = [sum(gamma**k * rewards[t + k] for k in range(n - t)) for t in range(n)]
        close(ppo.gae(rewards, values, gamma, 1.0), [g - v for g, v in zip(returns, values)])
        following = [*values[1:], 0.0]
        deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values)]
        close(ppo.gae(rewards, values, gamma, 0.0), deltas)


# ---- the critic


@pytest.fixture
def critic(group):
    """A critic whose values are not 0, in float64."""
    with float64():
        torch.manual_seed(0)
        critic = ppo.Critic(make_config(), minibatches=3, lam=0.7)
        torch.nn.init.normal_(critic.head.weight)
        yield critic


def test_values_are_those_of_one_sequence_at_a_time_before_each_token(critic, tokenizer):
    rollouts = fixed_rollouts(tokenizer)
    batch = nr.collate(rollouts)
    with torch.no_grad():
        values = critic(batch).split(batch.lengths.tolist())
        for r, ours in zip(rollouts, values):
            row = torch.tensor([r.prompt + r.completion])
            critic.decoder.set_attn_implementation("eager")
            hidden = critic.decoder(input_ids=row, use_cache=False).last_hidden_state[0]  # (tokens, H)
            critic.decoder.set_attn_implementation("packed")
            close(ours, critic.head(hidden[len(r.prompt) - 1:-1])[:, 0])  # each from the token before it


def test_advantages_are_normalised_gae_and_the_targets_are_gae_plus_the_values(critic, tokenizer):
    rollouts = fixed_rollouts(tokenizer)
    rollouts[0].steps = [(1, 0.5), (len(rollouts[0].completion), 0.25)]  # a reward per step also works
    batches, wanted = critic.assign_advantages(rollouts), {}
    assert len(batches) == 3
    for i, batch in enumerate(batches):
        with torch.no_grad():
            values = critic(batch)  # (R,)
        close(batch.values, values)
        raw = []
        for r, v in zip(rollouts[i::3], values.split(batch.lengths.tolist())):
            rewards = [0.0] * len(v)
            rewards[-1] = r.reward
            if r is rollouts[0]:
                rewards[-1] = 0.25
                rewards[0] += 0.5
            wanted[id(r)] = ppo.gae(rewards, v.tolist(), 1.0, 0.7)
            raw += wanted[id(r)]
        close(batch.returns, torch.tensor(raw) + values)
    wanted = torch.tensor([a for r in rollouts for a in wanted[id(r)]])  # (tokens,)
    normalised = (wanted - wanted.mean()) / (wanted.std(correction=0) + 1e-4)
    close(nr.collate(rollouts).advantage, normalised)  # each token has its own in the loss


def test_before_the_first_step_every_value_is_0_and_a_token_gets_the_normalised_reward(critic, tokenizer):
    rollouts = fixed_rollouts(tokenizer)
    batches = ppo.Critic(make_config(), lam=1.0).assign_advantages(rollouts)
    assert not any(batch.values.any() for batch in batches)
    rewards = torch.tensor([r.reward for r in rollouts for _ in r.completion])
    close([a for r in rollouts for a in r.advantages],
          (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4))


def test_the_critic_learns_to_predict_the_reward(group, tokenizer):
    rollouts = fixed_rollouts(tokenizer, groups=2)
    critic = ppo.Critic(make_config(), lr=1e-3, epochs=30, minibatches=1, lam=1.0)
    batches = critic.assign_advantages(rollouts)
    critic.update(batches)
    with torch.no_grad():
        error = torch.cat([critic(batch) - batch.returns for batch in batches])  # (tokens,)
    assert error.square().mean() < 0.2 * torch.cat([batch.returns for batch in batches]).var()


# ---- the loop


def test_a_short_run_trains_policy_and_critic_on_the_samples_of_grpo(fresh_llm, tokenizer, monkeypatch):
    cfg = make_config(max_prompt=256, prompts=4, samples=4, steps=2, eval_size=16, eval_every=2, kl_coef=0.1)
    train_set, eval_set = data.load_splits(cfg, tokenizer)
    sampled, histories, score = [], [], nr.score
    monkeypatch.setattr(nr, "score", lambda rollouts, *a: sampled.append(rollouts) or score(rollouts, *a))
    with Verifier("gsm8k") as verifier:
        for critic in (ppo.Critic(cfg), None):
            policy, ref = nr.make_policy(cfg), nr.make_reference(cfg)
            before = [p.detach().clone() for p in policy.parameters()]
            histories.append(ppo.train(cfg, fresh_llm, policy, ref, train_set, eval_set, verifier, critic))
            assert any((a != b).any() for a, b in zip(before, policy.parameters()))
            if critic is not None:
                assert critic.head.weight.any()
    of_ppo, of_grpo = histories
    assert [m["step"] for m in of_ppo] == [0, 1, 2] and "loss" not in of_ppo[2]
    assert of_ppo[0]["eval/accuracy"] == of_grpo[0]["eval/accuracy"] and "eval/accuracy" in of_ppo[2]
    assert "critic/explained" in of_ppo[1] and "critic/explained" not in of_grpo[1]
    ppo_first, grpo_first = sampled[1], sampled[5]  # per run: evaluation, two steps, evaluation
    assert [r.completion for r in ppo_first] == [r.completion for r in grpo_first]
    assert any(len(set(r.advantages)) > 1 for r in sampled[2])  # the critic's second step: credit per token
    assert all(len(set(r.advantages)) == 1 for r in sampled[6])


def test_a_bad_flag_is_one_line():
    with pytest.raises(SystemExit, match="^nano_rlvr: --steps -1: "):
        ppo.main(["--steps", "-1"])
