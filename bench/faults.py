"""What a run survives: kills, signals, damaged checkpoints, full disks, a lost host, a long run.

    python bench/faults.py kill       kill -9 at 50 random moments; each run is continued (an hour)
    python bench/faults.py ranks      the same with two ranks, 10 times
    python bench/faults.py signals    SIGTERM, SIGINT and SIGUSR1 at 12 random moments
    python bench/faults.py damage     checkpoints cut, changed, incomplete; full and read-only disks
    python bench/faults.py soak       2,000 steps: memory, open files, processes, size of the folder
    python bench/faults.py inputs     the bad inputs of tests/bad_inputs.py: is each refused clearly?
    python bench/faults.py hosts      two hosts, network namespaces with a cable between them; one
                                      is cut off after the first step (root only)

Each writes bench/results/faults_<name>.md. Every run is the real script with vLLM and DeepSpeed.
"Equal" means: the same bits in all weights, AdamW moments, metrics (except seconds and memory, and
what is computed from them) and rollouts as in a run without the fault.
"""
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, median

import psutil

import common  # puts the repository on sys.path

FLAGS = ("--steps 8 --prompts 8 --samples 4 --eval_size 16 --eval_every 4 --save_every 1 "
         "--max_tokens 64 --baseline running --ref_reset_every 3 --epochs 2 --minibatches 2 "
         "--lr 3e-4").split()
TIMED = ("seconds/", "memory/", "tokens_per_second", "mfu")  # metrics that depend on time
ENV = os.environ | {"OMP_NUM_THREADS": "1"}  # with several threads two runs may add in another order
CLOCK = f"""
import sys, time
start = time.perf_counter()
time.time = lambda: 1.8e9 - 1000 * (time.perf_counter() - start)
sys.path.insert(0, {str(common.ROOT)!r})
import nano_rlvr
nano_rlvr.main(sys.argv[1:])
"""


# ---- runs


def start(folder, *flags, ranks=1, script=common.SCRIPT[1:]):
    """Starts a run in processes of its own. Its output is added to <folder>.log."""
    launcher = common.LAUNCHER if ranks > 1 else [sys.executable]
    command = [*launcher, *script, *FLAGS, "--out", folder.parent, "--name", folder.name, *flags]
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=ENV)


def rows(folder):
    """Metrics of a run without those that depend on time."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)}
            for row in common.read(folder)]


def differences(a, b):
    """What differs between two finished runs: a list of texts, [] if they are equal bit for bit."""
    from safetensors.torch import load_file
    a, b, found = Path(a), Path(b), []
    last = max(int(path.name[5:]) for path in a.glob("step-*"))
    trainer = [path.relative_to(a) for path in a.glob(f"step-{last}/trainer/*.safetensors")]
    for name in ("final/model.safetensors", *trainer):
        if not (b / name).exists():
            found.append(f"{name} is missing")
            continue
        x, y = ({key: tensor.numpy().tobytes() for key, tensor in load_file(folder / name).items()}
                for folder in (a, b))
        found += [f"{name}: {key}" for key in x.keys() | y.keys() if x.get(key) != y.get(key)]
    for p, q in zip(rows(a), rows(b)):
        names = [name for name in p.keys() | q.keys() if repr(p.get(name)) != repr(q.get(name))]
        if names:
            found.append(f"metrics of step {p['step']}: {names}")
    if len(rows(a)) != len(rows(b)):
        found.append("number of lines in metrics.jsonl")
    if (a / "rollouts.jsonl").read_bytes() != (b / "rollouts.jsonl").read_bytes():
        found.append("rollouts.jsonl")
    return found


def whole_run(out, ranks=1):
    """(the folder of a run without a fault, its seconds)."""
    begin = time.time()
    if start(out / "whole", ranks=ranks).wait():
        sys.exit((out / "whole.log").read_text()[-3000:])
    return out / "whole", time.time() - begin


def outcome(whole, folder, *flags, **options):
    """Continues a run to its end: "equal" to the whole run, or what went wrong."""
    if code := start(folder, "--resume", *flags, **options).wait():
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


def random_moment(process, folder, seconds, rng):
    """Waits for a random moment of a run that takes so many seconds; one time in three, from there
    until it writes a checkpoint. Returns what the folder shows then."""
    end = time.time() + rng.uniform(0.2, 1) * seconds
    wait_until(process, lambda: time.time() > end)
    if rng.random() < 1 / 3:
        wait_until(process, lambda: any(folder.glob("*.part")))
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    writing = ", a checkpoint is being written" * any(folder.glob("*.part"))
    return f"{lines} lines of metrics{writing}" if process.poll() is None else "ended"


# ---- the benches: each yields (fault, result)


def kill(out, ranks=1, times=50):
    """kill -9 at random moments; every fifth run is killed twice."""
    (whole, seconds), rng = whole_run(out, ranks), random.Random(0)
    for i in range(times):
        folder, moments = out / f"killed-{i}", []
        for _ in range(2 if i % 5 == 4 else 1):
            process = start(folder, "--resume", ranks=ranks)
            moments.append(random_moment(process, folder, seconds, rng))
            victims = [process]
            if ranks > 1:  # both, as when a machine fails, or one, whose end the other one notices
                victims = psutil.Process(process.pid).children()[:1 + i % 2] or [process]
            for victim in victims:
                victim.kill()
            process.wait()
        yield "; ".join(moments), outcome(whole, folder, ranks=ranks)


def ranks(out):
    """The same with two ranks; both are killed, or one of them."""
    return kill(out, ranks=2, times=10)


def signals(out):
    """The first signal stops the run with a checkpoint; then it is continued."""
    (whole, seconds), rng = whole_run(out), random.Random(1)
    for i in range(12):
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[i % 3]
        folder = out / f"stopped-{i}"
        process = start(folder, "--save_every", "0")
        moment = random_moment(process, folder, seconds, rng)
        process.send_signal(number)
        code, log = process.wait(), Path(f"{folder}.log")
        said = [line for line in own_lines(log) if number.name in line]
        traceback = "Traceback" in log.read_text()
        result = outcome(whole, folder, "--save_every", "1")
        if code == 0 and result == "equal":
            result = "equal: it came after the last rollout, and the run ended"
        elif code != 128 + number or traceback or len(said) != 1:
            result = f"exit code {code}, said {said}, then {result}"
        yield f"{number.name}, {moment}", result


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def empty(path):
    os.truncate(path, 0)


def damage(out):
    """A run is killed after step 5; then its newest checkpoint, its clock or its disk is damaged."""
    (whole, _), stopped = whole_run(out), out / "stopped"
    process = start(stopped)
    wait_until(process, (stopped / "step-6").exists)
    process.kill()
    process.wait()
    newest = max(int(p.name[5:]) for p in stopped.glob("step-*") if p.suffix != ".part")
    for harm in (cut, flip, empty, os.remove):
        for name in ("model.safetensors", "trainer/00000.safetensors", "trainer/state.json",
                     "manifest.json"):
            shutil.copytree(stopped, out / "harmed", dirs_exist_ok=True)
            harm(out / f"harmed/step-{newest}" / name)
            yield f"{harm.__name__} {name}", outcome(whole, out / "harmed")
    yield "the clock runs backwards", outcome(whole, stopped, script=["-c", CLOCK])
    if os.geteuid() == 0:  # may mount
        yield from full_disk(out / "disk", whole)


def shell(words):
    subprocess.run(words.split(), check=True)


def full_disk(disk, whole):
    """The folder of the runs is a file system of 30 to 48 MB, which fills up, or is read-only."""
    disk.mkdir()
    log = disk / "run.log"
    for size in (30, 36, 42, 48):
        shell(f"mount -t tmpfs -o size={size}m tmpfs {disk}")
        try:
            code = start(disk / "run", "--keep", "9").wait()
            said, traceback = own_lines(log), "Traceback" in log.read_text()
            lines = [line for name in ("metrics", "rollouts")
                     for line in (disk / f"run/{name}.jsonl").read_text().splitlines(True)]
            broken = [line for line in lines if not line.endswith("}\n")]
            shell(f"mount -o remount,size=500m {disk}")
            result = outcome(whole, disk / "run")
            if code != 1 or len(said) != 1 or broken or traceback:
                result = f"exit code {code}, {said}, {broken}"
            yield f"a disk of {size} MB is full, then grows", result
        finally:
            shell(f"umount {disk}")
    shell(f"mount -t tmpfs -o ro tmpfs {disk}")
    try:
        command = [*common.SCRIPT, "--out", disk / "runs"]
        done = subprocess.run(command, capture_output=True, text=True)
        good = done.returncode == 1 and done.stderr.startswith("nano_rlvr: --out")
        yield "a read-only folder", "one line" if good else done.stderr
    finally:
        shell(f"umount {disk}")


def soak(out, steps=2000):
    """Many steps: what grows?"""
    flags = (f"--steps {steps} --prompts 2 --samples 2 --minibatches 1 --epochs 1 --max_tokens 8 "
             "--save_every 100 --eval_every 400 --ref_reset_every 0 --keep_rollouts 4").split()
    run, metrics, samples = start(out / "soak", *flags), out / "soak/metrics.jsonl", {}
    process = psutil.Process(run.pid)
    while run.poll() is None:
        time.sleep(0.2)
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines >= max(samples, default=0) + steps // 20 and lines < steps:
            children = process.children(recursive=True)
            samples[lines] = {
                "MB": process.memory_info().rss / 1e6, "open files": process.num_fds(),
                "threads": process.num_threads(), "processes": len(children),
                "MB of children": sum(p.memory_info().rss for p in children) / 1e6}
    yield "flags after the others", f"`{' '.join(flags)}`"
    yield "exit code", str(run.returncode)
    yield "files at the end", ", ".join(sorted(path.name for path in (out / "soak").iterdir()))
    early = [s for step, s in samples.items() if 0.2 * steps <= step < 0.5 * steps]
    late = [s for step, s in samples.items() if 0.7 * steps <= step]
    for name in early[0]:
        a, b = (fmean(s[name] for s in part) for part in (early, late))
        yield (f"{name}, at 20 to 50 % and 70 to 100 % of the steps",
               f"{a:.1f} and {b:.1f} ({b / a - 1:+.1%})")


def inputs(out):
    """Bad inputs, in this process: none may load vLLM, print more than its line, or write a file."""
    sys.path.append(str(common.ROOT / "tests"))
    import bad_inputs
    cases = list(bad_inputs.run_all(out))
    seconds = [row[-1] for row in cases]
    usage = sum(case.says is bad_inputs.USAGE for case, *_ in cases)
    yield from ((f"{case.group}, {case.id}", wrong) for case, wrong, *_ in cases if wrong)
    yield (f"{len(cases)} bad inputs", f"{len(cases) - usage} want one clear line, {usage} the usage;"
           f" median {median(seconds):.2f} s, slowest {max(seconds):.2f} s")


# ---- two hosts

HOST_FLAGS = ("--steps 3 --prompts 4 --samples 4 --eval_size 4 --max_prompt 64 --max_tokens 48 "
              "--save_every 1 --timeout 0.5").split()
HOSTS = ("nano_rlvr_0", "nano_rlvr_1")


def start_hosts(out):
    """examples/two_nodes.sh on both hosts; their output is added to <out>.<host>.log."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = ENV | {"PATH": path, "RANKS": "1", "GLOO_SOCKET_IFNAME": "net0"}
    processes = []
    for i, host in enumerate(HOSTS):
        command = ["ip", "netns", "exec", host, common.ROOT / "examples/two_nodes.sh", str(i),
                   "10.213.0.1", "--out", out, "--name", "run", *HOST_FLAGS]
        with open(f"{out}.{i}.log", "a") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return processes


def hosts(out):
    """A run ends; the same run, in which one host is cut off; connected again, it continues."""
    try:
        for host in HOSTS:
            shell(f"ip netns add {host}")
        shell(f"ip link add net0 netns {HOSTS[0]} type veth peer name net0 netns {HOSTS[1]}")
        for i, host in enumerate(HOSTS):
            shell(f"ip -n {host} addr add 10.213.0.{i + 1}/24 dev net0")
            shell(f"ip -n {host} link set net0 up")
            shell(f"ip -n {host} link set lo up")
        yield "flags of the hosts", f"`{' '.join(HOST_FLAGS)}`"
        yield "exit codes of the whole run", str([p.wait() for p in start_hosts(out / "whole")])
        processes = start_hosts(out / "cut")
        wait_until(processes[0], (out / "cut/run/step-1").exists)
        shell(f"ip -n {HOSTS[1]} link set net0 down")
        begin = time.time()
        yield "exit codes after the cut", str([p.wait() for p in processes])
        yield "seconds from the cut to the end of both", f"{time.time() - begin:.0f}"
        for i in (0, 1):
            yield f"words of host {i}", str(own_lines(Path(f"{out}/cut.{i}.log")))
        shell(f"ip -n {HOSTS[1]} link set net0 up")
        yield "exit codes continued", str([p.wait() for p in start_hosts(out / "cut")])
        different = differences(out / "whole/run", out / "cut/run")
        yield "the continued run and the whole one", "; ".join(different) or "equal"
    finally:
        for host in HOSTS:
            shell(f"ip netns delete {host}")


BENCHES = {"kill": kill, "ranks": ranks, "signals": signals, "damage": damage, "soak": soak,
           "inputs": inputs, "hosts": hosts}


def main(name):
    begin, conditions, results = time.time(), common.conditions(), []
    with tempfile.TemporaryDirectory(prefix="faults-") as out:
        for row in BENCHES[name](Path(out)):
            results.append(row)
            print(*row, flush=True)
    lines = [(*row, n) for row, n in sorted(Counter(results).items())]
    equal = sum(result == "equal" for _, result in results)
    common.write(f"faults_{name}", f"""{conditions}, {time.time() - begin:.0f} s.
Flags: `{' '.join(FLAGS)}`.

{equal} of {len(results)} equal.

{common.table(["fault", "result", "times"], lines)}""")


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("bench", choices=BENCHES)
    main(parser.parse_args().bench)
