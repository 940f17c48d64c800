"""Checkpoints: the policy as a Hugging Face folder, and beside it what the run needs to continue bit for bit.

    step-40/                   the weights before the update of step 40, for transformers and vLLM
        nano_rlvr.json         the settings of the run
        trainer/*.safetensors  fp32 weights and AdamW's two moments, by the name of the parameter
        trainer/state.json     progress of the loop, sizes of the logs
        manifest.json          size and SHA-256 of every other file

A folder is written under another name, synced to the disk and renamed: it is there whole or not at all.
"""
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime import dist, memory
from runtime.dist import RunError
from runtime.folder import step_of, steps_on_disk, sync, to_json
from runtime.shape import ModelShape
from runtime.trainer import (
    KINDS, adamw_states, get_tensor, named_weights, set_tensor, trained_parameters)

SHARD = 2**30  # bytes of a file in trainer/, unless one tensor is larger


@dataclasses.dataclass
class Progress:
    """What the loop carries from step to step besides the weights and AdamW's state."""
    step: int = 0  # the one to take next
    running_mean: float = math.nan  # moving average of the reward, for --baseline running
    skipped: int = 0  # optimizer steps in a row that were not taken: guard.py


class Checkpoints:
    """Reads and writes the checkpoints of a run. Its methods are collective.

    Rank 0 writes: in the background if a copy of the state fits into half of the free host memory, else
    tensor by tensor while the loop waits. Raises ValueError if the disk has no room for one checkpoint, or if
    the run has checkpoints and all are damaged.
    """

    def __init__(self, cfg, log):
        self.cfg, self.log, self.folder = cfg, log, log.folder
        self.bytes = memory.checkpoint_bytes(cfg, ModelShape.of(cfg.model))
        self.executor, self.pending = ThreadPoolExecutor(1), None  # the write in progress, or the last one
        if dist.rank() == 0:
            self.pending = self.executor.submit(self._prepare)
        self.newest, problem = dist.all_gather([self._result()])[0]
        self.pending = None
        if problem:
            raise ValueError(problem)

    def _prepare(self):
        """On rank 0 -> (newest undamaged checkpoint or None, "" or what is wrong)."""
        for path in self.folder.glob("*.part"):  # of a run that was killed while it wrote
            shutil.rmtree(path, ignore_errors=True)
        try:
            newest = newest_whole(self.folder) if self.cfg.resume else None
            if newest:
                check_logs(self.folder, read_state(newest)[1])
        except ValueError as e:
            return None, str(e)
        for path in steps_on_disk(self.folder):
            if newest and step_of(path) > step_of(newest):  # damaged: no longer one of the newest to keep
                path.rename(path.with_name(path.name + ".damaged"))
        return newest, self._lacks_space() if self.cfg.steps and newest is None else ""

    def _lacks_space(self):
        free = shutil.disk_usage(self.folder).free
        return "" if free >= self.bytes else (
            f"a checkpoint needs {self.bytes / 2**30:.2f} GiB, the disk of {self.folder} has "
            f"{free / 2**30:.2f}: make room or choose another --out")

    def _result(self):
        """What the background task returned, on rank 0. Short collective calls, so that no rank times out."""
        while any(dist.all_gather([bool(self.pending and not self.pending.done())])):
            time.sleep(0.05)
        return self.pending and self.pending.result()

    def restore(self, engine):
        """Loads the newest checkpoint into policy and AdamW, and cuts the logs back to its step.

        Returns its Progress, or that of a new run. Raises RunError if it belongs to another model.
        """
        self.engine, self.progress = engine, Progress()
        if self.newest is None:
            if self.cfg.resume:
                dist.print_once(f"note: {self.folder} has no checkpoint: the run starts at step 0")
            self.log.cut_back({})
            return self.progress
        self.progress, logs, adamw_step = read_state(self.newest)
        parameters = trained_parameters(engine)
        expected = {f"{kind}.{name}": getattr(p, "ds_shape", p.shape)
                    for name, p in parameters.items() for kind in KINDS}
        # of the files in the folder only those whose checksums were compared
        files = [safe_open(self.newest / name) for name in read_manifest(self.newest)
                 if name.startswith("trainer/") and name.endswith(".safetensors")]
        found = {name: torch.Size(f.get_slice(name).get_shape()) for f in files for name in f.keys()}
        if found != expected:
            different = sorted(name for name in found | expected if found.get(name) != expected.get(name))
            raise RunError(f"{self.newest} is a checkpoint of another model than {self.cfg.model}: "
                           f"{len(different)} tensors differ, one is {different[0]}")
        for f in files:
            for key in f.keys():
                kind, _, name = key.partition(".")
                set_tensor(parameters[name], kind, f.get_tensor(key).to(dist.device()))
        for s in adamw_states(engine):
            s["step"] = s["step"] * 0 + adamw_step  # a tensor, or an int in DeepSpeed's CPU version
        self.log.cut_back(logs)
        dist.print_once(f"continues from {self.newest}")
        return self.progress

    def save(self, final=False):
        """Writes step-<progress.step>; then deletes old ones, except the newest --keep and the most accurate.

        final: final/ gets the same weights, without trainer/. A checkpoint that is there is not written
        again. Raises RunError if the disk has too little space, if a weight is not finite, or if the previous
        write failed.
        """
        self.wait()
        folder = self.folder / f"step-{self.progress.step}"
        last = [(write_final, self.folder / "final.part", folder)] if final else []
        if self.progress.step == 0:
            return
        if folder == self.newest:
            if dist.rank() == 0:
                self.pending = self.executor.submit(attempt, *last)
            return
        self._raise_together(self._lacks_space() if dist.rank() == 0 else "")
        weights = {}
        for name, w in named_weights(self.engine):
            if not w.sum().isfinite() and not w.isfinite().all():  # the sum needs no memory
                raise RunError(f"weights of {name} are not finite: nothing was saved; is --lr too high?")
            if dist.rank() == 0:
                weights[name] = w.to("cpu", copy=True)
        state = {"progress": dataclasses.asdict(self.progress), "logs": self.log.sizes(),
                 "adamw_step": max(int(s["step"]) for s in adamw_states(self.engine))}
        part, tensors = self.folder / f"{folder.name}.part", self._tensors()
        finish, problem = (self._finish, part, folder, state), ""
        if dist.rank() == 0:
            if memory.free_host_bytes() > 2 * self.bytes:
                tensors = list(tensors)
                self.pending = self.executor.submit(
                    attempt, (self._write, part, weights, tensors), finish, *last)
            elif not (problem := attempt((self._write, part, weights, tensors))):
                self.pending = self.executor.submit(attempt, finish, *last)
        for _ in tensors:  # a gather per tensor: also on ranks that do not write, also after a failed write
            pass
        self._raise_together(problem)
        self.newest = folder

    def check(self):
        """Raises RunError if the write in the background has failed."""
        self._raise_together(self.pending.result() if self.pending and self.pending.done() else "")

    def wait(self):
        """Returns when the last checkpoint is on the disk. Raises RunError if that failed."""
        self._raise_together(self._result())

    def _raise_together(self, problem):
        problems = [p for p in dist.all_gather([problem]) if p]
        if problems:
            raise RunError(problems[0])

    def _tensors(self):
        """Yields (name, tensor on the CPU) of the trainer's state."""
        for name, p in trained_parameters(self.engine).items():
            for kind in KINDS:
                yield f"{kind}.{name}", get_tensor(p, kind).to("cpu", copy=True)

    def _write(self, part, weights, tensors):
        shutil.rmtree(part, ignore_errors=True)
        (part / "trainer").mkdir(parents=True)
        self.engine.module.model.save_pretrained(part, state_dict=weights)
        self.log.tokenizer.save_pretrained(part)
        (part / "nano_rlvr.json").write_text(to_json({"config": dataclasses.asdict(self.cfg)}))
        for i, shard in enumerate(shards(tensors)):
            save_file(shard, part / f"trainer/{i:05}.safetensors")

    def _finish(self, part, folder, state):
        (part / "trainer/state.json").write_text(json.dumps(state))
        files = sorted(path for path in part.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(part)): size_and_sum(path) for path in files}
        (part / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in (part / "manifest.json", *files, part / "trainer", part):
            sync(path)
        replace(part, folder)
        for path in expired(self.folder, self.cfg.keep, self.log.rows):
            shutil.rmtree(path, ignore_errors=True)


def attempt(*writes):
    """Calls each (function, part, arguments ...) -> "" or, in one line, why one failed.

    part: the folder that it writes to, and renames at the end.
    """
    for function, part, *arguments in writes:
        try:
            function(part, *arguments)
        except Exception as e:  # transformers, safetensors and the file system have types of their own
            shutil.rmtree(part, ignore_errors=True)
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            return f"{part.with_suffix('')} could not be written ({reason}); older checkpoints are whole"
    return ""


# ---- files


def safe_open(path):
    """A safetensors file, memory-mapped."""
    import safetensors
    return safetensors.safe_open(path, "pt")


def save_file(tensors, path):
    """{name: tensor} -> a safetensors file."""
    from safetensors.torch import save_file
    save_file(tensors, path)


def shards(tensors):
    """(name, tensor) pairs -> dicts of about SHARD bytes."""
    shard = {}
    for name, tensor in tensors:
        shard[name] = tensor
        if sum(x.nbytes for x in shard.values()) >= SHARD:
            yield shard
            shard = {}
    if shard:
        yield shard


def size_and_sum(path):
    """[bytes, SHA-256] of a file."""
    with path.open("rb") as f:
        return [path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]


def replace(part, folder):
    """Renames a complete folder. One that has the name already is deleted afterwards."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_final(part, checkpoint):
    """Writes final/: a checkpoint without trainer/."""
    shutil.rmtree(part, ignore_errors=True)
    no_trainer = shutil.ignore_patterns("trainer", "manifest.json")
    shutil.copytree(checkpoint, part, copy_function=link_weights, ignore=no_trainer)
    replace(part, part.with_suffix(""))


def link_weights(source, target):
    """A copy; of weights a second name for the same bytes, where the file system can do that."""
    try:
        (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)
    except OSError:
        shutil.copy2(source, target)


def read_manifest(folder):
    """{file: [bytes, SHA-256]} of a checkpoint."""
    return json.loads((folder / "manifest.json").read_text())


def read_state(folder):
    """What save() wrote into trainer/state.json: Progress, sizes of the logs, AdamW's steps.

    Raises ValueError if something is missing there.
    """
    state = json.loads((folder / "trainer/state.json").read_text())
    try:
        return Progress(**state["progress"]), state["logs"], state["adamw_step"]
    except (KeyError, TypeError) as e:
        raise ValueError(f"{folder} was written by another version of this program ({e})") from e


def damage(folder):
    """What is wrong with a checkpoint: "" if nothing."""
    try:
        manifest = read_manifest(folder)
        if "trainer/state.json" not in manifest:
            return "manifest.json does not list trainer/state.json"
        for name, (size, checksum) in manifest.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size:,} bytes, not {size:,}"
            if size_and_sum(folder / name)[1] != checksum:
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError, AttributeError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def newest_whole(folder):
    """The newest undamaged checkpoint; None if there is none. Raises ValueError if all are damaged."""
    steps = steps_on_disk(folder)
    for path in reversed(steps):
        problem = damage(path)
        if not problem:
            return path
        print(f"note: {path} is damaged ({problem}); looking for an older checkpoint", file=sys.stderr)
    if steps:
        raise ValueError(f"all checkpoints in {folder} are damaged; move them away to start from step 0")


def check_logs(folder, sizes):
    """Raises ValueError unless each log, {name: bytes}, begins with so many bytes of JSON lines with a step.

    A log that is not there is no error: the run then starts a new one.
    """
    for path in (folder / name for name in sizes if (folder / name).exists()):
        rest, number = sizes[path.name], 0
        with path.open("rb") as f:
            while rest > 0:  # what comes after these bytes is cut off
                line, number = f.readline(), number + 1
                rest -= len(line)
                try:
                    has_step = type(json.loads(line)["step"]) is int
                except (ValueError, TypeError, KeyError):
                    has_step = False
                if not has_step or rest < 0 or not line.endswith(b"\n"):
                    raise ValueError(
                        f"{path}:{number} is damaged: not a whole line of JSON with a step; "
                        "mend it, or move the file away: the run then starts a new one")


def expired(folder, keep, rows):
    """The checkpoints to delete: all but the newest `keep` and the most accurate, the first of equals.

    rows: the metrics of each step so far.
    """
    steps = steps_on_disk(folder)
    accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    best = max(steps, key=lambda path: accuracy.get(step_of(path), -1))  # the first of equals
    return [path for path in steps[:-keep] if path != best or step_of(path) not in accuracy]
