"""The memory plan: how many bytes each phase of a step needs on this device, and which settings make it fit.

The plan is made and printed before weights are loaded.
"""
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
from runtime.folder import is_writable
from runtime.shape import ModelShape

GIB = 2**30
CUDA_CONTEXT = 1.5 * GIB  # PyTorch, the CUDA context and the kernels, before the first tensor
VLLM_ASLEEP = 1.2 * GIB  # what vLLM keeps while it sleeps (vLLM issue 28714, Qwen3-4B)
VLLM_ACTIVATIONS = 2 * GIB  # vLLM's activations and CUDA graphs
ZERO3_LIVE = 10**9  # weights that DeepSpeed keeps gathered in stage 3: its stage3_max_live_parameters
BUCKET = 2**26  # numbers in one gradient bucket of DeepSpeed (its default of 5e8 can take 3 GB)
MOST_RUNNING = 1024  # sequences that vLLM decodes at once, at most
CHUNK = 2048  # vocabulary tokens that model.HeadLogps handles at a time: 8 KiB of fp32 logits per row
USABLE = 0.9  # the plan uses this fraction of the memory; the rest is for fragmentation


def need_gpu(dtype):
    """Raises ValueError if PyTorch was installed for a GPU that it cannot use or that has no bfloat16."""
    if torch.version.cuda and not torch.cuda.is_available():  # without this, it would run on the CPU
        raise ValueError(f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no "
                         "usable GPU: nvidia-smi must show one, with driver 580 or newer; to run on the CPU: "
                         "pip install -r requirements-cpu.txt, in a new environment")
    if dtype == "bfloat16" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(dist.device())
        if major < 8:
            raise ValueError(f"--dtype bfloat16 needs a GPU of compute capability 8.0 or higher, this one "
                             f"has {major}.{minor}: use --dtype float32")


def need_compiler(cpu_operators=True):
    """Raises ValueError if DeepSpeed could not compile its CPU operators at their first use, or Triton, on a
    GPU, what starts its kernels."""
    if torch.cuda.is_available() and not os.environ.get("CC", shutil.which("gcc") or shutil.which("clang")):
        raise ValueError("Triton needs a C compiler on a GPU (apt-get install gcc)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise ValueError(f"{header} is missing, which compilers need (apt-get install python3-dev)")
    if not cpu_operators:
        return
    from torch.utils.cpp_extension import get_default_build_root
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # pip installs ninja there
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if not shutil.which(tool):
            raise ValueError(f"DeepSpeed needs '{tool}' to compile its CPU operators "
                             "(apt-get install g++ ninja-build)")
    build_root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not is_writable(build_root):
        raise ValueError(f"DeepSpeed compiles its CPU operators in {build_root}, which cannot be written: "
                         "set HOME, or TORCH_EXTENSIONS_DIR, to a folder of yours")
    for lock in build_root.rglob("lock"):  # left by a run that was killed while it compiled
        dist.print_once(f"note: DeepSpeed will wait for {lock} to be removed: delete it, "
                        "unless another run is just starting", file=sys.stderr)


class Phases(NamedTuple):
    """Bytes while vLLM generates, while the reference model runs, and while the policy is updated."""
    generate: float
    reference: float
    update: float


class Device(NamedTuple):
    """What a plan is made for: the device of this process (`here`) or one that this machine does not have."""
    gpu: bool
    free: float  # bytes
    total: float  # bytes
    host: float = math.inf  # bytes of available host memory; inf = unknown

    @classmethod
    def here(cls):
        """The GPU of this process, or this rank's share of the host memory; `free` is the least over the
        ranks."""
        gpu, host = torch.cuda.is_available(), free_host_bytes()
        free, total = torch.cuda.mem_get_info() if gpu else [host // dist.world_size()] * 2
        return cls(gpu, min(dist.all_gather([free])), total, host)


def bytes_per_number(cfg):
    """Bytes of one weight or activation."""
    return 2 if cfg.dtype == "bfloat16" else 4


def trained_parameters(cfg, shape):
    """Number of trained parameters: all, or those of the adapters: r * (a + b) per matrix (a, b)."""
    keys_and_values = shape.kv_cache // shape.layers
    # a + b over a layer's matrices
    sum_of_sides = 7 * shape.hidden + 2 * shape.attention + keys_and_values + 3 * shape.mlp
    return cfg.lora_rank * shape.layers * sum_of_sides or shape.parameters


def has_bf16_optimizer(cfg):
    """Whether DeepSpeed takes its BF16_Optimizer, which always keeps unsharded fp32 gradients, and until the
    step also those in bf16."""
    return cfg.zero_stage == 1 and cfg.dtype == "bfloat16" and cfg.offload != "optimizer"


def step_bytes(cfg, shape, gpu, reference_stays=False):
    """Bytes of each part of the trainer in each phase: {name: Phases}. vLLM's own memory is not included.

    reference_stays: on a GPU, the reference stays there in all phases.

    Counted from what the code keeps:
        DeepSpeed 0.19   the fp32 sum of gradients stays on the device, also with offload, but not in stage 3;
                         there, weights are sharded, and up to ZERO3_LIVE of them gathered
        HeadLogps        two fp32 chunks of logits; its backward pass also holds the gradients of the head
                         and, in fp32, of its input
        decoder layer    per token 5 hidden, 8 attention (14 with query and key norms) and 4 MLP activations;
                         with --compile 4, 5 (7) and 3: the backward pass recomputes norms, rotary embedding
                         and SiLU from them
    tests/test_memory.py compares this with a simulation of the real code at 1.5B parameters.
    """
    offload = gpu and cfg.offload == "optimizer"
    size = bytes_per_number(cfg)
    tokens = max(cfg.pack_tokens, cfg.max_prompt + cfg.max_tokens)
    trained = trained_parameters(cfg, shape)
    largest = min(trained, shape.vocab * shape.hidden)  # numbers in the largest gradient, the embedding's

    sharded = cfg.zero_stage == 3
    whole = shape.parameters * size
    weights = whole / dist.world_size() if sharded else whole
    generate_weights = 0 if offload and cfg.lora_rank else weights  # trainer.place_frozen_weights
    gathered = size * sharded * min(shape.parameters, ZERO3_LIVE)
    # vLLM holds the embedding, the head and what it fuses until the end of the sync, but no activations yet
    synced = sharded * max(0, size * 2 * (shape.vocab + shape.mlp) * shape.hidden - VLLM_ACTIVATIONS)
    optimizer = 0 if offload else 12 * trained / dist.world_size()
    offload_buffer = largest * size * offload
    buckets = (size + 4) * min(trained, max(BUCKET, largest))
    reference = whole if cfg.kl_coef and not cfg.lora_rank else 0
    bf16_optimizer = has_bf16_optimizer(cfg)
    gradients = 4 * trained / (1 if cfg.zero_stage == 1 else dist.world_size()) * (not offload or not sharded)
    asleep = VLLM_ASLEEP if gpu else 0
    # a checkpoint is made tensor by tensor while vLLM can generate: of each trained one an fp32 copy; with
    # LoRA, an MLP's matrix and its adapter's product, which are added in fp32: 8 bytes in bf16 and in fp32
    copies = 8 * shape.mlp if cfg.lora_rank else 4 * shape.vocab

    hidden, attention, mlp = 5, 14 if shape.qk_norms else 8, 4
    layer = tokens * size * (hidden * shape.hidden + attention * shape.attention + mlp * shape.mlp)
    layer_gradients = tokens * size * (3 * shape.mlp + 4 * shape.qk_norms * shape.attention)
    if cfg.checkpointing == "on":  # keep each layer's input, compute the layer again in the backward pass
        kept = tokens * size * (shape.layers + 4) * shape.hidden
        layer_backward = layer + layer_gradients
    else:
        kept = shape.layers * layer
        layer_backward = layer_gradients
    head = 2 * 4 * tokens * min(CHUNK, shape.vocab)
    head_backward = head + tokens * shape.hidden * (4 + size) + largest * size

    return {
        "weights": Phases(generate_weights, weights, weights),
        "gathered weights": Phases(synced, gathered, gathered),
        "fp32 weights and AdamW": Phases(optimizer, optimizer, optimizer),
        "gradients": Phases(*[gradients * bf16_optimizer] * 2, gradients + 2 * trained * bf16_optimizer),
        "offload buffer": Phases(offload_buffer, offload_buffer, offload_buffer),
        "gradient buckets": Phases(0, 0, buckets),
        "reference": Phases(*[0 if gpu and not reference_stays else reference] * 3)._replace(
            reference=reference),
        "activations kept": Phases(0, 0, kept),
        "a layer or the head": Phases(0, max(layer, head), max(layer_backward, head_backward)),
        "PyTorch, CUDA, kernels": Phases(CUDA_CONTEXT, CUDA_CONTEXT, CUDA_CONTEXT),
        "a checkpoint's copies": Phases(copies * shape.hidden * gpu, 0, 0),
        "vLLM asleep": Phases(0, asleep, asleep),
    }


def totals(parts):
    """Sum of the parts of step_bytes, per phase."""
    return Phases(*map(sum, zip(*parts.values())))


def sequence_bytes(cfg, shape):
    """Bytes of the keys and values of one sequence of the largest length, on a rank."""
    tokens = cfg.max_prompt + cfg.max_tokens
    return tokens * bytes_per_number(cfg) * shape.kv_cache / min(cfg.tp, shape.kv_heads)


def vllm_weights(cfg, shape):
    """Bytes on a rank that vLLM copies to host memory to sleep: its weights and, for penalties that we do not
    use, how often each running sequence has each token, in 32 bits (in its prompt: 1 bit)."""
    counts = (4 + 1 / 8) * most_sequences(cfg) * shape.vocab
    return shape.parameters * bytes_per_number(cfg) / cfg.tp + counts


def most_sequences(cfg):
    """The most sequences that run at once in an engine of vLLM: those of a call, up to MOST_RUNNING."""
    sequences = max(cfg.prompts * cfg.samples, cfg.eval_size * max(cfg.eval_n, 1))
    return min((sequences // dist.world_size() + 1) * cfg.tp, MOST_RUNNING)


def kv_cache_bytes(cfg, device=None, shape=None):
    """Bytes of vLLM's KV cache on a GPU: what its share leaves, at most what all sequences of a step need.

    vLLM is told in bytes, because its own estimate of free memory differs between versions. None on a CPU.
    Raises ValueError if the share has no room for one sequence.
    """
    device, shape = device or Device.here(), shape or ModelShape.of(cfg.model)
    if not device.gpu:
        return None
    left = cfg.vllm_memory * device.total - vllm_weights(cfg, shape) - VLLM_ACTIVATIONS
    if left < sequence_bytes(cfg, shape):
        missing = (sequence_bytes(cfg, shape) - left) / device.total
        raise ValueError(f"--vllm_memory {cfg.vllm_memory} has no room for a KV cache: use at least "
                         f"{cfg.vllm_memory + missing + 0.005:.2f}, or 0 for what the plan leaves")
    return int(min(left, most_sequences(cfg) * sequence_bytes(cfg, shape)))


def free_host_bytes():
    """Free bytes of host memory, also in a container with a limit, which psutil does not know."""
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    limit = (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
    if limit == "max":
        return free
    return min(free, int(limit) - int((group / "memory.current").read_text()))


def checkpoint_bytes(cfg, shape):
    """Bytes on disk of one checkpoint: all weights; per trained one, the fp32 weight and AdamW's two moments."""
    return shape.parameters * bytes_per_number(cfg) + 12 * trained_parameters(cfg, shape)


def peak_bytes(cfg, shape, gpu, reference_stays=False):
    """The most that any phase needs. On a GPU, it includes vLLM with a KV cache for two sequences. If the
    reference stays there, the KV cache holds all sequences at half of the largest length."""
    generate, reference, update = totals(step_bytes(cfg, shape, gpu, reference_stays))
    if gpu:
        generate += vllm_weights(cfg, shape) + VLLM_ACTIVATIONS
        generate += (most_sequences(cfg) / 2 if reference_stays else 2) * sequence_bytes(cfg, shape)
    return max(generate, reference, update)


def largest_pack(gpu):
    """Tokens above which a larger pack is no faster."""
    return 32768 if gpu else 4096


def candidates(cfg, gpu):
    """Configs to try, in this order, where cfg leaves a choice: no offload before offload; for each of them,
    activations kept (if packs of 8192 tokens stay possible) before recomputed (if the longest sequence
    fits)."""
    longest = cfg.max_prompt + cfg.max_tokens
    offloads = [cfg.offload]
    if cfg.offload == "auto":
        offloads = ["none", "optimizer"] if gpu else ["none"]
    for offload in offloads:
        for checkpointing, tokens in (("off", max(8192, longest)), ("on", longest)):
            if cfg.checkpointing in ("auto", checkpointing):
                yield dataclasses.replace(cfg, offload=offload, checkpointing=checkpointing,
                                          pack_tokens=cfg.pack_tokens or min(tokens, largest_pack(gpu)))


def host_bytes(cfg, shape, reference_stays=False):
    """Bytes of host memory that the ranks of a machine need. PyTorch rounds each pinned tensor up to a power
    of two: the plan takes twice its size."""
    # trained: fp32 weights, gradients, bf16 weights (pinned) and AdamW's moments
    offload = cfg.offload == "optimizer"
    optimizer = 24 * trained_parameters(cfg, shape) / dist.world_size() * offload
    # pinned: vLLM's weights while it sleeps, and the reference
    weights = shape.parameters * bytes_per_number(cfg)
    reference = bool(cfg.kl_coef and not cfg.lora_rank and not reference_stays)
    pinned = 2 * (vllm_weights(cfg, shape) + reference * weights)
    if offload and cfg.lora_rank:  # trainer.place_frozen_weights pins one tensor
        pinned += 2 ** math.ceil(math.log2(weights))
    return dist.local_world_size() * (optimizer + pinned)


def plan(cfg, device=None, shape=None):
    """Fills in pack_tokens, checkpointing, offload and vllm_memory where cfg leaves them open; prints the
    plan.

    Everything must fit into nine tenths of the device's memory, or of --memory_gb. Takes the first of
    candidates() that fits, then the largest packs that fit. While vLLM generates, it may use all the memory
    that the trainer does not hold. The reference model stays on the GPU if all of this is possible beside it,
    see peak_bytes; else it waits in host memory. Returns the completed cfg, and a dict of what was decided.
    Raises ValueError, with one line, when nothing fits.
    device, shape: those of this process and of cfg.model, or other ones to see their plan.
    """
    device, shape = device or Device.here(), shape or ModelShape.of(cfg.model)
    budget = USABLE * min(device.free, cfg.memory_gb * GIB or device.free)

    def fits(c, stays=False):
        return peak_bytes(c, shape, device.gpu, stays) <= budget

    tried = list(candidates(cfg, device.gpu))
    best = next(filter(fits, tried), None)
    if best is None:
        needed = peak_bytes(tried[-1], shape, device.gpu)
        raise ValueError(f"{cfg.model} needs about {needed / GIB:.1f} GiB at --max_tokens {cfg.max_tokens}, "
                         f"this run may use {budget / GIB:.1f} (nine tenths of the memory): "
                         f"try {' '.join(smaller(tried[-1], device.gpu))} or a smaller model")
    stays = device.gpu and not cfg.vllm_memory and fits(best, stays=True)
    if best.offload == "optimizer":
        need_compiler()
    needed = host_bytes(best, shape, stays)
    if device.gpu and needed > device.host:
        raise ValueError(f"--offload {best.offload} needs about {needed / GIB:.0f} GiB of host memory, "
                         f"{device.host / GIB:.0f} are free")
    if not cfg.pack_tokens:
        sizes = range(largest_pack(device.gpu), best.pack_tokens, -1024)
        larger = (dataclasses.replace(best, pack_tokens=n) for n in sizes)
        best = next((c for c in larger if fits(c, stays)), best)
    parts = step_bytes(best, shape, device.gpu, stays)
    if device.gpu and not cfg.vllm_memory:
        left = budget - totals(parts).generate
        best = dataclasses.replace(best, vllm_memory=round(left / device.total, 3))
    kv_cache_bytes(best, device, shape)  # raises ValueError
    decided = {name: x for name, x in vars(best).items() if x != getattr(cfg, name)}
    vllm = vllm_weights(cfg, shape) + VLLM_ACTIVATIONS
    if device.gpu:
        vllm = best.vllm_memory * device.total
    parts["vLLM: weights, KV cache"] = Phases(vllm, 0, 0)
    host = host_bytes(best, shape, stays) if device.gpu else 0
    dist.print_once(describe(best, shape, parts, budget / USABLE, device.gpu, host))
    return best, decided | {"reference_stays": stays}


def describe(cfg, shape, parts, available, gpu, host):
    """The plan as text: the chosen flags, and a table of the parts in GiB per phase."""
    flags = f"--offload {cfg.offload} --checkpointing {cfg.checkpointing} --pack_tokens {cfg.pack_tokens}"
    if gpu:
        flags += f" --vllm_memory {cfg.vllm_memory}"
    model = f"{shape.parameters / 1e6:,.1f} M parameters in {cfg.dtype}"
    lines = [f"memory plan for {model} and {available / GIB:.1f} GiB: {flags}",
             f"  {'GiB per phase':24}" + "".join(f"{phase:>10}" for phase in Phases._fields)]
    for name, phases in {**parts, "total": totals(parts)}.items():
        if any(phases):
            lines.append(f"  {name:24}" + "".join(f"{size / GIB:10.2f}" for size in phases))
    if gpu:
        lines.append(f"  host memory: {host / GIB:.0f} GiB")
    return "\n".join(lines)


_blocked = None  # the tensor of limit_device


def limit_device(cfg):
    """With --memory_gb on a GPU: allocates the rest of its memory, so that a run that needs more fails as on
    a smaller GPU."""
    global _blocked
    if cfg.memory_gb and torch.cuda.is_available():
        excess = max(0, int(Device.here().free - cfg.memory_gb * GIB))
        _blocked = torch.empty(excess, dtype=torch.uint8, device="cuda")


def is_out_of_memory(error):
    """Whether an exception means that the device is full. vLLM's wake_up and PyTorch's CPU allocator raise a
    plain RuntimeError then."""
    full = ("out of memory", "allocate memory", "ALLOC_FAILED")  # the last: cuBLAS and cuDNN
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in full)


def smaller(cfg, gpu):
    """The flags that would make a run with cfg take less memory: a list of texts."""
    longest = cfg.max_prompt + cfg.max_tokens
    return [flag for helps, flag in (
        (cfg.pack_tokens > longest, f"--pack_tokens {max(cfg.pack_tokens // 2, longest)}"),
        (cfg.pack_tokens <= longest, f"--max_tokens {cfg.max_tokens // 2}"),  # one sequence is a whole pack
        (cfg.checkpointing == "off", "--checkpointing on"),
        (gpu and cfg.offload == "none", "--offload optimizer"),
        (has_bf16_optimizer(cfg), "--zero_stage 2"),
        (dist.world_size() > 1 and cfg.zero_stage == 2 and not cfg.lora_rank, "--zero_stage 3"),
        (gpu and cfg.tp < dist.local_world_size(), f"--tp {dist.local_world_size()}"),
        (cfg.zero_stage == 3 and cfg.kl_coef, "--kl_coef 0"),  # each rank has a whole reference model
        (not cfg.lora_rank, "--lora_rank 32"),
    ) if helps]


def advice(error, cfg):
    """The message for an out-of-memory error: the error's first line, and which flags to change."""
    gpu = torch.cuda.is_available()
    flags = smaller(cfg, gpu) + [f"--vllm_memory {0.8 * cfg.vllm_memory:.2f}"] * gpu
    return (f"nano_rlvr: {str(error).splitlines()[0]} To use less memory: {' '.join(flags)}; "
            "or plan for a smaller device: --memory_gb")


def peak_gib():
    """Peak memory in GiB.

    On a GPU: all that is in use on the device, vLLM's memory included, since PyTorch's peak was last reset.
    On a CPU: this process since it started.
    """
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
    return (used - (0 if _blocked is None else _blocked.nbytes)) / GIB
