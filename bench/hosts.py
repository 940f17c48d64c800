"""Two hosts on one machine: network namespaces with a cable between them, one rank on each. Needs root.

    python bench/hosts.py [FLAGS of nano_rlvr.py]

1. A run through examples/two_nodes.sh ends.
2. The same run, in which one host is cut off after its first step: both hosts end, with which words?
3. Connected again, the same command continues it: is everything equal to the bit to the run of 1?

Writes bench/results/hosts.md and .json. What the hosts share here, unlike real ones: disk, clock, shared
memory and the caches of models and compiled operators.
"""
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common  # puts the repository on sys.path
from bench.faults import differences, rows

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--steps 3 --prompts 4 --samples 4 --eval_size 4 --max_prompt 64 --max_tokens 48 --save_every 1 "
         "--timeout 0.5").split()
HOSTS = ("nano_rlvr_0", "nano_rlvr_1")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def connect():
    """Makes both namespaces and the veth pair. Raises OSError or CalledProcessError where it must not."""
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", "net0", "netns", HOSTS[0], "type", "veth", "peer", "name", "net0", "netns", HOSTS[1])
    for i, host in enumerate(HOSTS):
        ip("-n", host, "addr", "add", f"10.213.0.{i + 1}/24", "dev", "net0")
        for device in ("net0", "lo"):
            ip("-n", host, "link", "set", device, "up")


def disconnect():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True)


def why_not():
    """Why this machine or user cannot have network namespaces; "" if it can."""
    try:
        connect()
    except (OSError, subprocess.CalledProcessError) as e:
        return (getattr(e, "stderr", None) or str(e)).strip()
    finally:
        disconnect()
    return ""


def start(out, flags):
    """The processes of examples/two_nodes.sh on both hosts; their output goes to <out>.<host>.log."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RANKS": "1",
           "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net0"}
    command = [ROOT / "examples/two_nodes.sh", "NODE", "10.213.0.1", "--out", out, "--name", "run", *flags]
    processes = []
    for i, host in enumerate(HOSTS):
        command[1] = str(i)
        log = open(f"{out}.{i}.log", "a")
        processes.append(subprocess.Popen(["ip", "netns", "exec", host, *command], env=env, stdout=log,
                                          stderr=subprocess.STDOUT, cwd=ROOT))
    return processes


def words(out):
    """Per host, the lines of its last run that say why it ended."""
    texts = [Path(f"{out}.{i}.log").read_text() for i in (0, 1)]
    return [[line for line in text.splitlines() if line.startswith("nano_rlvr:")] for text in texts]


def measure(folder, flags):
    """Runs 1, 2 and 3. -> a dict of what was found."""
    whole, cut, found = f"{folder}/whole", f"{folder}/cut", {}
    connect()
    begin = time.time()
    found["exit codes of the whole run"] = [p.wait() for p in start(whole, flags)]
    found["seconds of the whole run"] = round(time.time() - begin)
    processes, metrics = start(cut, flags), Path(cut) / "run/metrics.jsonl"
    while not metrics.exists() or not metrics.read_text().count("\n"):
        if any(p.poll() is not None for p in processes):
            sys.exit("the run ended before its first step:\n" + Path(f"{cut}.0.log").read_text()[-2000:])
        time.sleep(0.05)
    ip("-n", HOSTS[1], "link", "set", "net0", "down")
    begin, ended = time.time(), {}
    while len(ended) < 2:
        over = [i for i, p in enumerate(processes) if i not in ended and p.poll() is not None]
        ended |= dict.fromkeys(over, time.time() - begin)
        time.sleep(0.1)
    found["exit codes after the cut"] = [p.returncode for p in processes]
    found["seconds from the cut to the end"] = [round(ended[i]) for i in (0, 1)]
    found["words"] = words(cut)
    ip("-n", HOSTS[1], "link", "set", "net0", "up")
    found["steps on disk"] = len(metrics.read_text().splitlines())
    found["exit codes continued"] = [p.wait() for p in start(cut, flags)]
    found["differences"] = differences(Path(whole) / "run", Path(cut) / "run")
    found["steps"] = len(rows(Path(cut) / "run"))
    return found


def main(flags):
    if reason := why_not():
        sys.exit(f"no network namespaces here: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(folder, [*FLAGS, *flags])
        finally:
            disconnect()
    lines = ["| what | found |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found.items())]
    common.write("hosts", "\n".join(lines) + f"\n\n{common.conditions()}; `python bench/hosts.py`", found)


if __name__ == "__main__":
    main(sys.argv[1:])
