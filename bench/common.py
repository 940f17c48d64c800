"""What update.py and scale.py share: a Qwen2 of any size with random weights, ragged rollouts, a measured update, the conditions."""
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
sys.path = [p for p in sys.path if Path(p).resolve() != ROOT / "bench"] + [str(ROOT)]  # a rewards.py is in both

import torch  # noqa: E402

import nano_rlvr as nr  # noqa: E402
from bench.random_model import random_qwen2  # noqa: E402
from tools.runlog import provenance  # noqa: E402

CUDA = torch.cuda.is_available()


def make_model(folder, hidden, layers, vocab):
    """Qwen2 with random weights and tied embeddings. hidden 1536, layers 28, vocab 151936 is the exact shape of Qwen2.5-1.5B."""
    width = 128 if hidden >= 1536 else 64  # of a head
    random_qwen2(torch.bfloat16 if CUDA else torch.float32, vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 35 // 6,
                 num_hidden_layers=layers, num_attention_heads=hidden // width, num_key_value_heads=2, tie_word_embeddings=True,
                 max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).save_pretrained(folder)


def make_config(model, **changes):
    """The defaults of nano_rlvr.py without the KL term, whose reference model is no part of an update."""
    cfg = nr.check(dataclasses.replace(nr.Config(), model=str(model), kl_coef=0.0, checkpointing="on", **changes))
    return dataclasses.replace(cfg, mismatch_bound=math.inf)  # no vLLM has sampled here


def make_rollouts(n, max_tokens, vocab, seed=0):
    """n rollouts of random tokens, 8 a prompt, in the order of sampling.

    At max_tokens 3000: prompts of 60 to 120 tokens, completions as long as those of GSM8K with a long tail - lognormal with
    median 200 and 99th percentile 3000, where they are cut. Other max_tokens shrink everything by the same factor.
    """
    rng, ids, spread, out = random.Random(seed), random.Random(seed), math.log(15) / 2.326, []  # lengths do not depend on vocab
    for i in range(n):
        if i % 8 == 0:
            prompt = [ids.randrange(vocab) for _ in range(rng.randint(1 + max_tokens // 50, 1 + max_tokens // 25))]
        length = min(max_tokens, max(1, round(max_tokens / 15 * math.exp(spread * rng.gauss(0, 1)))))
        logps = [-math.log(vocab)] * length  # nearly what a random model says
        out.append(nr.Rollout(prompt, [ids.randrange(vocab) for _ in range(length)], "", length == max_tokens, logps, 0.0,
                              advantage=rng.gauss(0, 1)))
    return out


def memory(peak=False):
    """Bytes that PyTorch holds on the GPU, without one the resident size of this process: now, or the most since measure() began."""
    if CUDA:
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    name = "VmHWM:" if peak else "VmRSS:"  # not ru_maxrss: it begins with the parent's and cannot be set back
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024


def measure(engine, split, rollouts, cfg):
    """nano_rlvr.update on split(rollouts), a list of packs -> its metrics, seconds, memory before and at its peak (bytes)."""
    rollouts = nr.weigh(rollouts, cfg)
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    idle, start, cpu = memory(), time.perf_counter(), time.process_time()
    metrics = nr.update(engine, split(rollouts), cfg)
    if CUDA:
        torch.cuda.synchronize()
    return {**metrics, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu, "idle": idle,
            "peak": memory(peak=True), "tokens": sum(map(len, rollouts))}


def in_a_process(script, *arguments, **environment):
    """Runs a script in a process of its own -> what it printed last, as JSON."""
    done = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def conditions():
    """One line: commit, machine, versions, load. Call it before the work: afterwards the load is one's own."""
    about, load = provenance(), os.getloadavg()[0]
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    return f"commit {about['commit']}, {about['device']}, load {load:.1f} before, {versions}, {time.strftime('%Y-%m-%d')}"


def write(name, text, numbers):
    """Prints the text and leaves it with the numbers in bench/results/."""
    folder = ROOT / "bench/results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n")
    (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1))
    print(text)
