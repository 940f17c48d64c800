"""Run by test_ranks.py on 1, 2 and 4 ranks: five steps on fixed rollouts per row of SETTINGS, float64.

    zero_worker.py FILE MODEL

Rank 0 saves {name of the setting: weights} to FILE.
"""
import math
import sys

import torch
from transformers import AutoTokenizer

import nano_rlvr as nr
from conftest import fixed_rollouts, float64, make_config
import runtime.trainer
from runtime import dist, stats

SETTINGS = {
    "stage 1": dict(zero_stage=1),
    "stage 2": dict(zero_stage=2),
    "stage 3": dict(zero_stage=3),
    "one group left": dict(zero_stage=3, drop_flat_groups=True),
    "one group left, not balanced": dict(zero_stage=2, drop_flat_groups=True),
    "correction": dict(zero_stage=1, correction="token_mask", correction_cap=3.0),
    "process rewards": dict(zero_stage=2, aggregate="token"),
}


def groups_of(name, tokenizer):
    """Four groups of four rollouts. With "one group left", the rewards of three are flat."""
    rollouts = fixed_rollouts(tokenizer, groups=4)
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    for i, group in enumerate(groups):
        for j, r in enumerate(group):
            r.reward = float(j < 2) if i == 0 or "one group" not in name else 1.0
            if name == "process rewards":
                r.steps = [(max(1, len(r.completion) // 2), j / 4), (len(r.completion), r.reward)][:1 + j % 2]
                r.reward = sum(value for _, value in r.steps)
    return groups


def train(name, tokenizer):
    cfg = make_config(**SETTINGS[name], model=sys.argv[2], prompts=4, lr=1e-3, pack_tokens=200, kl_coef=0.0,
                      mismatch_bound=1e9)
    policy = nr.make_policy(cfg)
    groups, share = groups_of(name, tokenizer), 4 // dist.world_size()
    groups = groups[dist.rank() * share:][:share]
    filler = groups[0][0]
    nr.assign_advantages(groups, cfg, math.nan)
    kept = [g for g in groups if not (cfg.drop_flat_groups and stats.is_flat(g))]
    trained = nr.assign_token_weights([r for g in kept for r in g], cfg)
    if "not balanced" not in name:
        trained = nr.balance(trained, cfg.model)
    elif dist.rank():
        assert not trained  # a rank with nothing left
    packs = nr.pack_evenly(trained, filler, cfg.pack_tokens)
    for _ in range(5):
        nr.update(policy, [nr.collate(p) for p in packs], cfg)
    return {key: w.clone() for key, w in runtime.trainer.named_weights(policy)}


if __name__ == "__main__":
    dist.init_process_group()
    with float64():
        tokenizer = AutoTokenizer.from_pretrained(make_config().model)
        weights = {name: train(name, tokenizer) for name in SETTINGS}
    if dist.rank() == 0:
        torch.save(weights, sys.argv[1])
