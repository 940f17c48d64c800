"""Run by test_sampler.py under torchrun: syncs into a vLLM of two ranks, healthy and damaged.

    sync_worker.py FOLDER MODEL

Rank r has r + 1 prompts. With each policy it takes two steps; with the last one it then damages
syncs. Each rank writes what it sampled and what the checks said to FOLDER/<rank>.json."""
import json
import sys
from unittest import mock

import torch
import vllm._custom_ops

import nano_rlvr as nr
from conftest import make_config
from examples import tensor_parallel
from runtime import ranks

POLICIES = dict(zero_stage=2, lora_rank=4, lr=0.1), dict(zero_stage=3)
EMBEDDING = "model.embed_tokens.weight"


def checkpoint_from_disk(llm, rpc):
    """TRL issue 5312."""
    rpc("reload_weights", kwargs={"weights_iterator": None})


def bit_on_the_last_rank(llm, rpc):
    def flip(model):
        bits = model.get_parameter(EMBEDDING).data.view(-1).view(torch.int32)
        bits[len(bits) // 2] ^= 1

    if ranks.rank() == ranks.world_size() - 1:
        llm.apply_model(flip)


DAMAGES = {checkpoint_from_disk: "in all", bit_on_the_last_rank: EMBEDDING}  # -> part of the error


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


def main(folder, model):
    vllm._custom_ops._supports_onednn = False  # before LLM(): it would keep repacked weights only
    ranks.init_process_group()
    base = dict(model=model, lr=0.01, kl_coef=0.0)
    llm = tensor_parallel.SharedEngine(make_config(**base), ranks.world_size())
    results = {"sampled": [], "mismatch": [], "damaged": {}}
    prompts, seeds = prompts_of(ranks.rank())
    for changes in POLICIES:
        cfg = make_config(**base | changes)
        policy = nr.make_policy(cfg)
        sampled = []
        for _ in range(2):
            nr.sync_weights(policy, llm)
            rollouts = nr.rollout(llm, prompts, 2, 1.0, 24, seeds)
            sampled.append([r.completion for r in rollouts])
            for i, r in enumerate(rollouts):
                r.reward, r.advantages = 1.0, [i + 1.0] * len(r.completion)  # also if equal
            metrics = nr.update(policy, [nr.collate(nr.assign_token_weights(rollouts, cfg))], cfg)
            results["mismatch"].append(metrics["mismatch/mean_abs"])
        results["sampled"].append(sampled)
    for harm in DAMAGES:
        def damaged(*args, rpc=llm.collective_rpc, **kwargs):
            rpc(*args, **kwargs)
            harm(llm, rpc)

        with mock.patch.object(llm._llm, "collective_rpc", damaged):
            results["damaged"][harm.__name__] = outcome(policy, llm)
    results["repaired"] = outcome(policy, llm)
    with open(f"{folder}/{ranks.rank()}.json", "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
