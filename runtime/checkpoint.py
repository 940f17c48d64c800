"""Checkpoints: the policy as a Hugging Face folder, and what the run needs to continue bit for bit.

    step-40/                   the weights before the update of step 40, for transformers and vLLM
        nano_rlvr.json         the settings of the run
        trainer/*.safetensors  a file per trained parameter: fp32 weights and AdamW's two moments
        trainer/state.json     progress of the loop, sizes of the logs
        manifest.json          SHA-256 of every other file
    final/                     the last checkpoint, without trainer/

A folder is written under another name, synced to the disk and renamed: it is there whole or not.
"""
import dataclasses
import fcntl
import hashlib
import json
import math
import shutil
import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from runtime import memory, ranks, trainer
from runtime.memory import ModelShape
from runtime.messages import RunError, first_line
from runtime.records import replaced, series, sha256, sync_file

_held = []  # the open file whose lock this process holds


@dataclasses.dataclass
class Progress:
    """What the loop carries from step to step besides the weights and AdamW's state."""
    step: int = 0  # the one to take next
    running_mean: float = math.nan  # moving average of the reward, for --baseline running
    skipped: int = 0  # optimizer steps in a row that were not taken: see stop.py


class Checkpoints:
    """Reads and writes the checkpoints of a run. Its methods are collective; rank 0 writes.

    A resumed run continues from the newest whole one: the logs are cut back to its step. Raises
    ValueError if all are damaged, if a log is, or if the disk has no room."""

    def __init__(self, cfg, log):
        self.cfg = cfg
        self.log = log
        self.folder = log.folder
        self.progress = Progress()
        self.newest = None  # the folder of the newest whole checkpoint
        self.state = {"logs": {}}  # the content of its state.json
        if ranks.rank() == 0:
            for path in self.folder.glob("*.part"):  # of a run that was killed while it wrote
                shutil.rmtree(path, ignore_errors=True)
            needed = memory.checkpoint_bytes(cfg, ModelShape.of(cfg.model))
            free = shutil.disk_usage(self.folder).free
            if cfg.steps and cfg.save_every >= 0 and free < needed:
                raise ValueError(
                    f"a checkpoint needs {needed / 2**30:.2f} GiB, the disk of {self.folder} has "
                    f"{free / 2**30:.2f}: make room or choose another --out")
            if cfg.resume:
                self.newest = newest_whole(self.folder)
        self.newest = ranks.all_gather([self.newest])[0]
        if self.newest:
            self.state = json.loads((self.newest / "trainer/state.json").read_text())
            self.progress = Progress(**self.state["progress"])
        log.cut_back(self.state["logs"])

    def restore(self, engine):
        """Loads the newest checkpoint into policy and AdamW. Returns the progress of the run."""
        self.engine = engine
        if self.newest:
            for name, p in trainer.trained_parameters(engine).items():
                tensors = load_file(self.newest / f"trainer/{name}.safetensors")
                for kind in trainer.KINDS:
                    trainer.set_tensor(p, kind, tensors[kind].to(ranks.device()))
            for s in trainer.adamw_states(engine):
                s["step"] = s["step"] * 0 + self.state["adamw_step"]  # on a CPU it may be an int
            ranks.print_once(f"continues from {self.newest}")
        return self.progress

    def save(self, final=False):
        """Writes step-<progress.step> unless it is there; deletes all but the newest --keep and the
        most accurate. final: then copies it to final/. Nothing at step 0 or with --save_every -1.
        Raises RunError if a weight is not finite or a write fails, as on a full disk."""
        if self.progress.step == 0 or self.cfg.save_every < 0:
            return
        folder = self.folder / f"step-{self.progress.step}"
        if folder != self.newest:
            weights = {}
            for name, w in trainer.named_weights(self.engine):
                if not is_finite(w):
                    raise RunError(
                        f"weights of {name} are not finite: nothing was saved; is --lr too high?")
                if ranks.rank() == 0:
                    weights[name] = w.to("cpu", copy=True)
            states = self._states()
            self._write(folder, lambda part: self._fill(part, weights, states), states)
            self.newest = folder
            if ranks.rank() == 0:
                self._delete_old()
        if final:
            ignore = shutil.ignore_patterns("trainer", "manifest.json")
            self._write(self.folder / "final",
                        lambda part: shutil.copytree(folder, part, ignore=ignore))

    def _write(self, folder, make, states=()):
        """Rank 0 calls make(part); the folder `part` becomes `folder`. RunError if that fails.
        states: a generator whose tensors all ranks gather while rank 0 writes."""
        problem = ""
        cause = None
        try:
            if ranks.rank() == 0:
                with replaced(folder) as part:
                    make(part)
                    for path in (part, *part.rglob("*")):
                        sync_file(path)
                    shutil.rmtree(folder, ignore_errors=True)  # final/, if there are more steps now
                sync_file(folder.parent)
        except Exception as e:  # transformers, safetensors and the file system have their own types
            problem = f"{folder} could not be written ({first_line(e)}); older ones are whole"
            cause = e
        for _ in states:  # on ranks that do not write, and after a failed write
            pass
        problem = max(ranks.all_gather([problem]))  # of one of the ranks
        if problem:
            raise RunError(problem) from cause

    def _fill(self, part, weights, states):
        """Writes the files of a checkpoint into the folder `part`."""
        (part / "trainer").mkdir(parents=True)
        self.engine.module.model.save_pretrained(
            part, state_dict=weights, save_original_format=False)  # they have that format
        self.log.tokenizer.save_pretrained(part)
        settings = json.dumps({"config": dataclasses.asdict(self.cfg)}, indent=1)
        (part / "nano_rlvr.json").write_text(settings)
        for name, tensors in states:
            path = part / f"trainer/{name}.safetensors"
            save_file(tensors, path)
            sync_file(path)  # now: the other ranks wait for each tensor
        state = {
            "progress": dataclasses.asdict(self.progress),
            "logs": self.log.sizes(),
            "adamw_step": max(int(s["step"]) for s in trainer.adamw_states(self.engine)),
        }
        (part / "trainer/state.json").write_text(json.dumps(state))
        manifest = {}
        for path in part.rglob("*"):
            if path.is_file():
                manifest[str(path.relative_to(part))] = sha256(path)
        (part / "manifest.json").write_text(json.dumps(manifest, indent=1))

    def _states(self):
        """Yields (name, {kind: tensor on the CPU}) of the trained parameters."""
        for name, p in trainer.trained_parameters(self.engine).items():
            tensors = {}
            for kind in trainer.KINDS:
                tensors[kind] = trainer.get_tensor(p, kind).to("cpu", copy=True)
            yield name, tensors

    def _delete_old(self):
        """Deletes all checkpoints but the newest --keep and the first of the most accurate."""
        paths = on_disk(self.folder)
        accuracy = series(self.log.rows, "eval/accuracy")  # by step
        evaluated = [step for step in paths if step in accuracy]
        best = max(evaluated, key=accuracy.get, default=None)
        for step in list(paths)[:-self.cfg.keep]:
            if step != best:
                shutil.rmtree(paths[step], ignore_errors=True)


# ---- files

def is_finite(weight):
    """Whether all numbers are finite. The sum, which is tried first, needs no memory."""
    return weight.sum().isfinite() or weight.isfinite().all()


def on_disk(folder):
    """{step: folder} of the checkpoints of a run, oldest first. A folder step-007 is none."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-[1-9]*")]
    steps = sorted(int(name) for name in names if name.isdecimal())
    return {step: folder / f"step-{step}" for step in steps}


def damage(folder):
    """What is wrong with a checkpoint: "" if nothing."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in {"trainer/state.json", *manifest}:  # it may be {}
            if sha256(folder / name) != manifest.get(name):
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def newest_whole(folder):
    """The newest whole checkpoint, None if there is none. Newer ones are renamed to .damaged."""
    damaged = []
    for path in reversed(on_disk(folder).values()):
        problem = damage(path)
        if not problem:
            for newer in damaged:  # no longer one of the newest to keep
                shutil.rmtree(f"{newer}.damaged", ignore_errors=True)  # of an earlier time
                newer.rename(f"{newer}.damaged")
            return path
        damaged.append(path)
        ranks.note(f"{path} is damaged ({problem}); looking for an older one")
    if damaged:
        raise ValueError(
            f"all checkpoints in {folder} are damaged; move them away to start from step 0")


# ---- the folder of a run

def claim_folder(cfg, examples=()):
    """Takes the folder of the run, until this process ends. Returns cfg with its name. Collective.

    Raises ValueError if another process runs in the folder, if it holds a run that cfg does not
    resume, or if that run had other data."""
    start = time.strftime("%Y%m%d-%H%M%S")
    name = cfg.name or f"{Path(cfg.model).name}-{cfg.task}-{cfg.algo}-{start}"
    folder = Path(cfg.out) / name
    if ranks.rank() == 0:
        _lock(folder, cfg.resume)
        _check_inputs(folder, cfg, examples)
    return dataclasses.replace(cfg, name=ranks.all_gather([name])[0])


def _lock(folder, resume):
    """Takes the lock of a folder until this process ends."""
    _held.clear()  # closes the file of an earlier run in this process
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{folder}: another process is running there; choose another --name") from None
    except OSError as e:
        ranks.note(f"{folder} cannot be locked ({e}): start no second run there")
    if not resume and ((folder / "metrics.jsonl").exists() or list(folder.glob("step-*"))):
        raise ValueError(
            f"{folder} holds a run; choose another --name, or continue it: --resume {folder}")
    _held.append(lock)


def _check_inputs(folder, cfg, examples):
    """Keeps a checksum of data and starting weights, which a resumed run must have, too."""
    from transformers.utils import cached_file
    path = folder / "inputs.sha256"
    rows = [sorted(example.items(), key=str) for example in examples]
    # of an image only its type: its text would name an address, another one in the next process
    text = json.dumps(rows, default=lambda value: type(value).__name__)
    checksum = hashlib.sha256(text.encode())
    model = Path(cached_file(cfg.model, "config.json")).parent  # of a hub id: in the local cache
    for file in [model / "config.json", *sorted(model.glob("*.safetensors"))]:
        checksum.update(bytes.fromhex(sha256(file)))
    before = path.read_text(errors="replace") if path.exists() else ""
    if cfg.resume and not cfg.resume_force and before != checksum.hexdigest():
        raise ValueError(f"--resume {cfg.resume}: its data, tokenizer or --model have changed, or "
                         f"{path.name} is missing; --resume_force continues nevertheless")
    with replaced(path) as part:
        part.write_text(checksum.hexdigest())
