"""Run by test_ranks.py on 3 ranks, then called there: updates on fixed rollouts, in float64.

    rank_worker.py FOLDER      rank 0 saves to FOLDER/found what main() returns"""
import functools
import math
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import nano_rlvr as nr
from conftest import ROOT, fixed_rollouts, float64, make_checkpoints, make_config
from runtime import guard, ranks, stats, trainer

SETTINGS = {  # differences from Config
    "all on rank 0": dict(zero_stage=1, aggregate="constant"),
    "process rewards, all on rank 0": dict(zero_stage=2, aggregate="token"),
    "one group left, untied": dict(
        zero_stage=3, filter_groups=True, correction="token_mask", correction_cap=3.0),
}
FOLDER = Path(sys.argv[-1])


def config(name="", **changes):
    model = FOLDER / ("untied" if "untied" in name else "tied")
    return make_config(model=str(model), prompts=6, samples=3, lr=1e-3, pack_tokens=150,
                       kl_coef=0.0, mismatch_bound=1e9, **changes)


def batches_of(name, cfg, tokenizer):
    """The packs of this rank. With "one group left", all other groups have equal rewards."""
    rollouts = fixed_rollouts(tokenizer, groups=6, n=3)
    groups = [rollouts[i:i + 3] for i in range(0, 18, 3)]
    for i, group in enumerate(groups):
        for j, r in enumerate(group):
            r.reward = float(j < 2) if i == 0 or "one group" not in name else 1.0
            if "process rewards" in name:
                ends = (max(1, len(r.completion) // 2), len(r.completion))
                r.steps = list(zip(ends, (j / 4, r.reward)))[:1 + j % 2]
                r.reward = sum(value for _, value in r.steps)
    groups = groups[ranks.rank()::ranks.world_size()]
    nr.assign_advantages(groups, cfg, math.nan)
    kept = [g for g in groups if not (cfg.filter_groups and stats.has_zero_std(g))]
    trained = nr.assign_token_weights([r for g in kept for r in g], cfg)
    if "all on rank 0" in name:
        trained = ranks.all_gather(trained)[:None if ranks.rank() == 0 else 0]
    if ranks.rank() and "left" in name:
        assert not trained  # a rank without anything to train on takes part nevertheless
    return [nr.collate(p) for p in nr.pack_evenly(trained, cfg.pack_tokens)]


def result(policy, packs, steps, cfg):
    for _ in range(steps):
        metrics = nr.update(policy, packs, cfg)
    return {key: w.clone() for key, w in trainer.named_weights(policy)}, metrics


def train(name, tokenizer, steps=2, **changes):
    cfg = config(name, **changes)
    policy = nr.make_policy(cfg)
    return result(policy, batches_of(name, cfg, tokenizer), steps, cfg)


def train_one_more_step(tokenizer):
    """A step of the run in FOLDER/run, from its last checkpoint, if there is one, to the next."""
    cfg = config(zero_stage=ranks.world_size())
    policy = nr.make_policy(cfg)
    guard.rehearse(policy, None, cfg)  # makes AdamW's moments
    checkpoints = make_checkpoints(policy, model=cfg.model, prompts=6, out=str(FOLDER), name="run",
                                   resume=str(FOLDER / "run"))
    nr.set_lr(policy, 0, cfg)
    found = result(policy, batches_of("", cfg, tokenizer), 1, cfg)
    checkpoints.progress.step += 1
    checkpoints.save()
    return found


def shard_small_weights(set_attribute=setattr):
    """ZeRO-3 then shards all weights. By default DeepSpeed keeps small ones whole."""
    import deepspeed
    initialize = deepspeed.initialize

    def without_threshold(config, **others):
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return initialize(config=config, **others)

    set_attribute(deepspeed, "initialize", without_threshold)


def main(set_attribute=setattr):
    """-> {setting: (weights, metrics of the last step)}"""
    shard_small_weights(set_attribute)
    in_three_chunks = functools.partial(nr.TokenLogps, chunk=100)  # of the vocabulary
    set_attribute(nr, "TokenLogps", in_three_chunks)
    with float64():
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny")
        found = {name: train(name, tokenizer, **SETTINGS[name]) for name in SETTINGS}
        if ranks.world_size() == 3:
            train_one_more_step(tokenizer)
        else:
            found["two steps"] = train("", tokenizer, steps=2)
            found["three steps"] = train("", tokenizer, steps=3)
        return found | {"continued": train_one_more_step(tokenizer)}


if __name__ == "__main__":
    ranks.init_process_group()
    found = main()
    if ranks.rank() == 0:
        torch.save(found, FOLDER / "found")
