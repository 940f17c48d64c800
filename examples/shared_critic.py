"""PPO in which policy and critic share one model: loss = policy loss + vf_coef * value loss.

    python -m examples.shared_critic --minibatches 4 --steps 20     flags of nano_rlvr.py work

The critic of ppo.py is a second model. Here it is one vector, the head: the value before a token is
its product with the hidden state from which the policy predicts the token. So the value loss, 0.5
times the mean square of value - return, trains the layers of both. That saves a model's memory and
a forward pass, but a large --vf_coef spoils the policy, and a small one the values. The head has an
AdamW of its own, whose step follows that of the policy. One process, layout packed.
"""
import argparse
from statistics import fmean, pstdev

import torch

import nano_rlvr as nr
from examples.ppo import gae, outcome
from runtime import ranks
from runtime.messages import RunError


class Head(torch.nn.Module):
    """The value head, and the hidden states of the policy's last forward pass."""

    def __init__(self, policy, lr=1e-3):
        super().__init__()
        decoder = policy.module.model.get_decoder()
        hidden_size = policy.module.model.config.hidden_size
        self.linear = torch.nn.Linear(hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)  # the value is 0 before the first step
        self.to(ranks.device())
        self.adam = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.0)
        decoder.register_forward_hook(self.keep)

    def keep(self, decoder, inputs, output):
        self.hidden = output.last_hidden_state[0]  # (T, H)

    def values(self, pack):
        """(R,) of the pack that the policy has just read."""
        hidden = self.hidden[pack.predictors]  # (R, H)
        return self.linear(hidden.float())[:, 0]  # (R,)


@torch.no_grad()
def assign_advantages(run, head, groups, lam):
    """GAE on the values before the step, normalised over all tokens. A token's return, which its
    value has to predict, goes to the loss as r.extra["returns"]."""
    cfg = run.cfg
    rollouts = [r for r in nr.flatten(groups) if r.reward is not None]
    every = []  # the advantages of all tokens
    for members in nr.pack_evenly(rollouts, cfg.pack_tokens, cfg.layout):
        pack = nr.collate(members, layout=cfg.layout)
        run.policy(pack)
        values = head.values(pack)  # (R,)
        lengths = pack.lengths.tolist()
        for r, part in zip(pack.rollouts, values.split(lengths)):
            values = part.tolist()
            r.advantages = gae(outcome(r), values, lam=lam)
            pairs = zip(r.advantages, values)
            r.extra["returns"] = [advantage + value for advantage, value in pairs]
            every += r.advantages
    mean = fmean(every)
    std = pstdev(every)
    for r in rollouts:
        centred = [a - mean for a in r.advantages]
        r.advantages = [a / (std + 1e-4) for a in centred]


def train(run, own):
    """nano_rlvr's loop with a value head on the policy."""
    head = Head(run.policy)

    def of_critic(groups, cfg, running_mean):
        assign_advantages(run, head, groups, own.lam)
        return running_mean

    def policy_loss(logp, old, ref, pack, cfg):
        loss, terms = nr.policy_loss(logp, old, ref, pack, cfg)
        values = head.values(pack)  # (R,)
        error = values - pack.extra["returns"]  # (R,)
        square = 0.5 * error**2  # (R,)
        terms["value_loss"] = square.detach()
        value_loss = (pack.weight * square).sum()  # ()
        return loss + own.vf_coef * value_loss, terms

    def step_head(*_):
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        head.adam.step()
        head.adam.zero_grad()

    run.policy.optimizer.optimizer.register_step_post_hook(step_head)
    nr.train(
        run,
        assign_advantages=of_critic,
        policy_loss=policy_loss,
        skip_zero_advantages=False)


def make_sampler(cfg):
    """The script's sampler, if the model can be packed: before the engines load."""
    if cfg.layout == "rows" or ranks.world_size() > 1:
        raise RunError("examples/shared_critic.py needs one process and --layout packed")
    return nr.Sampler(cfg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--vf_coef", type=float, default=0.1)
    parser.add_argument("--lam", type=float, default=1.0)
    own, argv = parser.parse_known_args()
    nr.main(argv, lambda run: train(run, own), make_sampler)
