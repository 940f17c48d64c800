"""Checks whether this machine can do a run, and prints the memory plan for its flags.

    python -m examples.doctor [flags of nano_rlvr.py]
    python -m examples.doctor --model Qwen2.5-Math-1.5B --memory_gb 24    the plan for another GPU

Without --memory_gb it also samples some answers and shows them as a run does after its first
evaluation: two prompts, three completions with their rewards, and why none is rewarded.

A check gets the flags, parsed and as they were typed. It returns what it found and a text about
what limits a run, which is empty or None if nothing does. It raises an error if the run would fail.
"""
import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import torch

import nano_rlvr as nr
from bench import roofline
from runtime import memory
from runtime.evaluation import FIRST_LOOK
from runtime.memory import GIB
from runtime.model import loading

REPOSITORY = Path(__file__).resolve().parents[1]
LOOK = "--steps 0 --eval_size 16 --eval_n 0 --wandb off --out"
STEP = ("--steps 1 --prompts 2 --samples 2 --max_prompt 256 --max_tokens 16 --pack_tokens 512 "
        "--eval_size 2 --out")


def versions(cfg, argv):
    if torch.version.cuda:
        source = "-r requirements.txt"
        packages = (REPOSITORY / "requirements.txt").read_text().splitlines()
    else:
        source = "--group cpu"
        packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
        packages = packages["dependency-groups"]["cpu"]
    pins = dict(package.split("==") for package in packages if "==" in package)
    installed = {x.name: x.version.partition("+")[0] for x in metadata.distributions()}
    wrong = [f"{name} is {installed.get(name, 'missing')}, pinned {pin}"
             for name, pin in pins.items() if installed.get(name) != pin]
    found = f"Python {platform.python_version()}, the {len(pins)} pinned packages"
    return found, wrong and f"{', '.join(wrong)}: pip install {source}"


def device(cfg, argv):
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found = f"{torch.cuda.get_device_name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        return found, free < 0.9 * total and "other processes use this GPU, see nvidia-smi"
    # flags.check has refused a torch that is built for GPUs
    return (f"a CPU, {platform.machine()}, {os.cpu_count()} cores", shutil.which("nvidia-smi")
            and "torch is built for CPUs; for the GPU: pip install -r requirements.txt")


def host(cfg, argv):
    free, shared = memory.free_host_bytes(), shutil.disk_usage("/dev/shm").total
    found = f"{free / GIB:.1f} GiB of memory are free, /dev/shm has {shared / GIB:.2f}"
    return found, (free < 4 * GIB or shared < GIB) and (
        "libraries take 3 GiB; ranks need 1 GiB of /dev/shm (--shm-size 8g)")


def child(flags, seconds):
    """What nano_rlvr.py prints with these flags, in a process that may crash. RuntimeError with the
    last line if it fails."""
    child = subprocess.run([sys.executable, "nano_rlvr.py", *flags], timeout=seconds,
                           cwd=REPOSITORY, capture_output=True, text=True, errors="replace")
    if child.returncode:
        last = (child.stderr.splitlines() or [""])[-1]
        raise RuntimeError(f"{last} ({child.returncode})")
    return child.stdout


def step(cfg, argv):
    """vLLM, DeepSpeed, the sync and a checkpoint."""
    with tempfile.TemporaryDirectory() as out:
        try:
            child([*STEP.split(), out], 900)
        except RuntimeError as e:
            raise RuntimeError(f"the bundled model cannot be trained: {e}") from e
    return "the bundled model takes a step, with vLLM and DeepSpeed", ""


def look(cfg, argv):
    """The first look of a run with these flags, at 16 answers. Its reasons are what limits it."""
    if cfg.memory_gb:
        return "no answers are sampled, because --memory_gb asks for a plan", ""
    with tempfile.TemporaryDirectory() as out:
        printed = child([*argv, *LOOK.split(), out], 3600)
    lines = []
    for line in printed.splitlines():
        _, mark, text = line.partition(FIRST_LOOK)
        lines += [text] * bool(mark)
    found = "\n".join([*lines, "these are answers to 16 held-out questions"])
    return found, "no answer is rewarded: " in found and "none is rewarded"


def plan(cfg, argv):
    with loading("config.json", cfg, "is it a folder, or a model of the hub?"):
        model = memory.ModelShape.of(cfg.model)
    device, size, place = None, cfg.memory_gb * GIB, "this machine"
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    if size > 1.1 * total:  # a card of 24 GB has 23.6 GiB: it is here
        device = memory.Device(True, size, size)
        place = "a GPU that is not here; host memory is not checked"
        if "--compile" not in " ".join(argv):  # what auto means there
            cfg = dataclasses.replace(cfg, compile="on" if cfg.zero_stage < 3 else "off")
    _, planned = memory.plan(cfg, device, model)
    return f"for {place}\n{planned['text']}", ""


def hours(cfg, argv):
    """The least hours of the run on one GPU of each of four kinds, from their data sheets. Answers
    have 700 tokens on average, or half of --max_tokens if that is fewer."""
    cfg = dataclasses.replace(cfg, dtype="bfloat16", memory_gb=0.0)  # of a whole card
    model, found = memory.ModelShape.of(cfg.model), []
    n, mean = cfg.prompts * cfg.samples, max(2, min(700, cfg.max_tokens // 2))
    lengths = roofline.geometric(n, mean, cfg.max_tokens)
    groups = [(100, lengths[i::cfg.prompts]) for i in range(cfg.prompts)]
    for gpu in roofline.DEVICES:
        if planned := roofline.planned(cfg, model, gpu):
            stages = roofline.bounds(planned, model, groups, gpu).values()
            seconds = cfg.steps * sum(sum(parts.values()) for parts in stages)
            adapters = f" with --lora_rank {planned.lora_rank}"
            found.append(f"{seconds / 3600:.2g} on {gpu.name}"
                         + adapters * (planned.lora_rank != cfg.lora_rank))
    return (f"on paper, {cfg.steps} steps of {n} answers of {mean} tokens take at least (hours): "
            f"{', '.join(found) or 'it fits none'}; multiply by the price of an hour"), ""


def disk(cfg, argv):
    out = Path(cfg.out).absolute()
    folder = next(path for path in (out, *out.parents) if path.exists())
    size = memory.checkpoint_bytes(cfg, memory.ModelShape.of(cfg.model))
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB are free in {folder}; a checkpoint takes {size / GIB:.2f}"
    if free < (cfg.keep + 2) * size:  # those kept, the best one and the one being written
        raise RuntimeError(f"{found}, and {cfg.keep + 2} must fit: change --out or --keep")
    return found, ""


def main(argv, checks=(versions, device, host, step, plan, hours, disk, look)):
    """Prints all checks. Returns 1 if one failed, else 0. Raises ValueError for bad flags."""
    cfg = nr.parse_config(argv)
    if cfg.memory_gb and not torch.cuda.is_available():  # a plan for a GPU, whose default is bf16
        cfg = nr.parse_config(["--dtype", "bfloat16", *argv])
    failed = False
    for check in checks:
        try:
            found, limit = check(cfg, argv)
            status, found = ("note", f"{found}: {limit}") if limit else ("ok", found)
        except Exception as e:  # any library may raise anything here: that is the finding
            status, found, failed = "FAIL", (str(e).splitlines() or [type(e).__name__])[0], True
        print(f"{status:4}  {check.__name__:8}  {found.rstrip()}", flush=True)
    print(f"verdict: {'not ready' if failed else 'ready'}")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as e:
        sys.exit(f"doctor: {e}")
