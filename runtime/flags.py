"""The command line, and the checks of flags, machine and model before weights are loaded.

Each check raises ValueError with one line.
"""
import ast
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import torch

import data
import rewards
from runtime import dist, memory
from runtime.folder import FREE, ROUNDING
from runtime.shape import empty_model, first_line, hub_answers


@dataclass
class RunFlags:
    """The flags that any trainer has; Config, in nano_rlvr.py, adds those of the algorithm."""

    # model and data
    model: str = "models/tiny"  # a folder or a hub id; a bare name of a known family gets its organisation
    trust_remote_code: bool = False  # run Python code that comes with the model
    algo: str = "grpo"  # a row of ALGOS; any flag below overrides a value of the row
    task: str = "gsm8k"  # arithmetic, countdown, gsm8k, math, math500, aime24, amc23
    data: str = ""  # train on this file (jsonl, json, csv, parquet) or hub set instead of the task's own
    eval_data: str = ""  # evaluate on these, as a,b; with --data alone, up to a tenth of it is held out
    question_key: str = ""  # column of the question ("" = the first of question, problem, prompt)
    answer_key: str = ""  # column of the answer ("" = answer, solution or ground_truth; "none" = no column)
    template: str = "qwen_math"  # of the prompt: chat, none, r1, qwen_math, or a file with {question}
    rewards: str = ""  # name:weight,... or my_file.py:my_reward ("" = the task's); evaluation uses the first
    reward_timeout: float = 5.0  # seconds a reward function has per completion; after that, no verdict
    allow_unsafe_code: bool = False  # --rewards code: run the model's programs even without isolation
    judge_model: str = ""  # --rewards judge: the name of the model at OPENAI_BASE_URL
    # engines and memory
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # bfloat16 has fp32 master weights
    lora_rank: int = 0  # train adapters of this rank on all linear layers; 0 = train all weights
    memory_gb: float = 0.0  # GiB of the device this run may use (0 = all); the next four are fitted into it
    pack_tokens: int = 0  # most tokens per forward pass (a longer sequence goes alone); 0 = what fits
    checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations: less memory, more compute
    offload: Literal["auto", "none", "optimizer"] = "auto"  # keep optimizer and fp32 weights in host memory
    vllm_memory: float = 0.0  # share of the GPU for vLLM while it generates; 0 = what is left
    tp: int = 1  # ranks per vLLM engine (tensor parallel), which generate their prompts together
    zero_stage: Literal[1, 2, 3] = 2  # ZeRO shards over the ranks: 1 optimizer, 2 + gradients, 3 + weights
    timeout: float = 10.0  # minutes after which a rank that does not answer ends the run
    mismatch_bound: float = 0.0  # stop above this mean |trainer - vLLM log-prob|; 0 = 1e-3 fp32, 0.15 bf16
    # evaluation and files
    eval_every: int = 20  # steps between evaluations; also before the first and after the last update
    eval_size: int = 512  # held-out examples per set, 0 = all
    eval_n: int = 0  # also draw this many samples per example: mean@n, pass@k, maj@n, best@n
    name: str = ""  # name of the run ("" = model-task-algo-time); its files are in <out>/<name>/
    out: str = "runs"  # folder of the runs
    save_every: int = 20  # steps between checkpoints; 0 = one at the end and one when the run is stopped
    keep: int = 2  # newest checkpoints to keep; the one with the best accuracy is also kept
    resume: str = ""  # continue the run in this folder, or without a value: --name, new if there is none
    resume_force: bool = False  # ... also with flags that give other results than the run had so far
    keep_rollouts: int = 64  # rollouts per step of rank 0 written to rollouts.jsonl, in whole groups
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    seed: int = 0  # seed of data order, sampling and everything else


def given(argv, flag, default):
    """The value of a flag, before the command line is parsed as a whole."""
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            default = argv[i + 1]
        elif word.startswith(flag + "="):
            default = word.partition("=")[2]
    return default


@functools.cache
def fields_by_group(config):
    """{title: {field: help}} from the source of a dataclass and its bases.

    A comment line before a field begins a group and is its title. A comment behind a field is its help text.
    """
    if config is object:
        return {}
    groups = dict(fields_by_group(config.__base__))
    lines = textwrap.dedent(inspect.getsource(config)).splitlines()
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.AnnAssign):
            above = lines[node.lineno - 2].strip()
            if above.startswith("# "):
                fields = groups[above[2:]] = {}
            fields[node.target.id] = lines[node.end_lineno - 1].partition("  # ")[2]
    return groups


def parse_words(config, argv, defaults, description):
    """argv -> config(...). `defaults` replaces the defaults of some fields.

    Exits with the usage for --help, an unknown flag or a value of the wrong type.
    """
    import tyro
    hints, groups = get_type_hints(config), {}
    for title, fields in fields_by_group(config).items():
        group = dataclasses.make_dataclass("Group", [
            (name, Annotated[hints[name], tyro.conf.arg(help=text)]) for name, text in fields.items()])
        groups[title] = group(**{name: defaults.get(name, getattr(config, name)) for name in fields})
    parsed = tyro.cli(dict, args=argv, default=groups, description=description, use_underscores=True,
                      config=[tyro.conf.OmitArgPrefixes])
    return config(**{name: x for group in parsed.values() for name, x in vars(group).items()})

REPOSITORY = Path(__file__).resolve().parents[1]

ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
                 "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}

# (interval, flags, reason). "(" and ")" exclude an end. All intervals are finite: inf and nan are in none.
RANGES = (
    ("[0, 1e9]", "steps warmup save_every keep_rollouts pack_tokens kl_coef clip_high "
                 "delta weight_decay max_grad_norm memory_gb mismatch_bound", ""),
    ("[1, 1e9]", "max_prompt max_tokens eval_every correction_cap keep", ""),
    ("(0, 1e6]", "tau tau_neg reward_timeout timeout", ""),
    ("[1, 65536]", "prompts minibatches", ""),
    ("[1, 16384]", "samples", "vLLM's limit for one prompt"),
    ("[0, 16384]", "eval_n", "vLLM's limit for one prompt"),
    ("[0, 100000]", "eval_size", "0 = all"),
    ("[0, 4294967295]", "seed", "it must fit into 32 bits for vLLM"),
    ("[0, 16384]", "lora_rank", ""),
    ("[0, 1000]", "resample", ""),
    ("[1, 1000]", "epochs", ""),
    ("[1, 64]", "tp", ""),
    ("[0, 1]", "lr lr_end clip_low", ""),
    ("(0, 2]", "temperature", "vLLM's limit; evaluation is always greedy"),
    ("(0, 1]", "top_p", ""),
    ("[0, 1)", "beta2", ""),
    ("[0, 1)", "overlong_buffer", "it is a fraction of --max_tokens"),
    ("[0, 1)", "vllm_memory", "0 = what the memory plan leaves"),
)

# (flags, test of (config, {name of a reward: weight}), requirement): without it the flags have no
# effect. flag=value: only with this value.
NEEDS = (
    ("question_key answer_key", lambda cfg, _: cfg.data or cfg.eval_data, "--data or --eval_data"),
    ("delta clip_low", lambda cfg, _: cfg.gate == "clip", "--gate clip"),
    ("clip_high", lambda cfg, _: cfg.gate in ("clip", "detach"), "--gate clip or detach"),
    ("kl_in", lambda cfg, _: cfg.kl_coef, "--kl_coef above 0"),
    ("tau", lambda cfg, _: cfg.gate in ("soft", "squared"), "--gate soft or squared"),
    ("tau_neg", lambda cfg, _: cfg.gate == "soft", "--gate soft"),
    ("correction_cap", lambda cfg, _: cfg.correction != "none", "a --correction"),
    # rows of files and hub sets may name these rewards
    ("judge_model", lambda cfg, names: cfg.data or cfg.eval_data or "judge" in names,
     "--rewards judge"),
    ("allow_unsafe_code", lambda cfg, names: cfg.data or cfg.eval_data or "code" in names, "--rewards code"),
    ("vllm_memory", lambda *_: torch.cuda.is_available(), "a GPU"),
    ("rewards", lambda cfg, weights: cfg.data or any(weights.values()), "a weight other than 0"),
    # On-policy, pi/pi_old is 1: no bound is reached, the slope of the soft gate is 1, and that of the
    # squared gate's penalty is 0. --ratio product still sums over a sequence. --ratio sequence still
    # averages what differs within a sequence: rewards per step, and the correction, which is near 1.
    ("ratio=sequence gate clip_low clip_high delta tau tau_neg",
     lambda cfg, _: cfg.epochs * cfg.minibatches > 1,
     "--epochs or --minibatches above 1: on-policy, pi/pi_old is 1 (rewards per step aside)"),
)

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on a CPU

RECORD = "nano_rlvr.json"  # in the folder of a trained model: {"config": the fields of its run}


def range_of(name):
    """(interval, reason) of a numeric flag."""
    return next((interval, reason) for interval, names, reason in RANGES if name in names.split())


def check_range(name, value):
    """Raises ValueError unless the value of a numeric flag is in its interval."""
    interval, reason = range_of(name)
    low, high = map(float, interval[1:-1].split(","))
    words = {"[": "at least", "(": "above", "]": "at most", ")": "below"}
    inside = isinstance(value, (int, float)) and low <= value <= high
    if not inside or (value == low and interval[0] == "(") or (value == high and interval[-1] == ")"):
        raise ValueError(f"--{name} {value}: must be {words[interval[0]]} {low:.10g} and "
                         f"{words[interval[-1]]} {high:.10g}" + f" ({reason})" * bool(reason))


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


def model_row(model, rows):
    """The defaults that suit a model: its row in `rows`, or those that its run recorded in the folder.

    Of a record, the fields count that any row names. Raises ValueError if the record is damaged.
    """
    path = Path(find_model(model)) / RECORD
    if not path.is_file():
        return next((row for name, row in rows.items() if same_model(name, model)), {})
    try:
        recorded = json.loads(path.read_text())["config"]
        return {name: type(value)(recorded[name]) for row in rows.values() for name, value in row.items()
                if name in recorded}
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"--model {model}: {path} is damaged ({type(e).__name__}: {e}); without this file, "
                         "the defaults are used") from e


def parse(config, algos, models, argv, description):
    """argv -> checked config(...). Defaults: those of `config`, the row of --model in `models`, the run that
    --resume continues, the row of --algo in `algos`; the later one counts.

    Raises ValueError with one line for a bad value; exits with the usage for an unknown flag.
    """
    argv, saved = saved_config(argv, config.out)
    algo = given(argv, "--algo", saved.get("algo", config.algo))
    model = given(argv, "--model", saved.get("model", config.model))
    if algo not in algos:
        raise ValueError(f"--algo {algo}: choose one of {', '.join(algos)}")
    row = model_row(model, models)  # of a trained model: what its run used
    defaults = row | saved | {"algo": algo, "model": model}
    defaults |= algos[algo] if algo != saved.get("algo") else {}
    cfg = check(parse_words(config, argv, defaults, description))
    if not saved and cfg.template != row.get("template", cfg.template):
        dist.print_once(f"note: --template {shorten(cfg.template, 200)}, but {model} was trained with "
                        f"--template {shorten(row['template'], 200)}", file=sys.stderr)
    return check_resumed(cfg, saved)


def check(cfg):
    """Checks a Config, resolves its model, and fills in template, dtype, rewards and mismatch_bound.

    Returns the completed Config; raises ValueError for what cannot work. Prints a note to stderr for each
    flag that differs from its default and has no effect.
    """
    cfg = dataclasses.replace(cfg, template=data.read_template(cfg.template))
    for name, hint in get_type_hints(type(cfg)).items():
        value, choices = getattr(cfg, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise ValueError(f"--{name} {value}: choose one of {', '.join(map(str, choices))}")
        if hint in (int, float):
            check_range(name, value)

    ranks, tasks = dist.world_size(), data.TASKS
    for invalid, message in (
        (cfg.samples == 1 and (cfg.baseline, cfg.scale) != ("none", "none"),
         "--samples 1: a group of one has no mean or deviation to compare with; "
         "use at least 2, or --baseline none --scale none"),
        (cfg.prompts % ranks, f"--prompts {cfg.prompts} cannot be shared evenly by {ranks} ranks"),
        (ranks % cfg.tp, f"--tp {cfg.tp}: must divide the number of ranks, {ranks}"),
        (cfg.prompts // ranks % cfg.minibatches,
         f"--minibatches {cfg.minibatches} must divide the {cfg.prompts // ranks} prompts of each rank"),
        (cfg.task not in tasks,
         f"--task {cfg.task}: choose one of {', '.join(tasks)} (use --data for a file or a hub dataset)"),
        (cfg.rollout and not re.fullmatch(r".+:\w+", cfg.rollout),
         f"--rollout {cfg.rollout}: must be a file and a function in it, my_file.py:my_rollout"),
        (cfg.lora_rank and cfg.zero_stage == 3,
         "--lora_rank needs --zero_stage 1 or 2: each rank merges the adapters on its own"),
        (cfg.top_p < 1 and (cfg.correction, cfg.temperature) != ("none", 1.0),
         "--top_p samples from a truncated distribution, whose log-probs the trainer cannot compute: "
         "the importance correction would be wrong; use --correction none --temperature 1 with it"),
        (cfg.delta != 0 and not cfg.delta > 1 + cfg.clip_high,
         f"--delta {cfg.delta:g}: must be above 1 + clip_high = {1 + cfg.clip_high:g}, or 0 for off"),
        (cfg.resample and not cfg.drop_flat_groups,
         "--resample draws new prompts for dropped groups: it needs --drop_flat_groups"),
    ):
        if invalid:
            raise ValueError(message)

    spec = cfg.rewards or tasks[cfg.task]["rewards"]
    try:
        weights = {name: weight for name, weight, _ in rewards.parse_spec(spec)}
    except ValueError as e:
        raise ValueError(f"--rewards {spec}: {e}") from None
    if cfg.overlong_buffer and "overlong" not in weights:
        spec, weights["overlong"] = f"{spec},overlong:1", 1.0
    cuda = torch.cuda.is_available()
    dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32"
    memory.need_gpu(dtype)
    memory.need_compiler(cpu_operators=not cuda or cfg.offload == "optimizer")
    bound = cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.15)
    check_folder(cfg.out, cfg.name)
    notes = [text for applies, text in (
        (cfg.warmup > cfg.steps > 0,
         f"--warmup {cfg.warmup}: --lr is not reached in {cfg.steps} steps"),
        (cfg.max_grad_norm == 0, "--max_grad_norm 0: gradients are not clipped"),
    ) if applies]
    named = set()  # a flag is in one note at most
    for names, has_effect, requirement in NEEDS:
        found = {}
        for flag, _, only in (name.partition("=") for name in names.split()):
            value = getattr(cfg, flag)
            if value != getattr(type(cfg), flag) and only in ("", value) and flag not in named:
                found[flag] = f"--{flag} {value}"
        if found and not has_effect(cfg, weights):
            named |= found.keys()
            verb = "has" if len(found) == 1 else "have"
            notes.append(f"{', '.join(found.values())} {verb} no effect without {requirement}")
    for note in notes:
        dist.print_once(f"note: {note}", file=sys.stderr)
    return dataclasses.replace(cfg, model=find_model(cfg.model), dtype=dtype, mismatch_bound=bound,
                               rewards=spec)


def check_folder(out, name):
    """Raises ValueError unless a run may write into <out>/<name>. folder.claim_folder takes it later."""
    if name in (".", "..") or "/" in name or not name.isprintable() or len(os.fsencode(name)) > 200:
        raise ValueError(f"--name {name[:200]!r}: must be the plain name of a folder, created in --out")
    if not out.isprintable():
        raise ValueError(f"--out {out!r}: has a character that cannot be printed")
    folder = (Path(out) / name).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as e:
        raise ValueError(f"--out {out}: cannot write into {existing} ({e.strerror})") from e


def load_tokenizer(cfg):
    """The model's tokenizer; ValueError if model or tokenizer is missing, damaged or not supported."""
    from transformers import AutoTokenizer
    from transformers.utils import logging
    logging.set_verbosity_error()  # what is wrong is said here, in one line
    is_folder = Path(cfg.model).is_dir()
    is_folder or hub_answers()
    # A config.json is free text and a model may have its own code: any type of exception can come.
    try:
        model = empty_model(cfg.model, cfg.trust_remote_code)
    except Exception as e:
        if not is_folder:
            raise ValueError(f"--model {cfg.model}: no folder and not loadable from the hub "
                             f"({first_line(e, cfg.model)}); --model can be a local folder") from e
        final = Path(cfg.model) / "final"  # of a run
        hint = f"; --model {final} has one" if final.is_dir() else ""
        if "custom code" in str(e):
            hint = "; --trust_remote_code runs it"
        raise ValueError(f"--model {cfg.model}: no model can be built from its config.json "
                         f"({first_line(e)}){hint}") from e
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model, trust_remote_code=cfg.trust_remote_code)
        # without files, transformers makes an empty one
        fault = "" if tokenizer("1+1", add_special_tokens=False)["input_ids"] else "it has no tokens"
    except Exception as e:
        fault = first_line(e)
    if fault:
        raise ValueError(f"--model {cfg.model}: no tokenizer can be loaded from it ({fault}); "
                         "copy the tokenizer's files of the model it was made from")
    config = model.config.get_text_config()
    check_layers(cfg, config, model)
    check_heads(cfg, config)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):  # TokenLogps does not do that
            raise ValueError(f"--model {cfg.model} changes its logits by {name}, which is not supported")
    limit = getattr(config, "max_position_embeddings", math.inf)
    if cfg.max_prompt + cfg.max_tokens > limit:
        raise ValueError(f"--max_prompt {cfg.max_prompt} + --max_tokens {cfg.max_tokens} is more than "
                         f"the {limit} positions of {cfg.model}")
    check_weights(cfg)
    return tokenizer


def check_weights(cfg):
    """Raises ValueError unless the safetensors files have exactly the tensors of the model.

    Reads headers only. transformers would fill a missing tensor with random numbers, different at each load.
    """
    from huggingface_hub.utils import enable_progress_bars
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    enable_progress_bars()  # of a download
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # it would ask the hub to convert a .bin
    try:
        _, info = AutoModelForCausalLM.from_pretrained(
            cfg.model, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True,
            use_safetensors=True, trust_remote_code=cfg.trust_remote_code)
    except Exception as e:  # OSError, SafetensorError, and what the model's own code raises
        if any(Path(cfg.model).glob("*.bin")):
            raise ValueError(
                f"--model {cfg.model}: only safetensors weights are read, as a .bin file can run code; to "
                "convert one: transformers.AutoModelForCausalLM.from_pretrained(folder, "
                "use_safetensors=False).save_pretrained(folder)") from e
        raise ValueError(f"--model {cfg.model}: its weights cannot be read ({first_line(e)}); "
                         "a file is missing or damaged: copy or download it again") from e
    shapes = [f"{name} {list(stored)} instead of {list(wanted)}"
              for name, stored, wanted in info["mismatched_keys"]]
    for names, fault in ((info["missing_keys"], "lack tensors of the model"),
                         (shapes, "have other shapes than config.json says"),
                         (info["unexpected_keys"], "have tensors that the model lacks")):
        if names:
            raise ValueError(f"--model {cfg.model}: its weights {fault}: {', '.join(sorted(names)[:3])}"
                             + f" and {len(names) - 3} more" * (len(names) > 3))


def check_heads(cfg, config):
    """Raises ValueError unless vLLM can divide the attention heads of the model by --tp."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % cfg.tp or key_heads % cfg.tp and cfg.tp % key_heads:
        raise ValueError(f"--tp {cfg.tp}: {cfg.model} has {heads} attention heads and {key_heads} key heads; "
                         "--tp must divide the first number and divide, or be divisible by, the second")


def check_layers(cfg, config, model):
    """Raises ValueError unless packed_attention is all that connects the tokens of a row.

    transformers states it for each model: the types of its layers, whether it keeps a state, and whether it
    calls a registered attention function. guard.check_packing measures it later. See docs/models.md.
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
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    compressed = getattr(config, "kv_lora_rank", None)
    if compressed or getattr(config, "v_head_dim", head_size) != head_size:
        raise ValueError(f"--model {cfg.model}: the keys and values of {config.model_type} are "
                         "compressed or of different sizes (MLA): that is not supported")
    if head_size not in (range(8, 257, 8) if torch.cuda.is_available() else CPU_HEAD_SIZES):
        raise ValueError(f"--model {cfg.model}: attention heads of size {head_size} are not supported here")
    layers = config.num_hidden_layers
    if len(layer_types) > 1 and getattr(config, "max_window_layers", layers) != layers:
        raise ValueError(f"--model {cfg.model}: vLLM does not support a sliding window in some layers of "
                         f"{config.model_type} only")
    window = getattr(config, "sliding_window", None) if "sliding_attention" in layer_types else None
    if window and cfg.max_prompt + cfg.max_tokens > window:
        raise ValueError(f"--max_prompt {cfg.max_prompt} + --max_tokens {cfg.max_tokens} is more than the "
                         f"sliding window of {cfg.model}, {window} tokens: that is not supported")



def saved_config(argv, out):
    """The values of the run that --resume names, for the command line: (argv, {field: value}).

    --resume <folder or name> must exist. --resume alone continues the run --name or, if there is none,
    starts it: the same command works for the first start and after every interruption. Without --resume: {}.
    Raises ValueError with one line.
    """
    out, name, argv = given(argv, "--out", out), given(argv, "--name", ""), list(argv)
    alone = "--resume" in argv and (argv[argv.index("--resume") + 1:] or ["--"])[0].startswith("--")
    if alone:
        argv.remove("--resume")
    target = name if alone else given(argv, "--resume", None)
    if target is None:
        return argv, {}
    if not target:
        raise ValueError("--resume needs the folder of a run, or --name")
    places = [Path(out) / target] if alone else [Path(target), Path(out) / target]
    folder = next((place for place in places if (place / "config.json").exists()), None)
    if folder is None and alone:
        dist.print_once(f"note: there is no run {places[0]} yet: it starts")
        return argv, {}
    if folder is None:
        raise ValueError(f"--resume {target}: no folder of a run (it has a config.json) here or in {out}")
    if name and name != folder.resolve().name:
        raise ValueError(f"--name {name} and --resume {target} are two runs; leave --name out")
    try:
        about = json.loads((folder / "config.json").read_text())
        not_given = ("resume_force", "profile", *about.get("memory plan", ()))  # this device has its own plan
        saved = {name: value for name, value in about["config"].items() if name not in not_given}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{folder / 'config.json'} cannot be read ({e})") from None
    folder = folder.resolve()
    return argv, saved | {"name": folder.name, "out": str(folder.parent), "resume": str(folder)}


def check_resumed(cfg, saved):
    """Raises ValueError, naming the fields, if a resumed run would give other results than without the break.

    cfg: of this run. saved: of the run so far, {} for a new run. Returns cfg with the folder of the run.
    """
    fields = {f.name for f in dataclasses.fields(cfg)} & saved.keys()
    if Path(cfg.model).is_dir():
        fields.discard("model")  # by its weights: _check_inputs
    changed = {name for name in fields - FREE if getattr(cfg, name) != saved[name]}
    if "steps" in changed and (cfg.lr_end == 1 and cfg.steps > saved["steps"]):
        changed.remove("steps")
    if rounding := sorted(changed & ROUNDING):
        dist.print_once(f"note: other {', '.join(rounding)}: from here the run is equal only up to rounding")
    values = {name: [shorten(str(x), 200) for x in (getattr(cfg, name), saved[name])] for name in changed}
    texts = [f"--{name} {values[name][0]} (was {values[name][1]})" for name in sorted(changed - ROUNDING)]
    if "steps" in changed:
        texts.append("the learning rate depends on --steps unless --lr_end is 1"
                     if cfg.steps > saved["steps"] else "--steps may only grow")
    if texts and not cfg.resume_force:
        raise ValueError(f"--resume {cfg.resume}: other results with {'; '.join(texts)}. "
                         "--resume_force continues nevertheless")
    return dataclasses.replace(cfg, **{name: saved[name] for name in ("name", "out", "resume") if saved})
