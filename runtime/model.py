"""What the trainer starts with: tokenizer, model, layout, torch.compile, LoRA's adapters."""
import contextlib
import dataclasses
import os
from pathlib import Path

import torch

from runtime import ranks
from runtime.batch import packed_attention
from runtime.memory import ModelShape, empty_model, layer_kinds
from runtime.messages import first_line, hub_answers

CPU_HEADS = 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512  # sizes that vLLM has kernels for
CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2; RecurrentGemma


@contextlib.contextmanager
def loading(part, cfg, hint):
    """Any exception in this block becomes a ValueError with one line about a part of the model."""
    is_folder = Path(cfg.model).is_dir()
    if not is_folder:
        hub_answers()  # decides whether the libraries try to reach it
    try:
        yield
    except Exception as e:  # a config.json is free text, and a model may have its own code
        why = first_line(e, "" if is_folder else cfg.model)
        raise ValueError(f"--model {cfg.model}: its {part} cannot be loaded ({why}); {hint}") from e


def load_tokenizer(cfg):
    """The tokenizer. Raises ValueError if the model is missing, damaged or not supported."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    logging.set_verbosity_error()  # what is wrong is said here, in one line
    logging.disable_progress_bar()
    enable_progress_bars()  # of a download
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # the hub would convert a .bin
    code = dict(trust_remote_code=cfg.trust_remote_code)
    with loading("config.json", cfg, "it needs attention, or --trust_remote_code for its own code"):
        model = empty_model(cfg.model, **code)
        ModelShape.of(cfg.model)
    check_architecture(cfg, model)
    with loading("tokenizer", cfg, "copy the files of the model it was made from"):
        tokenizer = AutoTokenizer.from_pretrained(cfg.model, **code)
        if not tokenizer("1+1", add_special_tokens=False)["input_ids"]:
            raise ValueError("it has no tokens")  # made by transformers, which found no file
    with loading("weights", cfg, "only safetensors files are read, as a .bin can run code"):
        _, info = AutoModelForCausalLM.from_pretrained(  # on the meta device: reads headers only
            cfg.model, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True,
            use_safetensors=True, **code)
    # transformers would fill a missing tensor with random numbers, different at each load
    faults = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if faults:
        raise ValueError(f"--model {cfg.model}: its weights do not fit its config.json: "
                         f"{len(faults)} tensors are missing, unknown or of another shape, "
                         f"one is {faults[0]}")
    return tokenizer


def check_architecture(cfg, model):
    """Raises ValueError for what the rehearsal does not notice: see guard.rehearse."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    faults = []
    if type(head) is not torch.nn.Linear or head.bias is not None:
        faults.append("an LM head that is no plain matrix")
    size = ModelShape.of(cfg.model).head_size
    if size and not torch.cuda.is_available() and size not in CPU_HEADS:
        faults.append(f"attention heads of size {size}, for which vLLM has no kernel on a CPU")
    if faults:
        raise ValueError(f"--model {cfg.model} ({config.model_type}) is not supported: it has "
                         f"{' and '.join(faults)}")


def logit_factor_and_cap(config):
    """What a model does to its logits: logits = factor * hidden @ head.T, and if cap is not None,
    cap * tanh(logits / cap). The rehearsal compares the result with the library's logits."""
    config = config.get_text_config()
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        factor *= getattr(config, name, None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    caps = [getattr(config, name, None) for name in CAPS]
    return factor, next(filter(None, caps), None)


def why_not_packed(cfg):
    """The reason why a model cannot be given sequences end to end in one row; "" if it may.

    A pack needs attention that can be told where sequences end. What these names do not tell, the
    rehearsal finds: see guard.check_packing."""
    model = empty_model(cfg.model, trust_remote_code=cfg.trust_remote_code)
    config = model.config.get_text_config()
    if not ModelShape.of(cfg.model).attention:
        return "it has no attention"
    kinds = layer_kinds(config)
    others = kinds - {"full_attention", "sliding_attention", "attention"}
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    window = getattr(config, "sliding_window", None)
    is_used = "sliding_attention" in kinds or getattr(config, "use_sliding_window", True)
    if window and is_used and window < cfg.max_prompt + cfg.max_tokens:
        return f"its attention has a window of {window} tokens"
    for name in ("attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, name, None):
            return f"its attention has {name}"
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        return "it has convolutions along the sequence"
    if not model._supports_attention_backend:
        return "its attention cannot be replaced"
    return ""


def choose_layout(cfg):
    """Returns cfg with --layout auto decided: packed where the model allows it, or rows, with a
    note."""
    if cfg.layout != "auto":
        return cfg
    reason = why_not_packed(cfg)
    if reason:
        ranks.note(f"--layout rows, because {reason}: a prompt is computed once per completion, "
                   "and rows are padded to their longest sequence")
    return dataclasses.replace(cfg, layout="rows" if reason else "packed")


def load_model(cfg):
    """The causal language model in cfg.dtype on the CPU, with packed attention or, in the layout
    `rows`, with the library's own; with lora_rank its weights are frozen and adapters are added."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    AttentionInterface.register("packed", packed_attention)
    attention = "packed"
    if cfg.layout == "rows":
        config = empty_model(cfg.model).config.get_text_config()
        # the library's default would ignore the soft cap of Gemma 2
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model, dtype=getattr(torch, cfg.dtype), attn_implementation=attention,
        use_safetensors=True, trust_remote_code=cfg.trust_remote_code)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # GPT-2: log-probs must not be random
            module.p = 0.0
    if cfg.lora_rank:
        add_adapters(model, cfg.lora_rank)
    if cfg.gradient_checkpointing == "on":  # of activations, while the model trains
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if cfg.compile == "on":
        compile_layers(model)
    return model


# ---- torch.compile: what is computed element by element takes fewer passes over memory

def compile_layers(model, **options):
    """Compiles each decoder layer of a transformers model at its first call, and the LM head's
    functions: norms, rotary embeddings, SiLU * up become one or two passes. Matrix products and
    attention stay PyTorch's own. Equal layers share what is compiled, for any lengths. options:
    of torch.compile, for the layers."""
    from torch._inductor import config
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer
    config.compile_threads = ranks.CORES  # vLLM's import has set 1
    # the layers are compiled up to the attention, and from there on
    AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # a decoder layer
            module.compile(dynamic=True, **options)
    model.is_compiled = True
    ranks.print_each_once(
        "layers and LM head are compiled at their first call, for a minute or two; with "
        "--compile off a run starts at once, and a step takes longer")


# ---- low-rank adapters (LoRA, arXiv:2106.09685) with peft: r * (a + b) numbers per matrix (a, b)

def add_adapters(model, rank):
    """Freezes the model and adds LoRA adapters of rank `rank` to all linear layers but the LM head.
    Their product is scaled by 2 (alpha = 2 * rank) and is 0 at the start."""
    from peft import LoraConfig, inject_adapter_in_model
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"),
                            model.requires_grad_(False))
