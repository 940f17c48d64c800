"""PPO with a critic, to compare with GRPO: values per token and GAE in place of the group's mean.

    python -m examples.ppo --steps 20    PPO on the bundled model; all flags of nano_rlvr.py work

A critic V predicts, before each token, the reward that the completion will get. An advantage is
what a token changed in this prediction: the token that decides gets the credit. GRPO has no critic,
so all tokens of a completion share one number. One process, for the bundled model: neither the
memory plan nor the checkpoints know the critic, so --resume starts with a new one.
"""
import sys

import torch

import nano_rlvr as nr
from runtime import ranks


def gae(rewards, values, gamma=1.0, lam=1.0):
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16) of a completion.

    rewards[t]: reward for token t. values[t]: V before token t. Returns a list of advantages:
        delta_t = r_t + gamma V_{t+1} - V_t      V after the last token is 0
        A_t = delta_t + gamma lam A_{t+1}        the sum of (gamma lam)^l delta_{t+l} over l >= 0
    lam 1: the return minus V_t, right on average but noisy. lam 0: delta_t, as wrong as V.
    """
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        delta = reward + gamma * next_value - value
        next_value, next_advantage = value, delta + gamma * lam * next_advantage
        advantages.append(next_advantage)
    return advantages[::-1]


class Critic(torch.nn.Module):
    """V: a copy of the starting model with one output instead of the LM head, and its AdamW."""

    def __init__(self, cfg, lr=3e-4, minibatches=8, gamma=1.0, lam=1.0):
        super().__init__()
        model = nr.load_model(cfg)
        self.decoder = model.get_decoder()
        self.head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)  # V is 0 before the first step
        self.cfg, self.minibatches, self.gamma, self.lam = cfg, minibatches, gamma, lam
        self.to(ranks.device())
        self.adam = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.0)

    def forward(self, batch):
        """A batch of collate -> values before each of its completion tokens (R,)."""
        output = self.decoder(input_ids=batch.input_ids, position_ids=batch.position_ids,
                              use_cache=False, batch=batch)
        return self.head(output.last_hidden_state[0, batch.predictors])[:, 0]  # (R,)

    @torch.no_grad()
    def assign_advantages(self, rollouts):
        """Fills the advantages of each rollout with GAE, normalised over all tokens of the step.

        Returns the critic's minibatches with batch.values (R,) and their targets, batch.returns.
        """
        batches = []
        for i in range(min(self.minibatches, len(rollouts))):
            part = rollouts[i::self.minibatches]  # completions of all prompts
            batch = nr.collate(part, ranks.device())
            batch.values = self(batch)  # (R,)
            for r, values in zip(part, batch.values.split(batch.lengths.tolist())):
                rewards = [0.0] * len(values)
                rewards[-1] = r.reward  # the outcome, with the last token
                r.advantages = gae(rewards, values.tolist(), self.gamma, self.lam)
            own = torch.tensor([a for r in part for a in r.advantages])  # (R,)
            batch.returns = batch.values + own.to(batch.values)  # (R,)
            batches.append(batch)
        advantages = torch.tensor([a for r in rollouts for a in r.advantages])  # (tokens,)
        mean, std = advantages.mean().item(), advantages.std(correction=0).item()
        for r in rollouts:
            r.advantages = [(a - mean) / (std + 1e-4) for a in r.advantages]
        return batches

    def update(self, batches):
        """One AdamW step on the mean squared error of V per minibatch."""
        for batch in batches:
            self.adam.zero_grad()
            torch.nn.functional.mse_loss(self(batch), batch.returns).backward()
            if self.cfg.max_grad_norm:  # 0 = no clipping
                torch.nn.utils.clip_grad_norm_(self.parameters(), self.cfg.max_grad_norm)
            self.adam.step()


def train(run, critic):
    """nano_rlvr's loop, with GAE in place of the group's mean."""
    def assign_advantages(groups, cfg, running_mean):
        judged = [r for group in groups for r in group if r.reward is not None]
        with nr.timed(run.metrics, "critic"):  # a part of the stage "update"
            batches = critic.assign_advantages(judged)
            returns = torch.cat([batch.returns for batch in batches])  # (tokens,)
            errors = returns - torch.cat([batch.values for batch in batches])  # (tokens,)
            # share of the variance of the returns that V explains, before it is trained on them
            run.metrics["critic/explained"] = 1 - (errors.var() / returns.var()).item()
            critic.update(batches)
        return running_mean

    nr.train(run, assign_advantages=assign_advantages)


if __name__ == "__main__":
    if ranks.world_size() > 1:
        sys.exit("nano_rlvr: examples/ppo.py runs in one process: leave out torchrun")
    nr.main(train=lambda run: train(run, Critic(run.cfg)))
