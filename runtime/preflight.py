"""Checks of flags, machine and model before weights are loaded. Each raises ValueError with one line."""
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from textwrap import shorten
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from runtime import cli, dist, evaluation
from runtime.flops import empty_model
from runtime.folder import check_resumed, is_writable, saved_config

REPOSITORY = Path(__file__).resolve().parents[1]
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
                 "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}

# (interval, flags, reason). "(" and ")" exclude an end. All intervals are finite: inf and nan are in none.
RANGES = (
    ("[0, 1e9]", "steps warmup ref_reset_every top_k save_every keep_rollouts pack_tokens kl_coef clip_high "
                 "squared_tau delta weight_decay max_grad_norm memory_gb mismatch_bound", ""),
    ("[1, 1e9]", "max_prompt max_tokens eval_every correction_cap keep", ""),
    ("(0, 1e6]", "soft_tau_pos soft_tau_neg reward_timeout timeout", ""),
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
    ("(0, 1e6]", "eps", "the standard deviation of a flat group is 0"),
)
# (flags, test of (config, {name of a reward: weight}), requirement): without it the flags have no
# effect. flag=value: only with this value.
NEEDS = (
    ("question_key answer_key", lambda cfg, _: cfg.data or cfg.eval_data, "--data or --eval_data"),
    ("delta clip_low", lambda cfg, _: cfg.gate == "clip", "--gate clip"),
    ("clip_high", lambda cfg, _: cfg.gate in ("clip", "detach"), "--gate clip or detach"),
    ("squared_tau", lambda cfg, _: cfg.gate == "squared", "--gate squared"),
    ("kl_in", lambda cfg, _: cfg.kl_coef, "--kl_coef above 0"),
    ("overlong", lambda cfg, names: cfg.overlong_buffer or "overlong" in names, "--overlong_buffer"),
    ("soft_tau_pos soft_tau_neg", lambda cfg, _: cfg.gate == "soft", "--gate soft"),
    ("ref_reset_every", lambda cfg, _: cfg.kl_coef, "a reference model: --kl_coef above 0"),
    ("eps", lambda cfg, _: cfg.scale != "none" or cfg.decorrelate_length, "--scale group, batch or mean"),
    ("correction_cap", lambda cfg, _: cfg.correction != "none", "a --correction"),
    # rows of files and hub sets may name these rewards
    ("judge_url judge_model", lambda cfg, names: cfg.data or cfg.eval_data or "judge" in names,
     "--rewards judge"),
    ("allow_unsafe_code", lambda cfg, names: cfg.data or cfg.eval_data or "code" in names, "--rewards code"),
    ("eval_select", lambda cfg, _: cfg.eval_n, "--eval_n, whose samples it selects from"),
    ("vllm_memory", lambda *_: torch.cuda.is_available(), "a GPU"),
    ("rewards", lambda cfg, weights: cfg.data or any(weights.values()), "a weight other than 0"),
    # On-policy, pi/pi_old is 1: no bound is reached, the slope of the soft gate is 1, and that of the
    # squared gate's penalty is 0. --ratio product still sums over a sequence. --ratio sequence still
    # averages what differs within a sequence: rewards per step, and the correction, which is near 1.
    ("ratio=sequence gate clip_low clip_high delta soft_tau_pos soft_tau_neg squared_tau",
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


def parse(config, algos, models, argv, check, description):
    """argv -> check(config(...)). Defaults: those of `config`, the row of --model in `models`, the run that
    --resume continues, the row of --algo in `algos`; the later one counts.

    Raises ValueError with one line for a bad value; exits with the usage for an unknown flag.
    """
    argv, saved = saved_config(argv, config.out)
    algo = cli.given(argv, "--algo", saved.get("algo", config.algo))
    model = cli.given(argv, "--model", saved.get("model", config.model))
    if algo not in algos:
        raise ValueError(f"--algo {algo}: choose one of {', '.join(algos)}")
    row = model_row(model, models)  # of a trained model: what its run used
    defaults = row | saved | {"algo": algo, "model": model}
    defaults |= algos[algo] if algo != saved.get("algo") else {}
    cfg = check(cli.parse(config, argv, defaults, description))
    if not saved and cfg.template != row.get("template", cfg.template):
        dist.print_once(f"note: --template {shorten(cfg.template, 200)}, but {model} was trained with "
                        f"--template {shorten(row['template'], 200)}", file=sys.stderr)
    return check_resumed(cfg, saved)


def check(cfg, tasks, parse_spec):
    """Checks a Config, resolves its model, and fills in dtype, rewards and mismatch_bound if empty.

    tasks: data.TASKS. parse_spec: called with the reward spec, raises ValueError if it is invalid.
    Returns the completed Config; raises ValueError for what cannot work. Prints a note to stderr for each
    flag that differs from its default and has no effect.
    """
    for name, hint in get_type_hints(type(cfg)).items():
        value, choices = getattr(cfg, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise ValueError(f"--{name} {value}: choose one of {', '.join(map(str, choices))}")
        if hint in (int, float):
            check_range(name, value)

    ranks, cut_sampling = dist.world_size(), (cfg.top_p, cfg.top_k) != (1.0, 0)
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
        (cfg.compile == "on" and cfg.zero_stage == 3,
         "--compile on needs --zero_stage 1 or 2: stage 3 replaces the weights of a layer at each call"),
        (cfg.lora_rank and cfg.ref_reset_every,
         "--ref_reset_every needs a separate reference; with --lora_rank it is the model without adapters"),
        (cut_sampling and (cfg.correction, cfg.temperature) != ("none", 1.0),
         "--top_p and --top_k sample from a truncated distribution, whose log-probs the trainer cannot "
         "compute: the importance correction would be wrong; "
         "use --correction none --temperature 1 with them"),
        (cfg.delta != 0 and not cfg.delta > 1 + cfg.clip_high,
         f"--delta {cfg.delta:g}: must be above 1 + clip_high = {1 + cfg.clip_high:g}, or 0 for off"),
        (cfg.resample and not cfg.drop_flat_groups,
         "--resample draws new prompts for dropped groups: it needs --drop_flat_groups"),
    ):
        if invalid:
            raise ValueError(message)

    spec = cfg.rewards or tasks[cfg.task]["rewards"]
    rewards = weights_of("rewards", spec, parse_spec)
    if cfg.overlong_buffer and "overlong" not in rewards:
        spec, rewards["overlong"] = f"{spec},overlong:1", 1.0
    if cfg.eval_select:
        selector = weights_of("eval_select", cfg.eval_select, parse_spec)
        rewards = dict.fromkeys(selector, 0.0) | rewards
    evaluation.token_budgets(cfg.eval_budget)
    cuda = torch.cuda.is_available()
    dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32"
    need_gpu(dtype)
    need_compiler(cpu_operators=not cuda or cfg.offload == "optimizer")
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
        if found and not has_effect(cfg, rewards):
            named |= found.keys()
            verb = "has" if len(found) == 1 else "have"
            notes.append(f"{', '.join(found.values())} {verb} no effect without {requirement}")
    for note in notes:
        dist.print_once(f"note: {note}", file=sys.stderr)
    return dataclasses.replace(cfg, model=find_model(cfg.model), dtype=dtype, mismatch_bound=bound,
                               rewards=spec)


def weights_of(flag, spec, parse_spec):
    """{name of a reward: its weight} of a spec. Raises ValueError with the flag that has it."""
    try:
        return {name: weight for name, weight, _ in parse_spec(spec)}
    except ValueError as e:
        raise ValueError(f"--{flag} {spec}: {e}") from None


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


def need_gpu(dtype):
    """Raises ValueError if PyTorch was installed for a GPU that it cannot use or that has no bfloat16."""
    if torch.version.cuda and not torch.cuda.is_available():  # without this, it would run on the CPU
        raise ValueError(f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no "
                         "usable GPU: nvidia-smi must show one, with driver 580 or newer; to run on the CPU: "
                         "pip install -r requirements-cpu.txt, in a new environment")
    if dtype == "bfloat16" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(dist.device())
        if major < 8:
            raise ValueError(f"--dtype bfloat16 needs a GPU of compute capability 8.0 or higher, this one "
                             f"has {major}.{minor}: use --dtype float32")


def need_compiler(cpu_operators=True):
    """Raises ValueError if DeepSpeed could not compile its CPU operators at their first use, or Triton, on a
    GPU, what starts its kernels."""
    if torch.cuda.is_available() and not os.environ.get("CC", shutil.which("gcc") or shutil.which("clang")):
        raise ValueError("Triton needs a C compiler on a GPU (apt-get install gcc)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise ValueError(f"{header} is missing, which compilers need (apt-get install python3-dev)")
    if not cpu_operators:
        return
    from torch.utils.cpp_extension import get_default_build_root
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # pip installs ninja there
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if not shutil.which(tool):
            raise ValueError(f"DeepSpeed needs '{tool}' to compile its CPU operators "
                             "(apt-get install g++ ninja-build)")
    build_root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not is_writable(build_root):
        raise ValueError(f"DeepSpeed compiles its CPU operators in {build_root}, which cannot be written: "
                         "set HOME, or TORCH_EXTENSIONS_DIR, to a folder of yours")
    for lock in build_root.rglob("lock"):  # left by a run that was killed while it compiled
        dist.print_once(f"note: DeepSpeed will wait for {lock} to be removed: delete it, "
                        "unless another run is just starting", file=sys.stderr)


@functools.cache
def hub_answers():
    """Whether the Hugging Face hub can be reached; if not, its libraries use their local cache from now on.

    Without this, each of them would try again and again, for half a minute and a dozen lines.
    """
    from huggingface_hub import constants, get_session
    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask():
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=3))
        except Exception:  # of httpx, of requests or of a proxy's client: all mean "not reached"
            return

    thread = threading.Thread(target=ask, daemon=True)  # a look-up of the name has no time limit of its own
    thread.start()
    thread.join(3)
    if not answers:
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    return bool(answers)


def first_line(error, name=""):
    """What failed in a library, in one line. `name`: the model or data set that the hub was asked for."""
    if name and not hub_answers():
        from huggingface_hub import constants
        return (f"{constants.ENDPOINT} is not reachable or HF_HUB_OFFLINE is set, and {name} is not in the "
                "local cache")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"


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
