"""The memory plan against a simulation of the real code at real sizes, and against what the README
promises. Nothing is allocated."""
import dataclasses
import gc
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
import runtime.model
from conftest import ENV, ROOT, fixed_rollouts, make_config
from examples import tensor_parallel
from runtime import memory
from runtime.memory import GIB, ModelShape
from runtime.stats import forward_flops
from shapes import SIZES, make, shape_of

TOKENS = 8192  # in a simulated forward pass


def test_cached_files_of_a_container_count_as_free(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    without_limit = memory.free_host_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 500\nactive_file 100\n")
    assert memory.free_host_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(memory.free_host_bytes() - without_limit) < 2**34  # other programs run, too


def planned(name="1.5B", gpu=True, **flags):
    """The parts of the plan of a step, in bytes, in bfloat16 if the flags do not say otherwise."""
    return memory.step_bytes(nr.Config(**dict(dtype="bfloat16") | flags), shape_of(name), gpu)


def host(**flags):
    """Planned bytes of host memory beside a GPU."""
    return planned(**flags)["total"][2]


def simulated_peak(size, checkpointing):
    """Peak bytes without the weights: forward and backward in bf16, each gradient freed at once."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    n = TOKENS // 4 - 64
    pack = nr.collate([nr.Rollout([i] * 64, [0] * n, "", True, [0.0] * n) for i in range(4)])
    lengths = SimpleNamespace(tolist=lambda: [TOKENS // 4] * 4)  # fake tensors have no values
    pack.cu_seqlens_q = pack.cu_seqlens_k = SimpleNamespace(diff=lambda: lengths)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make(size, torch.bfloat16).train()
        if checkpointing == "on":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            logp, _ = nr.TokenLogps(model)(pack)
            logp.sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        return peak["Total"] - sum(p.numel() for p in model.parameters()) * 2


@pytest.mark.parametrize("name, checkpointing", [
    ("1.5B", "off"), ("1.5B", "on"), ("Qwen3", "off"), ("Qwen3", "on")])
def test_planned_activations_are_at_least_those_of_the_code_and_at_most_three_tenths_more(
        name, checkpointing):
    """Simulated with 2 and with 4 layers: each further one adds as much. A tied head's gradient,
    which waits for the embedding's, is planned among the buffers."""
    shape = shape_of(name)
    found = planned(name, gpu=False, pack_tokens=TOKENS, gradient_checkpointing=checkpointing,
                    max_prompt=64, max_tokens=64)["activations"][1]
    found += 2 * shape.vocab * shape.hidden
    two, four = (simulated_peak(SIZES[name] | {"num_hidden_layers": n}, checkpointing)
                 for n in (2, 4))
    measured = four + (shape.layers - 4) * (four - two) / 2
    assert measured < found < 1.3 * measured, (found / GIB, measured / GIB)


def test_planned_activations_of_compiled_layers_are_those_that_autograd_keeps():
    pack, kept = nr.collate([nr.Rollout([1] * 4, [0] * 60, "", True, [0.0] * 60)]), []
    for layers in (1, 2):
        size = SIZES["Qwen3"] | {"num_hidden_layers": layers, "vocab_size": 256}
        model, found = make(size, torch.bfloat16).train(), {}
        runtime.model.compile_layers(model, backend="aot_eager_decomp_partition")
        model.is_compiled = False  # the head

        def note(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logp, _ = nr.TokenLogps(model)(pack)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for storage, size in found.items() if storage not in weights))
    parts = planned("Qwen3", gpu=False, max_prompt=4, max_tokens=60, compile="on")
    measured = SIZES["Qwen3"]["num_hidden_layers"] * (kept[1] - kept[0])
    assert measured < parts["activations"][1] < 1.3 * measured, parts


def test_planned_state_is_what_two_ranks_hold_before_the_step(monkeypatch):
    """Measured by bench/ranks.py. The plan of stage 1 has the gradients of bf16 with fp32, too."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, row in json.loads((ROOT / "bench/results/ranks_reduce.json").read_text()).items():
        dtype, stage = name.split()
        parts = planned(gpu=False, dtype=dtype, zero_stage=int(stage))
        state = parts["weights"][0] + parts["optimizer"][1] + parts["gradients"][1]
        ours = state / shape_of("1.5B").parameters
        assert 0.9 * row["held"] < ours < (1.2 if stage == "1" else 1.05) * row["held"], name


def card(gib, size="1.5B", host=64, **changes):
    """The planned Config for a GPU of `gib` GiB with `host` GiB of host memory. It fits."""
    shape, device = shape_of(size), memory.Device(True, gib * GIB, gib * GIB, host * GIB)
    cfg, _ = memory.plan(nr.Config(dtype="bfloat16", **changes), device, shape)
    parts, vllm = memory.step_bytes(cfg, shape, gpu=True), cfg.gpu_memory_utilization * gib * GIB
    generate, update, _ = parts["total"]
    least = parts["vLLM, at least"][0]
    assert vllm >= least and max(generate - least + vllm, update) <= 0.905 * gib * GIB
    return cfg


@pytest.mark.parametrize("gib, pack_tokens, allocated", [
    (39.4, 8192, 29.9),  # on a stand-in for a GPU: PyTorch's allocator, kernels that do nothing
    (79.1, 16384, 61.6)])  # on an H100
def test_the_plan_of_the_update_is_above_what_a_run_allocated_by_at_most_15_percent(
        gib, pack_tokens, allocated):
    shape, device = shape_of("1.5B"), memory.Device(True, gib * GIB, gib * GIB)
    cfg = nr.Config(dtype="bfloat16", compile="on", pack_tokens=pack_tokens)
    cfg, _ = memory.plan(cfg, device, shape)
    _, update, _ = memory.step_bytes(cfg, shape, gpu=True)["total"]
    assert allocated * GIB < update < 1.15 * allocated * GIB, update / GIB


def test_there_are_no_gradients_while_the_reference_is_on_the_gpu():
    """held_in_update.py, in a process without the tensors of other tests. So the plan counts the
    larger of the two."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         ROOT / "tests/held_in_update.py"], capture_output=True, text=True, env=ENV, cwd=ROOT)
    assert "1 passed" in done.stdout, done.stdout[-3000:]
    parts = planned(gpu=True, gradient_checkpointing="on")
    assert parts["reference"][1] + parts["gradients"][1] == 4 * shape_of("1.5B").parameters


def test_the_plan_of_a_cpu_has_no_row_of_a_gpu_and_none_of_zeros():
    cfg = make_config()
    device = memory.Device(False, 8 * GIB, 8 * GIB)
    text = memory.plan(cfg, device)[1]["text"]
    names = [line[:26].strip() for line in text.splitlines()[1:]]
    assert names == ["GiB", "optimizer", "activations", "libraries, buffers", "vLLM", "total"], text
    assert "host" not in text


def test_zero_3_and_shared_engines_are_planned_where_one_gpu_cannot_hold_the_model(monkeypatch):
    flags = dict(zero_stage=3, kl_coef=0)
    for size, ranks, gib, host in (("32B", 8, 80, 1024), ("7B", 2, 32, 256)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with pytest.raises(ValueError, match="needs about"):  # a whole engine on each rank
            card(gib, size, host, **flags)
        with monkeypatch.context() as patch:
            for name in ("step_bytes", "kv_cache_bytes"):
                patch.setattr(memory, name, getattr(memory, name))  # to be restored
            tensor_parallel.plan_shards(ranks)
            cfg = card(gib, size, host, **flags)
            assert cfg.offload == "optimizer" and cfg.pack_tokens >= 4024
            for name, x in (("zero_stage", 2), ("kl_coef", 0.001)) if size == "7B" else ():
                with pytest.raises(ValueError, match=f"needs about .*--{name} {flags[name]}"):
                    card(gib, size, host, **flags | {name: x})


def test_planned_host_memory_holds_pinned_tensors_rounded_up_to_powers_of_two():
    """Weights of the reference or frozen ones; those of a sleeping vLLM are dropped."""
    shape = shape_of("1.5B")
    with torch.device("meta"):
        sizes = [2 * p.numel() for p in make(SIZES["1.5B"]).parameters()]
    pinned = [2 ** math.ceil(math.log2(size)) for size in sizes]
    assert sum(pinned) < host() == 4 * shape.parameters
    assert host(gradient_checkpointing="off") == host(kl_coef=0.0) == 0
    assert host(offload="optimizer") == host() + 24 * shape.parameters
    lora = dict(lora_rank=32)
    trained = memory.trained_parameters(nr.Config(**lora), shape)
    assert host(offload="optimizer", **lora) - host(**lora) == 24 * trained + 4 * shape.parameters


def test_the_kv_cache_is_not_larger_than_what_all_sequences_can_fill(monkeypatch):
    """A step unmaps and maps it: 0.5 s for 60 GB on an H100."""
    cfg = make_config(gpu_memory_utilization=0.8, prompts=32, samples=16, eval_size=64)
    token = 2 * ModelShape.of(cfg.model).kv_cache  # bytes, in bf16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GIB, 80 * GIB))
    found = memory.kv_cache_bytes(dataclasses.replace(cfg, dtype="bfloat16"))
    assert 512 * math.ceil((cfg.max_prompt + cfg.max_tokens) / 16) * 16 * token <= found < GIB


def test_a_start_on_a_cpu_writes_zeros_into_no_more_than_a_run_can_fill(monkeypatch):
    cfg = make_config(prompts=32, samples=16, eval_size=64)
    token = 4 * ModelShape.of(cfg.model).kv_cache  # bytes, in float32
    found = memory.kv_cache_bytes(cfg)
    assert 512 * math.ceil((cfg.max_prompt + cfg.max_tokens) / 32) * 32 * token <= found < GIB
    longer = dataclasses.replace(cfg, max_tokens=10**6)
    assert memory.kv_cache_bytes(longer) == memory.CPU_KV_CACHE
    recurrent = dataclasses.replace(ModelShape.of(cfg.model), kv_cache=0, recurrent=True)
    monkeypatch.setattr(ModelShape, "of", lambda model: recurrent)
    assert memory.kv_cache_bytes(cfg) == memory.CPU_KV_CACHE  # for its states


def test_garbage_is_collected_again_after_a_start_also_after_a_failed_one():
    with pytest.raises(ValueError, match="in the block"), memory.without_garbage_collection():
        assert not gc.isenabled()
        raise ValueError("in the block")
    assert gc.isenabled()


def test_what_the_user_gives_is_kept_and_what_cannot_fit_is_refused_in_one_line():
    given = dict(pack_tokens=5000, gradient_checkpointing="on", offload="none",
                 gpu_memory_utilization=0.3)
    cfg = card(80, **given)
    assert {name: getattr(cfg, name) for name in given} == given
    for gib, host, says in ((12, 64, "needs about .* GiB at --max_tokens 3000.*--lora_rank 32"),
                            (24, 16, "needs about .* GiB of host memory, 16 are free")):
        with pytest.raises(ValueError, match=says) as e:
            card(gib, host=host)
        assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="--gpu_memory_utilization: at least 0.26"):
        card(24, gpu_memory_utilization=0.1)
    assert all(card(gib).pack_tokens >= 8192 for gib in (24, 40, 80))  # README's table
    assert card(12, lora_rank=16) and card(24, "7B", lora_rank=32)  # adapters


def test_planned_flops_are_those_a_counter_sees(tokenizer):
    from torch.utils.flop_counter import FlopCounterMode
    cfg, rollouts = make_config(), fixed_rollouts(tokenizer)
    model = nr.TokenLogps(runtime.model.load_model(cfg))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(nr.collate(rollouts))
    flops = forward_flops(ModelShape.of(cfg.model), rollouts)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_checkpoint_is_as_large_as_its_tensors(model, lora_rank):
    weights, shape = sum(p.nbytes for p in model.parameters()), ModelShape.of(make_config().model)
    if lora_rank:
        runtime.model.add_adapters(model, lora_rank)
    state = 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)  # and two moments
    cfg = nr.Config(dtype="float32", lora_rank=lora_rank)
    assert memory.checkpoint_bytes(cfg, shape) == weights + state


def test_each_flag_of_the_advice_makes_the_plan_smaller(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    given = dict(pack_tokens=8192, gradient_checkpointing="off", offload="none", zero_stage=1,
                 gpu_memory_utilization=0.5)
    cfg = nr.Config(dtype="bfloat16", **given)
    flags = dict(flag.split() for flag in memory.smaller(cfg).removeprefix("--").split(" --"))
    assert float(flags.pop("gpu_memory_utilization")) == 0.4 and len(flags) == 6
    for name, x in flags.items():
        less = given | {name: type(getattr(cfg, name))(x)}
        assert sum(planned(**less)["total"][:2]) < sum(planned(**given)["total"][:2]), name


@pytest.mark.parametrize("given", [{}, {"lora_rank": 16}, {"kl_coef": 0.0}])
def test_where_host_memory_is_short_each_flag_of_the_advice_takes_less_of_it(given):
    with pytest.raises(ValueError, match="needs about .* of host memory") as e:
        card(24, host=4, offload="optimizer", **given)
    given = {"offload": "optimizer"} | given
    for flag in str(e.value).partition("--")[2].split(" --"):
        name, x = flag.split()
        assert host(**given | {name: x if x == "none" else int(x)}) < host(**given), flag


def test_out_of_memory_ends_a_run_in_one_line_with_the_flags_to_change(tmp_path):
    def full(cfg):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling\nMore lines.")
    flags = ["--steps", "1", "--pack_tokens", "4096", "--gradient_checkpointing", "off"]
    with pytest.raises(SystemExit) as e:
        nr.main([*flags, "--out", str(tmp_path)], sampler=full)
    flags = "--gradient_checkpointing on", "--max_tokens 48", "--pack_tokens 1632", "--lora_rank 32"
    assert all(flag in str(e.value) for flag in flags)
    assert "\n" not in str(e.value)
    with pytest.raises(RuntimeError) as e:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory.is_out_of_memory(e.value)
    assert not memory.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
