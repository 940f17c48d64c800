"""Sizes of a model from its config.json, the FLOPs of its forward pass, and the peak speed of this device."""
import functools
import os
import re
import threading
import time
from dataclasses import dataclass

import torch

# dense bf16 FLOP/s from the manufacturers' data sheets
DATA_SHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


@functools.cache
def hub_answers():
    """Whether the Hugging Face hub can be reached; if not, its libraries use their local cache from now on.

    Without this, each of them would try again and again, for half a minute and a dozen lines.
    """
    from huggingface_hub import constants, get_session
    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask():
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=3))
        except Exception:  # of httpx, of requests or of a proxy's client: all mean "not reached"
            return

    thread = threading.Thread(target=ask, daemon=True)  # a look-up of the name has no time limit of its own
    thread.start()
    thread.join(3)
    if not answers:
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    return bool(answers)


def first_line(error, name=""):
    """What failed in a library, in one line. `name`: the model or data set that the hub was asked for."""
    if name and not hub_answers():
        from huggingface_hub import constants
        return (f"{constants.ENDPOINT} is not reachable or HF_HUB_OFFLINE is set, and {name} is not in the "
                "local cache")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"

_empty_models = {}


def empty_model(model, trust_remote_code=False):
    """The causal language model of a folder or hub id on the meta device: modules and shapes, no weights.

    The first call, in preflight, decides whether code that comes with the model may run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    if model not in _empty_models:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            _empty_models[model] = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code)
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
        """The shape of a model folder or hub id.

        Raises ValueError if the LM head is not a plain matrix without bias: HeadLogps uses its weight only.
        """
        built = empty_model(model)
        head = built.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            raise ValueError(f"--model {model}: an LM head with a bias (or no plain matrix) is not supported")
        parameters = dict(built.named_parameters())
        config = built.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            parameters=sum(p.numel() for p in parameters.values()),
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            attention=heads * head_size,
            mlp=getattr(config, "intermediate_size", 4 * config.hidden_size),  # GPT-2 has no such field
            vocab=config.vocab_size,
            kv_cache=2 * config.num_hidden_layers * kv_heads * head_size,
            kv_heads=kv_heads,
            qk_norms=any("q_norm" in name for name in parameters))

    def forward_flops(self, rollouts):
        """FLOPs of one forward pass over the completions and, once each, their prompts.

        The LM head runs on completion tokens only. Attention is causal: a query has half of the sequence's
        keys on average. The queries of a completion read the keys of its prompt, too.
        """
        prompts = {tuple(r.prompt) for r in rollouts}
        prompt_tokens = sum(map(len, prompts))
        completion_tokens = sum(len(r.completion) for r in rollouts)
        # The embedding is a look-up, without FLOPs. An untied head is counted as body too: slightly too much.
        body = self.parameters - self.vocab * self.hidden
        body_flops = 2 * body * (prompt_tokens + completion_tokens)
        head_flops = 2 * self.vocab * self.hidden * completion_tokens
        pairs = sum(len(prompt) ** 2 for prompt in prompts)  # twice the number of (query, key) pairs
        pairs += sum(len(r) ** 2 - len(r.prompt) ** 2 for r in rollouts)
        attention_flops = 2 * self.layers * self.attention * pairs
        return body_flops + head_flops + attention_flops


@functools.cache
def peak_flops(dtype):
    """Dense FLOP/s of this device in `dtype`: from the data sheet, or measured in 0.5 s."""
    cuda = torch.cuda.is_available()
    if cuda and dtype == "bfloat16":
        for name, flops in DATA_SHEET.items():
            if re.search(rf"\b{name}\b", torch.cuda.get_device_name()):
                return flops
    n = 8192 if cuda else 2048
    a = torch.randn(n, n, dtype=getattr(torch, dtype), device="cuda" if cuda else "cpu")
    seconds = []
    for _ in range(4):  # the first one is a warm-up
        start = time.perf_counter()
        (a @ a).view(-1)[0].item()  # item() waits for the GPU
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)
