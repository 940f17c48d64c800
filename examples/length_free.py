"""Advantages that do not depend on the length, and a step penalty for long completions.

    python -m examples.length_free --steps 30                 flags of nano_rlvr.py work
    python nano_rlvr.py --rewards gsm8k:1,examples/length_free.py:overlong_hard:0.5

In a group, the advantages A and the lengths l, minus their mean, are two vectors. Here A loses its
projection on l: A - (A.l / l.l) l. What is left does not say whether long or short is better.
Some courses call this "Dr. GRPO". The paper of that name (arXiv:2503.20783) does another thing: no
standard deviation and a constant divisor of the loss (--algo dr_grpo). Where only long answers are
right, the projection takes the whole signal away.

Some courses also give DAPO's penalty as a step, -1 for a completion longer than a limit. The paper
(arXiv:2503.14476, eq. 13) has a ramp: --rewards overlong.
"""
import sys
from functools import partial

import torch

import nano_rlvr as nr
from rewards import each


def without_length(advantages, lengths):
    """(G,) advantages, (G,) lengths -> (G,) advantages without their projection on the lengths."""
    centred = lengths - lengths.mean()  # (G,)
    square = centred @ centred  # ()
    if square == 0:
        return advantages  # (G,) all are equally long
    slope = (advantages @ centred) / square  # () advantage per token
    return advantages - slope * centred  # (G,)


def assign_advantages(groups, cfg, running_mean):
    """nano_rlvr's advantages, then without the length. A rollout without a reward keeps its 0."""
    running_mean = nr.assign_advantages(groups, cfg, running_mean)
    for group in groups:
        judged = [r for r in group if r.reward is not None]
        if not judged:
            continue
        advantages = torch.tensor([r.advantages[0] for r in judged])  # (G,)
        lengths = torch.tensor([float(r.length) for r in judged])  # (G,)
        for r, advantage in zip(judged, without_length(advantages, lengths).tolist()):
            r.advantages = [advantage] * len(r.completion)
    return running_mean


@each
def overlong_hard(text, completion_ids, max_tokens, overlong_buffer=None):
    """-1 for more than max_tokens - buffer tokens, else 0. The buffer is a fifth unless given.

    >>> overlong_hard(["", ""], completion_ids=[[0] * 80, [0] * 81], max_tokens=100)
    [0.0, -1.0]
    """
    buffer = max_tokens // 5 if overlong_buffer is None else overlong_buffer
    return -1.0 if len(completion_ids) > max_tokens - buffer else 0.0


if __name__ == "__main__":
    nr.main(sys.argv[1:], train=partial(nr.train, assign_advantages=assign_advantages))
