"""The pool and the verifier: no call delays, stops or outlives the trainer, or changes a value."""
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rewards
from conftest import ROOT, descendants, gone, processes_with
from verify import jail, pool

MARK = f"my-child-{os.getpid()}"
FUNCTIONS = """
import os, signal, subprocess, sys, threading, time
import numpy as np
threading.Thread(target=time.sleep, args=[600]).start()  # it holds nothing up
CHILD = [sys.executable, "-c", "import time; time.sleep(600)", MARK]
DAEMON = f"import subprocess; subprocess.Popen({CHILD!r}, start_new_session=True)"
def odd(completions, **_):
    return [float(len(c) % 2) for c in completions]
def misbehaves(completions, trainer=None, **_):
    (c,) = completions
    print("a reward function may print", c)
    if c == "raise": raise KeyError("no such thing")
    if c == "exit": sys.exit(3)
    if c == "die": os.kill(os.getpid(), signal.SIGKILL)
    if "child" in c: subprocess.Popen(CHILD)
    if "daemon" in c: subprocess.run([sys.executable, "-c", DAEMON])
    if "stop" in c:
        pid = os.getpid()
        above = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        while (pid := above(pid)) != trainer:
            os.kill(pid, signal.SIGSTOP)
    if "hang" in c: time.sleep(600)
    if "leave" in c: os._exit(0)
    if c == "ask": return [float(len(sys.stdin.read()))]
    odd = {"none": [None], "nan": [float("nan")], "inf": [float("inf")], "two": [1, 2],
           "text": ["x"], "int": [True], "dict": {1: 1.0}, "str": "1", "bytes": b"1", "set": {1.0},
           "number": 1.0, "nothing": None, "complex": [1j], "huge": [10 ** 400], "nested": [[1.0]],
           "numpy": np.ones(1), "column": np.ones((1, 1, 2)), "scalar": np.ones(())}
    return odd.get(c, [0.5])
def twice(completions, **_):
    if os.fork() == 0:
        time.sleep(0.2)  # the verdicts of the others come first
        return [-1.0]
    return [float(len(completions[0]))]
def late(completions, **_):
    raise TimeoutError("of its own")
async def later(completions, **_):
    return [2.0]
def modules(completions, **_):
    heavy = ("torch", "vllm", "transformers", "deepspeed", "nano_rlvr", "pytest")
    return [float(any(m in sys.modules for m in heavy))]
def strict(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]
def greedy(completions, **_):
    return [float(len(bytearray(200 << 20)) > 0)]
here = os.getpid()
def pid(completions, **_):
    return [float(os.getpid())]
def server(completions, **_):
    return [float(here)]
"""


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "my_own_file.py"
    path.write_text(FUNCTIONS.replace("MARK", repr(MARK)))
    return path


@pytest.fixture(scope="module")
def judge(my):
    """judge("odd:2,late", texts, **columns) -> (rewards, parts, metrics), from one pool."""
    specs = ["misbehaves", "misbehaves:0.5,odd:2", "odd", "late", "strict,later:0.5", "twice",
             "greedy", "pid", "server", "modules"]
    full = {spec: ",".join(f"{my}:{part}" for part in spec.split(",")) for spec in specs}
    kimi = f"{ROOT}/examples/shaping_rewards.py:length_kimi"
    full |= {spec: spec.replace("length_kimi", kimi)
             for spec in ("length_kimi,gsm8k", "gsm8k,length_kimi:0.5", "length_kimi")}
    rows = [*full.values(), "math"]  # for `modules`
    with rewards.Verifier(f"{my}:odd", timeout=5.0, workers=2, row_specs=rows) as verify:
        def run(spec, texts, **columns):
            values, parts, metrics = verify(texts, reward=[full[spec]] * len(texts), **columns)
            names = [part.split(":")[0] for part in spec.split(",")]
            return values, {name: parts[name] for name in names}, metrics
        run.verify = verify
        yield run


def test_twenty_hung_answers_cost_one_limit_and_the_rest_are_judged_right():
    hung = [r"\boxed{10^{10^{10}}}", r"\boxed{9^{9^9}}", r"\boxed{\binom{10^9}{5*10^8}}",
            r"\boxed{(10^9)!}"] * 5
    with rewards.Verifier("math", timeout=3.0, workers=2) as verify:
        start = time.monotonic()
        values, _, metrics = verify(hung + [r"\boxed{72}", r"\boxed{\frac12}"],
                                    answer=["5"] * 20 + ["72", "0.5"])
        took = time.monotonic() - start
        assert values == [None] * 20 + [1.0, 1.0]
        assert metrics == {"reward/timeouts": 20.0, "reward/crashes": 0.0}
        assert took < 15  # half of the 30 s that they take one after the other on two workers
        assert verify([r"\boxed{72}"], answer=["72"])[0] == [1.0]  # the workers have been replaced


def test_each_sample_gets_its_own_verdict_whatever_the_others_do(judge, capfd):
    wanted = {"ok": 0.5, "none": None, "nan": None, "int": 1.0, "ask": 0.0, "numpy": 1.0,
              "hang": None}
    crash = ["raise", "exit", "die", "inf", "two", "text", "dict", "str", "bytes", "set", "number",
             "nothing", "complex", "huge", "nested", "column", "scalar"]
    texts = [*crash, *wanted, "ok"]
    gold = [f"gold {text}" for text in texts]
    values, parts, metrics = judge("misbehaves", texts, answer=gold)
    assert values == [None] * len(crash) + [*wanted.values(), 0.5] == parts["misbehaves"]
    assert metrics == {"reward/timeouts": 1.0, "reward/crashes": len(crash)}
    assert judge("misbehaves", ["ok", "raise"])[0] == [0.5, None]
    printed = capfd.readouterr().err
    assert printed.count("crashed") == 1  # printed once, with function and example; then counted
    for text in "'misbehaves'", "'raise'", "gold raise", "KeyError: 'no such thing'", "my_own_file":
        assert text in printed


def test_parts_are_left_out_added_or_none_and_a_time_out_may_be_the_functions_own(judge, capfd):
    """None is left out of the sum, but a crash makes the sample None."""
    values, _, _ = judge("misbehaves:0.5,odd:2", ["ok", "none", "raise"])
    assert values == [0.25, 0.0, None]
    assert judge("late", ["a", "b"])[2] == {"reward/timeouts": 2.0, "reward/crashes": 0.0}
    # no **columns, and a coroutine
    columns = {"answer": ["a", "a"], "prompts": ["p", "p"]}
    assert judge("strict,later:0.5", ["a", "b"], **columns)[0] == [2.0, 1.0]


def test_a_batch_that_cannot_be_judged_raises_at_once(judge):
    with pytest.raises(ValueError, match="column 'answer' has 2 values for 3 completions"):
        judge("odd", ["a", "b", "c"], answer=["a", "b"])
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        judge("odd", ["a"], log=lambda: 0)
    assert judge("odd", ["a"])[0] == [1.0] and judge("odd", [])[0] == []  # the pool still works


def test_whole_batch_functions_see_every_completion_and_the_first_part(judge):
    columns = {"answer": ["72"] * 3, "prompts": ["p"] * 3}
    texts = [r"\boxed{72}", r"it is \boxed{72}", r"\boxed{71}"]
    # `correct` is gsm8k's part, wherever it stands; without it, math decides
    wanted = {"length_kimi": [0.5, -0.5, 0.0], "gsm8k": [1.0, 1.0, 0.0]}
    assert judge("length_kimi,gsm8k", texts, **columns)[1] == wanted
    values, parts, _ = judge("gsm8k,length_kimi:0.5", texts, **columns)
    assert parts == wanted and values == [1.25, 0.75, 0.0]
    assert judge("length_kimi", texts, **columns)[0] == [0.5, -0.5, 0.0]


def test_a_function_that_forks_and_returns_twice_changes_no_other_verdict(judge):
    for _ in range(2):
        assert judge("twice", ["x" * n for n in range(8)])[0] == [float(n) for n in range(8)]
        time.sleep(0.5)  # now come the second verdicts
    assert judge("twice", ["four"])[2] == {"reward/timeouts": 0.0, "reward/crashes": 0.0}


def test_functions_are_imported_in_the_fork_server_without_torch_and_the_trainer(judge):
    ((here,), _, _), server = judge("server", ["x"]), judge.verify.pool.fork_server.pid
    assert here in descendants([server]) - {server} - {w.pid for w in judge.verify.pool.workers}
    assert judge("modules", ["x"])[0] == [0.0]
    assert "reward_file_my_own_file" not in sys.modules


def test_workers_and_fork_servers_that_died_between_batches_are_replaced(judge):
    server = judge.verify.pool.fork_server.pid
    [worker] = map(int, judge("pid", ["x"])[0])
    for all_of_them in (False, True):
        killed = descendants([server]) - {server} if all_of_them else {worker}
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(pid, signal.SIGKILL)
        assert gone(killed)
        time.sleep(1)  # the fork server looks for dead children, and then tells the pool
        assert judge("pid", ["x", "y"])[2]["reward/crashes"] == 0


def test_a_fork_server_that_cannot_be_replaced_ends_the_call_with_its_reason(tmp_path, monkeypatch):
    second = tmp_path / "second"
    (tmp_path / "my.py").write_text(f"""import os, signal, time
if os.path.exists({str(second)!r}): time.sleep(600)
open({str(second)!r}, "w").close()
server = os.getpid()
def f(completions):
    os.kill(server, signal.SIGKILL)
    time.sleep(600)""")
    with rewards.Verifier(f"{tmp_path}/my.py:f", workers=1) as verify:
        monkeypatch.setattr(pool, "START_SECONDS", 1.0)
        with pytest.raises(RuntimeError, match="not ready after 1 s"):
            verify(["x", "y"])


@pytest.mark.parametrize("text, value", [
    ("a daemon", 0.5), ("daemon, hang", None), ("daemon, leave", None)])
def test_what_a_function_started_ends_with_its_worker_or_the_pool(my, text, value):
    timeout = 60 if value else 1.5  # a worker whose call was slow for its time limit is replaced
    with rewards.Verifier(f"{my}:misbehaves", timeout=timeout, workers=1) as verify:
        assert verify([text, "ok"])[0] == [value, 0.5]
        assert becomes(bool(value))  # a daemon may be a server for the next calls
    assert becomes(False)


def test_a_function_that_stops_all_above_it_does_not_stop_the_run(my, monkeypatch):
    monkeypatch.setattr(pool, "FORK_SECONDS", 0.7)
    before = descendants([os.getpid()])
    with rewards.Verifier(f"{my}:misbehaves", timeout=1.5, workers=1) as verify:
        texts = ["stop", "die", "stop and hang", "ok", "stop"]
        assert verify(texts, trainer=os.getpid())[0] == [0.5, None, None, 0.5, 0.5]
        family = descendants([os.getpid()]) - before
    assert len(family) >= 3 and gone(family)


def test_a_call_over_memory_mb_crashes_also_where_math_verify_says_unequal(my, judge):
    assert judge("greedy", ["x"])[0] == [1.0]  # 200 MB of 512
    texts = [r"\boxed{(x+1)^{10^6}}", r"\boxed{6}", r"\boxed{(x+1)^{10^6}}", r"\boxed{x+1}", "x"]
    specs = ["math"] * 4 + [f"{my}:greedy"]
    with rewards.Verifier("math", workers=1, timeout=30, memory_mb=64, row_specs=specs) as verify:
        values, _, metrics = verify(texts, answer=["5"] * 5, reward=specs)
    assert values == [None, 0.0, None, 0.0, None]
    assert metrics == {"reward/timeouts": 0.0, "reward/crashes": 3.0}


def test_ctrl_c_in_a_call_leaves_a_verifier_that_works(judge):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        judge("misbehaves", ["hang"] * 3)
    assert judge("misbehaves", ["ok", "none"])[0] == [0.5, None]


def test_a_closed_verifier_raises_and_leaves_no_process(my):
    with rewards.Verifier(f"{my}:odd", workers=2) as verify:
        verify(["a"] * 9)
        pids = [verify.pool.fork_server.pid, *(w.pid for w in verify.pool.workers)]
    assert len(pids) == 3 and gone(pids)
    with pytest.raises(RuntimeError, match="closed"):
        verify(["a"])


# ---- a trainer that ends


@pytest.fixture
def trainer(my):
    """trainer(tail, texts) -> (process with two busy workers, pids of fork server and workers)."""
    program = f"""import os, signal, sys, threading, time; sys.path.insert(0, {str(ROOT)!r})
import rewards
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
verify = rewards.Verifier({f"{my}:misbehaves"!r}, workers=2, timeout=60)
threading.Thread(target=lambda: verify(TEXTS, trainer=os.getpid()), daemon=True).start()
hang = lambda: sum(w.task is not None and b"hang" in w.task.payload for w in verify.pool.workers)
while hang() < 2: time.sleep(0.1)
print(verify.pool.fork_server.pid, *[w.pid for w in verify.pool.workers], flush=True)
"""
    started, words = [], []

    def start(tail, texts=("hang", "hang")):
        code = program.replace("TEXTS", repr(texts)) + tail
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True)
        started.append(process)
        while not words or not words[0].isdigit():
            words[:] = process.stdout.readline().split()
        return process, [int(word) for word in words]

    yield start
    started[0].kill()


def becomes(there):
    """Waits until there are processes with MARK, or none. Popen returns before they have it."""
    for _ in range(600):
        if bool(processes_with(MARK)) == there:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("text, number", [
    ("child", signal.SIGTERM), ("a daemon, stop", signal.SIGKILL),
    ("a daemon", None)])  # None: it exits without close
def test_all_that_was_started_ends_with_the_trainer(trainer, text, number):
    process, pids = trainer("time.sleep(600)" * bool(number), ("hang", text, "hang"))
    assert number is None or becomes(True)
    if number:
        process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == -(number or 0) and gone(pids) and becomes(False)


@pytest.mark.skipif(not jail.isolates(), reason="this machine cannot build a jail")
def test_programs_in_the_jail_end_with_a_trainer_that_was_killed(tmp_path):
    program = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import rewards
verify = rewards.Verifier("code", workers=1, timeout=60)
print(verify.pool.fork_server.pid, flush=True)
verify(["```python\\nimport os\\nos.fork()\\nwhile True: pass\\n```"], tests=[["assert True"]])"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    server, running = int(process.stdout.readline()), set()
    state = lambda pid: Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0]  # noqa: E731
    while sum(state(pid) == "R" for pid in running) < 2:
        time.sleep(0.1)
        running = descendants([server])
    process.kill()
    process.communicate()
    assert len(running) >= 5 and gone(running)  # fork server, worker, jail, supervisor, programs


def test_ctrl_c_prints_one_traceback_not_one_per_worker(trainer):
    process, pids = trainer('verify(["hang"])')
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    _, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err and gone(pids)


def test_an_import_that_never_ends_ends_with_the_trainer(tmp_path):
    (tmp_path / "my.py").write_text(f"""import os
open({str(tmp_path / 'pid')!r}, "w").write(str(os.getpid()))
while True: pass""")
    program = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import rewards
rewards.Verifier({f"{tmp_path}/my.py:f"!r})"""
    process = subprocess.Popen([sys.executable, "-c", program])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert gone([(tmp_path / "pid").read_text()])


# ---- files that cannot be used

GOOD = "def f(completions): return [1.0]\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()\n"


@pytest.mark.parametrize("source, says", [
    ("def f(completions) return []", "SyntaxError: .*my.py, line 1"),
    ("import os\n\nf = no", r"my.py:f: NameError: name 'no' is not defined \(line 3\)"),
    ("import sys\nsys.exit('bye')", r"SystemExit: bye \(line 2\)"),
    ("class Odd(BaseException): pass\nraise Odd", "ended with status 1 when it imported"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
    ("f = input('? ')", r"EOFError: .* \(line 1\)"),
    ("def f(texts): return []", r"no reward function, which is f\(completions, \*\*columns\)"),
    ("import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
     "not ready after 1 s: does a reward file loop"),
    (GOOD + "def warm(): return 1 / 0\nf.warm = warm", "^ZeroDivisionError"),
    (GOOD + "def check(**_): raise ValueError('n\\no')\nf.check = check", "^n o$"),
    (THREAD + "raise RuntimeError('two\\nlines')", r"RuntimeError: two lines \(line 3\)"),
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
