"""What a run survives: kills, damaged checkpoints, full disks, a long run.

    python -m bench.faults kill       kill -9 at 50 random moments; each run is continued (an hour)
    python -m bench.faults ranks      the same with two ranks, 10 times
    python -m bench.faults async      the same with examples/async_rl.py: its trainer or its sampler
    python -m bench.faults renames    kill -9 before and after each rename of a file, in two steps
    python -m bench.faults damage     checkpoints cut, changed, incomplete; a full disk
    python -m bench.faults soak       2,000 steps: memory, open files, processes, size of the folder

Each writes bench/results/faults_<name>.md. Every run is the real script with vLLM and DeepSpeed.
"Equal" means: the same bits in all weights, AdamW moments, metrics (except seconds and memory, and
what is computed from them) and rollouts as in a run without the fault.
"""
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import psutil

from bench import common, diff

FLAGS = ("--steps 8 --prompts 8 --samples 4 --eval_size 16 --eval_every 4 --save_every 1 "
         "--max_tokens 64 --baseline running --epochs 2 --minibatches 2 --lr 3e-4").split()
ONE = common.SCRIPT
TWO = [*common.LAUNCHER, common.SCRIPT[1]]
ASYNC = [sys.executable, "-m", "examples.async_rl"]
# with several threads two runs may add in another order
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
SHORT = ("--steps", "2")  # of renames


def start(folder, *flags, command=ONE):
    """Starts a run in processes of its own. Its output is added to <folder>.log."""
    place = ["--out", folder.parent, "--name", folder.name]
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [*command, *FLAGS, *place, *flags], stdout=log, stderr=log, env=ENV, cwd=common.ROOT)


def differences(a, b):
    """What differs between two finished runs: a list of texts, [] if they are equal bit for bit."""
    texts = [f"step {d.step}: {d.name}: {d.text}" for d in diff.differences(a, b)]
    numbered = diff.checkpoints(a).keys() - {float("inf")}
    last = max(numbered)
    if not (b / f"step-{last}").exists():
        texts.append(f"step-{last} is missing")
    if (a / "rollouts.jsonl").read_bytes() != (b / "rollouts.jsonl").read_bytes():
        texts.append("rollouts.jsonl")  # it also has numbers that diff.py leaves out
    return texts


def whole_run(out, *flags, command=ONE):
    """The folder of a run without a fault."""
    if start(out / "whole", *flags, command=command).wait():
        sys.exit((out / "whole.log").read_text()[-3000:])
    return out / "whole"


def outcome(whole, folder, *flags, command=ONE):
    """Continues a run to its end: "equal" to the whole run, or what went wrong."""
    if code := start(folder, "--resume", *flags, command=command).wait():
        return f"exit code {code}: {Path(f'{folder}.log').read_text()[-500:]}"
    different = differences(whole, folder)
    shutil.rmtree(folder)
    return "; ".join(different[:3]) or "equal"


def own_lines(path):
    """What a run says when it ends early. path: its log."""
    return [line for line in path.read_text().splitlines() if line.startswith("nano_rlvr:")]


def wait_until(process, condition):
    """Waits until a condition holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.001)


def metrics_lines(folder):
    """How many lines of metrics a run has written."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def random_moment(process, folder, rng):
    """Waits until a run has written a random number of lines of metrics, then at most half a
    second; one time in three until it writes a checkpoint. Returns what the folder shows then."""
    wanted = rng.randrange(int(FLAGS[1]))
    wait_until(process, lambda: metrics_lines(folder) >= wanted)
    end = time.time() + rng.uniform(0, 0.5)
    wait_until(process, lambda: time.time() > end)
    if rng.random() < 1 / 3:
        wait_until(process, lambda: any(folder.glob("*.part/step-*")))
    writing = ", a checkpoint is being written" * any(folder.glob("*.part/step-*"))
    if process.poll() is not None:
        return "ended"
    return f"{metrics_lines(folder)} lines of metrics{writing}"


def is_sampler(process):
    """Whether a child of examples/async_rl.py is its sampler."""
    try:
        return "spawn_main" in str(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def kill(out, command=ONE, times=50):
    """kill -9 at random moments; every fifth run is killed twice."""
    whole = whole_run(out, command=command)
    rng = random.Random(0)
    for i in range(times):
        folder = out / f"killed-{i}"
        moments = []
        for _ in range(2 if i % 5 == 4 else 1):
            process = start(folder, "--resume", command=command)
            moment = random_moment(process, folder, rng)
            children = []
            if process.poll() is None:
                children = psutil.Process(process.pid).children()
            victims = [process]
            if command is TWO:  # both, as when a machine fails, or one, whose end the other notices
                victims = children[:1 + i % 2] or [process]
            samplers = [child for child in children if is_sampler(child)]
            if command is ASYNC and i % 2 and samplers:
                moment += ", the sampler"
                victims = samplers
            for victim in victims:
                victim.kill()
            process.wait()
            moments.append(moment)
        yield "; ".join(moments), outcome(whole, folder, command=command)


# runs the script until its rename number n / 2: the process ends before it, or after it if n is odd
RENAMES = """
import os, pathlib, runpy, signal, sys
moments, rename, n = [], pathlib.Path.replace, int(sys.argv.pop())
def moment(name):
    if len(moments) == n:
        print("killed", name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    moments.append(name)
def replace(path, target):
    moment(f"before {target}")
    rename(path, target)
    moment(f"after {target}")
pathlib.Path.replace = replace
runpy.run_path("nano_rlvr.py", run_name="__main__")
"""


def renames(out):
    """kill -9 at each rename of a run, before it and after it; then the run is continued."""
    whole = whole_run(out, *SHORT)
    for n in itertools.count():
        folder = out / f"killed-{n}"
        if not start(folder, *SHORT, str(n), command=[sys.executable, "-c", RENAMES]).wait():
            return  # it had no rename n / 2
        name = Path(f"{folder}.log").read_text().rpartition("killed ")[2].split("\n")[0]
        yield name.replace(str(folder), "run"), outcome(whole, folder, *SHORT)


HARMS = {
    "cut": lambda data: data[:len(data) // 2],
    "empty": lambda data: b"",
    "flip": lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:],
}


def damage(out):
    """A run is killed after step 5; then its newest checkpoint is damaged."""
    whole = whole_run(out)
    stopped = out / "stopped"
    process = start(stopped)
    wait_until(process, (stopped / "step-6").exists)
    process.kill()
    process.wait()
    newest = max(stopped.glob("step-*[0-9]"), key=lambda path: int(path.name[5:]))
    state = min(newest.glob("trainer/*.safetensors")).relative_to(newest)
    for name in ("model.safetensors", state, "trainer/state.json", "manifest.json"):
        for harm in (*HARMS, "remove"):
            shutil.copytree(stopped, out / "harmed", dirs_exist_ok=True)
            path = out / "harmed" / newest.name / name
            if harm == "remove":
                path.unlink()
            else:
                path.write_bytes(HARMS[harm](path.read_bytes()))
            yield f"{harm} {name}", outcome(whole, out / "harmed")
    if os.geteuid() == 0:  # may mount
        yield from full_disk(out / "disk", whole)


def full_disk(disk, whole):
    """The folder of the runs is a file system of 30 to 48 MB, which fills up."""
    def mount(*options):
        subprocess.run(["mount", *options, disk], check=True)

    disk.mkdir()
    log = disk / "run.log"
    for size in (30, 36, 42, 48):
        mount("-t", "tmpfs", "-o", f"size={size}m", "tmpfs")
        try:
            code = start(disk / "run", "--keep", "9").wait()
            said = own_lines(log)
            traceback = "Traceback" in log.read_text()
            broken = broken_lines(disk / "run")
            mount("-o", "remount,size=500m")
            result = outcome(whole, disk / "run")
            if code != 1 or len(said) != 1 or broken or traceback:
                result = f"exit code {code}, {said}, {broken}"
            yield f"a disk of {size} MB is full, then grows", result
        finally:
            subprocess.run(["umount", disk], check=True)


def broken_lines(folder):
    """The lines of the logs of a run that have no end."""
    lines = []
    for name in ("metrics", "rollouts"):
        lines += (folder / f"{name}.jsonl").read_text().splitlines(True)
    return [line for line in lines if not line.endswith("}\n")]


def soak(out, steps=2000):
    """Many steps: what grows?"""
    flags = (f"--steps {steps} --prompts 2 --samples 2 --minibatches 1 --epochs 1 --max_tokens 8 "
             "--save_every 100 --eval_every 400 --keep_rollouts 4").split()
    run = start(out / "soak", *flags)
    process = psutil.Process(run.pid)
    samples = {}  # {step: what a process uses}
    while run.poll() is None:
        time.sleep(0.2)
        lines = metrics_lines(out / "soak")
        if lines >= max(samples, default=0) + steps // 20 and lines < steps:
            samples[lines] = usage(process)
    yield "flags after the others", f"`{' '.join(flags)}`"
    yield "exit code", str(run.returncode)
    yield "files at the end", ", ".join(sorted(path.name for path in (out / "soak").iterdir()))
    early = [s for step, s in samples.items() if 0.2 * steps <= step < 0.5 * steps]
    late = [s for step, s in samples.items() if 0.7 * steps <= step]
    for name in early[0]:
        before = fmean(sample[name] for sample in early)
        after = fmean(sample[name] for sample in late)
        yield (f"{name}, at 20 to 50 % and 70 to 100 % of the steps",
               f"{before:.1f} and {after:.1f} ({after / before - 1:+.1%})")


def usage(process):
    """{name: what a process and its children use}"""
    children = process.children(recursive=True)
    of_children = sum(child.memory_info().rss for child in children)
    return {
        "MB": process.memory_info().rss / 1e6,
        "open files": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(children),
        "MB of children": of_children / 1e6,
    }


BENCHES = {
    "kill": kill,
    "ranks": lambda out: kill(out, TWO, times=10),
    "async": lambda out: kill(out, ASYNC, times=24),
    "renames": renames,
    "damage": damage,
    "soak": soak,
}


def main(name):
    begin = time.time()
    conditions = common.conditions()
    results = []
    with tempfile.TemporaryDirectory(prefix="faults-") as out:
        for row in BENCHES[name](Path(out)):
            results.append(row)
            print(*row, flush=True)
    lines = [(*row, n) for row, n in sorted(Counter(results).items())]
    equal = sum(result == "equal" for _, result in results)
    table = common.table(["fault", "result", "times"], lines)
    common.write(f"faults_{name}", f"{conditions}, {time.time() - begin:.0f} s. Flags: "
                 f"`{' '.join(FLAGS)}`.\n\n{equal} of {len(results)} equal.\n\n{table}", results)


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("bench", choices=BENCHES)
    main(parser.parse_args().bench)
