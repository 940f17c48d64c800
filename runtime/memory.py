"""The memory plan, made before weights are loaded: what each phase of a step needs, what fits."""
import dataclasses
import math
import os
import resource
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from runtime import dist
from runtime.shape import ModelShape

GIB = 2**30
CUDA_CONTEXT = 1.5 * GIB  # PyTorch, the CUDA context and the kernels, before the first tensor
VLLM_ASLEEP = 1.2 * GIB  # what vLLM keeps while it sleeps (vLLM issue 28714, Qwen3-4B)
VLLM_ACTIVATIONS = 2 * GIB  # vLLM's activations and CUDA graphs
ZERO3_LIVE = 10**9  # weights that DeepSpeed keeps gathered: its stage3_max_live_parameters
BUCKET = 2**26  # numbers in one gradient bucket of DeepSpeed (its default of 5e8 can take 3 GB)
MOST_RUNNING = 1024  # sequences that vLLM decodes at once, at most
CHUNK = 2048  # vocabulary tokens that HeadLogps handles at a time: 8 KiB of fp32 logits per row
USABLE = 0.9  # the plan uses this fraction of the memory; the rest is for fragmentation


def check_machine(dtype):
    """Raises ValueError if PyTorch cannot use the GPU or has no bf16 on it, or if Triton (on a GPU)
    and DeepSpeed (its CPU operators) could not compile their kernels."""
    gpu = torch.cuda.is_available()
    if torch.version.cuda and not gpu:  # it would run on the CPU
        raise ValueError("PyTorch finds no usable GPU: nvidia-smi must show one, with driver 580 "
                         "or newer; for a CPU: pip install -r requirements-cpu.txt")
    if gpu and dtype == "bfloat16" and torch.cuda.get_device_capability(dist.device()) < (8, 0):
        raise ValueError("--dtype bfloat16 needs compute capability 8.0: use --dtype float32")
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # pip installs ninja there
    tools = os.environ.get("CC", "gcc"), os.environ.get("CXX", "g++"), "ninja"
    missing = [tool for tool in tools if not shutil.which(tool)]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if missing or not header.exists():
        raise ValueError(f"kernels cannot be compiled without {', '.join(missing) or header} "
                         "(apt-get install g++ ninja-build python3-dev)")
    from torch.utils.cpp_extension import get_default_build_root
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.rglob("lock"):  # left by a run that was killed while it compiled
        dist.print_once(f"note: DeepSpeed will wait for {lock} to be removed: delete it, "
                        "unless another run is just starting", file=sys.stderr)
    if not gpu and not any(root.rglob("cpu_adam.so")):
        dist.print_once("the first start compiles DeepSpeed's CPU operators, for two minutes")


def free_host_bytes():
    """Free bytes of host memory, also in a container with a limit, which psutil does not know."""
    free, limit = psutil.virtual_memory().available, Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip() != "max":
        used = int(limit.with_name("memory.current").read_text())
        free = min(free, int(limit.read_text()) - used)
    return free


class Device(NamedTuple):
    """What a plan is made for, in bytes: the device of this process (`here`) or another one."""
    gpu: bool
    free: float
    total: float
    host: float = math.inf  # available host memory; inf = unknown

    @classmethod
    def here(cls):
        """The GPU of this process, or its share of the host memory; `free`: least of all ranks."""
        gpu, host = torch.cuda.is_available(), free_host_bytes()
        free, total = torch.cuda.mem_get_info() if gpu else [host // dist.world_size()] * 2
        return cls(gpu, min(dist.all_gather([free])), total, host)


def bytes_per_number(cfg):
    """Bytes of one weight or activation."""
    return 2 if cfg.dtype == "bfloat16" else 4


def trained_parameters(cfg, shape):
    """Number of trained parameters: all, or those of adapters: r * (a + b) per matrix (a, b)."""
    keys_and_values = shape.kv_cache // shape.layers
    sides = 7 * shape.hidden + 2 * shape.attention + keys_and_values + 3 * shape.mlp  # of a layer
    return cfg.lora_rank * shape.layers * sides or shape.parameters


def checkpoint_bytes(cfg, shape):
    """Bytes of a checkpoint: weights; per trained one, the fp32 weight and AdamW's two moments."""
    return shape.parameters * bytes_per_number(cfg) + 12 * trained_parameters(cfg, shape)


def most_sequences(cfg):
    """The most sequences that run at once in vLLM: those of the largest call, or MOST_RUNNING."""
    sequences = max(cfg.prompts * cfg.samples, cfg.eval_size * max(cfg.eval_n, 1))
    return min((sequences // dist.world_size() + 1) * cfg.tp, MOST_RUNNING)


def sequence_bytes(cfg, shape):
    """Bytes of the keys and values of one sequence of the largest length, on a rank."""
    tokens = cfg.max_prompt + cfg.max_tokens
    return tokens * bytes_per_number(cfg) * shape.kv_cache / min(cfg.tp, shape.kv_heads)


def vllm_weights(cfg, shape):
    """Bytes that vLLM copies to host memory to sleep: its weights and, for penalties (unused), how
    often each running sequence has each token, in 32 bits, and whether its prompt has it, in 1."""
    counts = (4 + 1 / 8) * most_sequences(cfg) * shape.vocab
    return shape.parameters * bytes_per_number(cfg) / cfg.tp + counts


def kv_cache_bytes(cfg):
    """Bytes of vLLM's KV cache: what its share of the GPU leaves, at most what a step needs, as
    vLLM's own estimate differs between versions. None on a CPU."""
    device, shape = Device.here(), ModelShape.of(cfg.model)
    if not device.gpu:
        return None
    left = cfg.vllm_memory * device.total - vllm_weights(cfg, shape) - VLLM_ACTIVATIONS
    return int(min(left, most_sequences(cfg) * sequence_bytes(cfg, shape)))


class Phases(NamedTuple):
    """Bytes while vLLM generates, while the reference runs, and while the policy is updated."""
    generate: float
    reference: float
    update: float


def step_bytes(cfg, shape, gpu):
    """Bytes of each part of a step in each phase, and their total: {name: Phases}.

    On a GPU, vLLM has a KV cache for two sequences. On a CPU, vLLM is not counted.
    tests/test_memory.py compares the result with a simulation of the real code.
    """
    ranks, size = dist.world_size(), bytes_per_number(cfg)
    trained = trained_parameters(cfg, shape)
    largest = min(trained, shape.vocab * shape.hidden)  # numbers in the largest gradient
    offload, sharded = gpu and cfg.offload == "optimizer", cfg.zero_stage == 3

    whole = shape.parameters * size
    weights = whole / ranks if sharded else whole
    # a sync gathers weights, too, but before vLLM's activations and the copies below
    gathered = size * sharded * min(shape.parameters, ZERO3_LIVE)
    # DeepSpeed's fp32 sum of gradients stays on the device, also with offload, but not in stage 3
    gradients = 0 if offload and sharded else 4 * trained / (1 if cfg.zero_stage == 1 else ranks)
    # its BF16_Optimizer always keeps them, and until the step also those in bf16
    always = cfg.zero_stage == 1 and cfg.dtype == "bfloat16" and cfg.offload != "optimizer"
    buckets = (size + 4) * min(trained, max(BUCKET, largest))
    reference = whole if cfg.kl_coef and not cfg.lora_rank else 0
    # it stays on a GPU if activations are kept there too
    resting = 0 if gpu and cfg.checkpointing != "off" else reference
    # of a trained tensor a checkpoint makes an fp32 copy, beside the KV cache; with LoRA, a matrix
    # and its adapter's product are added in fp32
    copies = (8 * shape.mlp if cfg.lora_rank else 4 * shape.vocab) * shape.hidden

    # activations per token: 5 hidden, 8 attention (14 with query and key norms), 4 MLP
    tokens = max(cfg.pack_tokens, cfg.max_prompt + cfg.max_tokens)
    attention = 14 if shape.qk_norms else 8
    layer = tokens * size * (5 * shape.hidden + attention * shape.attention + 4 * shape.mlp)
    backward = layer + tokens * size * (3 * shape.mlp + 4 * shape.qk_norms * shape.attention)
    kept = shape.layers * layer
    if cfg.checkpointing == "on":  # each layer's input; the backward pass computes the layer again
        kept = tokens * size * (shape.layers + 4) * shape.hidden
    # HeadLogps: two fp32 chunks of logits, the gradients of the head and, in fp32, of its input
    head = 2 * 4 * tokens * min(CHUNK, shape.vocab) + largest * size
    head += tokens * shape.hidden * (4 + size)

    parts = {
        # trainer.place_frozen_weights
        "weights": (0 if offload and cfg.lora_rank else weights, weights, weights),
        "gathered weights": (0, gathered, gathered),
        "fp32 weights and AdamW": [0 if offload else 12 * trained / ranks] * 3,
        "gradients": (gradients * always, gradients * always, gradients + 2 * trained * always),
        "offload buffer": [largest * size * offload] * 3,
        "gradient buckets": (0, 0, buckets),
        "reference": (resting, reference, resting),
        "activations kept": (0, 0, kept),
        "a layer or the head": (0, max(layer, head), max(backward, head)),
        "PyTorch, CUDA, kernels": [CUDA_CONTEXT] * 3,
    }
    if gpu:
        least = vllm_weights(cfg, shape) + VLLM_ACTIVATIONS + 2 * sequence_bytes(cfg, shape)
        parts["a checkpoint's copies"] = (copies, 0, 0)
        parts["vLLM"] = (least, VLLM_ASLEEP, VLLM_ASLEEP)
    parts["total"] = map(sum, zip(*parts.values()))
    return {name: Phases(*phases) for name, phases in parts.items()}


def host_bytes(cfg, shape):
    """Bytes of host memory that the ranks of a machine need beside their GPUs. PyTorch rounds each
    pinned tensor up to a power of two: the plan takes twice its size."""
    pinned, offload = vllm_weights(cfg, shape), cfg.offload == "optimizer"
    reference = cfg.kl_coef and not cfg.lora_rank and cfg.checkpointing != "off"
    if reference or cfg.lora_rank and offload:  # see trainer.place_frozen_weights
        pinned += shape.parameters * bytes_per_number(cfg)
    # fp32 weights, gradients, bf16 weights (pinned), AdamW's moments
    optimizer = 24 * trained_parameters(cfg, shape) / dist.world_size() if offload else 0
    return dist.local_world_size() * (2 * pinned + optimizer)


def candidates(cfg, gpu):
    """Configs to try where cfg leaves a choice, best first: without offload, with activations kept
    (in packs of at least 8192 tokens), in large packs."""
    longest = cfg.max_prompt + cfg.max_tokens
    packs = [32768, 24576, 16384, 12288, 8192, longest] if gpu else [4096]
    packs = [cfg.pack_tokens] if cfg.pack_tokens else packs
    offloads = ["none"] + ["optimizer"] * gpu if cfg.offload == "auto" else [cfg.offload]
    for offload in offloads:
        for checkpointing, sizes in ("off", packs[:5]), ("on", packs):
            for tokens in sizes if cfg.checkpointing in ("auto", checkpointing) else []:
                yield dataclasses.replace(
                    cfg, offload=offload, checkpointing=checkpointing, pack_tokens=tokens)


def plan(cfg, device=None, shape=None):
    """Prints the plan. Returns cfg with all flags filled in, and a dict of what was decided.

    Takes the first of candidates() that fits into nine tenths of the device's memory, or of
    --memory_gb; vLLM gets what the trainer leaves. Raises ValueError, in one line, if none fits.
    device, shape: those of this process and of cfg.model, or other ones to see their plan.
    """
    device, shape = device or Device.here(), shape or ModelShape.of(cfg.model)
    available = min(device.free, cfg.memory_gb * GIB or device.free)
    budget = USABLE * available
    for best in candidates(cfg, device.gpu):
        parts = step_bytes(best, shape, device.gpu)
        if max(parts["total"]) <= budget:
            break
    else:
        raise ValueError(f"{cfg.model} needs about {max(parts['total']) / GIB:.1f} GiB at "
                         f"--max_tokens {cfg.max_tokens}, this run may use {budget / GIB:.1f} "
                         f"(nine tenths); to use less memory: {smaller(best)}")
    host = host_bytes(best, shape) * device.gpu
    if host > device.host:
        raise ValueError(f"--offload {best.offload} needs about {host / GIB:.0f} GiB of host "
                         f"memory, {device.host / GIB:.0f} are free")
    flags = ["offload", "checkpointing", "pack_tokens"]
    if device.gpu:
        flags += ["vllm_memory"]
        trainer, least = parts["total"].generate - parts["vLLM"].generate, parts["vLLM"].generate
        share = cfg.vllm_memory or round((budget - trainer) / device.total, 3)
        if cfg.vllm_memory and share * device.total < least:
            raise ValueError(f"--vllm_memory {share} has no room for a KV cache: use at least "
                             f"{least / device.total + 0.005:.2f}, or 0 for what is left")
        best = dataclasses.replace(best, vllm_memory=share)
        parts["vLLM"] = parts["vLLM"]._replace(generate=share * device.total)
        parts["total"] = parts["total"]._replace(generate=trainer + share * device.total)

    dist.print_once(f"memory plan for {shape.parameters / 1e6:,.1f} M parameters in {cfg.dtype} "
                    f"and {available / GIB:.1f} GiB: "
                    + " ".join(f"--{name} {getattr(best, name)}" for name in flags))
    dist.print_once(f"  {'GiB per phase':24}" + "".join(f"{phase:>10}" for phase in Phases._fields))
    for name, phases in parts.items():
        if any(phases):
            dist.print_once(f"  {name:24}" + "".join(f"{size / GIB:10.2f}" for size in phases))
    if device.gpu:
        dist.print_once(f"  host memory: {host / GIB:.0f} GiB")
    decided = {name: x for name, x in vars(best).items() if x != getattr(cfg, name)}
    return best, decided | {"reference_stays": device.gpu and best.checkpointing == "off"}


def peak_gib():
    """Peak memory in GiB. On a GPU: all that is in use on it, vLLM's memory included, since
    PyTorch's peak was last reset. On a CPU: this process since it started."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
    return used / GIB


def is_out_of_memory(error):
    """Whether an exception means that the device is full. vLLM's wake_up and PyTorch's allocator
    for the CPU raise a plain RuntimeError then, cuBLAS and cuDNN one with ALLOC_FAILED."""
    full = ("out of memory", "allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in full)


def smaller(cfg):
    """The flags with which a run like cfg takes less memory, as text."""
    longest = cfg.max_prompt + cfg.max_tokens
    flags = {"checkpointing": "on", "pack_tokens": min(cfg.pack_tokens, longest),
             "max_tokens": cfg.max_tokens // 2, "vllm_memory": round(0.8 * cfg.vllm_memory, 2)}
    if cfg.vllm_memory:  # planned for a GPU
        flags["offload"] = "optimizer"
    if not cfg.lora_rank:
        flags["lora_rank"] = 32
        if dist.world_size() > 1:
            flags |= {"zero_stage": 3, "tp": dist.local_world_size(), "kl_coef": 0}
    return " ".join(f"--{name} {x}" for name, x in flags.items() if x != getattr(cfg, name))
