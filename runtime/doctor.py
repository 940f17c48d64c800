"""Checks whether this machine can do a run, and prints the memory plan for its flags.

    python -m runtime.doctor [flags of nano_rlvr.py]
    python -m runtime.doctor --model Qwen2.5-Math-1.5B --memory_gb 24    the plan for a GPU that is not here

A check is a function that returns a status ("ok", "note", "FAIL"), what was found and, if needed, what to do.
An exception is a FAIL with its text. Packages are imported inside the checks: one may be missing or broken.
"""
import contextlib
import ctypes
import importlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GIB = 2**30
# programs for a child process: what they print, change or break stays there
DEEPSPEED = """
import torch
from runtime import dist, trainer
dist.init_process_group()
engine = trainer.start_deepspeed(torch.nn.Linear(8, 8), dict(lr=1e-3), dict(
    train_micro_batch_size_per_gpu=1, zero_allow_untested_optimizer=True, zero_optimization={zero}))
engine.backward(engine(torch.ones(1, 8, device=dist.device())).sum())
engine.step()
print("a ZeRO-2 step on", dist.device(), "with", torch.distributed.get_backend())"""
VLLM = """
from runtime import dist, sampler
dist.init_process_group()
llm = sampler.start_vllm(
    model="models/tiny", dtype="float32", max_model_len=64, max_num_seqs=1,
    cuda_args=dict(gpu_memory_utilization=0.2, enable_sleep_mode=True, enforce_eager=True))
[request] = llm.generate("1+1", use_tqdm=False)
print("samples", len(request.outputs[0].token_ids), "tokens on", dist.device())"""


def run_program(code, seconds=None):
    """Runs Python code in a child process: its last line of output. RuntimeError with its last error."""
    group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in group}
    child = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=env, timeout=seconds,
                           stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if child.returncode:
        errors = re.findall(r"^(?:\[rank0\]: )?([\w.]*(?:Error|Exception)\b.*)", child.stderr, re.MULTILINE)
        raise RuntimeError(errors[-1] if errors else f"exit code {child.returncode}")
    return child.stdout.splitlines()[-1]


def driver_cuda():
    """The CUDA version of the NVIDIA driver as (major, minor); None if there is no driver."""
    try:
        number, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


# ---- checks of the machine

def versions():
    file = REPOSITORY / ("requirements.txt" if driver_cuda() else "requirements-cpu.txt")
    pins = re.findall(r"^([\w-]+)==(.+)$", file.read_text().partition("# tests")[0], re.MULTILINE)
    installed = {dist.name: dist.version.partition("+")[0] for dist in metadata.distributions()}
    wrong = [(name, installed.get(name, "missing"), pin) for name, pin in pins if installed.get(name) != pin]
    if wrong:
        return ("FAIL" if "missing" in [version for _, version, _ in wrong] else "note",
                ", ".join(f"{name} is {version}, pinned {pin}" for name, version, pin in wrong),
                f"pip install -r {file.name}: only the pinned versions were tested together")
    return "ok", f"Python {platform.python_version()}, the {len(pins)} packages of {file.name}"


def device():
    import torch
    driver, built = driver_cuda(), torch.version.cuda
    if not driver and not built:
        return "ok", f"no NVIDIA driver: the CPU, {platform.machine()}, {os.cpu_count()} cores"
    driver = f"the driver is for {driver[0]}.{driver[1]}" if driver else "there is no NVIDIA driver"
    cuda = f"torch is built for CUDA {built}, {driver}"
    if not built:
        return "FAIL", cuda, "pip install -r requirements.txt, in a new environment"
    if not torch.cuda.is_available():
        return ("FAIL", f"no usable GPU; {cuda}", "see nvidia-smi (driver 580 or newer) and CUDA_VISIBLE_"
                "DEVICES; on a CPU: pip install -r requirements-cpu.txt, in a new environment")
    free, total = torch.cuda.mem_get_info()
    capability = torch.cuda.get_device_capability()
    found = (f"{torch.cuda.get_device_name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, "
             f"compute capability {capability[0]}.{capability[1]}, {cuda}")
    if capability < (8, 0):
        return "note", found, "bf16 needs compute capability 8.0: use --dtype float32"
    if free < 0.9 * total:
        return "note", found, "other processes use this GPU: see nvidia-smi"
    return "ok", f"{found}, bf16"


def host_memory():
    import psutil

    from runtime.memory import free_host_bytes
    found = f"{free_host_bytes() / GIB:.1f} of {psutil.virtual_memory().total / GIB:.1f} GiB are available"
    if free_host_bytes() < 4 * GIB:
        return "note", found, "end other processes: PyTorch, vLLM and DeepSpeed alone take about 3 GiB"
    return "ok", found


def shared_memory():
    size = shutil.disk_usage("/dev/shm").total
    if size < GIB:
        return ("note", f"/dev/shm has {size / GIB:.2f} GiB", "several ranks exchange data through it: "
                "docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm")
    return "ok", f"/dev/shm has {size / GIB:.1f} GiB"


def compiler():
    from runtime.memory import need_compiler
    with contextlib.redirect_stderr(io.StringIO()) as lock:
        need_compiler()
    if lock.getvalue():
        return "FAIL", "DeepSpeed's compilation is locked", lock.getvalue().strip().removeprefix("note: ")
    return "ok", "compilers, Python.h and ninja; no lock of DeepSpeed's compilation"


def deepspeed():
    if compiler()[0] != "ok":  # the program below would wait for the lock
        return "note", "not tried", "see compiler"
    found = run_program(DEEPSPEED.format(zero=dict(stage=2)))  # no time limit: it would leave a lock
    if driver_cuda():
        try:
            run_program(DEEPSPEED.format(zero=dict(stage=2, offload_optimizer=dict(device="cpu"))))
        except RuntimeError as e:
            return ("note", f"{found}; --offload optimizer fails: {e}",
                    "it is compiled with g++ and ninja, without nvcc; or use --offload none")
    return "ok", found


def vllm():
    return "ok", run_program(VLLM, seconds=300)


def matplotlib():
    from runtime import report
    report.figure()
    return "ok", f"matplotlib {metadata.version('matplotlib')} draws curve.png and report.html"


def git():
    if not shutil.which("git"):
        return "note", "git is missing: config.json will not name the commit", "apt-get install git"
    return "ok", "config.json will name the commit"


def hub():
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # any answer will do
    except OSError as e:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the checks below then try only once
        return ("note", f"{url} does not answer: {getattr(e, 'reason', e)}",
                "--model and --data must be local, or in the cache of an earlier download")
    return "ok", f"{url} answers"


# ---- checks of a run with these flags

def wandb(cfg):
    from runtime.log import check_wandb
    with contextlib.redirect_stderr(io.StringIO()):  # wandb tells whose account it is
        try:
            check_wandb("online" if cfg.wandb == "off" else cfg.wandb)
        except ValueError as e:
            return "note" if cfg.wandb == "off" else "FAIL", str(e)
    return "ok", f"--wandb {'online' if cfg.wandb == 'off' else cfg.wandb} works"


def jail(cfg):
    from verify import jail
    if not re.search(r"\bcode\b", cfg.rewards):
        return "ok", f"not needed for --rewards {cfg.rewards}"
    isolate = jail.jail(cfg.allow_unsafe_code)  # raises NoIsolation
    if isolate is None:
        return "note", "none: the model's programs can read and delete your files", "install bubblewrap"
    return "ok", f"the model's programs are isolated by {isolate.__name__[1:]}"


def model(cfg):
    from runtime.shape import ModelShape
    try:
        shape = ModelShape.of(cfg.model)
    except OSError as e:
        return ("FAIL", f"--model {cfg.model}: no config.json ({str(e).splitlines()[0]})",
                "give a local folder; for the plan, config.json is enough")
    return "ok", f"--model {cfg.model}: {shape.parameters / 1e6:,.1f} M parameters"


def plan(cfg):
    from runtime import memory
    device, size = memory.Device.here(), cfg.memory_gb * GIB
    status, found = "ok", "for this machine"
    if size > device.total * device.gpu:
        device = memory.Device(True, size, size)
        status, found = "note", f"for a GPU of {cfg.memory_gb:g} GiB, which this machine does not have"
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
        memory.plan(cfg, device)
    return status, f"{found}\n{text.getvalue().rstrip()}"


def disk(cfg):
    from runtime import memory
    from runtime.shape import ModelShape
    out = Path(cfg.out).absolute()
    folder = next(path for path in (out, *out.parents) if path.exists())
    free, size = shutil.disk_usage(folder).free, memory.checkpoint_bytes(cfg, ModelShape.of(cfg.model))
    found = f"{free / GIB:.1f} GiB are free in {folder}; a checkpoint takes {size / GIB:.2f}"
    if free < (cfg.keep + 2) * size:  # those kept, the most accurate one and the one being written
        return "FAIL", found, f"{cfg.keep + 2} must fit: make room, choose another --out or a smaller --keep"
    return "ok", found


MACHINE = (versions, device, host_memory, shared_memory, compiler, deepspeed, vllm, matplotlib, git, hub)
RUN = (wandb, jail, model)
PLAN = (plan, disk)  # only if the model is known


def report(check, *args):
    """Runs a check and prints its line. Returns the status."""
    try:
        status, found, *advice = check(*args)
    except Exception as e:  # any library may raise anything here: that is the finding
        status, found, advice = "FAIL", (str(e).splitlines() or [""])[0] or type(e).__name__, []
    print(f"{status:4}  {check.__name__:13}  {found}", *advice, sep=f"\n{'':21}-> ", flush=True)
    return status


def main(parse_config, argv):
    """Prints all checks and a verdict. Returns the exit code, 1 if a check failed.

    parse_config: argv -> Config, nano_rlvr's; raises ValueError for bad flags.
    """
    configs = []

    def flags():
        cfg = parse_config(argv)
        import torch
        if cfg.memory_gb and not torch.cuda.is_available():  # the plan is for a GPU, whose default is bf16
            cfg = parse_config(["--dtype", "bfloat16", *argv])
        configs.append(cfg)
        return "ok", " ".join(argv) or "none"

    statuses = [report(flags), *map(report, MACHINE)]
    for cfg in configs:
        statuses += [report(check, cfg) for check in RUN]
        if statuses[-1] == "ok":
            statuses += [report(check, cfg) for check in PLAN]
    failed, notes = statuses.count("FAIL"), statuses.count("note")
    print(f"verdict: {f'not ready, {failed} FAIL' if failed else 'ready'}, {notes} note{'s' * (notes != 1)}")
    return min(failed, 1)


if __name__ == "__main__":
    # The script is handed in, not imported above: runtime/ does not depend on it.
    sys.exit(main(lambda argv: importlib.import_module("nano_rlvr").parse_config(argv), sys.argv[1:]))
