"""Numbers per token for the report: of which rollouts, and which numbers.

They are written for at most LIMIT rollouts of a run: those that rollouts.jsonl keeps, in whole groups, of
evenly spaced steps.
"""
import math

import torch

from runtime import dist
from runtime.packing import pack_evenly

LIMIT = 2000


def spacing(steps, per_step, limit=LIMIT):
    """The smallest k with at most `limit` rollouts in every k-th of `steps` steps of `per_step` rollouts.

    >>> spacing(50, 64)
    2
    """
    return max(1, math.ceil(steps / max(1, limit // per_step)))


def kept_groups(groups, cfg):
    """The groups of this rank whose rollouts rollouts.jsonl keeps."""
    return groups[:math.ceil(cfg.keep_rollouts / cfg.samples)]


def chosen(step, groups, cfg):
    """The rollouts of a step that get numbers per token; none in most steps of a long run."""
    rollouts = [r for group in kept_groups(groups, cfg)[:max(1, LIMIT // cfg.samples)] for r in group]
    return rollouts if rollouts and step % spacing(cfg.steps, len(rollouts)) == 0 else []


@torch.no_grad()
def logps(policy, rollouts, collate, cfg):
    """The trainer's log-probs, a list per rollout: one per completion token, None where it was not sampled.

    They come from packs of their own, so that rollouts that are not trained, or on another rank, have them
    too. Collective. collate: that of nano_rlvr.
    """
    found = {}
    for packed in pack_evenly(rollouts, rollouts[0], cfg.pack_tokens):
        batch = collate(packed, dist.device())
        logp, _ = policy(batch)  # (R,)
        for r, own in zip(packed, logp.split(batch.lengths.tolist())):
            values = iter(own.tolist())
            found[id(r)] = [next(values) if sampled else None for sampled in r.sampled]
    return [found[id(r)] for r in rollouts]


def numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; two digits, at most five decimals.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's log-prob;
    advantage, unless all tokens have the same. None: the token was not sampled.
    """
    lists = {"text": texts(r.completion, tokenizer), "logp": before,
             "change": [None if x is None else y - x for x, y in zip(before, after)],
             "gap": [None if x is None else x - y for x, y in zip(before, r.vllm_logps)]}
    if len(set(r.advantages)) > 1:
        lists["advantage"] = r.advantages
    return {name: [float(f"{round(x, 5):.2g}") if isinstance(x, float) else x for x in values]
            for name, values in lists.items()}


def texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the last one has
    its text and the others have none."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        context = ids[max(0, start - 1):start]  # alone, SentencePiece would drop the space before a word
        text = tokenizer.decode(context + ids[start:end])[len(tokenizer.decode(context)):]
        if text.endswith("\ufffd") and end < min(start + 4, len(ids)):  # a character has at most 4 bytes
            found.append("")
        else:
            found.append(text)
            start = end
    return found
