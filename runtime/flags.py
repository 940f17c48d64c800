"""The command line, and the checks of flags, machine and model before weights are loaded."""
import argparse
import dataclasses
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from textwrap import shorten
from typing import Literal, get_type_hints

import torch
import typeguard
from torch._appdirs import user_cache_dir

import data
import rewards
from runtime import __version__, ranks
from runtime.report.page import check_regular


@dataclasses.dataclass
class RunFlags:
    """Flags of any trainer; Config in nano_rlvr.py adds those of GRPO. --help has the comments."""

    # model and data
    model: str = "models/tiny"  # folder or hub id, whose organisation may be left out
    trust_remote_code: bool = False  # run Python code that comes with the model
    algo: str = "grpo"  # a row of ALGOS; any other flag overrides a value of the row
    config: str = ""  # flags of a file, like the config.json of a run to repeat; others override it
    task: str = "gsm8k"  # arithmetic, countdown, products, gsm8k, math, math500, ...
    data: str = ""  # train on this file (jsonl, json, csv, parquet), my_file.py:make or hub set
    eval_data: str = ""  # evaluate on these, as a,b; without it a tenth of --data is held out
    question_key: str = ""  # column of the question ("" = question, problem or prompt)
    answer_key: str = ""  # column of the answer ("" = answer, solution or ground_truth), or none
    template: str = "qwen_math"  # prompt: chat, none, r1, qwen_math or a file with {question}
    rewards: str = ""  # name:weight,... or my_file.py:my_reward; the first counts in evaluations
    reward_timeout: float = 5.0  # seconds a reward function has per completion, then no reward
    # engines and memory
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # bfloat16 has fp32 master weights
    lora_rank: int = 0  # train adapters of this rank on all linear layers; 0 = train all weights
    memory_gb: float = 0.0  # GiB of the device for this run, 0 = all; the next four must fit it
    pack_tokens: int = 0  # most tokens per forward pass (a longer sequence goes alone), 0 = auto
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations
    compile: Literal["auto", "on", "off"] = "auto"  # layers and head by torch.compile: on a GPU
    offload: Literal["auto", "none", "optimizer"] = "auto"  # optimizer, fp32 weights in host memory
    gpu_memory_utilization: float = 0.0  # vLLM's share of the GPU while it generates; 0 = the rest
    zero_stage: Literal[1, 2, 3] = 2  # ZeRO shards: 1 optimizer, 2 + gradients, 3 + weights
    timeout: float = 10.0  # minutes after which a rank that does not answer ends the run
    mismatch_bound: float = 0.0  # stop above this mean |trainer - vLLM log-prob|; 0 = by dtype
    # evaluation and files
    eval_every: int = 20  # steps between evaluations; one more after the last step
    eval_size: int = 512  # held-out examples per set, 0 = all
    eval_n: int = 0  # also draw this many samples per example: mean@n, pass@k, maj@n
    eval_temperature: float = 0.0  # of these samples, 0 = --temperature
    eval_top_p: float = 1.0  # nucleus sampling of these samples
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
    ("steps warmup save_every keep_rollouts pack_tokens kl_coef clip_high delta "
     "resample max_grad_norm memory_gb mismatch_bound eval_size", 0, 10**9),
    ("max_prompt max_tokens eval_every correction_cap keep", 1, 10**9),
    ("tau tau_neg reward_timeout timeout", 1e-3, 10**6),
    ("prompts minibatches epochs", 1, 2**16),
    ("samples", 1, 16384),  # vLLM's limit for one prompt
    ("eval_n lora_rank", 0, 16384),
    ("seed", 0, 2**32 - 1),  # vLLM's limit
    ("temperature", 0.01, 2),  # vLLM's limits
    ("eval_temperature", 0, 2),
    ("lr lr_end clip_low weight_decay", 0, 1),
    ("top_p eval_top_p", 1e-3, 1),
    ("beta2", 0, 0.999999),
    ("overlong_buffer gpu_memory_utilization", 0, 0.99),
)

# (flags, whether they have an effect in a run, what they need): a note names those without effect.
NEEDS = (
    ("question_key answer_key", lambda cfg: cfg.data or cfg.eval_data, "--data or --eval_data"),
    ("delta clip_low", lambda cfg: cfg.surrogate == "ppo", "--surrogate ppo"),
    ("clip_high", lambda cfg: cfg.surrogate in ("ppo", "cispo"), "--surrogate ppo or cispo"),
    ("tau", lambda cfg: cfg.surrogate in ("sapo", "kimi"), "--surrogate sapo or kimi"),
    ("tau_neg", lambda cfg: cfg.surrogate == "sapo", "--surrogate sapo"),
    ("correction_cap", lambda cfg: cfg.correction != "none", "a --correction"),
    ("resume_force", lambda cfg: cfg.resume or "--resume" in sys.argv, "--resume"),
    ("gpu_memory_utilization", lambda cfg: torch.cuda.is_available(), "a GPU"),
    ("eval_temperature eval_top_p", lambda cfg: cfg.eval_n, "--eval_n"),
    ("warmup", lambda cfg: not cfg.warmup > cfg.steps > 0, "more --steps: --lr is not reached"),
    # On-policy, no bound is reached, and all surrogates have one slope. --ratio is not listed: it
    # still sums or averages the correction.
    ("surrogate clip_low clip_high delta tau tau_neg", lambda cfg: cfg.epochs * cfg.minibatches > 1,
     "--epochs or --minibatches above 1: on-policy, pi/pi_old is 1"),
)

# Flags that may differ in a resumed run: they change no result (log.py compares the data) ...
FREE = set("name out resume resume_force config save_every keep timeout wandb data "
           "eval_data".split())
ROUNDING = set("compile zero_stage pack_tokens gradient_checkpointing offload memory_gb "
               "gpu_memory_utilization versions world device".split())  # ... or its rounding

MOVED = {  # flags of former versions -> what to use now
    "--gate": "--surrogate ppo, cispo, sapo or kimi (once clip, detach, soft, squared)",
    "--scale mean": "--scale group_mean",
    "--drop_flat_groups": "--filter_groups",
    "--checkpointing": "--gradient_checkpointing",
    "--vllm_memory": "--gpu_memory_utilization",
    "--tp": "examples/tensor_parallel.py --tp",
    "--kl_in": "examples/kl.py --kl_in",
    "--allow_unsafe_code": "ALLOW_UNSAFE_CODE=1 with examples/code_reward.py",
}
REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = "nano_rlvr.json"  # in the folder of a model: {"config": the fields of a run of it} ...
SUITS = ("task template steps prompts samples temperature max_prompt max_tokens lr lr_end beta2 "
         "kl_coef pack_tokens eval_every eval_size save_every").split()  # ... of which these count
ORGANISATIONS = {
    "qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
    "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}


def parse(config, algos, argv, description):
    """argv -> checked config(...). Exits with the usage for an unknown flag, choice or type.

    argv: None for that of the process. Defaults: those of `config`, the record of --model, the row
    of --algo in `algos`, the file --config, the run that --resume continues; the later one counts.
    The row counts more than a file or run with another --algo, whose own row does not count."""
    import tyro
    argv = sys.argv[1:] if argv is None else argv
    for old, new in MOVED.items():
        if f"{old} " in f"{' '.join(argv)} ".replace("=", " "):
            raise ValueError(f"{old} is gone: use {new}")
    first = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in ("algo", "model", "name", "out", "config"):  # the other defaults depend on them
        first.add_argument(f"--{name}")
    first.add_argument("--resume", nargs="?", const="")
    given, argv = first.parse_known_args(argv)
    saved = saved_config(config, **vars(given)) if "resume" in given else {}
    stored = (stored_flags(Path(given.config), config) if "config" in given else {}) | saved
    chosen = config(**stored | vars(given))
    algo = chosen.algo
    if algo not in algos:
        raise ValueError(f"--algo {algo}: choose one of {', '.join(algos)}")
    values = algos[algo] | stored
    if algo != stored.get("algo", algo):  # the row of the file's preset goes, too
        row = algos.get(stored["algo"], ())
        values = {name: x for name, x in stored.items() if name not in row} | algos[algo]
    defaults = config(**model_row(chosen.model, config) | values | vars(given))
    cfg = check(tyro.cli(
        config, args=argv, default=defaults, use_underscores=True,
        description=description.partition("\n")[0]), defaults)
    return check_resumed(cfg, saved) if saved else cfg


def read_settings(path, config):
    """What a run wrote about itself, a dict with "config". ValueError if the file is damaged, or if
    a value has another type than in `config`."""
    try:
        about = json.loads(path.read_text())
        types = get_type_hints(config) | {"version": str, "memory plan": dict, "resumed": list}
        for name, x in (about | {"config": ""} | about["config"]).items():  # --config is a flag
            typeguard.check_type({name: x}, dict[str, types.get(name, object)])
        return about
    except Exception as e:  # of the file system, JSON, Python or typeguard
        raise ValueError(f"{path} is damaged ({type(e).__name__}: {e})") from e


def check(cfg, defaults=None):
    """Returns the Config with its model, template, dtype, rewards and mismatch_bound filled in.
    Raises ValueError for what cannot work. Notes flags without effect that are not `defaults`."""
    for names, low, high in RANGES:
        for name in names.split():
            if not low <= (x := getattr(cfg, name)) <= high:
                raise ValueError(f"--{name} {x}: must be from {low} to {high:.10g}")
    world = ranks.world_size()
    tasks = data.TASKS
    share = cfg.prompts // world
    for invalid, message in (
        (cfg.samples == 1 and (cfg.filter_groups or {cfg.baseline, cfg.scale} & {
            "group", "leave_one_out", "group_mean"}),
         "--samples 1 needs --baseline batch, running or none, --scale batch, centred or none and "
         "no --filter_groups: a group of one has no mean or deviation"),
        (cfg.prompts % world, f"--prompts {cfg.prompts} cannot be shared evenly by {world} ranks"),
        (share % cfg.minibatches,
         f"--minibatches {cfg.minibatches} must divide the {share} prompts of each rank"),
        (cfg.task not in tasks, f"--task {cfg.task}: choose one of {', '.join(tasks)} or --data"),
        (cfg.compile == "on" and cfg.zero_stage == 3,
         "--compile on needs --zero_stage 1 or 2: stage 3 replaces a layer's weights at each call"),
        (cfg.lora_rank and cfg.zero_stage == 3,
         "--lora_rank needs --zero_stage 1 or 2: each rank merges the adapters on its own"),
        (cfg.top_p < 1 and (cfg.correction, cfg.temperature) != ("none", 1.0),
         "--top_p needs --correction none --temperature 1: the trainer cannot truncate like vLLM; "
         "for evaluations there is --eval_top_p"),
        (cfg.delta and cfg.delta <= 1 + cfg.clip_high,
         f"--delta {cfg.delta:g}: must be above 1 + clip_high = {1 + cfg.clip_high:g}, or 0"),
        (cfg.resample and not cfg.filter_groups,
         "--resample draws new prompts for dropped groups: it needs --filter_groups"),
        (cfg.name in (".", "..") or "/" in cfg.name or not (cfg.name + cfg.out).isprintable(),
         f"--name {cfg.name!r}: must be the plain name of a folder, created in --out {cfg.out!r}"),
    ):
        if invalid:
            raise ValueError(message)
    spec = cfg.rewards or tasks[cfg.task].rewards
    names = [name for name, *_ in rewards.parse_spec(spec)]
    if cfg.overlong_buffer and "overlong" not in names:
        spec = f"{spec},overlong:1"
    gpu = torch.cuda.is_available()
    dtype = ("bfloat16" if gpu else "float32") if cfg.dtype == "auto" else cfg.dtype
    auto = "on" if gpu and cfg.zero_stage < 3 else "off"
    check_machine(dtype)
    for names, has_effect, requirement in NEEDS:
        given = [f"--{name} {getattr(cfg, name)}" for name in names.split()
                 if getattr(cfg, name) != getattr(defaults or type(cfg), name)]
        if given and not has_effect(cfg):
            ranks.note(f"{', '.join(given)}: no effect without {requirement}")
    if cfg.scale == "group" and cfg.baseline not in ("group", "leave_one_out"):
        ranks.note(f"--baseline {cfg.baseline} --scale group: in a group with equal rewards, what "
                  "is left is divided by 1e-4; see --scale")
    return dataclasses.replace(
        cfg, template=data.read_template(cfg.template), model=find_model(cfg.model), dtype=dtype,
        compile=auto if cfg.compile == "auto" else cfg.compile,
        eval_temperature=cfg.eval_temperature or cfg.temperature, rewards=spec,
        mismatch_bound=cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.15))


def check_machine(dtype):
    """Raises ValueError if PyTorch finds no usable GPU or no bf16 on it, or without the compilers
    that Triton (on a GPU) and DeepSpeed (its CPU operators) need."""
    gpu = torch.cuda.is_available()
    if torch.version.cuda and not gpu:  # it would run on the CPU
        raise ValueError("no usable GPU: install driver 580 or newer, or packages for a "
                         "CPU: make clean setup")
    if gpu and dtype == "bfloat16" and torch.cuda.get_device_capability(ranks.device()) < (8, 0):
        raise ValueError("--dtype bfloat16 needs compute capability 8.0: use --dtype float32")
    tools = os.environ.get("CC", "gcc"), os.environ.get("CXX", "g++"), "ninja"
    missing = [tool for tool in tools if not shutil.which(tool)]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if missing or not header.exists():
        raise ValueError(f"kernels cannot be compiled without {', '.join(missing) or header} "
                         "(apt-get install g++ ninja-build python3-dev)")
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache_dir("torch_extensions"))
    for lock in cache.rglob("lock"):  # left by a run that was killed while it compiled
        ranks.note(f"DeepSpeed will wait for {lock} to be removed: delete it, unless another run "
                   "is just starting")
    compiled = [file.read_text() for file in cache.rglob("build.ninja")]
    if not gpu and torch.__path__[0] not in str(compiled):  # also if the environment has moved
        ranks.print_once("the first start compiles DeepSpeed's CPU operators, for two minutes")


def check_resumed(cfg, saved):
    """Raises ValueError, naming the flags, if a run that goes on with cfg would give other results
    than the run so far, `saved`. Returns cfg with the folder of the run."""
    fields = saved.keys() - FREE - ROUNDING
    if Path(cfg.model).is_dir():
        fields.discard("model")  # by its weights: _check_inputs
    if cfg.lr_end == 1 and cfg.steps > saved["steps"]:
        fields.discard("steps")
    texts = [f"--{name} {shorten(str(getattr(cfg, name)), 200)} "
             f"(was {shorten(str(saved[name]), 200)})"
             for name in sorted(fields) if getattr(cfg, name) != saved[name]]
    if texts and not cfg.resume_force:
        raise ValueError(f"--resume {cfg.resume}: other results with {'; '.join(texts)}. "
                         "--resume_force continues nevertheless. More --steps need --lr_end 1 from "
                         "the start; else train on in a new run, from the folder final: --model")
    return dataclasses.replace(cfg, name=saved["name"], out=saved["out"], resume=saved["resume"])


def find_model(name):
    """--model -> folder, here or beside nano_rlvr.py, or hub id with its organisation."""
    for folder in (Path(name), REPOSITORY / name):
        if folder.is_dir():
            check_regular(folder)
            return str(folder)
    if (REPOSITORY / f"{name}.py").is_file():
        raise ValueError(f"--model {name}: this folder is made by: python {name}.py")
    for family, organisation in ORGANISATIONS.items():
        if name.lower().startswith(family) and "/" not in name:
            return f"{organisation}/{name}"
    return name


def model_row(model, config):
    """The defaults that suit a model, from the record in its folder: {} if it has none."""
    path = Path(find_model(model)) / RECORD
    fields = read_settings(path, config)["config"] if path.is_file() else {}
    return {name: fields[name] for name in SUITS if name in fields}


def stored_flags(path, config):
    """{flag: value} of a file that a run wrote, without its folder and what its memory plan
    decided. Raises ValueError if it is damaged, or if its version has other names of flags."""
    about = read_settings(path, config)
    version = about.get("version", __version__)
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise ValueError(f"{path}: this run is of version {version}, and its flags have other "
                         f"names in {__version__}: see docs/changelog.md")
    anew = {"name", "out", "resume", "resume_force",
            *about.get("memory plan", ())}  # this device has its own plan
    fields = vars(config()).keys() - anew  # without removed flags of older versions
    return {name: x for name, x in about["config"].items() if name in fields}


def saved_config(config, /, resume, out="", name="", **_):
    """{field: value} of the run that --resume continues, which must exist; {} if --resume without
    a value finds no run --name, which it then starts."""
    if not resume and not name:
        raise ValueError("--resume needs the folder of a run, or --name")
    folder = Path(out or config.out) / (resume or name)
    if resume and (Path(resume) / "config.json").exists():
        folder = Path(resume)
    if not (folder / "config.json").exists():
        if resume:
            raise ValueError(f"--resume {resume}: no folder of a run, and {folder} is none")
        ranks.print_once(f"note: there is no run {folder} yet: it starts")
        return {}
    folder = folder.resolve()
    if name not in ("", folder.name):
        raise ValueError(f"--name {name} and --resume {resume} are two runs; leave --name out")
    saved = stored_flags(folder / "config.json", config)
    return saved | {"name": folder.name, "out": str(folder.parent), "resume": str(folder)}
