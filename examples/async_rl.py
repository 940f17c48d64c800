"""Asynchronous RL that repeats bit for bit: vLLM samples while the trainer takes its step.

    python -m examples.async_rl --lag 1 --steps 50     all flags of nano_rlvr.py work

vLLM and the rewards run in a second process, on the last GPU or on cores of the CPU. The rollouts
of step t come from the weights before step t - lag; --lag 0 is synchronous. No queue decides: the
same command gives the same bits, and so does a run that was killed and continues.
"""
import argparse
import ctypes
import os
import signal
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import nano_rlvr as nr
from runtime import checkpoint, guard, memory, ranks, records, stop, sync
from runtime.messages import RunError

here = {}  # in the sampler's process: "run", its Run, and "path", the file whose weights vLLM has


def make_run(cfg, parent):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends when the trainer ends
    if os.getppid() != parent:
        os._exit(1)
    for number in stop.SIGNALS:  # they may reach both processes: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    del os.environ["RANK"]  # a process group of its own
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[-1]  # the trainer takes the first
    ranks.init_process_group(cfg.timeout)
    tokenizer = nr.load_tokenizer(cfg)
    train_set, eval_set = nr.data.load_splits(cfg, tokenizer)
    verifier = nr.rewards.start_verifier(cfg, train_set, eval_set)
    sample = guard.load_rollout(cfg.rollout) if cfg.rollout else nr.rollout
    llm = nr.Sampler(cfg)
    here["run"] = nr.Run(
        cfg, train_set, eval_set, verifier,
        log=None, checkpoints=None, llm=llm, policy=None, ref=None, rollout=sample)


def answer(path, step, *request):
    """Rollouts of a step, or (None) what vLLM generates for a request, with a file's weights."""
    run = here["run"]
    if path != here.pop("path", None):
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}
            if file.metadata() != checksums(weights):
                raise RunError(f"{path} has other weights than the trainer wrote")
        run.llm.sleep()
        nr.load_weights(run.llm, weights.items())
    elif step is not None and path.name != str(step):
        run.llm.reset_prefix_cache()  # as after a load: a run that continues loads here
    here["path"] = path
    run.metrics = {}
    if step is None:
        return run.llm.generate(*request, use_tqdm=False)
    minibatches, sampled = nr.collect_rollouts(run, step)
    return minibatches, sampled, run.metrics


def checksums(weights):
    """{name: checksum as text}, which a file can keep beside its tensors."""
    return {name: str(sync.checksum(w)) for name, w in weights.items()}


class RemoteSampler:
    """A Sampler in a process of its own, which answers calls in order. Each names its weights."""
    def __init__(self, cfg, lag):
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if by_torchrun or nr.torch.cuda.device_count() == 1 or lag < 0:
            raise RunError("async_rl needs no torchrun, two GPUs or none, and --lag from 0")
        tokenizer = nr.load_tokenizer(cfg)
        vocabulary = memory.ModelShape.of(cfg.model).vocab
        self.get_tokenizer = lambda: tokenizer
        self.llm_engine = self  # this and the next two: for the checks of a --rollout function
        self.model_config = self
        self.get_vocab_size = lambda: vocabulary
        # vLLM has a device of its own, and compares checksums itself: see answer
        self.sleep = lambda: None
        self.wake_for_weights = self.sleep
        self.wake_kv_cache = self.sleep
        self.is_checked = False
        self.lag = lag
        self.futures = {}  # step -> the rollouts to come
        self.folder = Path(cfg.out) / cfg.name / f"weights-lag-{lag}"
        self.folder.mkdir(exist_ok=True)
        self.process = ProcessPoolExecutor(1, get_context("spawn"))
        self.seconds = 60 * cfg.timeout
        self.started = self.process.submit(make_run, cfg, os.getpid())

    def reload_weights(self, named_weights):
        """Writes the weights before the next step, and deletes those that nobody needs any more."""
        self.version += 1
        weights = {name: w.to("cpu", copy=True) for name, w in named_weights}
        part = self.folder / "part"
        save_file(weights, part, checksums(weights))
        records.sync_file(part)
        part.rename(self.folder / str(self.version))
        needed = set()
        # where the run may go on
        for step in (self.version, *checkpoint.on_disk(self.folder.parent)):
            needed |= {*range(step - self.lag, step + 1)}
        for path in self.folder.glob("[0-9]*"):
            if int(path.name) not in needed:
                path.unlink()

    def generate(self, *request, use_tqdm=False):
        """LLM.generate with the newest weights, for the evaluation."""
        path = self.folder / str(self.version)
        future = self.process.submit(answer, path, None, *request)
        return future.result(self.seconds)

    def collect(self, run, step):
        """nr.collect_rollouts of this step, after it asked for those of the next `lag` steps."""
        end = min(step + self.lag + 1, run.cfg.steps)
        for ahead in range(step, end):
            if ahead not in self.futures:
                newest = max(0, ahead - self.lag)
                path = self.folder / str(newest)
                self.futures[ahead] = self.process.submit(answer, path, ahead)
        with nr.timed(run.metrics, "rollout"):  # the time that the trainer waits
            future = self.futures.pop(step)
            parts, sampled, metrics = future.result(self.seconds)
        for name, value in metrics.items():
            is_of_machine = name.startswith(("seconds", "memory"))
            if not is_of_machine:
                run.metrics[name] = value
        return parts, sampled


def train(run):
    """nano_rlvr's loop. If the sampler's process ends, or does not answer for --timeout minutes,
    the run ends with one line."""
    run.llm.version = run.checkpoints.progress.step - 1  # the first sync writes this step's weights
    try:
        run.llm.started.result(run.llm.seconds)
        nr.train(run, collect_rollouts=run.llm.collect)
    except (BrokenProcessPool, SafetensorError, TimeoutError) as e:
        for process in list(run.llm.process._processes.values()):
            process.kill()  # it may hang: nobody must wait for it at exit
        raise RunError("the sampler's process has ended, or has not answered for --timeout "
                       f"minutes; --resume continues ({e!r})") from e


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lag", type=int, default=1)
    own, argv = parser.parse_known_args()  # the log-probs of old weights differ without bound
    argv = ["--mismatch_bound", "20", *argv]
    nr.main(argv, train, lambda cfg: RemoteSampler(cfg, own.lag))
