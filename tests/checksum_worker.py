"""Run by test_checksum.py, with and without torchrun: syncs into the real vLLM, healthy and damaged ones.

    checksum_worker.py FOLDER MODEL DTYPE [POLICY ...]      POLICY: zero2, zero3 or lora

Each rank writes what the checksums said about each sync to FOLDER/<rank>.json: "" or the error.
"""
import json
import sys

import torch
import vllm._custom_ops

vllm._custom_ops._supports_onednn = False  # before LLM(): oneDNN would keep repacked linear weights only

import nano_rlvr as nr  # noqa: E402
from conftest import fixed_rollouts, make_config  # noqa: E402
import runtime.trainer  # noqa: E402
from runtime import dist  # noqa: E402

FLAGS = {"zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}, "lora": {"lora_rank": 4}}
KEY, VALUE = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
UP, GATE_UP = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
NORM, EMBEDDING = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"


class Damaged:
    """A vLLM engine with the weights of the step before, and a damaged sync.

    `weights` changes what it loads, `model` what it has loaded.
    """

    def __init__(self, llm, before, weights=lambda weights: weights, model=lambda model: None):
        self.llm, self.before, self.weights, self.model = llm, before, weights, model

    def collective_rpc(self, name, kwargs):
        self.llm.collective_rpc(name, kwargs={"weights_iterator": iter(self.before.items())})
        arriving = self.weights(iter(kwargs["weights_iterator"]))
        self.llm.collective_rpc(name, kwargs={"weights_iterator": arriving})
        with torch.no_grad():
            self.llm.apply_model(lambda model: self.model(dict(model.named_parameters())))

    def __getattr__(self, name):
        return getattr(self.llm, name)


def without(name):
    return lambda weights: ((n, w) for n, w in weights if n != name)


def with_other(name, other):
    """Hands over another tensor under this name."""
    return lambda weights: ((n, other if n == name else w) for n, w in weights)


def ignored(weights):
    """vLLM reads the checkpoint from disk, and the trainer's weights are not looked at."""
    return None


def from_disk(weights):
    """vLLM takes the trainer's weights and reads the checkpoint from disk afterwards (TRL #5312)."""
    list(weights)
    return None


def flip(name, place, bit=0):
    def damage(parameters):
        flat = parameters[name].view(-1)
        flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])[place] ^= 1 << bit
    return damage


def swap(name, i, j):
    """Swaps rows of a matrix or elements of a vector."""
    def damage(parameters):
        parameters[name][[i, j]] = parameters[name][[j, i]]
    return damage


def swap_norms(parameters):
    norms = [parameters[f"model.layers.{i}.input_layernorm.weight"] for i in (0, 1)]
    values = [norm.clone() for norm in norms]
    norms[0].copy_(values[1])
    norms[1].copy_(values[0])


def padding(parameters):
    """The vocabulary of 263 is padded to 320: nothing ever uses the rows in between."""
    assert len(parameters[EMBEDDING]) == 320
    parameters[EMBEDDING][263:] = 7.0


def outcome(policy, llm):
    try:
        nr.sync_weights(policy, llm)
    except RuntimeError as e:
        return str(e)
    return ""


def main(folder, model, dtype, *policies):
    dist.init_process_group()
    cfg = make_config(model=model, dtype=dtype, lr=0.01, kl_coef=0.0, mismatch_bound=1e9)
    llm, results = nr.Sampler(cfg), {}
    from transformers import AutoTokenizer
    rollouts = fixed_rollouts(AutoTokenizer.from_pretrained(make_config().model), groups=2)
    for name in policies:
        run = make_config(model=model, dtype=dtype, lr=0.01, kl_coef=0.0, mismatch_bound=1e9, **FLAGS[name])
        policy = nr.make_policy(run)
        results[f"{name}, as loaded"] = outcome(policy, llm)
        before = {n: w.clone() for n, w in runtime.trainer.named_weights(policy)}
        nr.update(policy, [nr.collate(rollouts)], run)
        results[f"{name}, after a step"] = outcome(policy, llm)

    row = before[KEY].shape[1]
    for name, changes in {
        "lowest bit of k_proj": dict(model=flip("model.layers.1.self_attn.qkv_proj.weight", 130 * row)),
        "highest bit of a norm": dict(model=flip(NORM, 5, 15 if dtype == "bfloat16" else 31)),
        "a bit of the last embedding": dict(model=flip(EMBEDDING, 263 * row - 1)),
        "v_proj left out": dict(weights=without(VALUE)),
        "up_proj left out": dict(weights=without(UP)),
        "norm left out": dict(weights=without(NORM)),
        "norm of the step before": dict(weights=with_other(NORM, before[NORM])),
        "k_proj of the step before": dict(weights=with_other(KEY, before[KEY])),
        "all of the step before": dict(weights=lambda weights: [(n, before[n]) for n, _ in weights]),
        "checkpoint from disk": dict(weights=from_disk),
        "trainer's weights ignored": dict(weights=ignored),
        "two values swapped": dict(model=swap(NORM, 3, 90)),
        "two rows of up_proj swapped": dict(model=swap(GATE_UP, 400, 401)),
        "two norms swapped": dict(model=swap_norms),
        "padding of the vocabulary": dict(model=padding),
    }.items():
        results[name] = outcome(policy, Damaged(llm, before, **changes))
    results["repaired"] = outcome(policy, llm)
    with open(f"{folder}/{dist.rank()}.json", "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
