"""Which rank trains a sequence, and which sequences share a forward pass.

The gradient depends on neither: see nano_rlvr.token_weights.
"""
import dataclasses
import itertools
import math

from runtime import dist
from runtime.flops import ModelShape

TOLERANCE = 1.05  # highest cost of a rank over the mean cost


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


def divide(parts, cost):
    """Rollouts of each rank -> rollouts of each rank, so that the costs of the ranks are nearly equal.

    cost: list of rollouts -> FLOPs, a prompt that several of them share counted once. Stops at the first
    division whose highest cost is at most TOLERANCE times the mean: as they are; whole prompts, largest cost
    first, each to the rank with the lowest cost so far (Graham 1969); the same with the completions of a
    prompt in pieces, if together they cost more than 100, 30, 10, 3 % of the mean, or all apart. If none
    does, for example because one sequence costs too much, returns the one with the lowest highest cost.
    """
    rollouts = [r for part in parts for r in part]
    groups = [list(group) for _, group in itertools.groupby(rollouts, key=lambda r: r.prompt)]
    mean, best = cost(rollouts) / len(parts), parts
    for limit in (math.inf, 1.0, 0.3, 0.1, 0.03, 1e-9):
        if max(map(cost, best)) <= TOLERANCE * mean:
            break
        units = []
        for group in groups:
            pieces = min(len(group), max(1, math.ceil(cost(group) / (limit * mean))))
            units += [group[i::pieces] for i in range(pieces)]
        costs, divided = [0] * len(parts), [[] for _ in parts]
        for unit_cost, unit in sorted(((cost(unit), unit) for unit in units), key=lambda x: -x[0]):
            lowest = costs.index(min(costs))
            costs[lowest] += unit_cost
            divided[lowest] += unit
        best = min(best, divided, key=lambda parts: max(map(cost, parts)))
    return [sorted(part, key=lambda r: r.prompt) for part in best]  # the completions of a prompt in a row


def balance(rollouts, model):
    """The rollouts that this rank trains, copies from all ranks: divide() by the FLOPs of a forward pass.

    Their weights must have been assigned. Every rank receives all rollouts, 30 bytes per token or less.
    Collective; a single rank keeps its rollouts as they are.
    """
    if dist.world_size() == 1:
        return rollouts
    return divide(dist.all_gather([rollouts]), ModelShape.of(model).forward_flops)[dist.rank()]


def pack_evenly(rollouts, filler, budget):
    """pack(), with as many packs on every rank: ranks with fewer add the rollout `filler` with weight 0.

    Collective, like the backward pass of each pack: all ranks must make the same number of them.
    """
    packs = pack(rollouts, budget)
    most = max(dist.all_gather([len(packs)]))
    return packs + [[dataclasses.replace(filler, weight=0.0)]] * (most - len(packs))
