"""The memory plan against a simulation of the real code at real sizes, and against what the README promises.

Nothing is allocated.
"""
import dataclasses
import importlib
import json
import math
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import ROOT, fixed_rollouts, make_config
import runtime.model
import runtime.trainer
from runtime import memory
from runtime.batch import packed_attention
from runtime.shape import ModelShape

SIZES = {
    "1.5B": dict(  # Qwen2.5-1.5B
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936),
    "Qwen3": dict(  # Qwen3-0.6B: queries and keys have norms and are twice as wide as the model
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, model_type="qwen3"),
    "7B": dict(  # Qwen2.5-7B
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
    "32B": dict(  # Qwen2.5-32B
        hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8, vocab_size=152064, tie_word_embeddings=False),
    "wide": dict(  # as many key heads as query heads
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000),
}


def make(size):
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    AttentionInterface.register("packed", packed_attention)
    config = AutoConfig.for_model(**{"model_type": "qwen2", "tie_word_embeddings": True} | size)
    return AutoModelForCausalLM.from_config(config, attn_implementation="packed")


def shape_of(size):
    with torch.device("meta"):
        config = make(size).config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return ModelShape.of(folder)


def simulated_peak(size, tokens, checkpointing):
    """Peak bytes without the weights: forward and backward in bf16, each gradient freed at once."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    count, prompt = 4, 64
    completion = tokens // count - prompt
    batch = nr.collate([nr.Rollout([i] * prompt, [0] * completion, "", True, [0.0] * completion)
                        for i in range(count)])
    lengths = SimpleNamespace(tolist=lambda: [tokens // count] * count)  # fake tensors have no values
    batch.cu_seqlens_q = batch.cu_seqlens_k = SimpleNamespace(diff=lambda: lengths)
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = make(size).train()
        finally:
            torch.set_default_dtype(torch.float32)
        if checkpointing == "on":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            logp, _ = nr.TokenLogps(model)(batch)
            logp.sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        return peak["Total"] - sum(p.numel() for p in model.parameters()) * 2


@pytest.mark.parametrize("size, tokens, checkpointing", [
    ("1.5B", 16384, "on"), ("Qwen3", 8192, "on"), ("Qwen3", 8192, "off"),
    ("wide", 8192, "on"), ("wide", 4096, "off"),
])
def test_planned_activations_are_those_of_the_code_within_a_fifth(size, tokens, checkpointing):
    cfg = dataclasses.replace(nr.Config(), dtype="bfloat16", pack_tokens=tokens, checkpointing=checkpointing,
                              max_prompt=64, max_tokens=64)
    parts = memory.step_bytes(cfg, shape_of(SIZES[size]), gpu=False)
    planned = parts["activations kept"].update + parts["a layer or the head"].update
    measured = simulated_peak(SIZES[size], tokens, checkpointing)
    assert 0.95 * measured < planned < 1.2 * measured, (planned / 2**30, measured / 2**30)


@pytest.mark.parametrize("size", [
    {}, dict(num_key_value_heads=4), dict(model_type="qwen3", head_dim=64, num_key_value_heads=4)], ids=str)
def test_a_compiled_layer_keeps_the_planned_activations_within_a_fifth(size):
    """What autograd saves. The backend splits the graphs into forward and backward as Inductor does."""
    size = dict(hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=1,
                vocab_size=64) | size
    tokens, kept = 256, {}
    batch = nr.collate([nr.Rollout([1] * 8, [0] * 56, "", True, [0.0] * 56) for _ in range(4)])
    for layers in (1, 3):
        model = make(size | dict(num_hidden_layers=layers)).to(torch.bfloat16)
        weights = {p.data_ptr() for p in model.parameters()}
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda x: saved.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
            nr.TokenLogps(model)(batch)
        kept[layers] = sum(x.untyped_storage().nbytes() for p, x in saved.items() if p not in weights)
    cfg = dataclasses.replace(nr.Config(), dtype="bfloat16", compile="on", checkpointing="off",
                              pack_tokens=tokens, max_prompt=8, max_tokens=56)
    planned = [memory.step_bytes(cfg, shape_of(size | dict(num_hidden_layers=layers)), gpu=False)[
        "activations kept"].update for layers in (1, 3)]
    measured = kept[3] - kept[1]
    assert 0.95 * measured < planned[1] - planned[0] < 1.2 * measured


def card(gib, size="1.5B", host=64, **changes):
    """The planned Config and its peak in GiB, for a GPU of `gib` GiB with `host` GiB of host memory."""
    shape = shape_of(SIZES[size])
    device = memory.Device(True, gib * memory.GIB, gib * memory.GIB, host * memory.GIB)
    cfg = memory.plan(dataclasses.replace(nr.Config(), dtype="bfloat16", **changes), device, shape)
    parts = memory.step_bytes(cfg, shape, gpu=True)
    generate, reference, update = (sum(sizes) / memory.GIB for sizes in zip(*parts.values()))
    return cfg, max(generate + cfg.vllm_memory * gib, reference, update)


def test_a_24_gib_card_trains_all_of_1_5b_with_3000_tokens_and_no_flags_in_22_gib():
    cfg, peak = card(24)
    assert (cfg.offload, cfg.checkpointing, cfg.max_tokens) == ("optimizer", "on", 3000)
    assert cfg.pack_tokens >= 8192 and peak <= 22


@pytest.mark.parametrize("gib, checkpointing", [(40, "on"), (80, "off")])
def test_from_40_gib_everything_is_on_the_card(gib, checkpointing):
    cfg, peak = card(gib)
    assert (cfg.offload, cfg.checkpointing) == ("none", checkpointing)
    assert cfg.pack_tokens >= 8192 and peak <= 0.905 * gib


@pytest.mark.parametrize("gib, changes, stays", [
    (24, {}, False), (40, {}, False), (80, {}, True), (140, {}, True), (140, dict(memory_gb=24), False),
    (80, dict(vllm_memory=0.5), False), (80, dict(prompts=512), False)])
def test_the_reference_stays_on_a_card_with_room_for_it_and_for_the_kv_cache(
        monkeypatch, capsys, gib, changes, stays):
    cfg, _ = card(gib, host=256, **changes)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  reference"))
    assert row.split()[1:] == (["2.88"] * 3 if stays else ["0.00", "2.88", "0.00"])
    assert cfg.pack_tokens >= 8192 and not memory.reference_stays  # which tells of this machine only
    device, shape = memory.Device(True, gib * memory.GIB, gib * memory.GIB), shape_of(SIZES["1.5B"])
    monkeypatch.setattr(memory.Device, "here", lambda: device)
    monkeypatch.setattr(memory, "reference_stays", None)
    memory.plan(dataclasses.replace(nr.Config(), dtype="bfloat16", **changes), shape=shape)
    assert memory.reference_stays is stays
    least = memory.most_sequences(cfg) / 2 * memory.sequence_bytes(cfg, shape)
    assert not stays or memory.kv_cache_bytes(cfg, device, shape) >= least


@pytest.mark.parametrize("stays", [False, True])
def test_a_reference_waits_in_host_memory_or_stays_as_the_plan_says(monkeypatch, stays):
    class Module(torch.nn.Linear):
        def to(self, device):
            self.weight.data = self.weight.data.clone()  # stands in for the GPU's copy

    monkeypatch.setattr(memory, "reference_stays", stays)
    model = Module(2, 3, bias=False)
    before = model.weight.data_ptr()
    with runtime.model.on_device(model):
        assert model.weight.data_ptr() != before
    assert (model.weight.data_ptr() != before) is stays


def pinned(size):
    """Bytes that PyTorch pins for a tensor of this size."""
    return 2 ** math.ceil(math.log2(size))


@pytest.mark.parametrize("size", ["1.5B", "wide"])
def test_planned_host_memory_holds_pinned_tensors_rounded_up_to_powers_of_two(size):
    """Those of the sleeping vLLM (weights, and how often each of 513 sequences has each token, in 32 bits),
    and of the reference unless it stays on the GPU."""
    with torch.device("meta"):
        weights = sum(pinned(2 * p.numel()) for p in make(SIZES[size]).parameters())
    cfg, shape = dataclasses.replace(nr.Config(), dtype="bfloat16", offload="none"), shape_of(SIZES[size])
    vllm = memory.host_bytes(cfg, shape, True)
    assert weights + pinned(4 * 513 * shape.vocab) < vllm < 4.1 * shape.parameters + 9 * 513 * shape.vocab
    assert weights < memory.host_bytes(cfg, shape) - vllm == 4 * shape.parameters
    no_kl, offload = dataclasses.replace(cfg, kl_coef=0.0), dataclasses.replace(cfg, offload="optimizer")
    assert memory.host_bytes(no_kl, shape) == vllm
    assert memory.host_bytes(offload, shape) == memory.host_bytes(cfg, shape) + 24 * shape.parameters


def test_planned_host_memory_holds_the_frozen_weights_of_adapters_with_offload():
    cfg, shape = dataclasses.replace(nr.Config(), dtype="bfloat16", lora_rank=32), shape_of(SIZES["7B"])
    on_card, offload = (memory.host_bytes(dataclasses.replace(cfg, offload=x), shape)
                        for x in ("none", "optimizer"))
    trained = memory.trained_parameters(cfg, shape)
    assert offload - on_card == 24 * trained + pinned(2 * shape.parameters)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_planned_copies_of_a_checkpoint_are_those_of_its_loop(monkeypatch, dtype, lora_rank):
    tensor_fragment = importlib.import_module("deepspeed.utils.tensor_fragment")  # a class has its name too
    from torch.distributed._tools.mem_tracker import MemTracker
    monkeypatch.setattr(tensor_fragment.dist, "all_reduce", lambda *args, **kwargs: None)
    size, measured = SIZES["7B"] | dict(num_hidden_layers=1), 0
    with torch.device("meta"):
        model = make(size)
    if lora_rank:
        runtime.model.add_adapters(model, lora_rank)
    model.to(getattr(torch, dtype))
    for name, p in model.named_parameters():
        p._hp_mapping = p._dp_group = None  # as DeepSpeed does, on a rank that has no part of p
        p.get_full_hp_param = partial(tensor_fragment.get_full_hp_param, p)
        w = p.detach()
        with MemTracker() as tracker:  # in the order of Checkpoints.save
            list(runtime.model.merge_adapter(model, name, w))
            if p.requires_grad:
                runtime.trainer.get_tensor(p, "fp32")
        totals = [x["Total"] for x in tracker.get_tracker_snapshot("peak").values()]
        measured = max(measured, sum(totals))
    cfg = nr.Config(dtype=dtype, lora_rank=lora_rank)
    planned = memory.step_bytes(cfg, shape_of(size), gpu=True)["a checkpoint's copies"]
    assert 0.99 * measured < planned.generate < 1.01 * measured and planned[1:] == (0, 0)


class Engine(SimpleNamespace):
    """Stands in for DeepSpeed's engine with --offload optimizer."""
    optimizer = SimpleNamespace(cpu_offload=True)


def test_frozen_weights_leave_the_gpu_without_being_copied_and_return_with_the_same_values(monkeypatch):
    def to(x, device):
        return x if device == "cpu" else x.clone()  # a clone stands in for the GPU's copy

    monkeypatch.setattr(torch.Tensor, "to", to)
    module = torch.nn.Linear(3, 2).requires_grad_(False)
    module.adapter = torch.nn.Linear(3, 2)
    engine, values = Engine(module=module), [p.detach().clone() for p in module.parameters()]
    runtime.trainer.place_frozen_weights(engine, "cpu")  # makes the copy in host memory
    first = [p.data_ptr() for p in module.parameters()]
    for _ in range(2):
        runtime.trainer.place_frozen_weights(engine, "gpu")
        moved = [p.data_ptr() != before for p, before in zip(module.parameters(), first)]
        assert moved == [True, True, False, False]  # the adapters stay
        runtime.trainer.place_frozen_weights(engine, "cpu")
        assert [p.data_ptr() for p in module.parameters()] == first
    assert all(torch.equal(p, value) for p, value in zip(module.parameters(), values))
    assert first[1] - first[0] == 4 * 6  # one tensor: PyTorch rounds the size of each one that it pins



def set_ranks(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


@pytest.mark.parametrize("size, ranks, gib, host", [("7B", 2, 24, 256), ("32B", 8, 80, 1024)])
def test_zero_3_and_shared_engines_are_planned_where_one_gpu_cannot_hold_the_model(
        monkeypatch, size, ranks, gib, host):
    set_ranks(monkeypatch, ranks)
    cfg, peak = card(gib, size, host, zero_stage=3, tp=ranks, kl_coef=0.0)
    assert peak <= 0.905 * gib and cfg.offload == "optimizer" and cfg.pack_tokens >= 4024
    shape = shape_of(SIZES[size])
    device = memory.Device(True, gib * memory.GIB, gib * memory.GIB)
    assert memory.kv_cache_bytes(cfg, device, shape) > 2 * memory.sequence_bytes(cfg, shape)
    for changes in (dict(zero_stage=2), dict(tp=1), dict(kl_coef=0.001)):  # each of them is needed
        if (size, *changes) != ("32B", "tp"):  # vLLM's whole 61 GiB fit beside 8 of the trainer
            with pytest.raises(ValueError, match="needs about") as e:
                card(gib, size, host, **dict(zero_stage=3, tp=ranks, kl_coef=0.0) | changes)
            name, = changes
            assert f"--{name} {dict(zero_stage=3, tp=ranks, kl_coef=0)[name]}" in str(e.value)


def test_keys_and_values_are_divided_by_the_ranks_of_an_engine_but_not_below_one_head():
    shape, cfg = shape_of(SIZES["7B"]), nr.Config(dtype="bfloat16")  # 4 key heads
    for tp, parts in ((1, 1), (2, 2), (4, 4), (8, 4)):
        of_rank = memory.sequence_bytes(dataclasses.replace(cfg, tp=tp), shape)
        assert of_rank * parts == 4024 * 2 * 2 * 28 * 4 * 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_planned_state_is_what_two_ranks_hold_before_the_step(monkeypatch, dtype, stage):
    """Measured by `python bench/ranks.py reduce`; in stage 3 DeepSpeed does not shard tensors below 1e5."""
    set_ranks(monkeypatch, 2)
    rows = json.loads((ROOT / "bench/results/ranks_reduce.json").read_text())
    measured = rows[f"{dtype} {stage}"]["held"]
    shape = shape_of(SIZES["1.5B"])
    parts = memory.step_bytes(nr.Config(dtype=dtype, zero_stage=stage), shape, gpu=False)
    planned = sum(parts[name].update for name in ("weights", "fp32 weights and AdamW", "gradients"))
    assert 0.9 * measured < planned / shape.parameters < 1.05 * measured


def test_a_large_card_capped_is_planned_like_a_small_one():
    small, capped = card(24)[0], card(140, memory_gb=24)[0]
    assert capped.vllm_memory * 140 == pytest.approx(small.vllm_memory * 24, rel=0.01)
    capped, small = (dataclasses.replace(cfg, vllm_memory=0, memory_gb=0) for cfg in (capped, small))
    assert capped == small


def test_an_optimizer_that_host_memory_cannot_hold_is_refused_in_one_line():
    with pytest.raises(ValueError, match="needs about .* GiB of host memory, 16 are free"):
        card(24, host=16)


def test_what_the_user_gives_is_kept():
    given = dict(pack_tokens=5000, checkpointing="on", offload="none", vllm_memory=0.3)
    cfg, _ = card(80, **given)
    assert {name: getattr(cfg, name) for name in given} == given


def test_what_cannot_fit_is_refused_in_one_line_and_adapters_make_it_fit():
    with pytest.raises(ValueError, match="needs about .* GiB at --max_tokens 3000.*--lora_rank") as e:
        card(12)
    assert "\n" not in str(e.value)
    assert card(12, lora_rank=16)[1] <= 12


def test_vllm_keeps_room_for_the_token_counts_of_the_sequences_that_run_at_once():
    """In vLLM's sampler: per running sequence and token 32 bits, and 1 bit for the prompt."""
    shape = shape_of(SIZES["1.5B"])
    for flags, running in (({}, 513), (dict(prompts=1024), 1024), (dict(prompts=8, eval_size=16), 65)):
        cfg = nr.Config(dtype="bfloat16", **flags)
        counts = memory.vllm_weights(cfg, shape) - 2 * shape.parameters
        assert memory.most_sequences(cfg) == running and counts == running * shape.vocab * (4 + 1 / 8)


def test_planned_flops_are_those_a_counter_sees(tokenizer):
    from torch.utils.flop_counter import FlopCounterMode
    cfg, rollouts = make_config(), fixed_rollouts(tokenizer)
    model = nr.TokenLogps(runtime.model.load_model(cfg))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(nr.collate(rollouts))
    flops = ModelShape.of(cfg.model).forward_flops(rollouts)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_an_lm_head_that_is_more_than_a_matrix_is_refused(tmp_path):
    from transformers import PhiConfig
    PhiConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LM head with a bias"):
        ModelShape.of(str(tmp_path))


def test_a_share_for_vllm_without_room_for_its_cache_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="--vllm_memory 0.1 has no room for a KV cache: use at least 0.2"):
        card(24, vllm_memory=0.1)
    least = 0.23
    assert card(24, vllm_memory=least)[0].vllm_memory == least


def test_a_checkpoint_is_as_large_as_its_tensors():
    model = make(dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                      num_key_value_heads=1, vocab_size=100))
    shape = shape_of(model.config.to_dict())
    weights = sum(p.nbytes for p in model.to(torch.bfloat16).parameters())
    state = 3 * sum(p.float().nbytes for p in model.parameters())  # fp32 weights and AdamW's two moments
    cfg = nr.Config(dtype="bfloat16")
    assert memory.checkpoint_bytes(cfg, shape) == weights + state
    assert memory.checkpoint_bytes(dataclasses.replace(cfg, ref_reset_every=5), shape) == 2 * weights + state
    runtime.model.add_adapters(model, 4)
    state = 3 * sum(p.float().nbytes for p in model.parameters() if p.requires_grad)
    cfg = dataclasses.replace(cfg, lora_rank=4)
    assert memory.checkpoint_bytes(cfg, shape) == weights + state


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
LARGE = dict(pack_tokens=8192, checkpointing="off", offload="none", vllm_memory=0.5, dtype="bfloat16")


@pytest.mark.parametrize("gpu, changes, flags", [
    (True, {}, "--pack_tokens 4096 --checkpointing on --offload optimizer --lora_rank 32 --vllm_memory 0.40"),
    (False, {}, "--pack_tokens 4096 --checkpointing on --lora_rank 32"),
    (True, dict(offload="optimizer", checkpointing="on", lora_rank=8),
     "--pack_tokens 4096 --vllm_memory 0.40"),
    (False, dict(pack_tokens=5000), "--pack_tokens 4024 --checkpointing on --lora_rank 32"),
    (False, dict(pack_tokens=4024, checkpointing="on"), "--max_tokens 1500 --lora_rank 32"),
    (False, dict(zero_stage=1, lora_rank=8, checkpointing="on"), "--pack_tokens 4096 --zero_stage 2"),
])
def test_advice_on_a_full_device_names_the_flags_that_help_this_run_and_no_others(monkeypatch, gpu, changes,
                                                                                  flags):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    text = memory.advice(FULL, nr.Config(**LARGE | changes))
    assert f"Tried to allocate 2.00 GiB. To use less memory: {flags}; or plan" in text
    assert "\n" not in text


def test_each_flag_of_the_advice_makes_the_plan_smaller():
    cfg = nr.Config(**LARGE | dict(zero_stage=1))
    shape = shape_of(SIZES["1.5B"])

    def total(cfg):
        return sum(map(sum, memory.step_bytes(cfg, shape, gpu=True).values()))

    for flag in memory.smaller(cfg, gpu=True):
        name, value = flag.removeprefix("--").split()
        value = type(getattr(cfg, name))(value)
        assert total(dataclasses.replace(cfg, **{name: value})) < 0.99 * total(cfg), flag


@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_a_library_without_memory_is_out_of_memory_too(library):
    assert memory.is_out_of_memory(RuntimeError(f"CUDA error: {library}_STATUS_ALLOC_FAILED when calling"))
    assert not memory.is_out_of_memory(RuntimeError(f"CUDA error: {library}_STATUS_EXECUTION_FAILED"))


def test_a_full_host_memory_is_out_of_memory_too():
    with pytest.raises(RuntimeError) as e:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory.is_out_of_memory(e.value)
    assert not memory.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_out_of_memory_ends_a_run_in_one_line_with_the_flags_to_change(monkeypatch, tmp_path):
    def full(cfg):
        raise FULL
    monkeypatch.setattr(nr, "make_llm", full)
    with pytest.raises(SystemExit) as e:
        nr.main(["--steps", "1", "--pack_tokens", "4096", "--checkpointing", "off", "--out", str(tmp_path)])
    assert "To use less memory: --pack_tokens 2048 --checkpointing on --lora_rank 32;" in str(e.value)
    assert "\n" not in str(e.value)
