"""The folder of a run: which one it is, one process at a time, and whether a run may continue in it."""
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from runtime import dist

# Fields of Config in which a resumed run may differ: they change no result ...
FREE = {"name", "out", "resume", "resume_force", "save_every", "keep", "timeout", "wandb", "data",
        "eval_data"}  # the examples themselves are compared: _check_inputs
# ... or only how it is rounded
ROUNDING = {"zero_stage", "pack_tokens", "checkpointing", "offload", "vllm_memory",
            "memory_gb", "tp"}
_lock = None  # the open file whose lock this process holds


def to_json(about):
    """JSON for a file of the run, without passwords in URLs."""
    return re.sub(r"(?<=://)[^/@\s\"]+@", "***@", json.dumps(about, indent=1))


def is_writable(folder):
    """Whether files can be written into a folder (a Path), which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def sync(path):
    """Returns when a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def steps_on_disk(folder):
    """The checkpoints of a run, oldest first."""
    paths = [path for path in Path(folder).glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(paths, key=step_of)


def step_of(path):
    """The step of a checkpoint, from the name of its folder."""
    return int(path.name.removeprefix("step-"))


def claim_folder(cfg, examples=()):
    """Takes the folder of the run for this process, until it ends. Returns cfg with the name. Collective.

    A run without --name takes the first free name. Raises ValueError if another process runs in the folder,
    if it holds a run that cfg does not resume, or if that run had other examples.
    """
    start = time.strftime("%Y%m%d-%H%M%S")
    base = name = cfg.name or f"{Path(cfg.model).name}-{cfg.task}-{cfg.algo}-{start}"
    problem, n = "", 1
    if dist.rank() == 0:
        while (problem := _lock_folder(Path(cfg.out) / name, cfg.resume)) and not cfg.name and n < 100:
            name, n = f"{base}-{n}", n + 1
        problem = problem or _check_inputs(Path(cfg.out) / name / "inputs.sha256", cfg, examples)
    name, problem = dist.all_gather([(name, problem)])[0]
    if problem:
        raise ValueError(problem)
    return dataclasses.replace(cfg, name=name)


def _check_inputs(path, cfg, examples):
    """Keeps a checksum of examples and model in a file, or returns that a resumed run has others.

    All bytes of the starting weights count: 0.7 s per GiB on a processor with SHA instructions.
    """
    from transformers.utils import cached_file
    checksum = hashlib.sha256(repr([sorted(e.items(), key=str) for e in examples]).encode())
    folder = Path(cached_file(cfg.model, "config.json")).parent  # of a hub id: in the local cache
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with file.open("rb") as f:
            checksum.update(hashlib.file_digest(f, "sha256").digest())
    checksum = checksum.hexdigest()
    is_same = path.exists() and path.read_bytes() == checksum.encode()
    if cfg.resume and not is_same and not cfg.resume_force:
        why = "have changed since it started"
        if not path.exists():
            why = f"cannot be compared: {path} is missing"
        return (f"--resume {cfg.resume}: its data, tokenizer or --model {why}. "
                "--resume_force continues nevertheless")
    path.write_text(checksum)
    return ""


def _lock_folder(folder, resume):
    """Takes the lock of a folder, or returns why not. The system releases it when the process ends."""
    global _lock
    _lock = None  # closes the file of an earlier run in this process
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"{folder}: another process is running there; choose another --name"
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            return f"--out: {folder} cannot be used ({e.strerror})"
        print(f"note: the file system of {folder} has no locks: start no second run there", file=sys.stderr)
    if not resume and ((folder / "metrics.jsonl").exists() or steps_on_disk(folder)):
        return f"{folder} holds a run already; choose another --name, or continue it: --resume {folder}"
    _lock = lock
    return ""
