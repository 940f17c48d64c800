"""What the tests share: model, tokenizer and vLLM engine, fixed rollouts, numeric comparisons."""
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

# pytest -n 2: each worker gets its own cores. On shared ones, two vLLM engines are slow.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw"))::int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, own or cores)

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

import nano_rlvr as nr
import runtime.flags
import runtime.model
from runtime import ranks
from runtime.checkpoint import Checkpoints
from runtime.log import Log

ROOT = Path(__file__).resolve().parents[1]

# environment of child processes: without the process group that this process has joined, and with
# one thread: with several, two runs may add in another order
ENV = {name: value for name, value in os.environ.items() if name not in (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} | {"OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node".split()]
SHARED = ROOT.parent / "shared" / "data"  # GSM8K, MATH-500 ... as jsonl, on machines that have them


# ---- numeric comparisons: every bound follows from the arithmetic, so that it holds on any machine
#
# float64 rounds at 2e-16. The error of a formula is 1e-16 to 1e-15, that of a whole model or of a
# run of ten steps 1e-15 to 1e-12; another order of summation (threads, vector width, BLAS) does not
# change this. A wrong formula shows at 1e-6 or more. 1e-9 is far from both.
EXACT = 1e-9
EPS = 2**-23  # of float32; bounds for results in float32 are multiples of it

def within(measured, bound):
    """Asserts measured <= bound (not NaN)."""
    assert measured <= bound


def close(ours, wanted, bound=EXACT, case=""):  # case: how the message begins
    """Asserts that numbers or tensors of one shape differ by at most bound * max |wanted|."""
    ours, wanted = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (ours, wanted))
    assert ours.shape == wanted.shape and ours.numel() and wanted.isfinite().all()
    largest = bound * (wanted.abs().max().item() or 1.0)
    assert (ours - wanted).abs().max() <= largest, (
        f"{case} yours {ours.flatten()[:6].tolist()}, wanted {wanted.flatten()[:6].tolist()}")


class Double(TorchDispatchMode):
    """Every operator that is told to make a float32 tensor makes a float64 one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = {name: torch.float64 if x is torch.float32 else x
                  for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def float64():
    """Runs our code, TRL, DeepSpeed and transformers in float64, also where they ask for float32.

    Exception: a tensor made from Python numbers with dtype=torch.float32 stays float32. Use numbers
    that float32 holds exactly (see `exactly`) there."""
    torch.set_default_dtype(torch.float64)
    accelerator = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
    try:  # on a CPU with fp16, DeepSpeed refuses float64 in ZeRO-3
        with Double(), mock.patch(f"{accelerator}.is_fp16_supported", lambda self: False):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def exactly(x):
    """The nearest multiple of 1/64, a number that float32 holds exactly."""
    return round(64 * x) / 64


def make_config(**changes):
    """A checked Config of the bundled model with small sizes; its dtype is float64 in float64()."""
    model = str(ROOT / "models/tiny")
    tiny = dict(model=model, **runtime.flags.model_row(model, nr.Config))
    small = dict(prompts=4, samples=4, steps=2, max_prompt=64, eval_size=32, kl_coef=0.001,
                 pack_tokens=4096)
    cfg = runtime.flags.check(nr.Config(**tiny | small | changes))
    if torch.get_default_dtype() is torch.float64:
        cfg = dataclasses.replace(cfg, dtype="float64")
    return cfg


def judged(values_of, **counts):
    """A stand-in for a Verifier with the reward x: values_of(texts, columns) -> their values."""
    def verify(texts, **columns):
        values = values_of(texts, columns)
        return values, {"x": values}, counts

    return verify


def write_rows(path, rows, **options):
    """Writes rows as lines of JSON. Returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), **options)
    return str(path)


def read_rows(path):
    """The rows of a file of lines of JSON."""
    return list(map(json.loads, path.read_text().splitlines()))


def save_untied(model, folder):
    """Saves a copy of the bundled model whose head is a tensor of its own."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.save_pretrained(folder)


def make_checkpoints(policy, **changes):
    """Checkpoints of a new run, or with resume=... an old one, ready to save. out, name: folder."""
    cfg = make_config(**changes)
    checkpoints = Checkpoints(cfg, Log(cfg, AutoTokenizer.from_pretrained(ROOT / "models/tiny")))
    checkpoints.restore(policy)
    return checkpoints


def fixed_rollouts(tokenizer, groups=4, n=4, seed=0):
    """Random completions of different lengths; random rewards, advantages, log-probs, weights."""
    rng, rollouts = random.Random(seed), []
    for _ in range(groups):
        question = f"<|user|>{rng.randint(1, 20)}+{rng.randint(1, 20)}<|assistant|>"
        prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
        for _ in range(n):
            length = rng.randint(1, 40)
            completion = [rng.randrange(256) for _ in range(length)]
            logps = [exactly(-rng.expovariate(1.0)) for _ in range(length)]
            rollouts.append(nr.Rollout(
                prompt, completion, "", False, logps, reward=float(rng.random() < 0.5),
                advantages=[rng.gauss(0, 1)] * length, weight=rng.random() / 100))
    return rollouts


def naive_logps(model, rollout, temperature=1.0):
    """Log-probs and entropies of one completion, from the library's full logits: (R,), (R,)."""
    ids, start = torch.tensor([rollout.prompt + rollout.completion]), len(rollout.prompt)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1:-1] / temperature  # (R, V)
    logp = logits.log_softmax(-1)  # (R, V)
    return logp.gather(1, ids[0, start:, None])[:, 0], -(logp.exp() * logp).sum(-1)


# writes what a run leaves, with accuracies that rise with step and seed; --fail 1 fails, 2 adds 0.1
FAKE_RUN = """
import json, pathlib, sys
words = [word for word in sys.argv[1:] if word != "--resume"]
flags = dict(zip(words[::2], words[1::2]))
sys.exit(3) if flags["--fail"] == "1" else None
folder = pathlib.Path(flags["--out"], flags["--name"])
for name in ("step-2", "final"):
    (folder / name).mkdir(parents=True)
about = {"command": " ".join(sys.argv), "config": {"steps": 2}, "commit": "c-dirty", "device": "d"}
(folder / "config.json").write_text(json.dumps(about | {"versions": {}}))
for step in range(3):
    accuracy = 0.5 + 0.1 * (flags["--fail"] == "2") + step * (1 + int(flags["--seed"])) / 20
    row = {"step": step, "eval/accuracy": accuracy, "eval/n": 64, "eval/length": 10.0,
           "reward/mean": accuracy, "completion/length": 9.0}
    (folder / "metrics.jsonl").open("a").write(json.dumps(row) + "\\n")
"""


def descendants(pids):
    """Process ids of these processes and of all that they started."""
    return set(pids) | {child.pid for pid in pids
                        for child in psutil.Process(pid).children(recursive=True)}


def eventually(condition):
    """Whether condition() becomes true within a minute."""
    return any(condition() or time.sleep(0.1) for _ in range(600))


def gone(pids):
    """Whether these processes end. A zombie has ended."""
    return eventually(lambda: not set(map(int, pids)) & {
        process.pid for process in psutil.process_iter(["status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE})


START, MINUTES = time.monotonic(), float(os.environ.get("TEST_MINUTES", "inf"))


def pytest_runtest_setup(item):
    """TEST_MINUTES, which .ci/run sets for the long tests: what has not begun by then is left out,
    by name."""
    if time.monotonic() - START > 60 * MINUTES:
        pytest.skip(f"TEST_MINUTES={MINUTES:g} are over")


@pytest.fixture(scope="module")
def in_float64(group):
    with float64():
        yield


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models/tiny")


@pytest.fixture(scope="session")
def group():
    ranks.init_process_group()


@pytest.fixture(scope="session")
def llm(group):
    """A vLLM engine with the bundled weights. A test that changes them must use fresh_llm."""
    return nr.Sampler(make_config(max_prompt=256, prompts=16, samples=8, eval_size=64))


@pytest.fixture
def fresh_llm(llm):
    """The engine of `llm`, which gets the bundled weights back after the test."""
    yield llm
    # not named_parameters(): it leaves out the tied head, of which vLLM has a copy on a CPU
    nr.load_weights(llm, runtime.model.load_model(make_config()).state_dict().items())


@pytest.fixture
def model(group):
    """The bundled model as the trainer loads it."""
    torch.manual_seed(0)
    return runtime.model.load_model(make_config())
