"""Sizes of a model from its config.json, its FLOPs, and the peak speed of this device."""
import functools
import os
import re
import timeit
from dataclasses import dataclass

import torch

# dense bf16 FLOP/s from the manufacturers' data sheets
DATA_SHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


@functools.cache
def hub_answers():
    """Whether the Hugging Face hub answers within 3 s. If not, its libraries use their local cache
    from now on: each of them would try again and again, for half a minute and a dozen lines."""
    from huggingface_hub import constants, get_session
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=3)
        except Exception:  # any of them means "not reached"
            constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    return not constants.HF_HUB_OFFLINE


def first_line(error, name=""):
    """An error in one line. `name`: the model or data set that the hub was asked for."""
    if name and not hub_answers():
        return f"the hub is offline or not reachable, and {name} is not in the local cache"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"


_empty_models = {}


def empty_model(model, trust_remote_code=False):
    """The model of a folder or hub id on the meta device: modules and shapes, no weights. The first
    call, in flags.py, decides whether code that comes with the model may run."""
    from transformers import AutoConfig, AutoModelForCausalLM
    if model not in _empty_models:
        code = {"trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(model, **code)
            _empty_models[model] = AutoModelForCausalLM.from_config(config, **code)
    return _empty_models[model]


@dataclass
class ModelShape:
    """Sizes of a causal language model."""
    parameters: int
    hidden: int
    layers: int
    attention: int  # query heads times head size
    mlp: int  # intermediate size of the MLP
    vocab: int
    kv_cache: int  # numbers in the keys and values of one token, over all layers
    kv_heads: int  # among which vLLM divides them
    qk_norms: bool  # whether queries and keys are normalized

    @classmethod
    @functools.cache
    def of(cls, model):
        """The shape of a model folder or hub id."""
        built = empty_model(model)
        config = built.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            parameters=sum(p.numel() for p in built.parameters()),
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            attention=heads * head_size,
            mlp=getattr(config, "intermediate_size", 4 * config.hidden_size),  # GPT-2 has none
            vocab=config.vocab_size,
            kv_cache=2 * config.num_hidden_layers * kv_heads * head_size,
            kv_heads=kv_heads,
            qk_norms=any("q_norm" in name for name, _ in built.named_parameters()))

    def forward_flops(self, rollouts):
        """FLOPs of one forward pass over the completions and, once each, their prompts. A query has
        half of the sequence's keys on average; those of completions read the prompt."""
        prompts = {tuple(r.prompt) for r in rollouts}
        completion_tokens = sum(len(r.completion) for r in rollouts)
        tokens = sum(map(len, prompts)) + completion_tokens
        pairs = sum(len(prompt) ** 2 for prompt in prompts)  # twice the (query, key) pairs
        pairs += sum(len(r) ** 2 - len(r.prompt) ** 2 for r in rollouts)
        # the embedding is a look-up; an untied head is counted as body too: slightly too much
        body = self.parameters - self.vocab * self.hidden
        return (2 * body * tokens + 2 * self.vocab * self.hidden * completion_tokens
                + 2 * self.layers * self.attention * pairs)


@functools.cache
def peak_flops(dtype):
    """Dense FLOP/s of this device in `dtype`: from the data sheet, or measured in 0.5 s."""
    cuda = torch.cuda.is_available()
    if cuda and dtype == "bfloat16":
        for name, flops in DATA_SHEET.items():
            if re.search(rf"\b{name}\b", torch.cuda.get_device_name()):
                return flops
    n, device = (8192, "cuda") if cuda else (2048, "cpu")
    a = torch.randn(n, n, dtype=getattr(torch, dtype), device=device)
    # item() waits for a GPU
    return 2 * n**3 / min(timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=4))
