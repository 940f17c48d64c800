"""Everything that can be refused before weights are loaded: flags, machine, model name, data. One clear line each."""
import dataclasses
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch

import data
import rewards
from tools.ranks import rank, world

HERE = Path(__file__).resolve().parents[1]
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
                 "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}


def find_model(name):
    """A folder (here or beside nano_rlvr.py) wins; a bare name such as Qwen2.5-Math-1.5B becomes Qwen/Qwen2.5-Math-1.5B."""
    for folder in (Path(name), HERE / name):
        if folder.is_dir():
            return str(folder)
    org = next((org for family, org in ORGANISATIONS.items() if name.lower().startswith(family)), None)
    return f"{org}/{name}" if org and "/" not in name else name


def check(cfg):
    """Fills what depends on the machine; raises ValueError for what cannot work, before anything is loaded."""
    def need(ok, message):
        if not ok:
            raise ValueError(message)

    for name in ("prompts", "samples", "max_prompt", "max_tokens", "epochs", "minibatches", "eval_every"):
        need(getattr(cfg, name) >= 1, f"--{name} must be at least 1")
    for name in ("steps", "warmup", "eval_size", "eval_n", "keep_rollouts", "kl_coef", "lr", "lr_end", "weight_decay", "clip_low",
                 "clip_high", "top_k", "resample", "ref_reset_every",
                 "max_grad_norm", "save_every", "lora_rank", "memory_gb", "pack_tokens"):
        need(getattr(cfg, name) >= 0, f"--{name} must not be negative")
    need(0 < cfg.temperature <= 2, "--temperature must be above 0 and at most 2, vLLM's limit (evaluation is greedy by itself)")
    need(cfg.samples > 1 or (cfg.baseline, cfg.scale) == ("none", "none"),
         "--samples 1: a group of one has no mean or deviation to compare with; take at least 2, or --baseline none --scale none")
    need(cfg.prompts % world() == 0, f"--prompts {cfg.prompts} cannot be shared evenly by {world()} ranks")
    need(cfg.prompts // world() % cfg.minibatches == 0,
         f"--minibatches {cfg.minibatches} must divide the {cfg.prompts // world()} prompts of a rank")
    need(cfg.task in data.TASKS, f"--task {cfg.task}: choose one of {', '.join(data.TASKS)} (any file or hub set goes to --data)")
    need(0 <= cfg.vllm_memory < 1, "--vllm_memory is a share between 0 and 1 (0 = what the memory plan leaves)")
    need(not cfg.lora_rank or cfg.zero_stage < 3, "--lora_rank needs --zero_stage 1 or 2: the adapters are merged rank by rank")
    need(not (cfg.lora_rank and cfg.ref_reset_every), "--ref_reset_every needs a reference of its own; with --lora_rank it is the model without adapters")
    need((cfg.top_p, cfg.top_k) == (1.0, 0) or (cfg.correction, cfg.temperature) == ("none", 1.0),
         "--top_p and --top_k sample from a cut distribution, whose log-probs the trainer cannot compute: the importance correction "
         "would be wrong; take --correction none --temperature 1 with them")
    need(0 < cfg.top_p <= 1, "--top_p is a share above 0 and at most 1")
    need(cfg.delta == 0 or cfg.delta > 1 + cfg.clip_high, f"--delta must be above 1 + clip_high = {1 + cfg.clip_high:g}, or 0 for off")
    need(cfg.eps > 0, "--eps must be above 0: a flat group has deviation 0")
    need(0 <= cfg.beta2 < 1, "--beta2 must be at least 0 and below 1")
    need(cfg.correction_cap >= 1, "--correction_cap must be at least 1")
    need(0 <= cfg.overlong_buffer < 1, "--overlong_buffer is a share of max_tokens between 0 and 1")
    need(not cfg.resample or cfg.drop_flat_groups, "--resample draws in place of dropped groups: it needs --drop_flat_groups")
    spec = cfg.rewards or data.TASKS[cfg.task]["rewards"]
    if cfg.overlong_buffer and "overlong" not in [name for name, *_ in rewards.parse_rewards(spec)]:
        spec += ",overlong:1"
    rewards.parse_rewards(spec)
    cuda = torch.cuda.is_available()
    if not cuda or cfg.offload == "optimizer":
        need_compiler()
    dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32"
    name = cfg.name or f"{Path(cfg.model).name}-{cfg.task}-{cfg.algo}-{time.strftime('%Y%m%d-%H%M%S')}"
    need(not (Path(cfg.out) / name / "metrics.jsonl").exists(), f"{Path(cfg.out) / name} holds a run already; choose another --name")
    bound = cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.05)
    return dataclasses.replace(cfg, dtype=dtype, name=name, mismatch_bound=bound, rewards=spec)


def need_compiler():
    """DeepSpeed compiles its shared-memory and CPU-Adam operators at first use. Raises ValueError where it could not."""
    from torch.utils.cpp_extension import get_default_build_root
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # the ninja that pip installed is there
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if not shutil.which(tool):
            raise ValueError(f"DeepSpeed needs '{tool}' to compile its CPU operators (apt-get install g++ ninja-build)")
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in built.rglob("lock") if rank() == 0 else ():  # a run killed while it compiled has left it
        print(f"note: DeepSpeed will wait for {lock} to go: delete it, unless another run is just starting", file=sys.stderr)


def prepare(cfg):
    """Tokenizer, training and held-out examples with their prompt ids: what can be wrong with the input shows here, before
    any weights are loaded. Raises ValueError or OSError with one line."""
    from transformers import AutoConfig, AutoTokenizer
    try:
        config = AutoConfig.from_pretrained(cfg.model).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    except (OSError, ValueError) as e:
        raise ValueError(f"--model {cfg.model}: no folder here, and the hub does not give it ({str(e).splitlines()[0]})") from e
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):  # TokenLogps goes from the head straight to the softmax
            raise ValueError(f"--model {cfg.model} changes its logits by {name}, which is not supported")
    limit = getattr(config, "max_position_embeddings", math.inf)
    if cfg.max_prompt + cfg.max_tokens > limit:
        raise ValueError(f"--max_prompt {cfg.max_prompt} + --max_tokens {cfg.max_tokens} is beyond the {limit} positions of {cfg.model}")
    if not cfg.data and data.TASKS[cfg.task].get("test_only"):
        raise ValueError(f"--task {cfg.task} has no training examples; evaluate on it: --task math --eval_data {cfg.task}")
    keys = dict(question_key=cfg.question_key, answer_key=cfg.answer_key)
    train_set = data.load(cfg.data or cfg.task, "train", seed=cfg.seed, **keys if cfg.data else {})
    if cfg.data and not cfg.eval_data:
        held = min(cfg.eval_size or len(train_set), max(1, len(train_set) // 10))
        order = data.epoch_order(len(train_set), cfg.seed, "held out")
        train_set, eval_set = [train_set[i] for i in sorted(order[held:])], [train_set[i] for i in sorted(order[:held])]
    else:
        source = cfg.eval_data or cfg.task
        eval_set = data.load(source, "test", size=cfg.eval_size, **{} if source in data.TASKS else keys)
    kept = []
    for flag, examples in (("training", train_set), ("evaluation", eval_set)):
        for e in examples:
            e["prompt_ids"] = data.encode(e, tokenizer, cfg.template)
        kept.append([e for e in examples if len(e["prompt_ids"]) <= cfg.max_prompt])
        if len(kept[-1]) < world():
            raise ValueError(f"{len(kept[-1])} {flag} prompts fit into --max_prompt {cfg.max_prompt} tokens: every rank needs one")
        if rank() == 0 and len(kept[-1]) < len(examples):
            print(f"{len(examples) - len(kept[-1])} of {len(examples)} {flag} prompts left out: longer than --max_prompt {cfg.max_prompt}")
    return tokenizer, *kept
