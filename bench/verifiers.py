"""What judging 1,024 completions costs: in a warm pool, and in one process without a pool.

    python -m bench.verifiers

gsm8k    the test set's questions, 8 answers each, half of them wrong
math     MATH-500 solutions, 8 per problem: half against their own answer, half against another's
hung     the same, but 20 answers hang sympy: they should cost the time limit once
code     256 programs with 3 tests each, in the jail

All but code need the data sets in ../shared/data.
"""
import json
import time
from statistics import median

import rewards
from measure import common
from verify import jail

DATA = common.ROOT.parent / "shared/data"
PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


def read(path):
    with open(DATA / path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def gsm8k():
    golds = [row["answer"] for row in read("gsm8k/test.jsonl")[:128] for _ in range(8)]
    answers = [gold.rpartition("####")[2].strip() if i % 2 else i % 8
               for i, gold in enumerate(golds)]
    texts = [f"<think>{gold}</think><answer>{x}</answer>" for gold, x in zip(golds, answers)]
    return texts, {"answer": golds}


def math():
    rows = read("math500/test.jsonl")
    texts = [rows[(i * 3 + 7 * k + 1) % 500 if k < 4 else i * 3]["solution"]
             for i in range(128) for k in range(8)]
    return texts, {"answer": [rows[i * 3]["answer"] for i in range(128) for _ in range(8)]}


def hung():
    texts, columns = math()
    return [r"\boxed{9^{9^9}}"] * 20 + texts[20:], {"answer": ["5"] * 20 + columns["answer"][20:]}


def code(n=256):
    tests = [{"input": f"{i} {i}", "output": str(2 * i)} for i in range(3)]
    return [PROGRAM] * n, {"tests": [tests] * n}


def measure(name, spec, texts, columns, pools=3, alone=True):
    """Prints the median over new pools: repeating a batch in one pool would measure caches. alone:
    also in this process, without a pool."""
    times, line = [], ""
    for _ in range(pools):
        with rewards.Verifier(spec, timeout=5.0) as verify:
            verify(texts[-32:], **{k: v[-32:] for k, v in columns.items()})  # warm
            start = time.perf_counter()
            values, _, metrics = verify(texts, **columns)
            times.append(time.perf_counter() - start)
    if alone:
        function = rewards.REWARDS[spec]
        function(texts[-32:], **{k: v[-32:] for k, v in columns.items()})
        start = time.perf_counter()
        assert function(texts, **columns) == values, "the pool and one process must agree"
        line = f", one process: {time.perf_counter() - start:.2f} s"
    print(f"{name:6} {len(texts):5,} completions, {metrics['reward/timeouts']:.0f} timeouts, pool: "
          f"{median(times):.2f} s ({min(times):.2f} to {max(times):.2f}){line}")


def main():
    print(common.conditions())
    measure("gsm8k", "gsm8k", *gsm8k())
    measure("math", "math", *math())
    measure("hung", "math", *hung(), pools=1, alone=False)
    jail.check()
    measure("code", "code", *code(), pools=1)


if __name__ == "__main__":
    main()
