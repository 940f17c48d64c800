"""Run by test_ranks.py, with and without torchrun: optimizer steps on fixed rollouts, in float64.

Of two ranks, the first one gets `first` of the 16 rollouts; with `balanced` 1 they are then redistributed.
Rank 0 saves the final weights and the metrics of the last step.
With a folder, the steps continue from the checkpoint there and end with a new one.
"""
import functools
import sys

import deepspeed
import torch
from transformers import AutoTokenizer

import nano_rlvr as nr
from conftest import fixed_rollouts, float64, make_checkpoints, make_config
import runtime.trainer
from runtime import dist

out, model, aggregate, stage, steps, folder, first, balanced = sys.argv[1:]
initialize = deepspeed.initialize


def without_threshold(config, **others):
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # ZeRO-3 shards small weights too
    return initialize(config=config, **others)


deepspeed.initialize = without_threshold
nr.TokenLogps = functools.partial(nr.TokenLogps, chunk=100)  # three chunks of the vocabulary
dist.init_process_group()
with float64():
    cfg = make_config(model=model, aggregate=aggregate, zero_stage=int(stage), lr=1e-3, pack_tokens=120,
                      kl_coef=0.0, mismatch_bound=1e9)
    engine = nr.make_policy(cfg)
    rollouts = fixed_rollouts(AutoTokenizer.from_pretrained(make_config().model), groups=4)
    mine, filler = rollouts, rollouts[0]
    if dist.world_size() == 2:
        mine = mine[int(first):] if dist.rank() else mine[:int(first)]
    trained = nr.assign_token_weights(mine, cfg)
    if int(balanced):
        trained = nr.balance(trained, model)
        assert dist.world_size() > 1 or trained == mine
        assert 0.4 < sum(map(len, trained)) * dist.world_size() / sum(map(len, rollouts)) < 1.6
    packs = nr.pack_evenly(trained, filler, budget=cfg.pack_tokens)
    batches = [nr.collate(p) for p in packs]
    if folder:
        runtime.guard.rehearse(engine, None, cfg)  # creates AdamW's moments
        checkpoints = make_checkpoints(engine, out=folder, name="run", resume=folder + "/run")
        runtime.trainer.set_lr(engine, cfg.lr)
    for _ in range(int(steps)):
        metrics = nr.update(engine, batches, cfg)
    sharded = [hasattr(p, "ds_status") and p.ds_status.name == "NOT_AVAILABLE"
               for p in engine.module.parameters()]
    assert all(sharded) if stage == "3" else not any(sharded)
    if folder:
        checkpoints.progress.step += int(steps)
        checkpoints.save()
        checkpoints.wait()
    weights = {name: w.clone() for name, w in runtime.trainer.named_weights(engine)}
if dist.rank() == 0:
    torch.save((weights, metrics), out)
