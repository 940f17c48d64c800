"""The command line, and the checks of flags, machine and model before weights are loaded.

Each check raises ValueError with one line.
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Literal

import torch

import data
import rewards
from runtime import dist, memory
from runtime.folder import check_resumed
from runtime.shape import empty_model, first_line, hub_answers


@dataclasses.dataclass
class RunFlags:
    """Flags of any trainer; Config in nano_rlvr.py adds those of GRPO. --help has the comments."""

    # model and data
    model: str = "models/tiny"  # folder or hub id, whose organisation may be left out
    trust_remote_code: bool = False  # run Python code that comes with the model
    algo: str = "grpo"  # a row of ALGOS; any other flag overrides a value of the row
    task: str = "gsm8k"  # arithmetic, countdown, gsm8k, math, math500, aime24, amc23
    data: str = ""  # train on this file (jsonl, json, csv, parquet), my_file.py:make or hub set
    eval_data: str = ""  # evaluate on these, as a,b; without it a tenth of --data is held out
    question_key: str = ""  # column of the question ("" = question, problem or prompt)
    answer_key: str = ""  # column of the answer ("" = answer, solution or ground_truth), or none
    template: str = "qwen_math"  # prompt: chat, none, r1, qwen_math or a file with {question}
    rewards: str = ""  # name:weight,... or my_file.py:my_reward; the first counts in evaluations
    reward_timeout: float = 5.0  # seconds a reward function has per completion, then no verdict
    allow_unsafe_code: bool = False  # --rewards code: run the model's programs without isolation
    # engines and memory
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # bfloat16 has fp32 master weights
    lora_rank: int = 0  # train adapters of this rank on all linear layers; 0 = train all weights
    memory_gb: float = 0.0  # GiB of the device for this run, 0 = all; the next four must fit it
    pack_tokens: int = 0  # most tokens per forward pass (a longer sequence goes alone), 0 = auto
    checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations to save memory
    offload: Literal["auto", "none", "optimizer"] = "auto"  # optimizer, fp32 weights in host memory
    vllm_memory: float = 0.0  # share of the GPU for vLLM while it generates; 0 = what is left
    tp: int = 1  # ranks per vLLM engine (tensor parallel), which generate their prompts together
    zero_stage: Literal[1, 2, 3] = 2  # ZeRO shards: 1 optimizer, 2 + gradients, 3 + weights
    timeout: float = 10.0  # minutes after which a rank that does not answer ends the run
    mismatch_bound: float = 0.0  # stop above this mean |trainer - vLLM log-prob|; 0 = by dtype
    # evaluation and files
    eval_every: int = 20  # steps between evaluations; one more after the last step
    eval_size: int = 512  # held-out examples per set, 0 = all
    eval_n: int = 0  # also draw this many samples per example: mean@n, pass@k, maj@n, best@n
    name: str = ""  # name of the run ("" = model-task-algo-time); its files are in <out>/<name>/
    out: str = "runs"  # folder of the runs
    save_every: int = 20  # steps between checkpoints; 0 = one when the run ends or is stopped
    keep: int = 2  # newest checkpoints to keep; the one with the best accuracy is also kept
    resume: str = ""  # continue this run (folder); without a value the run --name, if there is one
    resume_force: bool = False  # ... also with flags that change its results
    keep_rollouts: int = 64  # rollouts per step in rollouts.jsonl, in whole groups, of rank 0
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    seed: int = 0  # seed of data order, sampling and everything else


# (flags, smallest, largest value): one row for each numeric flag. inf and nan are in no range.
RANGES = (
    ("steps warmup save_every keep_rollouts pack_tokens kl_coef clip_high delta weight_decay "
     "resample max_grad_norm memory_gb mismatch_bound eval_size", 0, 10**9),
    ("max_prompt max_tokens eval_every correction_cap keep", 1, 10**9),
    ("tau tau_neg reward_timeout timeout", 1e-3, 10**6),
    ("prompts minibatches epochs tp", 1, 2**16),
    ("samples", 1, 16384),  # vLLM's limit for one prompt
    ("eval_n lora_rank", 0, 16384),
    ("seed", 0, 2**32 - 1),  # vLLM's limit
    ("temperature", 0.01, 2),  # vLLM's limits; evaluation is always greedy
    ("lr lr_end clip_low", 0, 1),
    ("top_p", 1e-3, 1),
    ("beta2", 0, 0.999999),
    ("overlong_buffer vllm_memory", 0, 0.99),
)

# (flags, whether they have an effect in a run, what they need): a note names those without effect.
NEEDS = (
    ("question_key answer_key", lambda cfg: cfg.data or cfg.eval_data, "--data or --eval_data"),
    ("delta clip_low", lambda cfg: cfg.gate == "clip", "--gate clip"),
    ("clip_high", lambda cfg: cfg.gate in ("clip", "detach"), "--gate clip or detach"),
    ("tau", lambda cfg: cfg.gate in ("soft", "squared"), "--gate soft or squared"),
    ("tau_neg", lambda cfg: cfg.gate == "soft", "--gate soft"),
    ("kl_in", lambda cfg: cfg.kl_coef, "--kl_coef above 0"),
    ("correction_cap", lambda cfg: cfg.correction != "none", "a --correction"),
    ("vllm_memory", lambda cfg: torch.cuda.is_available(), "a GPU"),
    ("warmup", lambda cfg: not cfg.warmup > cfg.steps > 0, "more --steps: --lr is not reached"),
    # On-policy, pi/pi_old is 1: no bound is reached, and the slopes of the gates are equal there.
    # --ratio is not listed: it still sums or averages the correction and the rewards of steps.
    ("gate clip_low clip_high delta tau tau_neg", lambda cfg: cfg.epochs * cfg.minibatches > 1,
     "--epochs or --minibatches above 1: on-policy, pi/pi_old is 1"),
)

REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = "nano_rlvr.json"  # in the folder of a trained model: {"config": the fields of its run}
ORGANISATIONS = {
    "qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
    "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}


def parse(config, algos, models, argv, description):
    """argv -> checked config(...). Exits with the usage for an unknown flag, choice or type.

    Defaults: those of `config`, the row of --model in `models`, the run that --resume continues,
    the row of --algo in `algos`; the later one counts.
    """
    import tyro
    first = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in ("algo", "model", "name", "out"):  # the other defaults depend on them
        first.add_argument(f"--{name}")
    first.add_argument("--resume", nargs="?", const="")
    given, argv = first.parse_known_args(argv)
    saved = saved_config(config, **vars(given)) if "resume" in given else {}
    chosen = {"algo": config.algo, "model": config.model} | saved | vars(given)
    algo, model = chosen["algo"], chosen["model"]
    if algo not in algos:
        raise ValueError(f"--algo {algo}: choose one of {', '.join(algos)}")
    row = {} if algo == saved.get("algo") else algos[algo]
    defaults = config(**model_row(model, models) | chosen | row)
    cfg = check(tyro.cli(
        config, args=argv, default=defaults, description=description, use_underscores=True),
        defaults)
    return check_resumed(cfg, saved) if saved else cfg


def read_settings(path):
    """What a run wrote about itself, a dict with "config". ValueError if the file is damaged."""
    try:
        about = json.loads(path.read_text())
        return about | {"config": dict(about["config"])}
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f"{path} is damaged ({type(e).__name__}: {e})") from e


def check(cfg, defaults=None):
    """Returns the Config with its model, template, dtype, rewards and mismatch_bound filled in.
    Raises ValueError for what cannot work. Prints a note for flags that differ from `defaults`
    (without them, from those of the class) and have no effect."""
    for names, low, high in RANGES:
        for name in names.split():
            if not low <= (x := getattr(cfg, name)) <= high:
                raise ValueError(f"--{name} {x}: must be from {low} to {high:.10g}")
    ranks, tasks = dist.world_size(), data.TASKS
    share = cfg.prompts // ranks
    for invalid, message in (
        (cfg.samples == 1 and (cfg.baseline, cfg.scale) != ("none", "none"),
         "--samples 1 needs --baseline none --scale none: a group of one has no mean or deviation"),
        (cfg.prompts % ranks, f"--prompts {cfg.prompts} cannot be shared evenly by {ranks} ranks"),
        (ranks % cfg.tp, f"--tp {cfg.tp}: must divide the number of ranks, {ranks}"),
        (share % cfg.minibatches,
         f"--minibatches {cfg.minibatches} must divide the {share} prompts of each rank"),
        (cfg.task not in tasks, f"--task {cfg.task}: choose one of {', '.join(tasks)} or --data"),
        (cfg.rollout and not re.fullmatch(r".+:\w+", cfg.rollout),
         f"--rollout {cfg.rollout}: must be a file and a function in it, my_file.py:my_rollout"),
        (cfg.lora_rank and cfg.zero_stage == 3,
         "--lora_rank needs --zero_stage 1 or 2: each rank merges the adapters on its own"),
        (cfg.top_p < 1 and (cfg.correction, cfg.temperature) != ("none", 1.0),
         "--top_p needs --correction none --temperature 1: the trainer cannot truncate like vLLM"),
        (cfg.delta and cfg.delta <= 1 + cfg.clip_high,
         f"--delta {cfg.delta:g}: must be above 1 + clip_high = {1 + cfg.clip_high:g}, or 0"),
        (cfg.resample and not cfg.drop_flat_groups,
         "--resample draws new prompts for dropped groups: it needs --drop_flat_groups"),
        (cfg.name in (".", "..") or "/" in cfg.name or not (cfg.name + cfg.out).isprintable(),
         f"--name {cfg.name!r}: must be the plain name of a folder, created in --out {cfg.out!r}"),
    ):
        if invalid:
            raise ValueError(message)
    spec = cfg.rewards or tasks[cfg.task]["rewards"]
    names = [name for name, *_ in rewards.parse_spec(spec)]
    if cfg.overlong_buffer and "overlong" not in names:
        spec = f"{spec},overlong:1"
    auto = "bfloat16" if torch.cuda.is_available() else "float32"
    dtype = auto if cfg.dtype == "auto" else cfg.dtype
    memory.check_machine(dtype)
    for names, has_effect, requirement in NEEDS:
        given = [f"--{name} {getattr(cfg, name)}" for name in names.split()
                 if getattr(cfg, name) != getattr(defaults or type(cfg), name)]
        if given and not has_effect(cfg):
            dist.print_once(
                f"note: {', '.join(given)}: no effect without {requirement}", file=sys.stderr)
    if cfg.scale == "group" and cfg.baseline not in ("group", "leave_one_out"):
        dist.print_once(f"note: --baseline {cfg.baseline} --scale group: in a group with equal "
                        "rewards, what is left is divided by 1e-4; see --scale", file=sys.stderr)
    return dataclasses.replace(
        cfg, template=data.read_template(cfg.template), model=find_model(cfg.model), dtype=dtype,
        rewards=spec, mismatch_bound=cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.15))


def find_model(name):
    """--model -> folder, here or beside nano_rlvr.py, or hub id with its organisation."""
    for folder in (Path(name), REPOSITORY / name):
        if folder.is_dir():
            return str(folder)
    for family, organisation in ORGANISATIONS.items():
        if name.lower().startswith(family) and "/" not in name:
            return f"{organisation}/{name}"
    return name


def model_row(model, rows):
    """The defaults that suit a model: its row or, of the record in its folder, what a row names."""
    path = Path(find_model(model)) / RECORD
    if path.is_file():
        names = set().union(*rows.values())
        return {name: x for name, x in read_settings(path)["config"].items() if name in names}
    by_path = {os.path.realpath(find_model(name)): row for name, row in rows.items()}
    return by_path.get(os.path.realpath(find_model(model)), {})


def saved_config(config, resume, out="", name="", **_):
    """{field: value} of the run that --resume continues; {} if --resume alone is to start it.

    --resume <folder or name> must exist. --resume alone continues the run --name or, if there is
    none, starts it: the same command works for the first start and after every interruption.
    """
    if not resume and not name:
        raise ValueError("--resume needs the folder of a run, or --name")
    folder = Path(out or config.out) / (resume or name)
    if resume and (Path(resume) / "config.json").exists():
        folder = Path(resume)
    if not (folder / "config.json").exists():
        if resume:
            raise ValueError(f"--resume {resume}: no folder of a run, and {folder} is none")
        dist.print_once(f"note: there is no run {folder} yet: it starts")
        return {}
    folder = folder.resolve()
    if name not in ("", folder.name):
        raise ValueError(f"--name {name} and --resume {resume} are two runs; leave --name out")
    about = read_settings(folder / "config.json")
    anew = {"resume_force", *about.get("memory plan", ())}  # this device has its own plan
    fields = vars(config()).keys() - anew  # without removed flags of older versions
    saved = {name: x for name, x in about["config"].items() if name in fields}
    return saved | {"name": folder.name, "out": str(folder.parent), "resume": str(folder)}


@contextlib.contextmanager
def loading(part, cfg, hint):
    """Any exception in this block becomes a ValueError with one line about a part of the model."""
    is_folder = Path(cfg.model).is_dir()
    is_folder or hub_answers()  # decides whether the libraries try to reach it
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
    with loading("config.json", cfg, "code of its own needs --trust_remote_code"):
        model = empty_model(cfg.model, **code)
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
    """Raises ValueError for a model whose log-probs would be wrong: only packed_attention may join
    the tokens of a row. guard.check_packing measures it later."""
    config, lm_head = model.config.get_text_config(), model.get_output_embeddings()
    # without this list all layers have the window, if there is one
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    others = layers - {"full_attention", "sliding_attention"}
    longest = getattr(config, "max_position_embeddings", math.inf)
    if "sliding_attention" in layers:
        longest = min(longest, getattr(config, "sliding_window", None) or longest)
    settings = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale",
                "logits_scaling", "kv_lora_rank")  # scaled logits, compressed keys and values (MLA)
    found = [name for name in settings if getattr(config, name, None) not in (None, 1.0)]
    for unsupported, what in (
        (others or model._is_stateful,
         f"its {', '.join(others) or 'recurrent'} layers mix the sequences that share a row"),
        (not model.is_backend_compatible(),
         "it has attention in its own code, which mixes the sequences that share a row"),
        (found, f"its config.json sets {' and '.join(found)}"),
        (type(lm_head) is not torch.nn.Linear or lm_head.bias is not None,
         "its LM head has a bias, or is no plain matrix"),
        (cfg.max_prompt + cfg.max_tokens > longest,
         f"its positions or its sliding window are {longest} tokens, fewer than --max_prompt "
         f"{cfg.max_prompt} + --max_tokens {cfg.max_tokens}"),
    ):
        if unsupported:
            raise ValueError(f"--model {cfg.model} ({config.model_type}) is not supported: {what}")
