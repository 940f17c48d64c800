"""Credit per token: the rewards of the steps of a completion, and the advantage of each of its tokens."""
import bisect
import itertools
import math

import numpy as np
import torch

from runtime import dist, sleep
from runtime.packing import pack_evenly


def ends_in_tokens(rollouts, llm):
    """Replaces the end of each step in r.steps, a number of characters of r.text, by a number of tokens.

    A step ends with the token that completes its last character (a character may have several tokens). A step
    that covers the whole text also covers the tokens after it, which have no text: the end of the sequence.
    """
    for r in (r for r in rollouts if r.steps):
        tokenizer = llm.get_tokenizer()
        pieces = tokenizer.batch_decode([[token] for token in r.completion], skip_special_tokens=True)
        covered = list(itertools.accumulate(map(len, pieces)))  # characters
        exact = "".join(pieces) == r.text  # no token has a part of a character or depends on those before it

        def complete(tokens, end):  # whether the first `tokens` tokens give the first `end` characters
            if exact:  # without decoding each prefix, which takes seconds for a long completion
                return covered[tokens - 1] >= end
            text = tokenizer.decode(r.completion[:tokens], skip_special_tokens=True)
            return text[:end] == r.text[:end]

        def tokens_of(end):
            if end == len(r.text):
                return len(r.completion)
            return 1 + bisect.bisect_left(range(1, len(r.completion)), True, key=lambda k: complete(k, end))

        r.steps = [(tokens_of(end), value) for end, value in r.steps]


def step_rewards(r, kl_coef):
    """The rewards of the steps of a rollout: list of at least one number, NaN without a verdict. An outcome
    reward is one step. r.kl, see --kl_in, is subtracted from the last one."""
    rewards = [reward for _, reward in r.steps] or [math.nan if r.reward is None else r.reward]
    return rewards[:-1] + [rewards[-1] - kl_coef * r.kl]


@torch.no_grad()
def store_kl(policy, ref, groups, filler, cfg, collate):
    """--kl_in reward: fills r.kl, the sum of k1 = log pi - log ref over the sequence, as in TRL's RLOO.

    Both log-probs come from the trainer, so k1 is exactly 0 while the two models are equal. vLLM's log-probs
    would add the difference of its kernels, up to 0.05 per token in bf16, and a group whose other rewards are
    equal would be normalised by the deviation of this noise. filler: a rollout for ranks with fewer packs.
    collate: that of nano_rlvr. Returns the mean per token as a metric. Collective.
    """
    rollouts = [r for group in groups for r in group]
    with sleep.on_device(ref):
        for packed in pack_evenly(rollouts, filler, cfg.pack_tokens):
            batch = collate(packed, dist.device())
            k1 = policy(batch)[0] - ref(batch)[0]  # (R,)
            sums = k1.new_zeros(len(packed)).index_add(0, batch.sequence_ids, k1)  # (B,)
            for r, kl in zip(packed, sums.tolist()):
                r.kl = kl
    total, tokens = dist.all_sum(sum(r.kl for r in rollouts), sum(r.length for r in rollouts))
    return {"kl": total / tokens} if tokens else {}


def gather(groups, get, cfg):
    """(G, n K): get(rollout), a list of at most K numbers, for the groups of all ranks, in the order of the
    ranks. Shorter lists are filled with NaN. Collective."""
    rows = dist.all_gather([[get(r) for r in group] for group in groups])  # concatenates the ranks' lists
    K = max((len(x) for row in rows for x in row), default=1)
    rows = [[x + [math.nan] * (K - len(x)) for x in row] for row in rows]
    return torch.tensor(rows).view(-1, cfg.samples * K)


def spread(groups, advantages):
    """Fills r.advantages: each completion token gets the sum of the advantages of all steps that end at it or
    after it. advantages (G, n K): those of the steps of all ranks. Collective."""
    start = sum(dist.all_gather([len(groups)])[:dist.rank()])  # groups of the ranks before this one
    for group, row in zip(groups, advantages[start:].tolist()):
        K = len(row) // len(group)
        for i, r in enumerate(group):
            at_end = np.zeros(len(r.completion))  # of the steps that end with this token
            for (end, _), advantage in zip(r.steps or [(len(r.completion), r.reward)], row[i * K:]):
                at_end[end - 1] += advantage
            r.advantages = at_end[::-1].cumsum()[::-1].tolist()
