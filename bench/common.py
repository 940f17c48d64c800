"""Shared by update.py and scale.py: ragged rollouts, a measured update."""
import ctypes
import dataclasses
import gc
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the repository in place of this folder: both have a rewards.py
sys.path = [p for p in sys.path if Path(p).resolve() != ROOT / "bench"] + [str(ROOT)]

import torch  # noqa: E402

import nano_rlvr as nr  # noqa: E402
from runtime.log import provenance  # noqa: E402

CUDA = torch.cuda.is_available()


def make_config(model, **changes):
    """The defaults of nano_rlvr.py without the KL term: the reference model is not part of an update."""
    cfg = dataclasses.replace(nr.Config(), model=str(model), kl_coef=0.0, checkpointing="on", **changes)
    return dataclasses.replace(nr.check_config(cfg), mismatch_bound=math.inf)  # the rollouts are not vLLM's


def make_rollouts(n, max_tokens, vocab, seed=0):
    """n rollouts of random tokens, 8 per prompt, in the order of sampling.

    At max_tokens 3000: prompts of 60 to 120 tokens, and completions with the median length of GSM8K and a
    long tail: lognormal with median 200 and 99th percentile 3000, where they are truncated. Another
    max_tokens scales all lengths.
    """
    lengths, tokens = random.Random(seed), random.Random(seed)  # lengths must not depend on vocab
    sigma = math.log(15) / 2.326  # the 99th percentile is 2.326 sigma above the median
    rollouts = []
    for i in range(n):
        if i % 8 == 0:
            prompt_length = lengths.randint(1 + max_tokens // 50, 1 + max_tokens // 25)
            prompt = [tokens.randrange(vocab) for _ in range(prompt_length)]
        length = round(max_tokens / 15 * math.exp(sigma * lengths.gauss(0, 1)))
        length = min(max_tokens, max(1, length))
        completion = [tokens.randrange(vocab) for _ in range(length)]
        vllm_logps = [-math.log(vocab)] * length  # nearly those of a random model
        rollouts.append(nr.Rollout(prompt, completion, "", length == max_tokens, vllm_logps, reward=0.0,
                                   advantages=[lengths.gauss(0, 1)] * length))
    return rollouts


def memory(peak=False):
    """Bytes that PyTorch holds on the GPU, or without one the resident size of this process: now, or its peak
    since measure() reset it."""
    if CUDA:
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    name = "VmHWM:" if peak else "VmRSS:"  # ru_maxrss starts at the parent's value and cannot be reset
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024


def measure(engine, split, rollouts, cfg):
    """Runs nano_rlvr.collate and update on split(rollouts), a list of packs.

    Returns its metrics with its seconds, its tokens, and the bytes in memory before it ("idle") and at its
    peak.
    """
    rollouts = nr.assign_token_weights(rollouts, cfg)
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    idle, start, cpu = memory(), time.perf_counter(), time.process_time()
    metrics = nr.update(engine, [nr.collate(p, nr.dist.device()) for p in split(rollouts)], cfg)
    if CUDA:
        torch.cuda.synchronize()
    return {**metrics, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu,
            "idle": idle, "peak": memory(peak=True), "tokens": sum(map(len, rollouts))}


def run_apart(script, *arguments, **environment):
    """Runs a script in its own process and returns the last line it printed, parsed as JSON."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def conditions():
    """One line: commit, machine, load and versions. To be called before the measurement, which adds load."""
    about, load = provenance(), os.getloadavg()[0]
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    date = time.strftime("%Y-%m-%d")
    return f"commit {about['commit']}, {about['device']}, load {load:.1f} before, {versions}, {date}"


def write(name, text, numbers):
    """Prints the text and writes it (.md) and the numbers (.json) to bench/results/."""
    folder = ROOT / "bench/results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n")
    (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1))
    print(text)
