"""Each family of models equals the library, one sequence at a time, or is refused in one line."""
import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
import runtime.flags
import runtime.guard
import runtime.model
from conftest import EXACT, ROOT, close, fixed_rollouts, float64, make_config, naive_logps, within
from runtime.batch import pack
from runtime.dist import RunError
from runtime.shape import ModelShape

SIZES = dict(
    vocab_size=263, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    initializer_range=0.1,
    bos_token_id=0, eos_token_id=0, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
DELTA_NET = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
                 linear_value_head_dim=16, **EXPERTS, shared_expert_intermediate_size=32)
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=32, qk_nope_head_dim=32,
              v_head_dim=32)
MAMBA = dict(mamba_d_head=16, mamba_n_heads=8, mamba_n_groups=1, mamba_d_ssm=128, mamba_d_state=16,
             mamba_expand=2, num_heads=8, n_groups=1, expand=2, state_size=16)
BOTH = ["sliding_attention", "full_attention"] * 2
LAST = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

# name -> (model type of transformers, changes to SIZES). A window of 160 holds all sequences.
SUPPORTED = {
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS),
    "Llama": ("llama", {}),
    "Mistral": ("mistral", dict(sliding_window=160)),
    "Mixtral": ("mixtral", EXPERTS | dict(sliding_window=None)),
    "Gemma 3": ("gemma3_text", dict(sliding_window=160, layer_types=BOTH)),
    "OLMo-2": ("olmo2", {}),
    "OLMo-3": ("olmo3", dict(sliding_window=160, layer_types=BOTH)),
    "Phi-3": ("phi3", {}),
    "SmolLM3": ("smollm3", {}),
    "Granite": ("granite", dict(embedding_multiplier=3.0, residual_multiplier=0.5,
                                logits_scaling=1.0)),
    "GPT-2": ("gpt2", {}),
}
# What carries a state along the row, or has its own attention, and words of its refusal.
MIXING = {
    "LFM2": ("lfm2", dict(layer_types=["conv", "conv", "full_attention", "conv"]), "its conv"),
    "Falcon-H1": ("falcon_h1", MAMBA, "hybrid layers"),
    "Mamba": ("mamba", MAMBA, "linear_attention layers"),
    "Mamba-2": ("mamba2", MAMBA | dict(head_dim=16), "linear_attention layers"),
    "Bamba": ("bamba", MAMBA, "linear_attention layers"),
    "Qwen3.5": ("qwen3_5_text", DELTA_NET | dict(layer_types=LAST), "linear_attention layers"),
    "Qwen3-Next": ("qwen3_next", DELTA_NET | dict(layer_types=LAST), "linear_attention layers"),
    "RWKV": ("rwkv", {}, "recurrent layers"),
    "RecurrentGemma": ("recurrent_gemma", dict(lru_width=64), "recurrent layers"),
    "BLOOM": ("bloom", {}, "in its own code"),
}
OTHER_REASONS = {
    "Mistral, short window": ("mistral", dict(sliding_window=159), "sliding window are 159 tokens"),
    "Gemma 3, short window": (
        "gemma3_text", dict(sliding_window=128, layer_types=BOTH), "sliding window are 128 tokens"),
    "Llama 4": ("llama4_text", EXPERTS | dict(intermediate_size_mlp=96), "chunked_attention"),
    "Granite, scaled logits": ("granite", dict(logits_scaling=8.0), "logits_scaling"),
    # on a CPU, vLLM's loader ended with KeyError: 'layers.1.mlp.gate.e_score_correction_bias'
    "DeepSeek-V3": ("deepseek_v3", LATENT | dict(
        num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=32), "compressed"),
    "DeepSeek-V2": ("deepseek_v2", LATENT, "compressed"),
    "MiMo-V2": ("mimo_v2_flash", dict(v_head_dim=16, layer_types=["full_attention"] * 4),
                "different sizes"),
    "Gemma 2": ("gemma2", dict(sliding_window=160, layer_types=BOTH), "softcapping"),
}


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """config_of(family) -> Config of a folder with a random model of it and our tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM
    folders = {}

    def config_of(family, **changes):
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp("model")
            model_type, differences, *_ = (SUPPORTED | MIXING | OTHER_REASONS)[family]
            torch.manual_seed(0)
            config = AutoConfig.for_model(model_type, **SIZES | differences)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(ROOT / "models/tiny" / file, folder)
        cfg = make_config(model=str(folders[family]))  # max_prompt 64, max_tokens 96
        return dataclasses.replace(cfg, **changes)
    return config_of


@pytest.mark.numeric
@pytest.mark.parametrize("family", SUPPORTED)
def test_packed_log_probs_and_gradients_equal_the_library_one_sequence_at_a_time(
        group, tokenizer, config_of, family):
    from transformers import AutoModelForCausalLM
    with float64():
        cfg = config_of(family)
        assert runtime.flags.load_tokenizer(cfg) and ModelShape.of(cfg.model).layers == 4
        packed = runtime.model.load_model(cfg).train()
        naive = AutoModelForCausalLM.from_pretrained(
            cfg.model, dtype=torch.float64, attn_implementation="eager")
        for model in (packed, naive):
            model.set_experts_implementation("eager")  # the grouped kernel has no float64
        rollouts = fixed_rollouts(tokenizer, groups=3)
        wanted = {id(r): naive_logps(naive, r)[0] for r in rollouts}
        sum(wanted[id(r)] @ torch.tensor(r.advantages) for r in rollouts).backward()
        (members,) = pack(rollouts, 10**6)
        batch = nr.collate(members)
        assert batch.input_ids.numel() < sum(map(len, rollouts))  # prompts are shared
        for checkpointing in (False, True):
            if checkpointing:
                packed.gradient_checkpointing_enable({"use_reentrant": False})
            packed.zero_grad()
            logp, _ = nr.TokenLogps(packed)(batch)
            close(logp, torch.cat([wanted[id(r)] for r in members]))
            (logp * batch.advantage).sum().backward()
            for (name, p), q in zip(packed.named_parameters(), naive.parameters(), strict=True):
                if q.grad is None:  # an expert without tokens
                    assert p.grad is None or not p.grad.any(), name
                else:
                    within((p.grad - q.grad).abs().max(), EXACT * max(1, q.grad.abs().max()))


@pytest.mark.parametrize("family", MIXING | OTHER_REASONS)
def test_a_model_that_would_get_wrong_numbers_is_refused_in_one_line_before_weights_are_read(
        config_of, monkeypatch, family):
    monkeypatch.setattr(runtime.model, "load_model", None)
    reason = (MIXING | OTHER_REASONS)[family][2]
    with pytest.raises(ValueError, match=reason) as error:
        runtime.flags.load_tokenizer(config_of(family))
    assert "\n" not in str(error.value) and "support" in str(error.value)


def test_heads_that_vllm_cannot_divide_are_refused_and_few_key_heads_are_copied(config_of):
    for tp in (1, 2, 4):
        runtime.flags.load_tokenizer(config_of("Qwen2", tp=tp))  # 4 heads, 2 key heads
    for tp in (3, 8):
        with pytest.raises(ValueError, match=f"--tp {tp} does not divide its 4 attention heads"):
            runtime.flags.load_tokenizer(config_of("Qwen2", tp=tp))


def check_packing(cfg):
    """The check before step 0, on a model that was not refused for its config."""
    runtime.guard.check_packing(nr.TokenLogps(runtime.model.load_model(cfg).train()), cfg)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*SUPPORTED, *MIXING])
def test_the_check_before_step_0_finds_every_model_that_mixes_sequences_and_no_other(
        group, config_of, family, dtype):
    if dtype == "bfloat16" and family in ("Mamba", "Mamba-2"):
        pytest.skip("transformers cannot run it in bfloat16 on a CPU")
    if family in SUPPORTED:
        check_packing(config_of(family, dtype=dtype))
    else:
        with pytest.raises(RunError, match="mean .difference. .*: this model is not supported"):
            check_packing(config_of(family, dtype=dtype))


def test_the_check_before_step_0_finds_wrong_positions_which_mix_no_sequences(
        group, config_of, monkeypatch):
    def collate(rollouts, device):
        batch = nr.collate(rollouts, device)
        batch.position_ids = torch.arange(batch.input_ids.numel())[None]  # (1, T) no new start
        return batch

    monkeypatch.setattr(runtime.guard, "collate", collate)
    with pytest.raises(RunError, match="packed and single sequences"):
        check_packing(config_of("Qwen2"))


def test_the_user_gets_one_line_if_only_the_check_before_step_0_finds_it(
        group, config_of, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime.flags, "check_architecture", lambda *_: None)
    monkeypatch.setattr(nr, "make_policy", lambda cfg: nr.TokenLogps(runtime.model.load_model(cfg)))
    flags = "--task arithmetic --template chat --max_tokens 96 --prompts 4 --kl_coef 0"
    with pytest.raises(SystemExit) as error:
        nr.main(["--model", config_of("LFM2").model, "--out", str(tmp_path), "--max_prompt", "400",
                 *flags.split()], sampler=lambda cfg: SimpleNamespace(sleep=lambda: None))
    line = str(error.value)
    assert line.startswith("nano_rlvr: --model ") and "\n" not in line
    assert "packed and single sequences give different log-probs (mean |difference| " in line
