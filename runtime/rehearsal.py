"""Before step 0: is a log-prob the same in a pack and alone, and is there memory for the largest pack?"""
import dataclasses
import math
import random

import torch

from runtime import dist, engines
from runtime.errors import RunError
from runtime.flops import empty_model

# Largest mean |difference| of log-probs that the dtype explains; a larger --mismatch_bound takes its place.
# float32: 8,192 times its rounding, 2**-23. bfloat16: two kernels differ by 0.02 to 0.05.
NOISE = {"float32": 2**-10, "bfloat16": 0.15}
# The same if kernels and shapes are equal: 64 times the rounding of float32, the dtype of log-probs.
ROUNDING = 2**-17


@torch.no_grad()
def check_packing(policy, rollout, collate, cfg):
    """Raises RunError if a log-prob depends on the other sequences of a pack. Collective.

    rollout, collate: Rollout and collate of nano_rlvr. With random tokens, two completions per prompt:
    1. Packed and alone, log-probs differ by no more than the noise of the dtype.
    2. If every second completion is replaced, the log-probs of the others do not change: not by one bit, in
       any dtype, as shapes and kernels stay the same. Two exceptions have the bound of 1: experts, which then
       multiply other numbers of tokens, and a device whose kernels do not repeat their own results.
    """
    rng, vocab = random.Random(0), empty_model(cfg.model).config.get_text_config().vocab_size

    def tokens(most):
        return [rng.randrange(vocab) for _ in range(min(16, most))]

    def logps(sequences):
        rollouts = [rollout(prompt, completion, "", False, [0.0] * len(completion))
                    for prompt, completion in sequences]
        return policy(collate(rollouts, dist.device()))[0].view(len(sequences), -1)  # (B, R / B)

    prompts = [tokens(cfg.max_prompt), tokens(cfg.max_prompt)]
    sequences = [(prompt, tokens(cfg.max_tokens)) for prompt in prompts for _ in range(2)]
    replaced = [(prompt, completion if i % 2 else tokens(cfg.max_tokens))
                for i, (prompt, completion) in enumerate(sequences)]
    packed = logps(sequences)  # (4, R / 4)
    alone = torch.cat([logps([sequence]) for sequence in sequences])  # (4, R / 4)
    repeats = torch.equal(packed, logps(sequences))
    experts = any("expert" in name for name, _ in policy.named_parameters())
    noise = max(NOISE.get(cfg.dtype, 0.0), cfg.mismatch_bound)
    for difference, bound, fault in (
        (packed - alone, noise, "packed and single sequences give different log-probs"),
        ((packed - logps(replaced))[1::2], ROUNDING if repeats and not experts else noise,
         "the log-probs of a sequence depend on the others in its pack"),
    ):
        mean = max(dist.all_gather([difference.abs().nan_to_num(torch.inf).mean().item()]))
        if mean > bound:
            raise RunError(
                f"--model {cfg.model}: {fault} (mean |difference| {mean:.2g}, bound {bound:.2g}): this model "
                "is not supported")


def largest_pack(cfg):
    """(prompt tokens, completion tokens) of each sequence of the largest pack that can occur.

    One sequence has the largest length. The others have a prompt of one token, so that the pack has the most
    tokens and nearly the most completion tokens, which are the rows of the LM head.
    """
    sequences = [(cfg.max_prompt, cfg.max_tokens)]
    left = cfg.pack_tokens - cfg.max_prompt - cfg.max_tokens
    while left >= 2:
        sequences.append((1, min(left - 1, cfg.max_tokens)))
        left -= sum(sequences[-1])
    return sequences


def rehearse(policy, ref, cfg, rollout, collate, store_fixed_logps, update):
    """Takes two steps on the largest pack at learning rate 0, then resets AdamW: weights and
    optimizer are as before, and too little memory shows before step 0. Collective.

    Twice, because the first step creates AdamW's moments and the second needs memory beside them. The last
    four arguments: Rollout and the functions of nano_rlvr. Raises RunError if log-probs depend on the pack
    (see check_packing), or if policy and reference differ already.
    """
    check_packing(policy, rollout, collate, cfg)
    vocab = empty_model(cfg.model).config.get_text_config().vocab_size
    rollouts = [rollout([i % vocab] * prompt, [0] * completion, "", True, [0.0] * completion, weight=1.0)
                for i, (prompt, completion) in enumerate(largest_pack(cfg))]  # hardly two equal prompts
    largest = collate(rollouts, dist.device())
    cfg = dataclasses.replace(cfg, mismatch_bound=math.inf, kl_in="loss")  # vLLM did not sample these tokens
    store_fixed_logps(policy, ref, [largest], cfg)
    engines.set_lr(policy, 0.0)
    for _ in range(2):
        kl = update(policy, [largest], cfg).get("kl", 0.0)
        if not kl <= NOISE.get(cfg.dtype, NOISE["float32"]):  # also when it is NaN
            raise RunError(f"policy and reference differ before the first step (KL {kl:.2g}): the model was "
                           "loaded twice with different weights; is its checkpoint complete?")
    for state in engines.adamw_states(policy):
        for name in state:
            state[name] *= 0  # in place for tensors; DeepSpeed's CPU AdamW counts its steps in an int
