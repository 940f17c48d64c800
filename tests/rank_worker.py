"""Run by test_ranks.py, with and without torchrun: optimizer steps on fixed rollouts, in float64.

Each rank takes its part of the rollouts. Rank 0 saves the final weights and the metrics of the last step.
With a folder, the steps continue from the checkpoint there and end with a new one.
"""
import functools
import sys

import deepspeed
import torch
from transformers import AutoTokenizer

import nano_rlvr as nr
from conftest import fixed_rollouts, float64, make_checkpoints, make_config
from runtime import checkpoint, dist, engines, rehearsal

out, model, aggregate, stage, steps, folder = sys.argv[1:]
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
    mine = fixed_rollouts(AutoTokenizer.from_pretrained(make_config().model), groups=4)
    if dist.world_size() == 2:
        mine = mine[12:] if dist.rank() else mine[:12]  # uneven on purpose
    packs = nr.pack_evenly(nr.assign_token_weights(mine, cfg), filler=mine[0], budget=cfg.pack_tokens)
    batches = [nr.collate(p) for p in packs]
    if folder:
        rehearsal.run(engine, lambda: nr.update(engine, batches, cfg), "float32")  # creates AdamW's moments
        checkpoints = make_checkpoints(engine, out=folder, name="run", resume=folder + "/run")
        engines.set_lr(engine, cfg.lr)
    for _ in range(int(steps)):
        metrics = nr.update(engine, batches, cfg)
    sharded = [hasattr(p, "ds_status") and p.ds_status.name == "NOT_AVAILABLE"
               for p in engine.module.parameters()]
    assert all(sharded) if stage == "3" else not any(sharded)
    if folder:
        checkpoints.progress.step += int(steps)
        checkpoints.save()
        checkpoints.wait()
    weights = {name: w.clone() for name, w in checkpoint.named_weights(engine)}
if dist.rank() == 0:
    torch.save((weights, metrics), out)
