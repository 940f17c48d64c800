"""PPO with a critic, to compare with GRPO: values per token and GAE take the place of the group's mean.

    python examples/ppo.py --steps 20               PPO on the bundled model; any flag of nano_rlvr.py works
    python examples/ppo.py --steps 20 --critic off  GRPO on the same number of samples, in the same loop

A critic V predicts, before each token, the reward that the completion will get. An advantage is what a token
changed in this prediction: the token that decides gets the credit, the tokens that only follow get none. GRPO
has no critic, so all tokens of a completion share one number. Only the advantages and the critic are new
here. Rollouts, rewards, packs, the clipped loss with its KL, the update and the sync are nano_rlvr's.

For the bundled model: one process, no checkpoints, and the memory plan does not know the critic.
"""
import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import data  # noqa: E402
import nano_rlvr as nr  # noqa: E402
import runtime.flags  # noqa: E402
import runtime.model  # noqa: E402
import runtime.sampler  # noqa: E402
import runtime.trainer  # noqa: E402
from runtime import dist, evaluation, log, memory, stats, stop  # noqa: E402


def gae(rewards, values, gamma=1.0, lam=1.0):
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16) of one completion.

    rewards[t]: reward for token t. values[t]: V before token t. Lists of numbers -> list of advantages:
        delta_t = r_t + gamma V_{t+1} - V_t      V after the last token is 0
        A_t = delta_t + gamma lam A_{t+1}        the sum of (gamma lam)^l delta_{t+l} over l >= 0
    lam 1: A_t is the return minus V_t, right on average but noisy. lam 0: A_t is delta_t, as wrong as V.

    >>> gae([0.0, 0.0, 1.0], [0.5, 0.75, 0.75], lam=0.0), gae([0.0, 0.0, 1.0], [0.5, 0.75, 0.75], lam=1.0)
    ([0.25, 0.0, 0.25], [0.5, 0.25, 0.25])
    """
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        delta = reward + gamma * next_value - value
        next_value, next_advantage = value, delta + gamma * lam * next_advantage
        advantages.append(next_advantage)
    return advantages[::-1]


class Critic(torch.nn.Module):
    """V: a copy of the starting model with one output instead of the LM head, and its AdamW."""

    def __init__(self, cfg, lr=3e-4, epochs=1, minibatches=8, gamma=1.0, lam=1.0):
        super().__init__()
        model = runtime.model.load_model(cfg)
        self.decoder, self.head = model.get_decoder(), torch.nn.Linear(model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)  # V is 0 before the first step
        torch.nn.init.zeros_(self.head.bias)
        self.epochs, self.minibatches, self.gamma, self.lam = epochs, minibatches, gamma, lam
        self.max_grad_norm = cfg.max_grad_norm
        self.to(dist.device())
        self.adam = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.0)

    def forward(self, batch):
        """A batch of collate -> values before each of its completion tokens (R,)."""
        output = self.decoder(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, batch=batch)
        return self.head(output.last_hidden_state[0, batch.predictors])[:, 0]  # (R,)

    @torch.no_grad()
    def assign_advantages(self, rollouts):
        """Fills the advantages of each rollout with GAE, normalised over all tokens of the step.

        Returns the minibatches of the critic. batch.values: V (R,). batch.returns: its target, V plus the
        advantage before normalisation, as in TRL (R,). All tokens must be sampled: no tool outputs.
        """
        batches, advantages = [], []
        for i in range(min(self.minibatches, len(rollouts))):
            part = rollouts[i::self.minibatches]  # completions of all prompts
            batch = nr.collate(part, dist.device())
            batch.values = self(batch)  # (R,)
            for r, values in zip(part, batch.values.split(batch.lengths.tolist())):
                rewards = [0.0] * len(values)
                for end, reward in r.steps or [(len(values), r.reward)]:  # an outcome is at the last token
                    rewards[end - 1] += reward
                r.advantages = gae(rewards, values.tolist(), self.gamma, self.lam)
            advantages.append(torch.tensor([a for r in part for a in r.advantages]))  # (R,)
            batch.returns = batch.values + advantages[-1].to(batch.values)  # (R,)
            batches.append(batch)
        advantages = torch.cat(advantages)  # (tokens,)
        mean, std = advantages.mean().item(), advantages.std(correction=0).item()
        for r in rollouts:
            r.advantages = [(a - mean) / (std + 1e-4) for a in r.advantages]
        return batches

    def update(self, batches):
        """One AdamW step on the mean squared error of V per minibatch and epoch."""
        for batch in batches * self.epochs:
            self.adam.zero_grad()
            F.mse_loss(self(batch), batch.returns).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.max_grad_norm)
            self.adam.step()


def train(cfg, llm, policy, ref, train_set, eval_set, verifier, critic=None):
    """nano_rlvr's loop, with GAE where there is a critic. Returns the metrics of each step (list of dicts);
    the last has only the evaluation of the final weights."""
    history, running_mean = [], math.nan
    nr.sync_weights(policy, llm)
    for step in range(cfg.steps + 1):
        metrics = {"step": step}
        history.append(metrics)
        if step % cfg.eval_every == 0 or step == cfg.steps:
            metrics |= nr.evaluate(llm, eval_set, verifier, cfg)[0]
            print(f"step {step:4d}  {log.evaluation_text(metrics)}", flush=True)
        if step == cfg.steps:
            return history
        parts, sampled = nr.collect_rollouts(cfg, llm, train_set, verifier, step, metrics)
        groups = sum(parts, [])
        runtime.sampler.put_to_sleep(llm, policy)
        if critic is None:
            running_mean = nr.assign_advantages(groups, cfg, running_mean)
        else:
            with log.timed(metrics, "critic"):
                judged = [r for group in groups for r in group if r.reward is not None]
                batches = critic.assign_advantages(judged)
                values, returns = (torch.cat([getattr(b, x) for b in batches]) for x in ("values", "returns"))
                # the share of the variance of the returns that V explains, before it is trained on them
                metrics["critic/explained"] = 1 - ((returns - values).var() / returns.var()).item()
                critic.update(batches)
        with log.timed(metrics, "update"):
            minibatches = []  # as in nano_rlvr.train
            for part in parts:
                trained = nr.assign_token_weights([r for group in part for r in group], cfg)
                packs = nr.pack(trained, cfg.pack_tokens)
                minibatches.append([nr.collate(pack, dist.device()) for pack in packs])
            nr.store_fixed_logps(policy, ref, sum(minibatches, []), cfg)
            runtime.trainer.set_lr(policy, nr.lr_at(step, cfg))
            metrics |= stats.step_means([nr.update(policy, batches, cfg) for _ in range(cfg.epochs)
                                         for batches in minibatches if batches])
        with log.timed(metrics, "sync"):
            nr.sync_weights(policy, llm)
        metrics |= log.summary(cfg, groups, sampled, metrics)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--critic", choices=("on", "off"), default="on", help="off: GRPO")
    parser.add_argument("--critic_lr", type=float, default=3e-4, help="AdamW's learning rate, constant")
    parser.add_argument("--critic_epochs", type=int, default=1, help="passes over the samples of a step")
    parser.add_argument("--gamma", type=float, default=1.0, help="discount per token")
    parser.add_argument("--lam", type=float, default=1.0, help="lambda of GAE")
    own, flags = parser.parse_known_args(argv)
    with stop.with_one_line(ValueError, OSError, RuntimeError):
        cfg = nr.parse_config(flags)
        dist.init_process_group(cfg.timeout)
        if dist.world_size() > 1:
            raise ValueError("examples/ppo.py runs in one process: leave out torchrun")
        train_set, eval_set = data.load_splits(cfg, runtime.flags.load_tokenizer(cfg))
        cfg = memory.plan(cfg)
        verifier, _ = evaluation.start_verifiers(cfg, nr.rewards.Verifier, train_set, eval_set)
    llm = nr.Sampler(cfg)
    runtime.sampler.put_to_sleep(llm)
    policy, ref, critic = nr.make_policy(cfg), nr.make_reference(cfg), None
    if own.critic == "on":
        critic = Critic(cfg, own.critic_lr, own.critic_epochs, gamma=own.gamma, lam=own.lam)
    history = train(cfg, llm, policy, ref, train_set, eval_set, verifier, critic)
    before, after = history[0], history[-1]
    print(f"{'PPO' if critic else cfg.algo}: held-out accuracy {before['eval/accuracy']:.1%} -> "
          f"{after['eval/accuracy']:.1%} in {cfg.steps} steps of {cfg.prompts} x {cfg.samples} completions")
    verifier.close()


if __name__ == "__main__":
    main()
