"""What judging 1,024 completions costs: in a warm pool, and in one process without a pool.

    python bench/rewards.py

gsm8k    the test set's questions, 8 answers each, half of them wrong (skipped where ../shared/data is absent)
math     MATH-500 solutions, 8 per problem: half against their own answer, half against another problem's
code     256 programs with 3 tests each, in the jail
hung     20 answers that hang sympy among 1,024: they should cost the time limit once
"""
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# without bench/, in which this file is a rewards.py too
sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent] + [str(ROOT)]

import rewards  # noqa: E402
from verify import jail  # noqa: E402

DATA = ROOT.parent / "shared" / "data"


def read(path):
    return [json.loads(line) for line in (DATA / path).read_text(encoding="utf-8").split("\n") if line]


def gsm8k():
    golds = [row["answer"] for row in read("gsm8k/test.jsonl")][:128]
    number = [gold.rpartition("####")[2].strip() for gold in golds]
    texts = [f"<think>{gold}</think><answer>{number[i] if k % 2 else k}</answer>"
             for i, gold in enumerate(golds) for k in range(8)]
    return "gsm8k:1", texts, {"answer": [gold for gold in golds for _ in range(8)]}


def math():
    rows = read("math500/test.jsonl")
    texts = [rows[(i * 3 + 7 * k + 1) % 500 if k < 4 else i * 3]["solution"]
             for i in range(128) for k in range(8)]
    return "math:1", texts, {"answer": [rows[i * 3]["answer"] for i in range(128) for _ in range(8)]}


def code():
    program = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    tests = [{"input": f"{i} {i}", "output": str(2 * i)} for i in range(3)]
    return "code:1", [program] * 256, {"tests": [tests] * 256}


def measure(name, spec, texts, columns, repeat=3):
    """Median of `repeat` new pools, each warmed on 32 completions: repeating a batch would measure caches."""
    function, times, warm = rewards.parse_rewards(spec)[0][2], [], len(texts) - 32
    for _ in range(repeat):
        with rewards.Verifier(spec) as verify:
            verify(texts[warm:], **{k: v[warm:] for k, v in columns.items()})
            start = time.perf_counter()
            values, _, metrics = verify(texts, **columns)
            times.append(time.perf_counter() - start)
            size = verify.pool.size
    getattr(function, "warm", lambda: None)()
    start = time.perf_counter()
    alone = function(texts, **columns)
    single = time.perf_counter() - start
    assert alone == values, "the pool and one process must agree"
    spread = f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
    print(f"{name:6} {len(texts):5,} completions   pool of {size}: {spread}   one process: {single:.2f} s   "
          f"mean reward {sum(values) / len(values):.2f}, {metrics['reward/timeouts']:.0f} timeouts")


def hung():
    spec, texts, columns = math()
    texts, columns = [r"\boxed{9^{9^9}}"] * 20 + texts[20:], {"answer": ["5"] * 20 + columns["answer"][20:]}
    with rewards.Verifier(spec, timeout=5.0) as verify:
        start = time.perf_counter()
        values, _, metrics = verify(texts, **columns)
        seconds = time.perf_counter() - start
        print(f"hung   {len(texts):5,} completions, 20 of which hang, limit 5 s: {seconds:.2f} s,"
              f" {metrics['reward/timeouts']:.0f} timeouts, {sum(v is None for v in values)} without verdict")


if __name__ == "__main__":
    print(f"{platform.processor() or platform.machine()}, {multiprocessing.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    if not DATA.exists():
        sys.exit(f"needs the data sets in {DATA}")
    measure("gsm8k", *gsm8k())
    measure("math", *math())
    hung()
    if jail.isolation():
        print(f"jail: {jail.isolation().__name__[1:]}")
        measure("code", *code(), repeat=1)
    else:
        print("code: this machine cannot build a jail")
