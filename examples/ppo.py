"""PPO with a critic, to compare with GRPO: values per token and GAE in place of the group's mean.

    python -m examples.ppo --steps 20    PPO on the bundled model; all flags of nano_rlvr.py work
    python -m examples.ppo --kl_in reward --kl_coef 0.05 --kl_target 1 --lam 0.95 \\
        --clip_value 0.2 --whiten_rewards --minibatches 4 --steps 20

A critic V predicts, before each token, the reward that the completion will get. An advantage is
what a token changed in this prediction: the token that decides gets the credit. GRPO has no critic,
so all tokens of a completion share one number. One process, for the bundled model: neither the
memory plan nor the checkpoints know the critic, so --resume starts with a new one.

The second command has the details of PPO for RLHF (AlpacaFarm, arXiv:2305.14387):

    --kl_in reward     token t has the reward -beta max(log pi - log ref, 0); the task's reward
                       comes on top at the last token; the loss has no KL; beta begins at --kl_coef
    --kl_target        moves beta so that the KL of a completion comes near this number of nats
    --whiten_rewards   divides the rewards of the tokens by their standard deviation
    --clip_value       V moves by at most this much from its value before the step
    --vf_coef          the critic's loss is vf_coef * 0.5 * max(square, square of the clipped V)

Policy and critic share no weights, so vf_coef acts on the critic's clipped gradient only. Curves of
a healthy run: ppo/shaped and ppo/task rise, ppo/kl_penalty, which is not above 0, falls slowly.
"""
import argparse
import dataclasses
import sys
from statistics import fmean

import torch

import nano_rlvr as nr
from runtime import ranks, trainer
from runtime.messages import RunError
from runtime.trainer import on_device


def gae(rewards, values, gamma=1.0, lam=1.0):
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16) of a completion.

    rewards[t]: reward for token t. values[t]: V before token t. Returns a list of advantages:
        delta_t = r_t + gamma V_{t+1} - V_t      V after the last token is 0
        A_t = delta_t + gamma lam A_{t+1}        the sum of (gamma lam)^l delta_{t+l} over l >= 0
    lam 1: the return minus V_t, right on average but noisy. lam 0: delta_t, as wrong as V.
    """
    advantages = []
    next_value = 0.0
    next_advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        delta = reward + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


def shape_reward(reward, logps, ref_logps, beta):
    """The rewards of a completion's tokens: -beta max(log pi - log ref, 0) for each of them, and
    the reward of the task on top for the last one."""
    shaped = []
    for logp, ref in zip(logps, ref_logps, strict=True):
        shaped.append(-beta * max(logp - ref, 0.0))
    shaped[-1] += reward
    return shaped


def outcome(r):
    """The rewards of a completion's tokens without a KL: 0, and that of the task for the last."""
    return [0.0] * (r.length - 1) + [r.reward]


def whiten_rewards(token_rewards):
    """Lists of rewards -> lists with the same mean over all tokens, and standard deviation 1."""
    flat = torch.tensor(nr.flatten(token_rewards))  # (tokens,)
    mean = flat.mean()  # ()
    inverse = torch.rsqrt(flat.var(correction=0) + 1e-8)  # ()
    whitened = (flat - mean) * inverse + mean  # (tokens,)
    lengths = list(map(len, token_rewards))
    return [part.tolist() for part in whitened.split(lengths)]


@dataclasses.dataclass
class AdaptiveKL:
    """The weight beta of the KL in the reward (Ziegler et al., arXiv:1909.08593, section 2.2).

    target: of the KL of a completion, in nats; 0 leaves beta as it is."""
    beta: float
    target: float = 0.0
    gain: float = 0.1

    def update(self, kl):
        """beta *= 1 + gain * error. error: how far kl is from the target, from -20 to 20 %."""
        if self.target:
            error = min(0.2, max(-0.2, kl / self.target - 1))
            self.beta *= 1 + self.gain * error


def value_loss(values, old, returns, clip_value=0.0, vf_coef=2.0):
    """vf_coef * 0.5 * mean of max((V - G)^2, (clip(V, old - c, old + c) - G)^2). Each (R,) -> ().

    clip_value c 0: no clip. With vf_coef 2 this is the mean squared error."""
    square = (values - returns)**2  # (R,)
    if clip_value:
        clipped = old + (values - old).clamp(-clip_value, clip_value)  # (R,)
        square = torch.maximum(square, (clipped - returns)**2)  # (R,)
    return vf_coef * 0.5 * square.mean()


def policy_loss(logp, old, ref, pack, cfg):
    """nano_rlvr's loss, with approxkl = 0.5 (log pi - log pi_old)^2 among the metrics."""
    loss, terms = nr.policy_loss(logp, old, ref, pack, cfg)
    change = torch.zeros_like(logp) if old is None else logp - old  # (R,)
    terms["approxkl"] = 0.5 * change**2  # (R,)
    return loss, terms


class Critic(torch.nn.Module):
    """V: a copy of the starting model with one output instead of the LM head, and its AdamW."""

    def __init__(self, cfg, lr=3e-4, minibatches=8, gamma=1.0, lam=1.0, clip_value=0.0,
                 vf_coef=2.0, whiten_rewards=False):
        super().__init__()
        model = nr.load_model(cfg)
        self.decoder = model.get_decoder()
        self.head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)  # V is 0 before the first step
        self.cfg = cfg
        self.minibatches = minibatches
        self.gamma = gamma
        self.lam = lam
        self.clip_value = clip_value
        self.vf_coef = vf_coef
        self.whiten_rewards = whiten_rewards
        self.to(ranks.device())
        self.adam = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.0)

    def forward(self, pack):
        """A pack -> values before each of its completion tokens (R,)."""
        output = self.decoder(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            pack=pack)
        hidden = output.last_hidden_state[0, pack.predictors]  # (R, H)
        return self.head(hidden)[:, 0]  # (R,)

    @torch.no_grad()
    def assign_advantages(self, rollouts, token_rewards=None):
        """Fills the advantages of each rollout with GAE, normalised over all tokens of the step.

        token_rewards: a list per rollout; None is the outcome, with the last token. Returns the
        critic's minibatches with pack.values (R,) and their targets, pack.returns (R,).
        """
        if token_rewards is None:
            token_rewards = [outcome(r) for r in rollouts]
        if self.whiten_rewards:
            token_rewards = whiten_rewards(token_rewards)
        packs = []
        for i in range(min(self.minibatches, len(rollouts))):
            part = rollouts[i::self.minibatches]  # completions of all prompts
            pack = nr.collate(part, ranks.device())
            pack.values = self(pack)  # (R,)
            part_rewards = token_rewards[i::self.minibatches]
            part_values = pack.values.split(pack.lengths.tolist())
            for r, rewards, values in zip(part, part_rewards, part_values):
                r.advantages = gae(rewards, values.tolist(), self.gamma, self.lam)
            advantages = torch.tensor(nr.flatten(r.advantages for r in part))  # (R,)
            pack.returns = pack.values + advantages.to(pack.values)  # (R,)
            packs.append(pack)
        advantages = torch.tensor(nr.flatten(r.advantages for r in rollouts))  # (tokens,)
        mean = advantages.mean().item()
        std = advantages.std(correction=0).item()
        for r in rollouts:
            centred = [a - mean for a in r.advantages]
            r.advantages = [a / (std + 1e-4) for a in centred]
        return packs

    def update(self, packs):
        """One AdamW step on the loss of V per minibatch."""
        for pack in packs:
            self.adam.zero_grad()
            values = self(pack)  # (R,)
            loss = value_loss(values, pack.values, pack.returns, self.clip_value, self.vf_coef)
            loss.backward()
            if self.cfg.max_grad_norm:  # 0 = no clipping
                torch.nn.utils.clip_grad_norm_(self.parameters(), self.cfg.max_grad_norm)
            self.adam.step()


def shape_rewards(run, ref, rollouts, controller):
    """The rewards of the tokens, a list per rollout, with the KL to ref. Logs the three curves and
    moves beta."""
    with on_device(ref):
        ref_logps = trainer.token_logps(ref, rollouts, run.cfg)
    logps = trainer.token_logps(run.policy, rollouts, run.cfg)
    shaped = []
    for r, of_policy, of_ref in zip(rollouts, logps, ref_logps):
        shaped.append(shape_reward(r.reward, of_policy, of_ref, controller.beta))
    total = fmean(map(sum, shaped))
    task = fmean(r.reward for r in rollouts)
    run.metrics["ppo/shaped"] = total
    run.metrics["ppo/task"] = task
    run.metrics["ppo/kl_penalty"] = total - task
    run.metrics["ppo/beta"] = controller.beta
    controller.update((task - total) / controller.beta)
    return shaped


def train(run, critic, controller=None, collect_rollouts=nr.collect_rollouts):
    """nano_rlvr's loop, with GAE in place of the group's mean. controller: AdaptiveKL, which puts
    the KL into the rewards of the tokens. collect_rollouts: perhaps one of yours."""
    ref = run.ref
    if controller:
        run.ref = None  # no KL in the loss

    def assign_advantages(groups, cfg, running_mean):
        judged = [r for r in nr.flatten(groups) if r.reward is not None]
        shaped = None
        if controller:
            shaped = shape_rewards(run, ref, judged, controller)
        with nr.timed(run.metrics, "critic"):  # a part of the stage "update"
            packs = critic.assign_advantages(judged, shaped)
            returns = torch.cat([pack.returns for pack in packs])  # (tokens,)
            values = torch.cat([pack.values for pack in packs])  # (tokens,)
            # share of the variance of the returns that V explains, before it is trained on them
            unexplained = (returns - values).var() / returns.var()  # ()
            run.metrics["critic/explained"] = 1 - unexplained.item()
            critic.update(packs)
        return running_mean

    nr.train(run, collect_rollouts, assign_advantages, policy_loss)


def make_sampler(cfg, own):
    """The script's sampler, if the flags go together: before the engines load."""
    if own.kl_in == "reward" and not cfg.kl_coef:
        raise RunError("--kl_in reward needs --kl_coef above 0, where beta begins")
    if own.kl_target and own.kl_in == "loss":
        raise RunError("--kl_target needs --kl_in reward")
    if cfg.layout == "rows":
        raise RunError("examples/ppo.py needs --layout packed: its critic reads packs")
    return nr.Sampler(cfg)


def start(run, own):
    """Trains with the flags of this file."""
    details = {name: getattr(own, name) for name in DETAILS}
    critic = Critic(run.cfg, whiten_rewards=own.whiten_rewards, **details)
    controller = None
    if own.kl_in == "reward":
        controller = AdaptiveKL(run.cfg.kl_coef, own.kl_target)
    train(run, critic, controller)


DETAILS = {"gamma": 1.0, "lam": 1.0, "clip_value": 0.0, "vf_coef": 2.0}  # flags with a number

if __name__ == "__main__":
    if ranks.world_size() > 1:
        sys.exit("nano_rlvr: examples/ppo.py runs in one process: leave out torchrun")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in DETAILS.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--whiten_rewards", action="store_true")
    parser.add_argument("--kl_in", choices=("loss", "reward"), default="loss")
    parser.add_argument("--kl_target", type=float, default=0.0)
    own, argv = parser.parse_known_args()
    nr.main(argv, lambda run: start(run, own), lambda cfg: make_sampler(cfg, own))
