"""Run by test_tensor_parallel.py under torchrun: two ranks share a vLLM engine (--tp 2).

    tensor_parallel_worker.py FOLDER

Two steps of the loop with ZeRO-2, then two with ZeRO-3; rank r has r + 1 prompts. Then damaged shards.
Each rank writes what it sampled and what the checks said to FOLDER/<rank>.json.
"""
import json
import sys

import torch
import vllm._custom_ops

vllm._custom_ops._supports_onednn = False  # before LLM(): oneDNN would keep repacked linear weights only

import nano_rlvr as nr  # noqa: E402
from checksum_worker import outcome  # noqa: E402
from conftest import make_config  # noqa: E402
from runtime import dist  # noqa: E402

LAYER = "model.layers.1."
DAMAGED = {  # a parameter of vLLM on rank 1, of which one bit is flipped
    "qkv": LAYER + "self_attn.qkv_proj.weight", "qkv bias": LAYER + "self_attn.qkv_proj.bias",
    "row parallel": LAYER + "self_attn.o_proj.weight", "column parallel": LAYER + "mlp.gate_up_proj.weight",
    "vocabulary": "model.embed_tokens.weight", "copy": "model.norm.weight"}


def prompts_of(rank):
    return [[60 + 10 * rank + i, 61, 62] for i in range(rank + 1)], [100 * rank + i for i in range(rank + 1)]


class Damaged:
    """The engine, of which rank 1 has one wrong bit after each sync."""

    def __init__(self, llm, name):
        self.llm, self.name = llm, name

    def collective_rpc(self, *args, **kwargs):
        self.llm.collective_rpc(*args, **kwargs)
        if dist.rank() == 1:
            self.llm.apply_model(self.flip)

    def flip(self, model):
        bits = model.get_parameter(self.name).data.view(-1).view(torch.int32)
        bits[len(bits) // 3] ^= 1

    def __getattr__(self, name):
        return getattr(self.llm, name)


def main(folder):
    dist.init_process_group()
    base = dict(tp=2, lr=1e-2, kl_coef=0.0, mismatch_bound=1e-4)
    llm, results = nr.Sampler(make_config(**base)), {}
    prompts, seeds = prompts_of(dist.rank())
    for stage in (2, 3):
        cfg = make_config(**base, zero_stage=stage)
        policy = nr.make_policy(cfg)
        results[stage] = []
        for _ in range(2):
            nr.sync_weights(policy, llm)
            rollouts = nr.rollout(llm, prompts, 2, 1.0, 24, seeds)
            for i, r in enumerate(rollouts):
                r.reward, r.advantages = 1.0, [(-1.0) ** i] * len(r.completion)
            batches = [nr.collate(nr.assign_token_weights(rollouts, cfg))]
            metrics = nr.update(policy, batches, cfg)  # raises above mismatch_bound
            results[stage].append(([r.completion for r in rollouts], metrics["mismatch/mean_abs"]))
    results["damaged"] = {name: outcome(policy, Damaged(llm, path)) for name, path in DAMAGED.items()}
    results["repaired"] = outcome(policy, llm)
    with open(f"{folder}/{dist.rank()}.json", "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
