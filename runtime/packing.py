"""Which sequences share a forward pass. The gradient does not depend on it: see nano_rlvr.token_weights."""
import dataclasses
import itertools

from runtime import dist


def pack(rollouts, budget):
    """First-fit bin packing: lists of rollouts of at most `budget` tokens. A longer one gets its own pack.

    The rollouts of a prompt stay together, because a pack runs a shared prompt once: largest group first, and
    in it the longest rollout first. The budget counts the prompt of every rollout: it is an upper bound.
    """
    groups = [list(group) for _, group in itertools.groupby(rollouts, key=lambda r: r.prompt)]
    groups.sort(key=lambda group: sum(map(len, group)), reverse=True)
    packs, free = [], []  # free[i]: tokens left in packs[i]
    for r in itertools.chain(*(sorted(group, key=len, reverse=True) for group in groups)):
        i = next((i for i, tokens in enumerate(free) if tokens >= len(r)), len(packs))
        if i == len(packs):
            packs.append([])
            free.append(budget)
        packs[i].append(r)
        free[i] -= len(r)
    return [sorted(members, key=len, reverse=True) for members in packs]


def pack_evenly(rollouts, filler, budget):
    """pack(), with as many packs on every rank: ranks with fewer add the rollout `filler` with weight 0.

    Collective, like the backward pass of each pack: all ranks must make the same number of them.
    """
    packs = pack(rollouts, budget)
    most = max(dist.all_gather([len(packs)]))
    return packs + [[dataclasses.replace(filler, weight=0.0)]] * (most - len(packs))
