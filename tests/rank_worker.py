"""Run by test_ranks.py under torchrun or alone: two optimizer steps on the same fixed rollouts, each rank taking its share."""
import sys

import torch
from conftest import fixed_rollouts, make_config
from transformers import AutoTokenizer

import nano_rlvr as nr

out, aggregate, stage = sys.argv[1:]
cfg = make_config(aggregate=aggregate, zero_stage=int(stage), lr=1e-3, pack_tokens=120, kl_coef=0.0, mismatch_bound=1e9)
nr.launch()
engine = nr.make_policy(cfg)
rollouts = fixed_rollouts(AutoTokenizer.from_pretrained(cfg.model), groups=4)
mine = rollouts[:12] if (nr.rank(), nr.world()) == (0, 2) else rollouts[12:] if nr.world() == 2 else rollouts  # uneven on purpose
for _ in range(2):
    used = nr.weigh(mine, cfg)
    metrics = nr.update(engine, nr.pack_evenly(used, mine, cfg.pack_tokens), cfg)
weights = {n: w.clone() for n, w in nr.named_weights(engine)}
if nr.rank() == 0:
    torch.save((weights, metrics), out)
