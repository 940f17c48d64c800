"""What a run survives: kills, signals, damaged checkpoints, full disks, and a long run.

    python bench/faults.py kill        kill -9 at 50 random moments, each resumed to the end     (about 15 minutes)
    python bench/faults.py ranks       the same with two ranks, 10 times; then 2 ranks -> 1 -> 2  (about 8 minutes)
    python bench/faults.py signals     SIGTERM, SIGINT, SIGUSR1, at random moments
    python bench/faults.py damage      checkpoints truncated, changed, incomplete; full and read-only disks
    python bench/faults.py soak        2,000 steps: memory, handles, processes, files

Each writes bench/results/faults_<name>.md. Every run is the real script with vLLM and DeepSpeed, in a process
forked from one that has imported them. "Equal" means: the same bits in all weights, AdamW moments, metrics (but
for seconds and memory, and what is computed from them) and rollouts as in a run without the fault.
"""
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import shared_memory
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # sums of several threads may be ordered differently from run to run

FLAGS = ("--steps 8 --prompts 8 --samples 4 --eval_size 16 --eval_every 4 --save_every 1 --max_tokens 64 "
         "--baseline running --ref_reset_every 3 --epochs 2 --minibatches 2 --lr 3e-4").split()
STAGES = ["start", "rollout", "reward", "update", "sync", "checkpoint", "between"]
TIMED = ("seconds/", "memory/", "tokens_per_second", "mfu")  # metrics that depend on time


def preload():
    """Imports what every run needs, so that a run starts in seconds."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", DS_ACCELERATOR="cpu")
    import deepspeed  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    import vllm  # noqa: F401

    import nano_rlvr  # noqa: F401


class Run:
    """A run in forked processes, one per rank. `stage()` says what rank 0 is doing."""

    def __init__(self, folder, flags=(), ranks=1):
        self.memory = shared_memory.SharedMemory(create=True, size=2)
        self.log = Path(f"{folder}.log")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        folder = Path(folder)
        argv = [*FLAGS, "--out", str(folder.parent), "--name", folder.name, *map(str, flags)]
        self.pids = [self._fork(rank, ranks, port, argv) for rank in range(ranks)]

    def _fork(self, rank, ranks, port, argv):
        if pid := os.fork():
            return pid
        try:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                              LOCAL_WORLD_SIZE=str(ranks), MASTER_PORT=str(port))
            self._run(argv)
        except SystemExit as e:
            if isinstance(e.code, str):
                print(e.code, file=sys.stderr)
            code = e.code if isinstance(e.code, int) else 1 if e.code else 0
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 70
        else:
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _run(self, argv):
        import nano_rlvr as nr
        from runtime import checkpoint

        def shown(stage, function):  # writes the stage into shared memory, then calls the function
            def call(*args, **kwargs):
                before, self.memory.buf[0] = self.memory.buf[0], STAGES.index(stage)
                result = function(*args, **kwargs)
                self.memory.buf[0] = before if stage == "checkpoint" else STAGES.index("between")
                return result
            return call

        for stage, name in (("rollout", "rollout"), ("reward", "score"), ("update", "update"),
                            ("sync", "sync_weights")):
            setattr(nr, name, shown(stage, getattr(nr, name)))
        checkpoint.Checkpoints._write = shown("checkpoint", checkpoint.Checkpoints._write)
        nr.main(argv)

    def stage(self):
        return STAGES[self.memory.buf[0]]

    def alive(self):
        """Whether rank 0 is running."""
        return os.waitid(os.P_PID, self.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def signal(self, number, ranks=slice(None)):
        for pid in self.pids[ranks]:
            os.kill(pid, number)

    def wait(self):
        """Exit codes of the ranks; a signal is negative."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        self.memory.close()
        self.memory.unlink()
        return codes


def at_stage(run, stage, rng):
    """Waits for a random occurrence of a stage and a random moment in it. Returns the stage then."""
    skip, before = rng.randrange(5), ""
    while run.alive():
        now = run.stage()
        if now == stage and before != stage:
            if skip == 0:
                time.sleep(rng.random() * {"start": 5.0, "checkpoint": 0.05}.get(stage, 0.15))
                return run.stage()
            skip -= 1
        before = now
        time.sleep(0.0005)
    return "ended"


def rows(folder):
    """Metrics of a run without those that depend on time."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines]


def differences(a, b, close=0.0):
    """What differs between two finished runs: a list of texts, [] if they are equal bit for bit.

    close: largest |difference| of a weight, in units of the largest weight of its tensor; then only the weights
    are compared.
    """
    from safetensors.torch import load_file
    a, b = Path(a), Path(b)
    found = []
    last = max(int(path.name[5:]) for path in a.glob("step-*"))
    for name in ("final/model.safetensors", *(f"step-{last}/trainer/{path.name}"
                                              for path in sorted((a / f"step-{last}/trainer").glob("*.safetensors")))):
        if not (b / name).exists():
            found.append(f"{name} is missing")
            continue
        x, y = load_file(a / name), load_file(b / name)
        for key in x.keys() | y.keys():
            if key not in x or key not in y:
                found.append(f"{name}: {key}")
            elif close and "exp_avg" not in key:
                distance = ((x[key] - y[key]).abs().max() / x[key].abs().max()).item()
                if distance > close:
                    found.append(f"{name}: {key} by {distance:.1e}")
            elif not close and x[key].numpy().tobytes() != y[key].numpy().tobytes():
                found.append(f"{name}: {key}")
    if not close:
        found += [f"metrics of step {p['step']}: {[k for k in p.keys() | q.keys() if p.get(k) != q.get(k)]}"
                  for p, q in zip(rows(a), rows(b)) if json.dumps(p) != json.dumps(q)]
        if len(rows(a)) != len(rows(b)):
            found.append("number of lines in metrics.jsonl")
        if (a / "rollouts.jsonl").read_bytes() != (b / "rollouts.jsonl").read_bytes():
            found.append("rollouts.jsonl")
    return found


def kill(out, ranks=1, times=50):
    """kill -9 at random moments; every fifth run is killed twice."""
    rng, results, moments = random.Random(0), [], Counter()
    assert Run(out / "whole", ranks=ranks).wait() == [0] * ranks, (out / "whole.log").read_text()[-2000:]
    stages = [s for s in STAGES if s != "between"]
    for i in range(times):
        folder, kills = out / f"killed-{i}", 2 if i % 5 == 4 else 1
        for _ in range(kills):
            run = Run(folder, ["--resume"], ranks)
            moment = at_stage(run, stages[(i + _) % len(stages)], rng)
            # with several ranks: all at once, as when a machine fails, or one, whose end the others notice
            victims = slice(None) if ranks == 1 or i % 2 else slice(i // 2 % 2, i // 2 % 2 + 1)
            if moment != "ended":
                run.signal(signal.SIGKILL, victims)
            run.wait()
            moments[moment] += 1
        codes = Run(folder, ["--resume"], ranks).wait()
        different = differences(out / "whole", folder)
        results.append(codes == [0] * ranks and not different)
        print(f"{i}: killed at {moment}, {'equal' if results[-1] else (codes, different[:3])}", flush=True)
        if results[-1]:
            shutil.rmtree(folder)
    return results, moments
