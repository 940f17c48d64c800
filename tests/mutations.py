"""Plants faults in copies of the repository, one at a time, and reports which test notices each.

    python tests/mutations.py                all faults; make mutations does the same
    python tests/mutations.py leave-one-out  only those whose description contains these words
    python tests/mutations.py --dry          no tests: only checks that every fault can be planted

The faults are in faults.txt. Each copy is tested in a forked child (torch, TRL and vLLM are imported once, here), which stops at
the first test that fails; the quickest tests run first. Prints a Markdown table. Exits with 1 if no test
notices a fault, or if a test fails without a fault.
"""
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("pytest.ini", "*.py", "runtime/*.py", "verify/*.py", "tests/*.py", "tests/vectors/*",
          "bench/faults.py",
          "examples/*.py", "models/tiny/*", "runtime/*.html", "bench/screenshots.py",
          "bench/results/ranks_reduce.json", "docs/data_and_rewards.md")
STAGES = (  # each runs if the one before it passed
    ["tests/test_vectors.py"],
    ["tests/test_by_hand.py"],
    ["tests/test_precision.py"],
    ["tests/test_wiring.py"],
    ["tests/test_credit.py", "tests/test_variants.py", "tests/test_math.py", "tests/test_guard.py"],
    ["tests/test_process_rewards.py"],
    ["tests/test_savings.py", "-k", "not llm and not vllm and not cache and not flat_log"],
    ["tests/test_presets.py", "-k", "grpo"],
    ["tests/test_trl.py"],
    ["tests/test_families.py", "-k", "one_sequence_at_a_time"],
    ["tests/test_checksum.py", "-k", "not damaged"],
    ["tests/test_tensor_parallel.py", "-k", "not sample_as_single_ranks"],
    ["tests/test_memory.py", "-k", "planned_state or keys_and_values"],
    ["tests/test_evaluation.py", "-k", "not vllm"],
    ["tests/test_tools.py", "-k", "not program and not example"],
    ["tests/test_report.py", "-k", "numbers_per_token_are or differ_only"],
    ["tests/test_ppo.py", "-k", "gae"],
    ["tests/test_resume.py", "-k", "not killed and not two_ranks and not does_not_answer"])
FAULTS = ROOT / "tests/faults.txt"
PRODUCT = ("nano_rlvr.py", "rewards.py", "data.py", "runtime/*.py", "runtime/*.html", "verify/*.py",
           "examples/*.py")


def faults():
    """(description, file, text, what replaces it) of each fault in FAULTS.

    A fault is a line "# description", lines "- text" and lines "+ replacement". The text must occur exactly
    once in the PRODUCT files, or, after a line "@ file", in that file.
    """
    texts = {str(path.relative_to(ROOT)): path.read_text() for pattern in PRODUCT for path in ROOT.glob(pattern)}
    for block in FAULTS.read_text().rstrip("\n").split("\n\n"):
        lines = {mark: "\n".join(line[2:] for line in block.split("\n") if line[0] == mark) for mark in "#@-+"}
        files = [lines["@"]] if lines["@"] else [file for file, text in texts.items() if lines["-"] in text]
        if len(files) != 1 or texts[files[0]].count(lines["-"]) != 1:
            sys.exit(f"{lines['#']}: its text must occur once, it is in {files}:\n{lines['-']}")
        yield lines["#"], files[0], lines["-"], lines["+"]


def copy(folder, patterns=COPIED):
    """Copies what the tests need into a folder."""
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def plant(folder, file, old, new):
    """A copy, in a folder, of what the tests need, with one fault."""
    copy(folder)
    (folder / file).write_text((ROOT / file).read_text().replace(old, new))


def import_libraries():
    """Once for all forked children."""
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    sys.dont_write_bytecode = True
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import tyro  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: F401
    from vllm import SamplingParams  # noqa: F401


class FirstFailure:
    """A pytest plugin. `name`: the first test that fails, or that a file could not be collected."""

    def __init__(self):
        self.name = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.name = "cannot be collected"


def caught_by(folder, topic="", stages=STAGES):
    """The first failing test of a copy, "" if all pass. The output of the last stage is <folder>/log.

    A stage with a test file named after the topic runs first. Each has a process of its own: DeepSpeed makes
    its groups once per process.
    """
    stages = sorted(stages, key=lambda stage: f"tests/test_{topic}.py" not in stage)
    return next(filter(None, (first_failure(folder, stage) for stage in stages)), "")


def first_failure(folder, arguments, cores=None, limit=math.inf):
    """The first failing test of a copy, "" if all pass. Runs pytest with these arguments in a forked child,
    on these cores if they are given, for at most `limit` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.sched_setaffinity(0, cores or os.sched_getaffinity(0))
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        libraries = [p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p]
        sys.path[:] = [str(folder / "tests"), str(folder), *libraries]
        import pytest
        first = FirstFailure()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
        code = pytest.main([*options, *arguments], plugins=[first])
        os.write(writing, (first.name or ("" if code == 0 else f"pytest ended with {int(code)}")).encode())
        os._exit(0)
    os.close(writing)
    begin = time.monotonic()
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() - begin > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "does not end"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left
    with os.fdopen(reading) as pipe:
        return pipe.read()


def main(words):
    planned = [fault for fault in faults() if words in (fault[0], "--dry") or words in fault[0]]
    if words == "--dry":
        sys.exit()
    import_libraries()
    begin, missed = time.time(), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for i, (_, *fault) in enumerate(planned):
            plant(folder / str(i), *fault)
        if not words:
            plant(folder / "plain", "nano_rlvr.py", "import torch\n", "import torch\n")
            if name := caught_by(folder / "plain"):
                sys.exit(f"without any fault: {name}\n" + (folder / "plain/log").read_text()[-3000:])
        print("| fault | caught by |\n|---|---|")
        for i, (what, *_) in enumerate(planned):
            name = caught_by(folder / str(i), topic=what.partition(":")[0])
            missed += "::" not in name
            print(f"| {what} | {f'`{name}`' if name else '**nothing**'} |", flush=True)
            if words or name and "::" not in name:
                print((folder / f"{i}/log").read_text()[-3000:], file=sys.stderr)
    print(f"\n{len(planned) - missed} of {len(planned)} caught, {time.time() - begin:.0f} s")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
