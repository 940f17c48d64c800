"""Checks of flags, machine and model before weights are loaded. Each raises ValueError with one line."""
import dataclasses
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from runtime import dist
from runtime.flops import empty_model

REPOSITORY = Path(__file__).resolve().parents[1]
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
                 "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}

# flags -> (test of the value, requirement in words); NaN fails every test
RANGES = {
    "prompts samples max_prompt max_tokens epochs minibatches eval_every keep correction_cap":
        (lambda x: x >= 1, "must be at least 1"),
    "steps warmup lr lr_end weight_decay max_grad_norm kl_coef clip_low clip_high ref_reset_every top_k "
    "resample eval_size eval_n save_every keep_rollouts lora_rank memory_gb pack_tokens":
        (lambda x: x >= 0, "must not be negative"),
    "temperature":
        (lambda x: 0 < x <= 2, "must be above 0 and at most 2, vLLM's limit (evaluation is always greedy)"),
    "top_p":
        (lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    "beta2":
        (lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
    "overlong_buffer":
        (lambda x: 0 <= x < 1, "must be at least 0 and below 1: it is a fraction of --max_tokens"),
    "vllm_memory":
        (lambda x: 0 <= x < 1, "must be at least 0 and below 1 (0 = what the memory plan leaves)"),
    "timeout":
        (lambda x: x > 0, "must be above 0"),
    "eps":
        (lambda x: x > 0, "must be above 0: the standard deviation of a flat group is 0"),
}


def find_model(name):
    """--model -> folder or hub id. A folder (in the working directory or beside nano_rlvr.py) comes first; a
    bare name of a known family gets its organisation: Qwen2.5-Math-1.5B -> Qwen/Qwen2.5-Math-1.5B."""
    for folder in (Path(name), REPOSITORY / name):
        if folder.is_dir():
            return str(folder)
    org = next((org for family, org in ORGANISATIONS.items() if name.lower().startswith(family)), None)
    return f"{org}/{name}" if org and "/" not in name else name


def same_model(a, b):
    """Whether two values of --model mean the same folder or hub id."""
    return os.path.realpath(find_model(a)) == os.path.realpath(find_model(b))


def check(cfg, tasks, parse_rewards):
    """Checks a Config, resolves its model, and fills in dtype, rewards and mismatch_bound if empty.

    tasks: data.TASKS. parse_rewards: called with the reward spec, raises ValueError if it is invalid.
    Returns the completed Config; raises ValueError for what cannot work.
    """
    for name, hint in get_type_hints(type(cfg)).items():
        value, choices = getattr(cfg, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise ValueError(f"--{name} {value}: choose one of {', '.join(map(str, choices))}")
    for names, (allowed, requirement) in RANGES.items():
        for name in names.split():
            if not allowed(getattr(cfg, name)):
                raise ValueError(f"--{name} {requirement}")

    ranks, cut_sampling = dist.world_size(), (cfg.top_p, cfg.top_k) != (1.0, 0)
    for invalid, message in (
        (cfg.samples == 1 and (cfg.baseline, cfg.scale) != ("none", "none"),
         "--samples 1: a group of one has no mean or deviation to compare with; "
         "use at least 2, or --baseline none --scale none"),
        (cfg.prompts % ranks, f"--prompts {cfg.prompts} cannot be shared evenly by {ranks} ranks"),
        (cfg.prompts // ranks % cfg.minibatches,
         f"--minibatches {cfg.minibatches} must divide the {cfg.prompts // ranks} prompts of each rank"),
        (cfg.task not in tasks,
         f"--task {cfg.task}: choose one of {', '.join(tasks)} (use --data for a file or a hub dataset)"),
        (cfg.lora_rank and cfg.zero_stage == 3,
         "--lora_rank needs --zero_stage 1 or 2: each rank merges the adapters on its own"),
        (cfg.lora_rank and cfg.ref_reset_every,
         "--ref_reset_every needs a separate reference; with --lora_rank it is the model without adapters"),
        (cut_sampling and (cfg.correction, cfg.temperature) != ("none", 1.0),
         "--top_p and --top_k sample from a truncated distribution, whose log-probs the trainer cannot "
         "compute: the importance correction would be wrong; "
         "use --correction none --temperature 1 with them"),
        (cfg.delta != 0 and not cfg.delta > 1 + cfg.clip_high,
         f"--delta must be above 1 + clip_high = {1 + cfg.clip_high:g}, or 0 for off"),
        (cfg.resample and not cfg.drop_flat_groups,
         "--resample draws new prompts for dropped groups: it needs --drop_flat_groups"),
    ):
        if invalid:
            raise ValueError(message)

    spec = cfg.rewards or tasks[cfg.task]["rewards"]
    if cfg.overlong_buffer and "overlong" not in [name for name, *_ in parse_rewards(spec)]:
        spec += ",overlong:1"
    parse_rewards(spec)
    cuda = torch.cuda.is_available()
    if not cuda or cfg.offload == "optimizer":
        need_compiler()
    dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32"
    bound = cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.15)
    return dataclasses.replace(cfg, model=find_model(cfg.model), dtype=dtype, mismatch_bound=bound,
                               rewards=spec)


def need_compiler():
    """Raises ValueError if DeepSpeed could not compile its CPU operators at their first use."""
    from torch.utils.cpp_extension import get_default_build_root
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # pip installs ninja there
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if not shutil.which(tool):
            raise ValueError(f"DeepSpeed needs '{tool}' to compile its CPU operators "
                             "(apt-get install g++ ninja-build)")
    build_root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in build_root.rglob("lock"):  # left by a run that was killed while it compiled
        dist.print_once(f"note: DeepSpeed will wait for {lock} to be removed: delete it, "
                        "unless another run is just starting", file=sys.stderr)


def load_tokenizer(cfg):
    """The model's tokenizer; ValueError if the model is missing, unsupported or has too few positions."""
    from transformers import AutoTokenizer
    try:
        model = empty_model(cfg.model)
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    except (OSError, ValueError) as e:
        reason = str(e).splitlines()[0]
        raise ValueError(f"--model {cfg.model}: no folder and not loadable from the hub ({reason})") from e
    config = model.config.get_text_config()
    check_layers(cfg, config, model)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):  # TokenLogps does not do that
            raise ValueError(f"--model {cfg.model} changes its logits by {name}, which is not supported")
    limit = getattr(config, "max_position_embeddings", math.inf)
    if cfg.max_prompt + cfg.max_tokens > limit:
        raise ValueError(f"--max_prompt {cfg.max_prompt} + --max_tokens {cfg.max_tokens} is more than "
                         f"the {limit} positions of {cfg.model}")
    return tokenizer


def check_layers(cfg, config, model):
    """Raises ValueError unless runtime/attention.py is all that connects the tokens of a row.

    transformers states it for each model: the types of its layers, whether it keeps a state, and whether it
    calls a registered attention function. rehearsal.check_packing measures it later. See docs/models.md.
    """
    # without this list all layers have the window, if there is one
    layer_types = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    others = ", ".join(sorted(layer_types - {"full_attention", "sliding_attention"}))
    if others or model._is_stateful:
        raise ValueError(f"--model {cfg.model}: the {others or 'recurrent'} layers of {config.model_type} "
                         "would mix the sequences that share a row: they are not supported")
    if not model.is_backend_compatible():
        raise ValueError(f"--model {cfg.model}: {config.model_type} computes attention in its own code, "
                         "which would mix the sequences that share a row: it is not supported")
    window = getattr(config, "sliding_window", None) if "sliding_attention" in layer_types else None
    if window and cfg.max_prompt + cfg.max_tokens > window:
        raise ValueError(f"--max_prompt {cfg.max_prompt} + --max_tokens {cfg.max_tokens} is more than the "
                         f"sliding window of {cfg.model}, {window} tokens: that is not supported")
