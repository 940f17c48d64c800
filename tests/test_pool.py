"""The pool and the verifier: no call delays, stops or outlives the trainer."""
import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import data
import rewards
from conftest import ROOT, descendants, eventually, gone
from runtime.verify import pool

MARK = f"my-child-{os.getpid()}"
FUNCTIONS = """
import os, signal, subprocess, sys, threading, time
import numpy as np
from examples import jail
from runtime.verify import pool
os.environ["ALLOW_UNSAFE_CODE"] = "1"
threading.Thread(target=time.sleep, args=[600]).start()  # it holds nothing up
CHILD = [sys.executable, "-c", "import time; time.sleep(600)", MARK]
DAEMON = f"import subprocess; subprocess.Popen({CHILD!r}, start_new_session=True)"
PROGRAM = f"import os, sys; os.fork(); os.execv(sys.executable, [sys.executable] + {CHILD[1:]!r})"
def odd(completions, **_):
    return [float(len(c) % 2) for c in completions]
def misbehaves(completions, **_):
    (c,) = completions
    print("a reward function may print", c)
    if c == "raise": raise KeyError("no such thing")
    if c == "exit": sys.exit(3)
    if c == "late": raise TimeoutError("of its own")
    if c == "die": os.kill(os.getpid(), signal.SIGKILL)
    if "child" in c: subprocess.Popen(CHILD)
    if "daemon" in c: subprocess.run([sys.executable, "-c", DAEMON])
    if "program" in c: jail.run_program(PROGRAM, [""], 600)
    if "hang" in c: time.sleep(600)
    if "leave" in c: os._exit(0)
    if c == "ask": return [float(len(sys.stdin.read()))]
    odd = {"none": [None], "nan": [float("nan")], "inf": [float("inf")], "two": [1, 2],
           "text": ["x"], "int": [True], "dict": {1: 1.0}, "str": "1", "number": 1.0,
           "nothing": None, "complex": [1j], "huge": [10 ** 400], "nested": [[1.0]],
           "numpy": np.ones(1)}
    return odd.get(c, [0.5])
async def later(completions, **_):
    return [2.0]
def modules(completions, **_):
    heavy = ("torch", "vllm", "transformers", "deepspeed", "nano_rlvr", "pytest")
    return [float(any(m in sys.modules for m in heavy))]
def strict(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]
def greedy(completions, **_):
    return [float(len(bytearray(200 << 20)) > 0)]
def pid(completions, **_):
    return [float(os.getpid())]
def size(completions, **_):
    return [float(len(c)) for c in completions]
def asks(completions, **_):
    return [len(completions) + 1.0]
asks.waits = True
"""


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "my_own_file.py"
    path.write_text(FUNCTIONS.replace("MARK", repr(MARK)))
    return path


@pytest.fixture(scope="module")
def judge(my):
    """judge(spec) -> a Verifier. Names without a file: those of `my`, gsm8k, math, length_kimi."""
    files = {"gsm8k": "", "math": "", "length_kimi": f"{ROOT}/examples/shaping_rewards.py:"}
    with contextlib.ExitStack() as stack:
        @functools.cache
        def judge(spec):
            parts = [files.get(part.partition(":")[0], f"{my}:") + part for part in spec.split(",")]
            return stack.enter_context(rewards.Verifier(",".join(parts), workers=2))

        yield judge


def test_twenty_calls_that_hang_run_beside_one_another_and_the_rest_are_judged_right(my):
    spec = f"{my}:misbehaves"
    with rewards.Verifier(spec, timeout=3.0, workers=2) as verify, ThreadPoolExecutor(1) as thread:
        call = thread.submit(verify, ["hang"] * 20 + ["ok", "int"], answer=["a"] * 22)
        most = 0  # calls at one time
        while not call.done():
            busy = [worker for worker in list(verify.pool.workers) if worker.task is not None]
            most = max(most, len(busy))
            time.sleep(0.01)
        values, _, metrics = call.result()
        assert values == [None] * 20 + [0.5, 1.0]
        assert metrics == {"reward/timeouts": 20.0, "reward/crashes": 0.0}
        assert most > verify.pool.size  # another worker takes the place of one that hangs
        assert verify(["ok"], answer=["a"])[0] == [0.5]


def test_each_sample_gets_its_own_verdict_whatever_the_others_do(judge, capfd):
    wanted = {"ok": 0.5, "none": None, "nan": None, "int": 1.0, "ask": 0.0, "numpy": 1.0,
              "hang": None, "late": None}
    crash = ["raise", "exit", "die", "inf", "two", "text", "dict", "str", "number", "nothing",
             "complex", "huge", "nested"]
    texts = [*crash, *wanted, "ok"]
    gold = [f"gold {text}" for text in texts]
    values, parts, metrics = judge("misbehaves")(texts, answer=gold)
    assert values == [None] * len(crash) + [*wanted.values(), 0.5] == parts["misbehaves"]
    assert metrics == {"reward/timeouts": 2.0, "reward/crashes": len(crash)}
    printed = capfd.readouterr().err
    assert printed.count("crashed") == 1  # printed once, with function and example; then counted
    for text in "'misbehaves'", "'raise'", "gold raise", "KeyError: 'no such thing'", "my_own_file":
        assert text in printed


def test_parts_are_left_out_added_or_none(judge):
    """None is left out of the sum, but a crash makes the sample None."""
    values, _, _ = judge("misbehaves:0.5,odd:2")(["ok", "none", "raise"])
    assert values == [0.25, 0.0, None]
    values, _, metrics = judge("misbehaves:0.5:-1,odd:2")(["raise", "hang"])  # -1 in their place
    assert values == [1.5, -0.5] and metrics == {"reward/timeouts": 1.0, "reward/crashes": 1.0}
    # no **columns, and a coroutine
    columns = {"answer": ["a", "a"], "prompts": ["p", "p"]}
    assert judge("strict,later:0.5")(["a", "b"], **columns)[0] == [2.0, 1.0]


def test_a_batch_that_cannot_be_judged_raises_at_once(judge):
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        judge("odd")(["a"], log=lambda: 0)
    assert judge("odd")(["a"])[0] == [1.0] and judge("odd")([])[0] == []  # the pool still works


def test_whole_batch_functions_see_every_completion_and_the_first_part(judge):
    columns = {"answer": ["72"] * 3, "prompts": ["p"] * 3}
    texts = [r"\boxed{72}", r"it is \boxed{72}", r"\boxed{71}"]
    # `correct` is gsm8k's part, wherever it stands; without it, math decides
    wanted = {"length_kimi": [0.5, -0.5, 0.0], "gsm8k": [1.0, 1.0, 0.0]}
    assert judge("length_kimi,gsm8k")(texts, **columns)[1] == wanted
    values, parts, _ = judge("gsm8k,length_kimi:0.5")(texts, **columns)
    assert parts == wanted and values == [1.25, 0.75, 0.0]
    assert judge("length_kimi")(texts, **columns)[0] == [0.5, -0.5, 0.0]


def test_a_user_file_is_imported_in_the_fork_server_without_torch_and_the_trainer(judge):
    assert judge("modules")(["x"])[1] == {"modules": [0.0]}
    assert "reward_file_my_own_file" not in sys.modules


def test_workers_and_fork_servers_that_died_between_batches_are_replaced(judge):
    server = judge("pid").pool.fork_server.pid
    [worker] = map(int, judge("pid")(["x"])[0])
    for all_of_them in (False, True):
        killed = descendants([server]) - {server} if all_of_them else {worker}
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(pid, signal.SIGKILL)
        assert gone(killed)
        time.sleep(1)  # the fork server looks for dead children, and then tells the pool
        assert judge("pid")(["x", "y"])[2]["reward/crashes"] == 0


@pytest.mark.parametrize("text, value", [
    ("a daemon", 0.5), ("daemon, hang", None), ("daemon, leave", None)])
def test_what_a_function_started_ends_with_its_worker_or_the_pool(my, text, value):
    timeout = 60 if value else 1.5  # a worker whose call was slow for its time limit is replaced
    with rewards.Verifier(f"{my}:misbehaves", timeout=timeout, workers=1) as verify:
        assert verify([text, "ok"])[0] == [value, 0.5]
        assert becomes(bool(value))  # a daemon may be a server for the next calls
        pids = [verify.pool.fork_server.pid, *(w.pid for w in verify.pool.workers)]
    assert len(pids) > bool(value) and gone(pids) and becomes(False)


def test_a_call_over_memory_mb_crashes(my, judge):
    assert judge("greedy")(["x"])[0] == [1.0]  # 200 MB of 512
    with rewards.Verifier(f"{my}:greedy", workers=1, timeout=30, memory_mb=64) as verify:
        values, _, metrics = verify(["x"] * 4)
    assert values == [None] * 4
    assert metrics == {"reward/timeouts": 0.0, "reward/crashes": 4}


def test_ctrl_c_in_a_call_leaves_a_verifier_that_works(judge):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        judge("misbehaves")(["hang"] * 3)
    assert judge("misbehaves")(["ok", "none"])[0] == [0.5, None]


@pytest.mark.parametrize("where, says", [("==", "^a process .*No such process$"), ("!=", "")])
def test_a_process_that_cannot_be_started_is_named(tmp_path, monkeypatch, where, says):
    (tmp_path / "my.py").write_text(
        "import os\nserver, f, fork = os.getpid(), lambda completions: [1.0], os.fork\n"
        f"os.fork = lambda: os.kill(2**30, 0) if os.getpid() {where} server else fork()")
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0, 0))
    with rewards.Verifier(f"{tmp_path}/my.py:f", timeout=9) as verify:
        with pytest.raises(OSError, match=says) if says else contextlib.nullcontext():
            assert verify(["x"])[0] == [None] and "No such" in verify.crashes["f"]
        assert verify.pool.limit == 3 * 9  # the machine is busy


def test_a_function_that_waits_for_a_network_is_called_per_text(judge):
    assert judge("asks,size:0.5")(["cd", "e"])[0] == [2.0 + 0.5 * 2, 2.0 + 0.5]


def test_a_column_that_no_row_has_is_named_in_one_line():
    rows = [{"question": "q", "answer": "7", "prompt_ids": [1]}, {"question": "q", "answer": None}]
    says = "^reward gsm8k: it reads the column 'answer', which x.jsonl does not have"
    with rewards.Verifier("gsm8k") as verify:
        assert verify(["7"], answer=["7"], self=["a column may have any name"])[0] == [1.0]
        verify.check_columns(rows, "x.jsonl")
        with pytest.raises(ValueError, match=says):
            verify.check_columns(rows[1:], "x.jsonl")


def test_the_rows_of_mixed_tasks_are_each_judged_by_their_own_reward():
    file = f"{ROOT}/examples/mixed_tasks.py"
    rows = data.load(f"{file}:make", size=64)
    own = [e for e in rows if e.get("numbers") is None]
    assert 0 < len(own) < 64 and all(e.get("target") is None for e in own)
    answers = ["<answer>40</answer>", "<answer>(3+2)*4</answer>", "4"]
    with rewards.Verifier(f"{file}:mixed,format:0.1", workers=1) as verify:
        values, parts, _ = verify(answers, answer=["40", "2", None],
                                  numbers=[None, [2, 3, 4], None], target=[None, 20, None])
    assert parts["mixed"] == [1.0, 1.0, None] and values == [1.0, 1.0, 0.0]


def test_each_domain_is_judged_by_its_own_verifier():
    file = f"{ROOT}/examples/domains.py"
    rows = data.load(f"{file}:mixed", size=60, answer_key="none")
    [story] = [row for row in rows if "kind" in row][:1]
    [ask] = [row for row in rows if "topic" in row][:1]
    assert sum("topic" in row for row in rows) == 20
    columns = dict(answer=[story["answer"], None, None],
                   instruction_id_list=[None, *[["punctuation:no_comma"]] * 2],
                   kwargs=[None, [{}], [{}]])
    with rewards.Verifier(f"{file}:judge", workers=1) as verify:
        verify.check_columns([story, ask], file)
        values, _, _ = verify([f"So {story['answer']}", "Owls, at night.", "Owls."], **columns)
    assert values == [1.0, 0.0, 1.0]


# ---- a trainer that ends


def becomes(there):
    """Waits until there are processes with MARK, or none. Popen returns before they have it."""
    return eventually(lambda: there == any(MARK in " ".join(process.info["cmdline"] or [])
                                           for process in psutil.process_iter(["cmdline"])))


@pytest.mark.parametrize("text, number", [
    ("child", signal.SIGTERM), ("a daemon", signal.SIGKILL), ("program", signal.SIGKILL),
    ("a daemon", signal.SIGINT), ("a daemon", 0)])  # 0: it exits without close
def test_all_that_was_started_ends_with_the_trainer(my, request, text, number):
    program = f"""import signal, sys, threading, time; sys.path.insert(0, {str(ROOT)!r})
import rewards
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
verify = rewards.Verifier({f"{my}:misbehaves"!r}, workers=2, timeout=60)
threading.Thread(target=lambda: verify(["hang", {text!r}, "hang"]), daemon=True).start()
hang = lambda: sum(w.task is not None and b"hang" in w.task.payload for w in verify.pool.workers)
while hang() < 2: time.sleep(0.1)
print("\\npids", verify.pool.fork_server.pid, *[w.pid for w in verify.pool.workers], flush=True)
if {number}: time.sleep(600)"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    request.addfinalizer(process.kill)
    pids = next(line for line in process.stdout if line.startswith("pids ")).split()[1:]
    assert number == 0 or becomes(True)
    os.killpg(process.pid, number)  # as a terminal does with Ctrl-C: to the whole foreground group
    _, err = process.communicate(timeout=120)
    assert process.returncode == -number and gone(pids) and becomes(False)
    assert err.count("Traceback") == (number == signal.SIGINT)  # not one per worker


# ---- files that cannot be used

@pytest.mark.parametrize("source, says", [
    ("def f(completions) return []", "SyntaxError: .*my.py, line 1"),
    ("import sys\nsys.exit('bye')", r"SystemExit: bye \(line 2\)"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
    ("f = input('? ')", r"EOFError: .* \(line 1\)"),
    ("import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
     "not ready after 1 s: does a reward file loop"),
    ("def f(*_): pass\ndef check(**_): raise ValueError('n\\no')\nf.check = check", "^n o$"),
])
def test_a_reward_file_that_cannot_be_used_ends_in_one_line_at_the_start(
        tmp_path, monkeypatch, source, says):
    (tmp_path / "my.py").write_text(source)
    before = descendants([os.getpid()])
    monkeypatch.setattr(pool, "START_SECONDS", 1.0 if says.startswith("not ready") else 60.0)
    with pytest.raises((ValueError, RuntimeError), match=says) as caught:
        rewards.Verifier(f"{tmp_path}/my.py:f")
    assert "\n" not in str(caught.value)
    assert gone(descendants([os.getpid()]) - before)
