"""A reward that ignores the answer: the control of Spurious Rewards (arXiv 2506.10947).

    python nano_rlvr.py --rewards gsm8k:0,random:1
"""
import hashlib

from runtime.verify.verifier import text_of


def random_reward(completions, prompts=None, sample_index=None, step=None, random_seed=0, **_):
    """A fair coin: 0.0 or 1.0 from a hash of (random_seed, step, sample_index, prompt, completion).

    A resumed run, and a run on another number of ranks, get the same values. Without `step` and
    `sample_index`, the number of a completion among those of its prompt, equal texts would always
    get equal values, which could be learned.
    """
    n = len(completions)
    rewards = []
    for row in zip(sample_index or range(n), prompts or [None] * n, map(text_of, completions),
                   strict=True):
        key = repr((random_seed, step, *row)).encode()
        rewards.append(float(hashlib.blake2b(key, digest_size=1).digest()[0] & 1))
    return rewards
