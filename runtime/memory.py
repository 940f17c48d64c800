"""The memory plan, made before weights are loaded: upper bounds of what a step needs, what fits."""
import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import os
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from runtime import ranks

GIB = 2**30
CUDA_CONTEXT = 1.5 * GIB  # PyTorch, the CUDA context and the kernels, before the first tensor
VLLM_AWAKE = 3 * GIB  # vLLM's activations, CUDA graphs, and counts of tokens for penalties
VLLM_ASLEEP = 1.2 * GIB  # what vLLM keeps while it sleeps (vLLM issue 28714, Qwen3-4B)
# on a CPU: at most, or what the user has set, which vLLM reads too
CPU_KV_CACHE = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 2)) * GIB
ZERO3_LIVE = 10**9  # weights that DeepSpeed keeps gathered: its stage3_max_live_parameters
BUCKET = 2**26  # numbers in one gradient bucket of DeepSpeed (its default of 5e8 can take 3 GB)
USABLE = 0.9  # the plan uses this fraction of the memory; the rest is for fragmentation
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
Device = namedtuple("Device", "gpu free total host", defaults=[float("inf")])  # bytes of memory


# ---- the model's sizes, from its config.json

_empty_models = {}


def empty_model(model, trust_remote_code=False):
    """The model of a folder or hub id on the meta device: modules and shapes, no weights. The first
    call, in model.py, decides whether code that comes with the model may run."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    if model not in _empty_models:
        code = {"trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(model, **code)
            _empty_models[model] = AutoModelForCausalLM.from_config(config, **code)
    return _empty_models[model]


# kinds of layers that carry no state along the sequence, but keys and values of its tokens
ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


def layer_kinds(config):
    """The kinds of the layers that a config.json names."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds | set(getattr(config, "layers_block_type", None) or ())


@dataclass
class ModelShape:
    """Sizes of a causal language model."""
    parameters: int
    hidden: int
    layers: int
    attention: int  # query heads times head size; 0 without attention
    head_size: int
    mlp: int  # intermediate size of the MLP
    vocab: int
    kv_cache: int  # numbers in the keys and values of one token, over all layers
    qk_norms: bool  # whether queries and keys are normalized
    recurrent: bool = False  # whether a layer carries a state along the sequence
    sinks: bool = False  # whether the attention has sinks

    @classmethod
    @functools.cache
    def of(cls, model):
        """The shape of a model folder or hub id."""
        empty = empty_model(model)
        config = empty.config.get_text_config()
        hidden = config.hidden_size
        layers = config.num_hidden_layers
        heads = getattr(config, "num_attention_heads", None) or 0  # Mamba has none
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or hidden // max(heads, 1)
        names = [name for name, _ in empty.named_parameters()]
        has_convolutions = any(isinstance(module, torch.nn.Conv1d) for module in empty.modules())
        return cls(
            parameters=sum(p.numel() for p in empty.parameters()),
            hidden=hidden,
            layers=layers,
            attention=heads * head_size,
            head_size=head_size if heads else 0,
            mlp=getattr(config, "intermediate_size", None) or 4 * hidden,  # GPT-2 has none
            vocab=config.vocab_size,
            kv_cache=2 * layers * kv_heads * head_size,
            qk_norms=any("q_norm" in name for name in names),
            recurrent=has_convolutions or not heads or bool(layer_kinds(config) - ATTENTION),
            sinks=any(name.endswith(".sinks") for name in names))



# ---- the plan

@contextlib.contextmanager
def without_garbage_collection():
    """Python looks for unreachable objects after this block, not in it. While libraries are
    imported it would look through all their objects a dozen times: 3 s of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_freed_memory():
    """On a CPU: glibc keeps what is freed for the next array. It would return large arrays to the
    kernel, which fills each page with zeros again: a fifth of an update of a real model."""
    libc = ctypes.CDLL(None)
    if not torch.cuda.is_available():
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_ARENA_MAX, 1)


CGROUP = Path("/sys/fs/cgroup")  # the limits of a container


def free_host_bytes():
    """Free bytes of host memory, also in a container with a limit, which psutil does not know."""
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    most = limit.read_text().strip() if limit.exists() else "max"
    if most == "max":
        return free
    used = int(limit.with_name("memory.current").read_text())
    # `used` counts the cache of files; the kernel drops what no process has read for a while
    [cache] = re.findall(r"^inactive_file (\d+)", limit.with_name("memory.stat").read_text(), re.M)
    return min(free, int(most) - used + int(cache))


def this_device():
    """The Device of this process; its free memory is that of the rank with the least, so that all
    ranks make the same plan. Collective"""
    gpu = torch.cuda.is_available()
    host = min(ranks.all_gather([free_host_bytes()]))
    if gpu:
        free, total = torch.cuda.mem_get_info()
    else:
        free = total = host // ranks.local_world_size()
    return Device(gpu, min(ranks.all_gather([free])), total, host)


def bytes_per_number(cfg):
    """Bytes of a number in --dtype."""
    return getattr(torch, cfg.dtype).itemsize


def trained_parameters(cfg, shape):
    """Number of trained parameters: all, or those of adapters: r * (a + b) per matrix (a, b)."""
    if not cfg.lora_rank:
        return shape.parameters
    keys_and_values = shape.kv_cache // shape.layers
    sides = 7 * shape.hidden + 2 * shape.attention + 3 * shape.mlp + keys_and_values
    return cfg.lora_rank * shape.layers * sides


def checkpoint_bytes(cfg, shape):
    """Bytes of a checkpoint: weights; per trained one, the fp32 weight and AdamW's two moments."""
    return shape.parameters * bytes_per_number(cfg) + 12 * trained_parameters(cfg, shape)


def most_sequences(cfg):
    """The most sequences that run at once in vLLM: those of the largest call, at most 1024."""
    sequences = max(cfg.prompts * cfg.samples, cfg.eval_size * max(cfg.eval_n, 1))
    return min(sequences // ranks.world_size() + 1, 1024)


def kv_cache_bytes(cfg):
    """Bytes of vLLM's KV cache: what its share of the GPU leaves, or CPU_KV_CACHE, but at most what
    all running sequences can fill. On a GPU each step maps the cache anew; on a CPU the start
    writes zeros into it, for half a second per GiB."""
    shape = ModelShape.of(cfg.model)
    size = bytes_per_number(cfg)
    left = CPU_KV_CACHE
    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        left = cfg.gpu_memory_utilization * total - VLLM_AWAKE - shape.parameters * size
    if shape.recurrent:  # its states need room too
        return int(left)
    # vLLM stores 16 tokens together, on a CPU 32: the last block of a sequence is not full
    tokens = cfg.max_prompt + cfg.max_tokens + 32
    return int(min(left, most_sequences(cfg) * tokens * shape.kv_cache * size))


def activation_bytes(cfg, shape):
    """Upper bound of the bytes that a forward pass over a pack keeps for its backward pass, and of
    what one layer's backward pass takes besides. For dense Llama and Qwen models."""
    # numbers per token and layer: 5 hidden, 8 attention (14 with query and key norms), 4 MLP
    attention = shape.attention * (14 if shape.qk_norms else 8)
    mlp = 4 * shape.mlp
    if cfg.compile == "on":  # what is cheap is computed again
        attention = 3 * (shape.attention + shape.kv_cache // shape.layers)
        mlp = 3 * shape.mlp
    tokens = max(cfg.pack_tokens, cfg.max_prompt + cfg.max_tokens)
    one = tokens * bytes_per_number(cfg)  # bytes of one number per token
    layer = one * (5 * shape.hidden + attention + mlp)
    kept = shape.layers * layer
    if cfg.gradient_checkpointing == "on":  # the inputs of layers; the rest is computed again
        kept = one * (shape.layers + 4) * shape.hidden
    return kept + 1.5 * layer  # the layer at work, and half a layer more in its backward pass


def step_bytes(cfg, shape, gpu):
    """Upper bounds of the bytes of a step, {part: [of a rank while vLLM generates, of a rank in the
    update, of host memory beside the GPUs of a machine]}, and their "total". On a GPU, vLLM has a
    KV cache for two sequences."""
    size = bytes_per_number(cfg)
    world = ranks.world_size()
    whole = shape.parameters * size
    trained = trained_parameters(cfg, shape)
    sharded = cfg.zero_stage == 3
    offload = gpu and cfg.offload == "optimizer"
    pinned = 2 * ranks.local_world_size()  # each pinned tensor is rounded up to a power of two

    weights = whole / world if sharded else whole
    gathered = size * min(shape.parameters, ZERO3_LIVE) if sharded else 0
    adamw = 12 * trained / world  # fp32 weights, two moments
    # DeepSpeed's sums in fp32. In stage 1 they are whole and always there, and those in bf16, too
    always = 6 * trained if cfg.zero_stage == 1 else 0
    gradients = always or 4 * trained / world
    if offload and sharded:
        gradients = always
    # a bucket, its fp32 copy, the head's gradient or offload's buffer; or a checkpoint's copies
    largest = max(min(trained, shape.vocab * shape.hidden), shape.mlp * shape.hidden,
                  min(BUCKET, shape.parameters))
    buffers = CUDA_CONTEXT + (size + 4 + size) * largest

    # The reference stays on the GPU or comes for its pass, which ends before there are gradients.
    reference = whole if cfg.kl_coef and not cfg.lora_rank else 0
    stays = reference if not gpu or cfg.gradient_checkpointing == "off" else 0
    comes = max(stays, reference - (gradients - always))
    moving = whole if offload and cfg.lora_rank else 0  # see trainer.place_frozen_weights

    parts = {
        "weights": [0 if moving else weights, weights + gathered, pinned * moving],
        "reference": [stays, comes, pinned * (reference - stays)],
        "optimizer": [0, 0, pinned * adamw] if offload else [adamw, adamw, 0],
        "gradients": [always, gradients, 0],
        "activations": [0, activation_bytes(cfg, shape), 0],
    }
    if gpu:
        sequence = shape.kv_cache * size * (cfg.max_prompt + cfg.max_tokens)
        parts["CUDA, kernels, buffers"] = [buffers, buffers, 0]
        parts["vLLM, at least"] = [whole + VLLM_AWAKE + 2 * sequence, VLLM_ASLEEP, 0]
    else:
        parts["libraries, buffers"] = [buffers, buffers, 0]
        parts["vLLM"] = [whole + CPU_KV_CACHE, whole + CPU_KV_CACHE, 0]
    parts["total"] = [sum(column) for column in zip(*parts.values())]
    return parts


def plan(cfg, device=None, shape=None):
    """Returns cfg with all flags filled in, and a dict: the flags that were decided, whether the
    reference_stays on the GPU, and the plan as text. Collective without a device.

    Of what cfg leaves open, takes the first that fits into nine tenths of the device's memory, or
    of --memory_gb: no offload, activations kept, large packs. vLLM gets what the trainer leaves.
    device, shape: of this process and cfg.model, or others. Raises ValueError if nothing fits."""
    device = device or this_device()
    shape = shape or ModelShape.of(cfg.model)
    available = min(device.free, cfg.memory_gb * GIB or device.free)
    usable = USABLE * available
    for decided in _choices(cfg, device.gpu):
        planned = dataclasses.replace(cfg, **decided)
        parts = step_bytes(planned, shape, device.gpu)
        generate, update, host = parts["total"]
        fits = max(generate, update) <= usable
        if fits and host <= device.host:
            break
    else:
        needs = (f"{max(generate, update) / GIB:.1f} GiB at --max_tokens {cfg.max_tokens}, "
                 f"this run may use {usable / GIB:.1f} (nine tenths)")
        if fits:
            needs = (f"{host / GIB:.0f} GiB of host memory, "
                     f"{device.host / GIB:.0f} are free")
        advice = smaller(planned, in_host=fits)
        raise ValueError(f"{cfg.model} needs about {needs}; to use less: {advice}")
    if device.gpu:
        least, *_ = parts["vLLM, at least"]
        if not cfg.gpu_memory_utilization:
            share = (usable - generate + least) / device.total
            decided["gpu_memory_utilization"] = round(share, 3)
        elif cfg.gpu_memory_utilization * device.total < least:
            share = least / device.total + 0.005
            raise ValueError(f"--gpu_memory_utilization: at least {share:.2f} is needed")
    planned = dataclasses.replace(cfg, **decided)
    flags = " ".join(f"--{name} {x}" for name, x in decided.items())
    title = (f"memory plan for {shape.parameters / 1e6:,.1f} M parameters in {cfg.dtype} "
             f"and {available / GIB:.1f} of {device.free / GIB:.1f} GiB: {flags}")
    stays = device.gpu and planned.gradient_checkpointing == "off"
    text = f"{title}\n{_table(parts, device.gpu)}"
    return planned, decided | {"reference_stays": stays, "text": text}


def _choices(cfg, gpu):
    """Yields the values, {flag: value}, that --offload, --gradient_checkpointing and --pack_tokens
    may take where cfg leaves them open, in the order in which the plan tries them."""
    packs = [32768, 24576, 16384, 12288, 8192, cfg.max_prompt + cfg.max_tokens]
    values = {"offload": ["none", "optimizer"] if gpu else ["none"],
              "gradient_checkpointing": ["off", "on"],
              "pack_tokens": packs if gpu else [4096]}
    left_open = [name for name in values if getattr(cfg, name) in ("auto", 0)]
    for row in itertools.product(*map(values.get, left_open)):
        yield dict(zip(left_open, row))


def _table(parts, gpu):
    """The parts of a step in GiB as text. Rows of zeros are left out, on a CPU the column "host",
    too."""
    columns = ["generate", "update", "host"] if gpu else ["generate", "update"]
    lines = [f"  {'GiB':24}" + "".join(f"{name:>10}" for name in columns)]
    for name, sizes in parts.items():
        cells = [f"{x / GIB:10.2f}" for x in sizes[:len(columns)]]
        if any(float(cell) for cell in cells):
            lines.append(f"  {name:24}" + "".join(cells))
    return "\n".join(lines)


# ---- while a run goes on

def is_out_of_memory(error):
    """Whether an exception means that the device is full: vLLM's and cuBLAS' are RuntimeErrors."""
    texts = ("out of memory", "allocate memory", "ALLOC_FAILED")
    is_named = any(text in str(error) for text in texts)
    return is_named or isinstance(error, torch.OutOfMemoryError)


def smaller(cfg, in_host=False):
    """The flags with which a run like cfg takes less memory of its device, or in_host, as text."""
    if in_host:
        flags = {"offload": "none"} if cfg.lora_rank else {"lora_rank": 32, "kl_coef": 0}
    else:
        flags = {"gradient_checkpointing": "on",
                 "max_tokens": cfg.max_tokens // 2,
                 "pack_tokens": min(cfg.pack_tokens, cfg.max_prompt + cfg.max_tokens),
                 "lora_rank": cfg.lora_rank or 32}
        if cfg.gpu_memory_utilization:  # planned for a GPU
            flags["offload"] = "optimizer"
            flags["gpu_memory_utilization"] = round(0.8 * cfg.gpu_memory_utilization, 2)
        if ranks.world_size() > 1 and not cfg.lora_rank:
            flags |= {"zero_stage": 3, "lora_rank": 0, "kl_coef": 0}
    changes = [f"--{name} {x}" for name, x in flags.items() if x != getattr(cfg, name)]
    return " ".join(changes)
