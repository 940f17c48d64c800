"""The command line, and the checks of flags, machine and model before weights are loaded."""
import argparse
import dataclasses
import functools
import inspect
import json
import os
import re
import shutil
import sysconfig
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Literal, get_type_hints

import torch
from torch._appdirs import user_cache_dir

import data
import rewards
from runtime import __version__, ranks


@dataclasses.dataclass
class RunFlags:
    """Flags of any trainer; Config in nano_rlvr.py adds those of GRPO. --help has the comments."""

    # model and data
    model: str = "models/tiny"  # folder or hub id, whose organisation may be left out
    trust_remote_code: bool = False  # run Python code that comes with the model
    config: str = ""  # flags of a file, like the config.json of a run to repeat; others override it
    task: str = "gsm8k"  # arithmetic, countdown, products, gsm8k, math, math500, aime24, amc23
    data: str = ""  # train on this file (jsonl, json, csv, parquet), my_file.py:make or hub set
    eval_data: str = ""  # evaluate on these, as a,b; without it a tenth of --data is held out
    question_key: str = ""  # column of the question ("" = question, problem or prompt)
    answer_key: str = ""  # column of the answer ("" = answer, solution or ground_truth), or none
    template: str = "qwen_math"  # prompt: chat, none, r1, qwen_math or a file with {question}
    rewards: str = ""  # name:weight,... or my_file.py:my_reward; the first counts in evaluations
    reward_timeout: float = 5.0  # seconds a reward function has per completion, then no reward
    # engine and memory
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # bfloat16 has fp32 master weights
    lora_rank: int = 0  # train adapters of this rank on all linear layers; 0 = train all weights
    layout: Literal["auto", "packed", "rows"] = "auto"  # sequences end to end, or padded in rows
    memory_gb: float = 0.0  # GiB of device memory to plan for, 0 = all; sets what is auto below
    pack_tokens: int = 0  # most tokens per forward pass (a longer sequence goes alone), 0 = auto
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations
    compile: Literal["auto", "on", "off"] = "auto"  # layers and head; auto: on a GPU
    offload: Literal["auto", "none", "optimizer"] = "auto"  # optimizer, fp32 weights in host memory
    gpu_memory_utilization: float = 0.0  # vLLM's share of the GPU while it generates; 0 = the rest
    zero_stage: Literal[1, 2, 3] = 2  # ZeRO shards: 1 optimizer, 2 + gradients, 3 + weights
    timeout: float = 10.0  # minutes after which a rank that does not answer ends the run
    mismatch_bound: float = 0.0  # stop above this mean |trainer - vLLM log-prob|; 0 = by dtype
    # evaluation
    eval_every: int = 20  # steps between evaluations; one more after the last step
    eval_size: int = 512  # held-out examples per set, 0 = all
    eval_n: int = 0  # also draw this many samples per example: mean@n, pass@k, maj@n
    eval_temperature: float = 0.0  # temperature of the eval_n samples, 0 = --temperature
    eval_top_p: float = 1.0  # nucleus sampling of the eval_n samples
    # files
    name: str = ""  # name of the run ("" = model-task-algo-time); its files are in <out>/<name>/
    out: str = "runs"  # folder of the runs
    save_every: int = 20  # steps between checkpoints; 0 = one at the end or a stop, -1 = none
    keep: int = 2  # newest checkpoints to keep; the one with the best accuracy is also kept
    resume: str = ""  # continue this run (folder); without a value the run --name, if there is one
    resume_force: bool = False  # continue a run also with flags that change its results
    keep_rollouts: int = 64  # rollouts per step in rollouts.jsonl, in whole groups, of rank 0
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    seed: int = 0  # seed of data order, sampling and everything else


# (flags, smallest, largest value): one row for each numeric flag. inf and nan are in no range.
RANGES = (
    ("steps warmup keep_rollouts pack_tokens kl_coef clip_high delta "
     "resample max_grad_norm memory_gb mismatch_bound eval_size", 0, 10**9),
    ("max_prompt max_tokens eval_every correction_cap keep", 1, 10**9),
    ("tau tau_neg reward_timeout timeout", 1e-3, 10**6),
    ("prompts minibatches epochs", 1, 2**16),
    ("save_every", -1, 10**9),
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

FAR_RATIOS = "surrogate clip_low clip_high delta tau tau_neg"  # what happens to ratios far from 1
# (flags, whether they have an effect in a run, what they need): a note names those without effect.
NEEDS = (
    ("question_key answer_key", lambda cfg: cfg.data or cfg.eval_data, "--data or --eval_data"),
    ("delta clip_low", lambda cfg: cfg.surrogate == "ppo", "--surrogate ppo"),
    ("clip_high", lambda cfg: cfg.surrogate in ("ppo", "cispo"), "--surrogate ppo or cispo"),
    ("eval_temperature eval_top_p", lambda cfg: cfg.eval_n, "--eval_n"),
    ("warmup", lambda cfg: not cfg.warmup > cfg.steps > 0, "more --steps: --lr is not reached"),
    # On-policy, no bound is reached, and all surrogates have one slope. --ratio is not listed: it
    # still sums or averages the correction.
    (FAR_RATIOS, lambda cfg: cfg.epochs * cfg.minibatches > 1,
     "--epochs or --minibatches above 1: on-policy, pi/pi_old is 1"),
)

# Flags that may differ in a resumed run: they change no result (the data are compared) ...
FREE = set("name out resume resume_force config save_every keep timeout wandb data "
           "eval_data".split())
ROUNDING = set("layout compile zero_stage pack_tokens gradient_checkpointing offload memory_gb "
               "gpu_memory_utilization versions world device".split())  # ... or its rounding

REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = "nano_rlvr.json"  # in the folder of a model: {"config": the fields of a run of it} ...
SUITS = ("task template steps prompts samples temperature max_prompt max_tokens lr lr_end beta2 "
         "kl_coef pack_tokens eval_every eval_size save_every").split()  # ... of which these count
ORGANISATIONS = {
    "qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
    "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}


# The groups of --help: the flags of a first run, then the sections of RunFlags and Config, which
# begin with a comment of this name.
FIRST_RUN = "model task data rewards template steps prompts samples max_tokens lr".split()
SECTIONS = ("model and data", "rollout", "algorithm", "optimizer", "engine and memory",
            "evaluation", "file")


@functools.cache
def help_of(config):
    """{flag: (its group in --help, its comment)}, read from the source of a dataclass. The comment
    stands behind the flag, or in the line before."""
    texts = {}
    section = SECTIONS[-1]
    for parent in reversed(config.__mro__[:-1]):  # the last one is object
        line_before = ""
        for line in inspect.getsource(parent).splitlines():
            if title := re.match(f"    # ({'|'.join(SECTIONS)})", line):
                section = title[1]
            if flag := re.match(r"    (\w+): ", line):
                group = "first run" if flag[1] in FIRST_RUN else section
                comment = line.partition("  # ")[2] or line_before.strip(" #")
                texts[flag[1]] = group, comment
            line_before = line
    return texts


def in_groups(config, defaults):
    """A dataclass whose fields are the groups of --help, for tyro. A flag keeps its plain name."""
    from tyro.conf import arg
    types = get_type_hints(config)
    groups = {title: [] for title in ("first run", *SECTIONS)}
    for name, (title, comment) in help_of(config).items():
        flag = Annotated[types[name], arg(help=comment, prefix_name=False)]
        groups[title].append((name, flag, getattr(defaults, name)))
    fields = []
    for title, flags in groups.items():
        group = dataclasses.make_dataclass(title.replace(" ", "_"), flags)
        default = dataclasses.field(default_factory=group)
        fields.append((group.__name__, Annotated[group, arg(name=title, help="")], default))
    return dataclasses.make_dataclass("Flags", fields)


def parse(config, algos, argv, description):
    """argv -> checked config(...). Exits with the usage for an unknown flag, choice or type.

    argv: None for that of the process. Defaults: those of `config`, the record of --model, the row
    of --algo in `algos`, the file of a run; the later one counts. The file is that of the run which
    --resume continues, or else --config. The row counts more than a file with another --algo, whose
    own row does not count."""
    import tyro
    first = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in ("algo", "model", "name", "out", "config"):  # the other defaults depend on them
        first.add_argument(f"--{name}")
    first.add_argument("--resume", nargs="?", const="")
    typed, argv = first.parse_known_args(argv)
    typed = vars(typed)
    saved = saved_config(config, **typed) if "resume" in typed else {}
    stored = saved
    if "config" in typed and not saved:
        stored = stored_flags(Path(typed["config"]), config)
    algo = (stored | typed).get("algo", config.algo)
    if algo not in algos:
        raise ValueError(f"--algo {algo}: choose one of {', '.join(algos)}")
    values = algos[algo] | stored
    if algo != stored.get("algo", algo):  # the row of the file's preset goes, too
        row = algos.get(stored["algo"], ())
        values = {name: x for name, x in stored.items() if name not in row} | algos[algo]
    model = (stored | typed).get("model", config.model)
    defaults = config(**model_row(model, config) | values | typed)
    groups = tyro.cli(
        in_groups(config, defaults), args=argv, use_underscores=True,
        description=description.partition("\n")[0])
    flags = {}
    for group in vars(groups).values():
        flags |= vars(group)
    cfg = check(config(**flags), defaults)
    return check_resumed(cfg, saved) if saved else cfg


def check(cfg, defaults=None):
    """Returns the Config with its model, template, dtype, rewards and mismatch_bound filled in.
    Raises ValueError for what cannot work. Notes flags without effect that are not `defaults`."""
    check_ranges(cfg)
    check_combinations(cfg)
    spec = cfg.rewards or data.TASKS[cfg.task].rewards
    names = [name for name, *_ in rewards.parse_spec(spec)]
    if cfg.overlong_buffer and "overlong" not in names:
        spec = f"{spec},overlong:1"
    gpu = torch.cuda.is_available()
    dtype = ("bfloat16" if gpu else "float32") if cfg.dtype == "auto" else cfg.dtype
    compiles = "on" if gpu and cfg.zero_stage < 3 else "off"
    check_machine(dtype)
    note_no_effect(cfg, defaults or type(cfg))
    return dataclasses.replace(
        cfg,
        template=data.read_template(cfg.template),
        model=find_model(cfg.model),
        dtype=dtype,
        compile=compiles if cfg.compile == "auto" else cfg.compile,
        eval_temperature=cfg.eval_temperature or cfg.temperature,
        rewards=spec,
        mismatch_bound=cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.15))


def check_ranges(cfg):
    for names, low, high in RANGES:
        for name in names.split():
            x = getattr(cfg, name)
            if not low <= x <= high:
                raise ValueError(f"--{name} {x}: must be from {low} to {high:.10g}")


def check_combinations(cfg):
    world = ranks.world_size()
    share = cfg.prompts // world
    tasks = ", ".join(data.TASKS)
    of_a_group = {"group", "leave_one_out", "group_mean"}  # values of --baseline and --scale
    for invalid, message in (
        (cfg.samples == 1 and (cfg.filter_groups or of_a_group & {cfg.baseline, cfg.scale}),
         "--samples 1 needs --baseline batch, running or none, --scale batch, centred or none and "
         "no --filter_groups: a group of one has no mean or deviation"),
        (cfg.prompts % world, f"--prompts {cfg.prompts} cannot be shared evenly by {world} ranks"),
        (share % cfg.minibatches,
         f"--minibatches {cfg.minibatches} must divide the {share} prompts of each rank"),
        (cfg.task not in data.TASKS, f"--task {cfg.task}: choose one of {tasks} or --data"),
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


def note_no_effect(cfg, defaults):
    for names, has_effect, requirement in NEEDS:
        changed = [name for name in names.split() if getattr(cfg, name) != getattr(defaults, name)]
        if changed and not has_effect(cfg):
            shown = ", ".join(f"--{name} {getattr(cfg, name)}" for name in changed)
            ranks.note(f"{shown}: no effect without {requirement}")
    of_the_preset = [name for name in FAR_RATIOS.split()
                     if getattr(defaults, name) != getattr(type(cfg), name)]
    if of_the_preset and cfg.epochs * cfg.minibatches == 1:
        ranks.note(f"--algo {cfg.algo}: its {', '.join(of_the_preset)} can act from the second "
                   "update of a step on; add --minibatches 4")
    if cfg.scale == "group" and cfg.baseline not in ("group", "leave_one_out"):
        ranks.note(f"--baseline {cfg.baseline} --scale group: in a group with equal rewards, what "
                  "is left is divided by 1e-4; see --scale")


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
    programs = [tool.split()[0] for tool in tools]  # CC may be "ccache gcc" or "gcc -pthread"
    missing = [program for program in programs if not shutil.which(program)]
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
    than the run so far, `saved`, or has no step left. Returns cfg with the folder of the run."""
    fields = saved.keys() - FREE - ROUNDING
    if Path(cfg.model).is_dir():
        fields.discard("model")  # by its weights: _check_inputs
    if cfg.lr_end == 1 and cfg.steps > saved["steps"]:
        fields.discard("steps")
    changes = []
    for name in sorted(fields):
        if getattr(cfg, name) != saved[name]:
            now, before = (shorten(str(x), 200) for x in (getattr(cfg, name), saved[name]))
            changes.append(f"--{name} {now} (was {before})")
    if changes and not cfg.resume_force:
        raise ValueError(f"--resume {cfg.resume}: other results with {'; '.join(changes)}. "
                         "--resume_force continues nevertheless. More --steps need --lr_end 1 from "
                         "the start; else train on in a new run, from the folder final: --model")
    names = [path.name.removeprefix("step-") for path in Path(saved["resume"]).glob("step-*")]
    done = max(map(int, filter(str.isdecimal, names)), default=0)
    if cfg.steps < done:
        raise ValueError(f"--steps {cfg.steps}: the run {saved['resume']} has a checkpoint of step "
                         f"{done}; choose at least {done} --steps, or start a new run")
    return dataclasses.replace(cfg, name=saved["name"], out=saved["out"], resume=saved["resume"])


def find_model(name):
    """--model -> folder, here or beside nano_rlvr.py, or hub id with its organisation."""
    for folder in (Path(name), REPOSITORY / name):
        if folder.is_dir():
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
    fields = read_settings(path)["config"] if path.is_file() else {}
    return {name: fields[name] for name in SUITS if name in fields and hasattr(config, name)}


def read_settings(path):
    """What a run wrote about itself, a dict with "config". ValueError if the file is damaged."""
    try:
        settings = json.loads(path.read_text())
        dict(settings["config"])
        return settings
    except (OSError, LookupError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is damaged ({type(e).__name__}: {e})") from e


def stored_flags(path, config):
    """{flag: value} of a file that a run wrote, without its folder and what its memory plan
    decided. Raises ValueError if it is damaged, or if its version has other names of flags."""
    settings = read_settings(path)
    version = settings.get("version", __version__)
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise ValueError(f"{path}: this run is of version {version}, and its flags have other "
                         f"names in {__version__}: see docs/changelog.md")
    anew = {"name", "out", "resume", "resume_force",
            *settings.get("memory plan", ())}  # this device has its own plan
    fields = vars(config()).keys() - anew  # without removed flags of older versions
    return {name: x for name, x in settings["config"].items() if name in fields}


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
