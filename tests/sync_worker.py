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

FLAGS = {"zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}, "lora": {"lora_rank": 4}}
VALUE, QKV = (f"model.layers.1.self_attn.{name}.weight" for name in ("v_proj", "qkv_proj"))
NORM, EMBEDDING = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"


def without(name):
    return lambda sent, before: ((n, w) for n, w in sent if n != name)


def of_step_before(name):
    return lambda sent, before: ((n, before[n] if n == name else w) for n, w in sent)


def from_disk(sent, before):
    """vLLM takes the trainer's weights and reads the checkpoint afterwards (TRL issue 5312)."""
    list(sent)


def flip(name, place):
    """Changes the lowest bit of one element of a parameter; place: 0 is the first, 1 the end."""
    def damage(parameters):
        flat = parameters[name].view(-1)
        bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
        bits[int(place * len(bits))] ^= 1
    return damage


def swap_norms(parameters):
    norms = [parameters[f"model.layers.{i}.input_layernorm.weight"] for i in (0, 1)]
    values = [norm.clone() for norm in norms]
    norms[0].copy_(values[1])
    norms[1].copy_(values[0])


# what is damaged -> (a tensor that the error names, what changes the weights on their way)
ON_THE_WAY = {
    "v_proj left out": (QKV, without(VALUE)),
    "norm left out": (NORM, without(NORM)),
    "v_proj of the step before": (QKV, of_step_before(VALUE)),
    "all of the step before": ("more", lambda sent, before: [(n, before[n]) for n, _ in sent]),
    "checkpoint from disk": ("more", from_disk),
    "trainer's weights ignored": ("more, for which it got no tensor", lambda sent, before: None)}
# ... or, in place, those that have arrived on the last rank
ARRIVED = {
    "a bit of a key": (QKV, flip(QKV, 0.55)),
    "a bit of the last embedding of a rank": (EMBEDDING, flip(EMBEDDING, 0.5)),
    "two norms swapped": ("model.layers.1.input_layernorm.weight differ", swap_norms)}


class Damaged:
    """vLLM's LLM with the weights of the step before, and a damaged sync."""

    def __init__(self, llm, before, on_the_way=lambda sent, _: sent, arrived=lambda parameters: 0):
        self.llm, self.before, self.on_the_way, self.arrived = llm, before, on_the_way, arrived

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def collective_rpc(self, name, kwargs):
        self.llm.collective_rpc(name, kwargs={"weights_iterator": iter(self.before.items())})
        weights = self.on_the_way(iter(kwargs["weights_iterator"]), self.before)
        self.llm.collective_rpc(name, kwargs={"weights_iterator": weights})
        if dist.rank() == dist.world_size() - 1:
            with torch.no_grad():
                self.llm.apply_model(lambda model: self.arrived(dict(model.named_parameters())))


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
    llm, results = nr.Sampler(make_config(**base)), {"sampled": {}, "damaged": {}}
    prompts, seeds = prompts_of(dist.rank())
    for name in policies:
        cfg = make_config(**base, **FLAGS[name])
        policy = nr.make_policy(cfg)
        results["sampled"][name] = []
        for _ in range(2):
            nr.sync_weights(policy, llm)
            rollouts = nr.rollout(llm, prompts, 2, 1.0, 24, seeds)
            for i, r in enumerate(rollouts):
                r.reward, r.advantages = 1.0, [i + 1.0] * len(r.completion)  # also if equal
            before = {n: w.clone() for n, w in trainer.named_weights(policy)}
            metrics = nr.update(policy, [nr.collate(nr.assign_token_weights(rollouts, cfg))], cfg)
            results["sampled"][name].append(
                ([r.completion for r in rollouts], metrics["mismatch/mean_abs"]))
    real = llm._llm
    damages = {what: dict(on_the_way=x) for what, (_, x) in ON_THE_WAY.items()}
    damages |= {what: dict(arrived=x) for what, (_, x) in ARRIVED.items()}
    for what, changes in damages.items():
        llm._llm = Damaged(real, before, **changes)
        results["damaged"][what] = outcome(policy, llm)
    llm._llm = real
    results["repaired"] = outcome(policy, llm)
    with open(f"{folder}/{dist.rank()}.json", "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
