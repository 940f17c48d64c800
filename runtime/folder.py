"""The folder of a run: its name, one process at a time, and whether a run may continue in it."""
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from textwrap import shorten

from runtime import dist

_held = []  # the open file whose lock this process holds


def to_json(about):
    """JSON for a file of the run, without passwords in URLs."""
    return re.sub(r"(?<=://)[^/@\s\"]+@", "***@", json.dumps(about, indent=1))


def sync(path):
    """Returns when a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(path):
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# Flags that may differ in a resumed run: they change no result (the data is compared below) ...
FREE = {"name", "out", "resume", "resume_force", "save_every", "keep", "timeout", "wandb", "data",
        "eval_data"}
ROUNDING = {"zero_stage", "pack_tokens", "checkpointing", "offload", "vllm_memory",
            "memory_gb", "tp"}  # ... or only how it is rounded


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
                         "--resume_force continues nevertheless")
    return dataclasses.replace(cfg, name=saved["name"], out=saved["out"], resume=saved["resume"])


def claim_folder(cfg, examples=()):
    """Takes the folder of the run, until this process ends. Returns cfg with its name. Collective.

    Raises ValueError if another process runs in the folder, if it holds a run that cfg does not
    resume, or if that run had other data.
    """
    start = time.strftime("%Y%m%d-%H%M%S")
    name, problem = cfg.name or f"{Path(cfg.model).name}-{cfg.task}-{cfg.algo}-{start}", ""
    if dist.rank() == 0:
        folder = Path(cfg.out) / name
        problem = _lock(folder, cfg.resume) or _check_inputs(folder, cfg, examples)
    name, problem = dist.all_gather([(name, problem)])[0]
    if problem:
        raise ValueError(problem)
    return dataclasses.replace(cfg, name=name)


def _lock(folder, resume):
    """Takes the lock of a folder until this process ends, or returns why not."""
    _held.clear()  # closes the file of an earlier run in this process
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"{folder}: another process is running there; choose another --name"
    except OSError as e:
        print(f"note: {folder} cannot be locked ({e}): start no second run there", file=sys.stderr)
    if not resume and ((folder / "metrics.jsonl").exists() or list(folder.glob("step-*"))):
        return f"{folder} holds a run; choose another --name, or continue it: --resume {folder}"
    _held.append(lock)
    return ""


def _check_inputs(folder, cfg, examples):
    """Keeps a checksum of data and starting weights, or returns that a resumed run has others."""
    from transformers.utils import cached_file
    path = folder / "inputs.sha256"
    checksum = hashlib.sha256(repr([sorted(e.items(), key=str) for e in examples]).encode())
    model = Path(cached_file(cfg.model, "config.json")).parent  # of a hub id: in the local cache
    for file in [model / "config.json", *sorted(model.glob("*.safetensors"))]:
        checksum.update(bytes.fromhex(sha256(file)))
    before = path.read_text(errors="replace") if path.exists() else ""
    if cfg.resume and not cfg.resume_force and before != checksum.hexdigest():
        return (f"--resume {cfg.resume}: its data, tokenizer or --model have changed, or "
                f"{path.name} is missing; --resume_force continues nevertheless")
    path.write_text(checksum.hexdigest())
    return ""
