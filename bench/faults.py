"""What a run survives: kills, signals, damaged checkpoints, full disks, and a long run.

    python bench/faults.py kill       kill -9 at 50 random moments, each run continued to its end (20 minutes)
    python bench/faults.py ranks      the same with two ranks, 10 times (10 minutes)
    python bench/faults.py signals    SIGTERM, SIGINT and SIGUSR1 at random moments
    python bench/faults.py damage     checkpoints cut, changed, incomplete; full and read-only disks
    python bench/faults.py limits     few files, little memory, a full /dev/shm, a HOME that cannot be written
    python bench/faults.py launcher   kill -9 of torchrun or of one of its ranks, also of one with --tp 2
    python bench/faults.py soak       2,000 steps: memory, open files, processes, size of the folder
    python bench/faults.py inputs     the bad inputs of tests/bad_inputs.py: is each refused clearly?

Each writes bench/results/faults_<name>.md. Every run is the real script with vLLM and DeepSpeed, in a process
forked from one that has imported them. "Equal" means: the same bits in all weights, AdamW moments, metrics
(except seconds and memory, and what is computed from them) and rollouts as in a run without the fault.
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
# the repository in place of this folder: both have a rewards.py
sys.path = [p for p in sys.path if Path(p).resolve() != ROOT / "bench"] + [str(ROOT)]
FLAGS = ("--steps 8 --prompts 8 --samples 4 --eval_size 16 --eval_every 4 --save_every 1 --max_tokens 64 "
         "--baseline running --ref_reset_every 3 --epochs 2 --minibatches 2 --lr 3e-4").split()
STAGES = ["start", "rollout", "reward", "update", "sync", "checkpoint", "between"]
TIMED = ("seconds/", "memory/", "tokens_per_second", "mfu")  # metrics that depend on time


def preload():
    """Imports what every run needs, so that a run starts in seconds."""
    os.environ["OMP_NUM_THREADS"] = "1"  # with several threads two runs may add in another order
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", DS_ACCELERATOR="cpu")
    import deepspeed  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    import vllm  # noqa: F401

    import nano_rlvr  # noqa: F401


class Run:
    """A run in forked processes, one per rank. `stage()` says what rank 0 is doing.

    before: a function that the processes call first.
    """

    def __init__(self, folder, flags=(), ranks=1, before=None):
        self.before = before
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
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                              WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
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
        if self.before:
            self.before()

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
    skip, before = rng.randrange(5) if stage != "start" else 0, ""
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

    close: largest |difference| of a weight, in units of the largest weight of its tensor; then only the
    weights are compared.
    """
    from safetensors.torch import load_file
    a, b = Path(a), Path(b)
    found = []
    last = max(int(path.name[5:]) for path in a.glob("step-*"))
    trainer = [str(path.relative_to(a)) for path in a.glob(f"step-{last}/trainer/*.safetensors")]
    for name in ("final/model.safetensors", *trainer):
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


def whole_run(out, ranks=1):
    """The folder of a run without a fault."""
    codes = Run(out / "whole", ranks=ranks).wait()
    if any(codes):
        raise SystemExit(f"exit codes {codes}\n{(out / 'whole.log').read_text()[-3000:]}")
    return out / "whole"


def outcome(whole, folder, flags=("--resume",), ranks=1):
    """Continues a run to its end: "equal" to the whole run, or what went wrong."""
    codes = Run(folder, flags, ranks).wait()
    if any(codes):
        return f"exit codes {codes}: {Path(f'{folder}.log').read_text()[-500:]}"
    different = differences(whole, folder)
    if not different:
        shutil.rmtree(folder)
    return "equal" if not different else "; ".join(different[:3])


def kill(out, ranks=1, times=50):
    """kill -9 at random moments; every fifth run is killed twice."""
    whole, rng, results = whole_run(out, ranks), random.Random(0), []
    stages = [stage for stage in STAGES if stage != "between"]
    for i in range(times):
        folder, moments = out / f"killed-{i}", []
        for again in range(2 if i % 5 == 4 else 1):
            run = Run(folder, ["--resume"], ranks)
            moments.append(at_stage(run, stages[(i + again) % len(stages)], rng))
            # of two ranks both, as when a machine fails, or one, whose end the other one notices
            victims = slice(None) if ranks == 1 or i % 2 else slice(i // 2 % 2, i // 2 % 2 + 1)
            if run.alive():
                run.signal(signal.SIGKILL, victims)
            run.wait()
        results.append((", ".join(moments), outcome(whole, folder, ranks=ranks)))
        print(i, *results[-1], flush=True)
    return results


def ranks(out):
    """The same with two ranks; both are killed, or one of them."""
    return kill(out, ranks=2, times=10)


def signals(out):
    """The first signal stops the run with a checkpoint; then it is continued."""
    whole, rng, results = whole_run(out), random.Random(1), []
    for i, (number, stage) in enumerate((n, s) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
                                        for s in ("rollout", "update", "sync", "checkpoint")):
        folder = out / f"stopped-{i}"
        run = Run(folder, ["--save_every", 0])
        moment = at_stage(run, stage, rng)
        run.signal(number)
        [code], log = run.wait(), Path(f"{folder}.log").read_text()
        lines = tuple(f"nano_rlvr: {text}" for text in (
            f"stopped by {number.name} at step", f"{number.name} before the first step"))
        said = [line for line in log.splitlines() if line.startswith(lines)]
        result = outcome(whole, folder, ["--resume", "--save_every", 1])
        if code == 0 and result == "equal":
            result = "equal: it came after the last rollout, and the run ended"
        elif code != 128 + number or "Traceback" in log or len(said) != 1:
            result = f"exit code {code}, said {said}, then {result}"
        results.append((f"{number.name}, {moment}", result))
        print(i, *results[-1], flush=True)
    return results


def damage(out):
    """A run that ended at step 5 and whose newest checkpoint or disk is then damaged."""
    whole, results = whole_run(out), []
    run = Run(out / "stopped")
    while not (out / "stopped/step-6").exists():
        time.sleep(0.01)
    run.signal(signal.SIGKILL)
    run.wait()
    newest = max(int(path.name[5:]) for path in (out / "stopped").glob("step-*") if path.suffix != ".part")

    def cut(path):
        os.truncate(path, path.stat().st_size // 2)

    def flip(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)

    def empty(path):
        os.truncate(path, 0)

    def clock():  # 1,000 times as fast, backwards
        start = time.perf_counter()
        time.time = lambda: 1.8e9 - 1000 * (time.perf_counter() - start)

    files = ("model.safetensors", "trainer/00000.safetensors", "trainer/state.json", "manifest.json")
    for harm in (cut, flip, empty, os.remove):
        for name in files:
            folder = out / "harmed"
            shutil.copytree(out / "stopped", folder)
            harm(folder / f"step-{newest}" / name)
            results.append((f"{harm.__name__} {name}", outcome(whole, folder)))
            print(*results[-1], flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(out / "stopped", out / "clock")
    Run(out / "clock", ["--resume"], before=clock).wait()
    different = differences(whole, out / "clock")
    results.append(("the clock runs backwards", "; ".join(different) or "equal"))
    if os.geteuid() == 0:  # may mount
        results += full_disk(out, whole)
    return results


def full_disk(out, whole):
    """The folder of the runs is a file system of 30 to 60 MB, which fills up, or is read-only."""
    results, disk = [], out / "disk"
    for size in (30, 36, 42, 48):
        disk.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", disk], check=True)
        try:
            [code] = Run(disk / "run", ["--keep", 9]).wait()
            log = Path(f"{disk / 'run'}.log").read_text()
            said = [line for line in log.splitlines() if line.startswith("nano_rlvr: ")]
            lines = [line for name in ("metrics", "rollouts")
                     for line in (disk / f"run/{name}.jsonl").read_text().splitlines(True)]
            broken = [line for line in lines if not line.endswith("}\n")]
            subprocess.run(["mount", "-o", "remount,size=500m", disk], check=True)
            result = outcome(whole, disk / "run")
            if code != 1 or len(said) != 1 or broken or "Traceback" in log:
                result = f"exit code {code}, {said}, {broken}"
            results.append((f"a disk of {size} MB is full, then grows", result))
            print(*results[-1], said, flush=True)
        finally:
            subprocess.run(["umount", disk], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk], check=True)
    try:
        command = [sys.executable, ROOT / "nano_rlvr.py", "--out", disk / "runs"]
        process = subprocess.run(command, capture_output=True, text=True)
        last = process.stderr.strip().splitlines()[-1]
        good = process.returncode == 1 and last.startswith("nano_rlvr: --out")
        results.append(("a read-only folder", "one line" if good else last))
        print(*results[-1], flush=True)
    finally:
        subprocess.run(["umount", disk], check=True)
    return results


def command(folder, *flags):
    """The command of a run in a process of its own."""
    return [ROOT / "nano_rlvr.py", *FLAGS, "--out", folder.parent, "--name", folder.name, *flags]


def limits(out):
    """A run of two steps where something is short: does it end well, or with one line?"""
    home = "mount -t tmpfs -o ro tmpfs $OUT && export HOME=$OUT"
    faults = {"ulimit -n 24": "", "ulimit -n 64": "", "ulimit -n 128": "",
              "ulimit -v 3000000": "", "ulimit -v 6000000": "",
              "/dev/shm is full": "mount -t tmpfs -o nr_inodes=1 tmpfs /dev/shm",
              "/dev/shm of 1 MB": "mount -t tmpfs -o size=1m tmpfs /dev/shm",
              "HOME cannot be written": home,
              "the same with TORCH_EXTENSIONS_DIR": f"{home} TORCH_EXTENSIONS_DIR=$OUT.compiled"}
    results = []
    for i, (fault, shell) in enumerate(faults.items()):
        (out / f"home-{i}").mkdir()
        process = subprocess.run(
            ["unshare", "-m", "bash", "-c", f'{shell or fault} && exec "$@"', "-", sys.executable,
             *command(out / f"short-{i}", "--steps", "2")],
            env=os.environ | {"OUT": str(out / f"home-{i}")}, capture_output=True, text=True)
        said = [line for line in process.stderr.splitlines() if line.startswith("nano_rlvr: ")]
        result = f"exit code {process.returncode}, {' '.join(said) or 'to the end'}"
        if "Traceback" in process.stderr + process.stdout:
            result += ", with a traceback"
        results.append((fault, result.replace(str(out), "...")))
        print(*results[-1], flush=True)
    return results


def launcher(out):
    """torchrun or one of its ranks is killed with -9 after step 3; then the same command continues."""
    import psutil
    results = []
    for flags in ((), ("--tp", "2")):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        whole = out / f"whole{len(flags)}"
        subprocess.run([*torchrun, *command(whole, *flags)], check=True, capture_output=True)
        for victim in ("torchrun", "rank 0", "rank 1"):
            folder = out / f"{victim}{len(flags)}".replace(" ", "")
            process = subprocess.Popen([*torchrun, *command(folder, "--resume", *flags)], text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            while not (folder / "step-3").exists():
                time.sleep(0.01)
            ranks = {p.environ()["RANK"]: p for p in psutil.Process(process.pid).children()}
            os.kill(process.pid if victim == "torchrun" else ranks[victim[-1]].pid, signal.SIGKILL)
            output = process.communicate()[0]  # the ranks have the same pipe: until all have ended
            said = [line for line in output.splitlines() if line.startswith("nano_rlvr: ")]
            again = subprocess.run([*torchrun, *command(folder, "--resume", *flags)], capture_output=True,
                                   text=True)
            result = again.stderr[-300:] if again.returncode else "; ".join(differences(whole, folder)[:3])
            results.append((f"kill -9 of {victim} {' '.join(flags)}".strip(),
                            f"{' '.join(said)[:100]}; then {result or 'equal'}".replace(str(out), "...")))
            print(*results[-1], flush=True)
    return results


def soak(out):
    """2,000 steps: what grows?"""
    import psutil
    flags = ("--steps 2000 --prompts 2 --samples 2 --minibatches 1 --epochs 1 --max_tokens 8 "
             "--save_every 100 --eval_every 400 --ref_reset_every 0 --keep_rollouts 4").split()
    run, samples = Run(out / "soak", flags), {}
    process = psutil.Process(run.pids[0])
    metrics, done = out / "soak/metrics.jsonl", 0
    while run.alive():
        time.sleep(0.2)
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines >= done + 100 and lines < 2000:
            done, children = lines, process.children(recursive=True)
            samples[lines] = {"MB": process.memory_info().rss / 1e6, "open files": process.num_fds(),
                              "threads": process.num_threads(), "processes": len(children),
                              "MB of children": sum(p.memory_info().rss for p in children) / 1e6}
            print(lines, samples[lines], flush=True)
    [code] = run.wait()
    folders = sorted(path.name for path in (out / "soak").iterdir())
    early, late = ([s for step, s in samples.items() if low <= step < high]
                   for low, high in ((400, 1000), (1400, 2000)))
    results = [("flags after the others", f"`{' '.join(flags)}`"), ("exit code", str(code)),
               ("files at the end", ", ".join(folders))]
    for name in early[0]:
        a, b = (sum(s[name] for s in part) / len(part) for part in (early, late))
        results.append((f"{name}, steps 400-1000 and 1400-2000", f"{a:.1f} and {b:.1f} ({b / a - 1:+.1%})"))
    return results


def inputs(out):
    """Bad inputs, in this process: none may load vLLM, print more than its line, or write a file."""
    sys.path.append(str(ROOT / "tests"))
    import bad_inputs
    cases = list(bad_inputs.run_all(out))
    results = [(f"{case.group}, {case.id}", wrong) for case, wrong, *_ in cases if wrong]
    for group in [*dict.fromkeys(case.group for case, *_ in cases), ""]:
        part = [row for row in cases if group in ("", row[0].group)]
        passed, seconds = sum(not wrong for _, wrong, *_ in part), [row[-1] for row in part]
        slowest = max(part, key=lambda row: row[-1])[0].id
        usage = sum(case.says is bad_inputs.USAGE for case, *_ in part)
        results.append((f"{group or 'total'}: {len(part)} bad inputs",
                        f"{passed} as wanted: {len(part) - usage} one clear line, {usage} the usage (wrong "
                        f"type, unknown flag or choice); median {sorted(seconds)[len(part) // 2]:.2f} s, "
                        f"slowest {max(seconds):.2f} s (`{slowest}`)"))
    return results


def main(name):
    from runtime.log import provenance
    benches = {"kill": kill, "ranks": ranks, "signals": signals, "damage": damage, "soak": soak,
               "inputs": inputs, "limits": limits, "launcher": launcher}
    preload()
    out = Path(tempfile.mkdtemp(prefix="faults-"))
    start = time.perf_counter()
    results = benches[name](out)
    about = provenance()
    lines = [f"`python bench/faults.py {name}` on {about['device']}, commit {about['commit']}, "
             f"{time.perf_counter() - start:.0f} s. Flags: `{' '.join(FLAGS)}`.", ""]
    counts = Counter(results)
    if name in ("kill", "ranks"):
        lines += [f"{sum(result == 'equal' for _, result in results)} of {len(results)} equal.", ""]
    lines += ["| fault | result | times |", "|---|---|---|"]
    lines += [f"| {fault} | {result} | {n} |" for (fault, result), n in sorted(counts.items())]
    (ROOT / f"bench/results/faults_{name}.md").write_text("\n".join(lines) + "\n")
    shutil.rmtree(out)


if __name__ == "__main__":
    main(sys.argv[1])
