"""What a model costs: FLOPs of a step, and the bytes it takes on this card. The plan is made and printed before weights are loaded."""
import dataclasses
import functools
import re
import resource
import time
from dataclasses import dataclass

import psutil
import torch

from tools.preflight import need_compiler
from tools.ranks import all_gather, rank, world

GIB = 2**30
RUNTIME = 1.5 * GIB  # PyTorch and its kernels, before the first tensor
BUCKET = 2**26  # numbers in one of DeepSpeed's gradient buckets (its default of 5e8 can take 3 GB)
CHUNK = 2048  # tokens of the vocabulary at a time in the LM head: 8 KiB of logits for each token of a pack
# dense bf16 FLOP/s by the maker's data sheets; any other device is measured by a large matrix product
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


@dataclass
class Shape:
    """Sizes of a causal language model."""
    parameters: int
    hidden: int
    layers: int
    attention: int  # query heads times their size
    inner: int  # of the MLP
    vocab: int
    cache: int  # keys and values of one token, in numbers
    norms: bool  # of queries and keys

    @classmethod
    @functools.cache
    def of(cls, model):
        """Of a folder or hub id: built without memory (on the meta device), so that every parameter is counted.

        Raises ValueError for an LM head that is more than a matrix: nano_rlvr.HeadLogps takes the product with its weight."""
        from transformers import AutoConfig, AutoModelForCausalLM
        whole = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(whole)
        parameters, head = dict(built.named_parameters()), built.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            raise ValueError(f"--model {model} has an LM head with a bias, or none that is a plain matrix: not supported")
        config = whole.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(sum(p.numel() for p in parameters.values()), config.hidden_size, config.num_hidden_layers, heads * size, config.intermediate_size, config.vocab_size,
                   2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * size,
                   any("q_norm" in name for name in parameters))

    def forward_flops(self, rollouts):
        """FLOPs of one forward pass over completions and, once each, their prompts; the LM head at completion tokens only."""
        prompts, heads = sum(map(len, {tuple(r.prompt) for r in rollouts})), sum(len(r.completion) for r in rollouts)
        body = self.parameters - self.vocab * self.hidden  # a table look-up is no product; untied, the head counts here (a little too much)
        return 2 * body * (prompts + heads) + 2 * self.vocab * self.hidden * heads + 2 * self.layers * self.attention * sum(len(r) ** 2 for r in rollouts)


@functools.cache
def peak_flops(dtype):
    """Dense FLOP/s of this device in `dtype`: the data sheet's, or measured (half a second)."""
    cuda = torch.cuda.is_available()
    if cuda and dtype == "bfloat16":
        for name, peak in PEAK.items():
            if re.search(rf"\b{name}\b", torch.cuda.get_device_name()):
                return peak
    n = 8192 if cuda else 2048
    a = torch.randn(n, n, dtype=getattr(torch, dtype), device="cuda" if cuda else "cpu")
    best = float("inf")
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        (a @ a).view(-1)[0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def device_bytes():
    """(free, all) bytes of the GPU; without one, this process's share of the host memory that is free, twice. The ranks agree."""
    free, card = torch.cuda.mem_get_info() if torch.cuda.is_available() else (psutil.virtual_memory().available // world(),) * 2
    return min(all_gather([free])), card


def width(cfg):
    """Bytes of a weight or an activation."""
    return 2 if cfg.dtype == "bfloat16" else 4


def trained(cfg, shape):
    """Parameters that are trained. An adapter of rank r on a matrix (a, b) has r * (a + b)."""
    return cfg.lora_rank * shape.layers * (7 * shape.hidden + 2 * shape.attention + 3 * shape.inner) or shape.parameters


def step_bytes(cfg, shape):
    """{what: bytes (while vLLM generates, while the reference runs, while the policy is updated)}, vLLM's own not counted.

    Counted from what the code keeps: DeepSpeed 0.19 (the fp32 sum of gradients stays on the device, also under offload),
    HeadLogps (two fp32 arrays of a chunk of logits; backward also the gradients of the head and, in fp32, of what goes into it), a decoder
    layer (5 hidden, 8 attention - 14 with norms there - and 4 inner activations a token).
    tests/test_cost.py compares it with a simulation of the real code at 1.5B parameters that allocates nothing.
    """
    cuda, tokens = torch.cuda.is_available(), max(cfg.pack_tokens, cfg.max_prompt + cfg.max_tokens)
    weights, moving = shape.parameters * width(cfg), trained(cfg, shape)
    largest = min(moving, shape.vocab * shape.hidden)  # the embedding's gradient
    layer = tokens * width(cfg) * (5 * shape.hidden + (14 if shape.norms else 8) * shape.attention + 4 * shape.inner)
    chunk = 4 * tokens * min(CHUNK, shape.vocab)
    spare = tokens * width(cfg) * (3 * shape.inner + 4 * shape.norms * shape.attention)  # gradients of activations in a layer's backward pass
    kept, again = {"on": (tokens * width(cfg) * (shape.layers + 4) * shape.hidden, layer + spare), "off": (shape.layers * layer, spare)}[cfg.checkpointing]
    adam = 0 if cuda and cfg.offload == "optimizer" else 12 * moving / world()
    reference = weights if cfg.kl_coef and not cfg.lora_rank else 0
    return {
        "weights": (0 if cuda and cfg.lora_rank and cfg.offload == "optimizer" else weights, weights, weights),
        "fp32 weights and AdamW": (adam, adam, adam),
        "gradients in fp32": (0, 0, 4 * moving / world()),
        "offload's buffer": (largest * width(cfg) * (cuda and cfg.offload == "optimizer"),) * 3,
        "gradient buckets": (0, 0, (width(cfg) + 4) * min(moving, max(BUCKET, largest))),
        "reference": (0, reference, 0) if cuda else (reference, reference, reference),
        "activations kept": (0, 0, kept),
        "a layer or the head": (0, max(layer, 2 * chunk), max(again, 2 * chunk + tokens * shape.hidden * (4 + width(cfg)) + largest * width(cfg))),
        "PyTorch, CUDA, kernels": (RUNTIME, RUNTIME, RUNTIME),
    }


def plan(cfg):
    """Fills pack_tokens, checkpointing, offload and vllm_memory where they are left to us, so that nine tenths of the card (or
    of --memory_gb) suffice, and prints the plan. Raises ValueError, in one line, when nothing fits.

    Everything on the card goes before offload; activations are kept rather than recomputed if packs of 8192 tokens stay
    possible; then packs are as large as fits. vLLM generates in what the sleeping trainer leaves.
    """
    cuda, (free, card), shape = torch.cuda.is_available(), device_bytes(), Shape.of(cfg.model)
    budget = 0.9 * min(free, cfg.memory_gb * GIB or free)
    longest, most = cfg.max_prompt + cfg.max_tokens, 32768 if cuda else 4096  # larger packs gain nothing
    vllm = 0 if not cuda else shape.parameters * width(cfg) + 2 * GIB + 2 * longest * width(cfg) * shape.cache  # the least it needs

    def needed(c):
        generate, *others = map(sum, zip(*step_bytes(c, shape).values()))
        return max(generate + vllm, *others)

    tries = [dataclasses.replace(cfg, offload=offload, checkpointing=checkpointing, pack_tokens=cfg.pack_tokens or min(tokens, most))
             for offload in (["none", "optimizer"][:1 + cuda] if cfg.offload == "auto" else [cfg.offload])
             for checkpointing, tokens in (("off", max(8192, longest)), ("on", longest)) if cfg.checkpointing in ("auto", checkpointing)]
    best = next((c for c in tries if needed(c) <= budget), None)
    if best is None:
        raise ValueError(f"{cfg.model} needs about {needed(tries[-1]) / GIB:.1f} GiB at --max_tokens {cfg.max_tokens}, this run may use "
                         f"{budget / GIB:.1f} (nine tenths of the memory): try --lora_rank 32, --offload optimizer, shorter completions or a smaller model")
    if best.offload == "optimizer":
        need_compiler()
        # fp32 weights, gradients and bf16 weights (pinned: up to twice as much), AdamW's moments; the reference, vLLM asleep
        host, there = 24 * trained(best, shape) + 2 * width(cfg) * shape.parameters, psutil.virtual_memory().available
        if host > there:
            raise ValueError(f"the optimizer must wait in host memory and needs about {host / GIB:.0f} GiB there, {there / GIB:.0f} are free")
    if not cfg.pack_tokens:
        larger = (dataclasses.replace(best, pack_tokens=tokens) for tokens in range(most, best.pack_tokens, -1024))
        best = next((c for c in larger if needed(c) <= budget), best)
    table = step_bytes(best, shape)
    left = budget - sum(generate for generate, *_ in table.values())
    if cuda and not cfg.vllm_memory:
        best = dataclasses.replace(best, vllm_memory=round(left / card, 3))
    if rank() == 0:
        table["vLLM: weights, KV cache"] = (best.vllm_memory * card if cuda else shape.parameters * width(cfg) + 2 * GIB, 0, 0)
        print(f"memory plan for {shape.parameters / 1e6:,.1f} M parameters in {cfg.dtype} and {budget / 0.9 / GIB:.1f} GiB: --offload {best.offload} "
              f"--checkpointing {best.checkpointing} --pack_tokens {best.pack_tokens}" + f" --vllm_memory {best.vllm_memory}" * cuda)
        print(f"  {'GiB while it does':24}{'generate':>10}{'reference':>10}{'update':>10}")
        for name, sizes in [*table.items(), ("together", map(sum, zip(*table.values())))]:
            print(f"  {name:24}" + "".join(f"{size / GIB:10.2f}" for size in sizes))
    return best


ballast = None


def shrink(cfg):
    """With --memory_gb: takes the rest of the card away, so that what asks for more fails here as it would on a smaller one."""
    global ballast
    if cfg.memory_gb and torch.cuda.is_available():
        ballast = torch.empty(max(0, int(device_bytes()[0] - cfg.memory_gb * GIB)), dtype=torch.uint8, device="cuda")


def out_of_memory(error, cfg):
    """What to say to the user when the plan was wrong."""
    return (f"nano_rlvr: {str(error).splitlines()[0]} Ask less of the device: --pack_tokens {cfg.pack_tokens // 2}"
            + " --checkpointing on" * (cfg.checkpointing == "off") + " --offload optimizer" * (cfg.offload == "none")
            + f" --vllm_memory {0.8 * cfg.vllm_memory:.2f}; or give less: --memory_gb; or --lora_rank 32")


def peak_memory():
    """GiB of the device in use at the most since PyTorch's peak was reset, with all that is held now, vLLM's too; on a CPU, of this
    process since it began."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
    return (used - (0 if ballast is None else ballast.nbytes)) / GIB
