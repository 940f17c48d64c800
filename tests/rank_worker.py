"""Run by test_ranks.py under torchrun or alone: two optimizer steps on the same fixed rollouts, each rank taking its share,
in float64."""
import functools
import sys

import deepspeed
import torch
from conftest import fixed_rollouts, float64, make_config
from transformers import AutoTokenizer

import nano_rlvr as nr

out, model, aggregate, stage = sys.argv[1:]
initialize = deepspeed.initialize


def without_threshold(config, **others):
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # ZeRO-3 shards even weights as small as these
    return initialize(config=config, **others)


deepspeed.initialize = without_threshold
nr.TokenLogps = functools.partial(nr.TokenLogps, chunk=100)  # three parts of the LM head
dist.init_process_group()
with float64():
    cfg = make_config(model=model, aggregate=aggregate, zero_stage=int(stage), lr=1e-3, pack_tokens=120, kl_coef=0.0,
                      mismatch_bound=1e9)
    engine = nr.make_policy(cfg)
    rollouts = fixed_rollouts(AutoTokenizer.from_pretrained(make_config().model), groups=4)
    mine = rollouts
    if dist.world_size() == 2:
        mine = rollouts[12:] if dist.rank() else rollouts[:12]  # uneven on purpose
    for _ in range(2):
        used = nr.assign_token_weights(mine, cfg)
        metrics = nr.update(engine, nr.pack_evenly(used, mine, cfg.pack_tokens), cfg)
    sharded = [hasattr(p, "ds_status") and p.ds_status.name == "NOT_AVAILABLE" for p in engine.module.parameters()]
    assert all(sharded) if stage == "3" else not any(sharded)
    weights = {n: w.clone() for n, w in checkpoint.named_weights(engine)}
if dist.rank() == 0:
    torch.save((weights, metrics), out)
