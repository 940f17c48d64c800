"""Sizes of a model from its config.json, its FLOPs, and the peak speed of this device."""
import functools
import re
import timeit
from dataclasses import dataclass

import torch

from runtime.hub import empty_model

# dense bf16 FLOP/s from the manufacturers' data sheets
DATA_SHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


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
            hidden=config.hidden_size, layers=config.num_hidden_layers,
            attention=heads * head_size,
            mlp=getattr(config, "intermediate_size", 4 * config.hidden_size),  # GPT-2 has none
            vocab=config.vocab_size,
            kv_cache=2 * config.num_hidden_layers * kv_heads * head_size,
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
