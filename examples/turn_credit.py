"""Credit per turn for episodes of several turns, from the rewards of each turn.

    python -m examples.turn_credit --rollout my_file.py:play --rewards $E:outcome ...

The rollout function is a `player` of examples/environment.py. A turn gets the sum of the rewards
from this turn on, because it cannot change what was paid before. nano_rlvr's baseline and scale
compare it with the same turn of the other episodes of the group. A turn that no other episode of
the group has is not trained. --rewards decides what is logged, and which episodes have no reward.
"""
from dataclasses import replace
from functools import partial

import torch

import nano_rlvr as nr
from runtime import ranks
from runtime.batch import flatten


def turn_starts(r):
    """The position of the first token of each turn of a Rollout."""
    starts = []
    was_sampled = False
    for i, is_sampled in enumerate(r.loss_mask):
        if is_sampled and not was_sampled:
            starts.append(i)
        was_sampled = is_sampled
    return starts


def from_turn(r, turn):
    """A copy of a Rollout whose reward is the sum of the rewards from a turn on. Its reward is None
    if the Rollout does not have this turn or has no reward."""
    starts = turn_starts(r)
    if r.reward is None or turn >= len(starts):
        return replace(r, reward=None)
    rewards = r.extra["reward"][starts[turn]:]
    return replace(r, reward=sum(rewards))


def assign_advantages(groups, cfg, running_mean):
    """As nano_rlvr's, with an advantage per turn."""
    after = nr.assign_advantages(groups, cfg, running_mean)  # the moving mean of the rewards
    rollouts = flatten(groups)
    counts = [len(turn_starts(r)) for r in rollouts]
    for turn in range(max(ranks.all_gather(counts), default=0)):
        copies = [from_turn(r, turn) for r in rollouts]
        nr.assign_advantages(nr.in_groups(copies, cfg.samples), cfg, running_mean)
        for r, copy in zip(rollouts, copies):
            for start in turn_starts(r)[turn:turn + 1]:
                r.advantages[start:] = copy.advantages[start:]  # later turns follow
    return after


def compare_turns(turns, cfg):
    """Fills advantages: each group of turns is compared within itself.

    turns: a list per group of (rollout, position of the turn's first token, return). A turn's
    advantage stands up to the next turn's start, if the groups of later turns come later."""
    for group in turns:
        returns = [value for _, _, value in group]
        returns = torch.tensor([returns])  # (1, turns)
        advantages = nr.group_advantages(returns, cfg.baseline, cfg.scale)[0]  # (turns,)
        for (r, start, _), advantage in zip(group, advantages.tolist()):
            after = len(r.completion) - start
            r.advantages[start:] = [advantage] * after


if __name__ == "__main__":
    nr.main(train=partial(nr.train, assign_advantages=assign_advantages))
