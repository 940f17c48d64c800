"""Run by test_sampler.py, alone and under torchrun: syncs into the real vLLM, healthy and damaged.

    sync_worker.py FOLDER MODEL DTYPE POLICY ...      POLICY: zero2, zero3 or lora

Under torchrun, two ranks share an engine, and rank r has r + 1 prompts. With each policy it takes
two steps; with the last policy it then damages syncs. Each rank writes what it sampled and what the
checks said to FOLDER/<rank>.json.
"""
import json
import sys

import torch
import vllm._custom_ops

import nano_rlvr as nr
from conftest import make_config
from runtime import dist, trainer

POLICIES = {"zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}, "lora": {"lora_rank": 4}}
VALUE, QKV = (f"model.layers.1.self_attn.{name}.weight" for name in ("v_proj", "qkv_proj"))
EMBEDDING = "model.embed_tokens.weight"


# ---- damaged syncs: load(weights) gives (name, tensor) pairs to vLLM


def tensor_left_out(load, weights, before, llm):
    load((name, w) for name, w in weights if name != VALUE)


def tensor_of_the_step_before(load, weights, before, llm):
    load((name, before[name] if name == VALUE else w) for name, w in weights)


def checkpoint_from_disk(load, weights, before, llm):
    """vLLM takes the trainer's weights and reads the checkpoint afterwards (TRL issue 5312)."""
    load(iter(list(weights)))
    load(None)


def bit_on_the_last_rank(load, weights, before, llm):
    """The lowest bit of a number changes after the sync."""
    def flip(model):
        numbers = model.get_parameter(EMBEDDING).data.view(-1)
        bits = numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])
        bits[len(bits) // 2] ^= 1

    load(weights)
    if dist.rank() == dist.world_size() - 1:
        llm.apply_model(flip)


# -> a part of the error
DAMAGES = {tensor_left_out: QKV, tensor_of_the_step_before: QKV, checkpoint_from_disk: "more",
           bit_on_the_last_rank: EMBEDDING}


class Damaged:
    """vLLM's LLM with the weights of the step before, and a damaged sync."""

    def __init__(self, llm, before, damage):
        self.llm, self.before, self.damage = llm, before, damage

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def collective_rpc(self, name, kwargs):
        def load(weights):
            self.llm.collective_rpc(name, kwargs={"weights_iterator": weights})

        load(iter(self.before.items()))
        self.damage(load, iter(kwargs["weights_iterator"]), self.before, self.llm)


def outcome(policy, llm):
    """What a sync raises, or ""."""
    try:
        nr.sync_weights(policy, llm)
    except RuntimeError as e:
        return str(e)
    return ""


def prompts_of(rank):
    """Prompts and seeds of a rank."""
    numbers = range(rank + 1)
    return [[60 + 10 * rank + i, 61, 62] for i in numbers], [100 * rank + i for i in numbers]


def main(folder, model, dtype, *policies):
    vllm._custom_ops._supports_onednn = False  # before LLM(): it would keep repacked weights only
    dist.init_process_group()
    base = dict(model=model, dtype=dtype, tp=dist.world_size(), lr=0.01, kl_coef=0.0)
    llm, results = nr.Sampler(make_config(**base)), {"sampled": {}, "mismatch": [], "damaged": {}}
    prompts, seeds = prompts_of(dist.rank())
    for name in policies:
        cfg = make_config(**base, **POLICIES[name])
        policy = nr.make_policy(cfg)
        results["sampled"][name] = []
        for _ in range(2):
            nr.sync_weights(policy, llm)
            rollouts = nr.rollout(llm, prompts, 2, 1.0, 24, seeds)
            results["sampled"][name].append([r.completion for r in rollouts])
            for i, r in enumerate(rollouts):
                r.reward, r.advantages = 1.0, [i + 1.0] * len(r.completion)  # also if equal
            before = {n: w.clone() for n, w in trainer.named_weights(policy)}
            metrics = nr.update(policy, [nr.collate(nr.assign_token_weights(rollouts, cfg))], cfg)
            results["mismatch"].append(metrics["mismatch/mean_abs"])
    real = llm._llm
    for damage in DAMAGES:
        llm._llm = Damaged(real, before, damage)
        results["damaged"][damage.__name__] = outcome(policy, llm)
    llm._llm = real
    results["repaired"] = outcome(policy, llm)
    with open(f"{folder}/{dist.rank()}.json", "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
