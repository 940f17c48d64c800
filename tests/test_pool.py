"""The pool and the verifier: no call delays, stops or outlives the trainer, or changes another value."""
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rewards
from verify import jail, pool

ROOT = Path(rewards.__file__).resolve().parent


def processes_with(mark):
    """Command lines on this machine that contain a mark."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # it has just ended
            continue
    return [line for line in lines if mark.encode() in line]


# -------------------------------------------------------------------------------- calls that hang


def test_twenty_hung_programs_cost_one_limit_and_the_rest_are_judged_right():
    if jail.isolation() is None:
        pytest.skip("neither bubblewrap nor unshare can build a jail on this machine")
    # most of them sleep: twenty that compute would leave the right one on one core without time
    hung = ["```python\nwhile True: pass\n```"] * 2 + ["```python\nimport time; time.sleep(600)\n```"] * 18
    right = "```python\nprint(int(input()) + 1)\n```"
    with rewards.Verifier("code", timeout=15.0, workers=2) as verify:  # time for the right one, too
        start = time.monotonic()
        values, _, metrics = verify(hung + [right], tests=[[{"input": "1", "output": "2"}]] * 21)
        took = time.monotonic() - start
    assert values[-1] == 1.0 and all(v in (0.0, None) for v in values[:-1])
    assert took < 67  # half of the 135 s that they take one after the other on two workers


def test_twenty_hung_answers_cost_one_limit_and_the_rest_are_judged_right():
    hung = [r"\boxed{10^{10^{10}}}", r"\boxed{9^{9^9}}", r"\boxed{\binom{10^9}{5*10^8}}",
            r"\boxed{(10^9)!}"] * 5
    with rewards.Verifier("math", timeout=4.0, workers=2) as verify:
        start = time.monotonic()
        values, _, metrics = verify(hung + [r"\boxed{72}", r"\boxed{\frac12}"],
                                    answer=["5"] * 20 + ["72", "0.5"])
        took = time.monotonic() - start
        assert values == [None] * 20 + [1.0, 1.0]
        assert metrics == {"reward/timeouts": 20.0, "reward/crashes": 0.0}
        assert took < 20  # half of the 40 s that they take one after the other on two workers
        assert verify([r"\boxed{72}"], answer=["72"])[0] == [1.0]  # the workers have been replaced


FUNCTIONS = """
import os, signal, subprocess, sys, time
CHILD = [sys.executable, "-c", "import time; time.sleep(600)", MARK]
DAEMON = f"import subprocess; subprocess.Popen({CHILD!r}, start_new_session=True)"
def odd(completions, **_):
    return [float(len(c) % 2) for c in completions]
def misbehaves(completions, trainer=None, **_):
    (c,) = completions
    print("a reward function may print", c)
    if c == "hang": time.sleep(600)
    if c == "raise": raise KeyError("no such thing")
    if c == "exit": sys.exit(3)
    if c == "die": os.kill(os.getpid(), signal.SIGKILL)
    if c == "child":
        subprocess.Popen(CHILD)
        time.sleep(600)
    if "daemon" in c:
        subprocess.run([sys.executable, "-c", DAEMON])
        if "hang" in c: time.sleep(600)
        if "exit" in c: os._exit(0)
    if "stop" in c:
        pid = os.getpid()
        above = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        while (pid := above(pid)) != trainer:
            os.kill(pid, signal.SIGSTOP)
        if "hang" in c: time.sleep(600)
    if c == "ask": return [float(len(sys.stdin.read()))]
    odd = {"none": [None], "nan": [float("nan")], "inf": [float("inf")], "two": [1, 2],
           "text": ["x"], "int": [True], "dict": {1: 1.0}, "str": "1", "bytes": b"1", "set": {1.0},
           "number": 1.0, "nothing": None, "complex": [1j], "huge": [10 ** 400], "nested": [[1.0]]}
    if c in ("numpy", "column", "scalar"):
        import numpy as np
        return {"numpy": np.ones(1), "column": np.ones((1, 1, 2)), "scalar": np.ones(())}[c]
    return odd.get(c, [0.5])
def twice(completions, **_):
    if os.fork() == 0:
        time.sleep(0.2)  # the verdicts of the others come first
        return [-1.0]
    return [float(len(completions[0]))]
def late(completions, **_):
    raise TimeoutError("of its own")
def meets(completions, folder, **_):  # ends when 50 calls run at the same time
    open(f"{folder}/{os.getpid()}", "w").close()
    while len(os.listdir(folder)) < 50: time.sleep(0.05)
    return [1.0]
meets.waits = True
async def later(completions, **_):
    return [2.0]
def modules(completions, **_):
    heavy = ("torch", "vllm", "transformers", "deepspeed", "nano_rlvr", "pytest")
    return [float(any(m in sys.modules for m in heavy))]
def strict(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]
def centred(completions, index, correct, **_):
    return [float(i) + c for i, c in zip(index, correct)]
centred.whole_batch = True
def greedy(completions, **_):
    return [float(len(bytearray(200 << 20)) > 0)]
def pid(completions, **_):
    return [float(os.getpid())]
not_a_function = 7
"""


@pytest.fixture
def my(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(FUNCTIONS.replace("MARK", repr(f"my-child-{os.getpid()}")))
    return path


def test_each_sample_gets_its_own_verdict_whatever_the_others_do(my, capfd):
    texts = ["ok", "hang", "raise", "exit", "die", "none", "nan", "inf", "two", "text", "int", "ask", "ok"]
    with rewards.Verifier(f"{my}:misbehaves", timeout=1.5, workers=2) as verify:
        values, parts, metrics = verify(texts, answer=[f"gold {i}" for i in range(13)])
        again, _, _ = verify(["ok", "raise"], answer=["gold 0", "gold 1"])
    assert values == [0.5, None, None, None, None, None, None, None, None, None, 1.0, 0.0, 0.5]
    assert parts == {"misbehaves": values} and again == [0.5, None]
    assert metrics == {"reward/timeouts": 1.0, "reward/crashes": 6.0}
    printed = capfd.readouterr().err
    assert printed.count("crashed") == 1  # printed once, with function, example and place; then only counted
    for text in "'misbehaves'", "'raise'", "gold 2", "KeyError: 'no such thing'", "my.py":
        assert text in printed


def test_a_part_that_is_none_is_left_out_of_the_sum_but_a_crash_makes_the_sample_none(my):
    with rewards.Verifier(f"{my}:misbehaves:0.5,{my}:odd:2", timeout=1.5, workers=1) as verify:
        assert verify(["ok", "none", "raise", "hang"])[0] == [0.25, 0.0, None, None]


def test_a_function_returns_a_list_of_numbers_or_it_crashes(my, capfd):
    crash = ["dict", "str", "bytes", "set", "number", "nothing", "complex", "huge", "nested", "column",
             "scalar"]
    with rewards.Verifier(f"{my}:misbehaves", timeout=10, workers=1) as verify:
        values, _, metrics = verify(["numpy", *crash])
    assert values == [1.0] + [None] * len(crash)
    assert metrics == {"reward/timeouts": 0.0, "reward/crashes": len(crash)}
    assert "returned {1: 1.0}, no list with a number or None per completion" in capfd.readouterr().err


def test_a_function_that_raises_timeout_error_has_timed_out(my, capfd):
    with rewards.Verifier(f"{my}:late", workers=1) as verify:
        assert verify(["a", "b"])[2] == {"reward/timeouts": 2.0, "reward/crashes": 0.0}
        assert verify.crashes == {} and "crashed" not in capfd.readouterr().err


def test_calls_that_wait_for_a_network_are_not_bound_to_the_cores(my, tmp_path):
    (tmp_path / "calls").mkdir()
    with rewards.Verifier(f"{my}:meets,{my}:odd", timeout=20, workers=1) as verify:
        assert verify(["a"] * 50, folder=str(tmp_path / "calls"))[0] == [2.0] * 50


def test_what_a_hung_reward_function_started_is_killed_with_it(my):
    with rewards.Verifier(f"{my}:misbehaves", timeout=1.0, workers=1) as verify:
        assert verify(["child"])[0] == [None]
        time.sleep(0.5)
        assert processes_with(f"my-child-{os.getpid()}") == []


def test_a_function_that_forks_and_returns_twice_changes_no_other_verdict(my):
    with rewards.Verifier(f"{my}:twice", timeout=10, workers=1) as verify:
        for _ in range(2):
            assert verify(["x" * n for n in range(20)])[0] == [float(n) for n in range(20)]
            time.sleep(0.5)  # now come the second verdicts
        assert verify(["four"])[2] == {"reward/timeouts": 0.0, "reward/crashes": 0.0}


@pytest.mark.parametrize("text, value",
                         [("a daemon", 0.5), ("daemon, hang", None), ("daemon, exit", None)])
def test_a_daemon_that_a_reward_function_starts_ends_with_its_worker_or_the_pool(my, text, value):
    mark = f"my-child-{os.getpid()}"
    with rewards.Verifier(f"{my}:misbehaves", timeout=2.0, workers=1) as verify:
        values, _, metrics = verify([text, "ok"])
        assert values == [value, 0.5] and sum(metrics.values()) == (value is None)
        if value is None:
            assert no_more(mark)
        else:  # it may be a server for the next calls
            assert processes_with(mark)
    assert no_more(mark)


@pytest.mark.parametrize("text, value", [("stop", 0.5), ("stop and hang", None)])
def test_a_function_that_stops_all_above_it_does_not_stop_the_run(my, monkeypatch, text, value):
    monkeypatch.setattr(pool, "FORK_SECONDS", 1.0)
    before = descendants([os.getpid()])
    with rewards.Verifier(f"{my}:misbehaves", timeout=2.0, workers=1) as verify:
        values, _, metrics = verify([text, "die", "ok", text], trainer=os.getpid())
        assert values == [value, None, 0.5, value]
        assert sum(metrics.values()) == values.count(None)
        family = descendants([os.getpid()]) - before
    assert len(family) >= 3 and gone(family)


def test_a_worker_that_died_between_batches_is_replaced(my):
    with rewards.Verifier(f"{my}:pid", workers=1) as verify:
        (pid,), _, _ = verify(["x"])
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.2)
        (other,), _, metrics = verify(["x"])
    assert other != pid and metrics["reward/crashes"] == 0


def test_a_fork_server_that_died_is_replaced(my):
    with rewards.Verifier(f"{my}:pid", workers=1) as verify:
        verify(["x"])
        for pid in descendants([verify.pool.fork_server.pid]) - {verify.pool.fork_server.pid}:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert verify(["x", "y"])[0][0] is not None


def test_a_fork_server_that_cannot_be_replaced_ends_the_call_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text(f"""import os, signal, time
if os.path.exists({str(tmp_path / 'second')!r}): time.sleep(600)
open({str(tmp_path / 'second')!r}, "w").close()
server = os.getpid()
def f(completions):
    os.kill(server, signal.SIGKILL)
    time.sleep(600)""")
    with rewards.Verifier(f"{tmp_path}/my.py:f", workers=1) as verify:
        monkeypatch.setattr(pool, "START_SECONDS", 1.0)
        with pytest.raises(RuntimeError, match="not ready after 1 s"):
            verify(["x", "y"])


def test_workers_import_neither_torch_nor_the_trainer(my):
    with rewards.Verifier(f"gsm8k:0,math:0,language:0,{my}:modules", workers=1) as verify:
        assert verify(["x"], answer=["1"], question=["Why?"])[1]["modules"] == [0.0]


def test_functions_without_var_keywords_and_coroutines_work_too(my):
    with rewards.Verifier(f"{my}:strict,{my}:later:0.5", workers=1) as verify:
        assert verify(["a", "b"], answer=["a", "a"], prompts=["p", "p"])[0] == [2.0, 1.0]


def test_whole_batch_functions_see_every_completion_and_the_first_part(my):
    with rewards.Verifier(f"{my}:odd,{my}:centred", workers=2) as verify:
        assert verify(["a", "bb", "c"])[1] == {"odd": [1.0, 0.0, 1.0], "centred": [1.0, 1.0, 3.0]}


def test_a_whole_batch_function_may_be_first_or_alone_in_the_spec():
    columns = {"answer": ["72"] * 2, "prompts": ["p"] * 2}
    texts = [r"\boxed{72}", r"it is \boxed{72}"]
    with rewards.Verifier("length_kimi,gsm8k", workers=1) as verify:  # `correct` is gsm8k's part
        assert verify(texts, **columns)[1] == {"length_kimi": [0.5, -0.5], "gsm8k": [1.0, 1.0]}
    with rewards.Verifier("length_kimi", workers=1) as verify:
        assert verify(texts, **columns)[0] == [0.5, -0.5]


def test_a_column_that_cannot_be_pickled_raises_at_submit(my):
    with rewards.Verifier(f"{my}:odd", workers=1) as verify:
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            verify(["a"], log=lambda: 0)
        assert verify(["a"])[0] == [1.0]  # the pool still works


def test_a_reward_function_over_memory_mb_crashes_with_memory_error(my):
    for memory, expected in (64, None), (512, 1.0):
        with rewards.Verifier(f"{my}:greedy", workers=1, memory_mb=memory) as verify:
            assert verify(["x"])[0] == [expected]


def test_an_answer_that_exhausts_the_memory_has_no_verdict_though_math_verify_says_unequal():
    with rewards.Verifier("math", workers=1, timeout=30, memory_mb=64) as verify:
        values, _, metrics = verify([r"\boxed{(x+1)^{10^6}}", r"\boxed{6}", r"\boxed{(x+1)^{10^6}}",
                                     r"\boxed{x+1}", r"\boxed{5}"], answer=["5"] * 5)
    assert values == [None, 0.0, None, 0.0, 1.0]
    assert metrics == {"reward/timeouts": 0.0, "reward/crashes": 2.0}


def test_batches_overlap_and_come_back_in_order(my):
    with rewards.Verifier(f"{my}:odd", workers=2) as verify:
        handles = [verify.submit(["x" * (i + j) for j in range(50)]) for i in range(8)]
        for i, handle in enumerate(handles):
            assert handle.result()[0] == [float((i + j) % 2) for j in range(50)] == handle.result()[0]
        assert verify([])[0] == []


def test_a_column_of_the_wrong_length_is_refused(my):
    with rewards.Verifier(f"{my}:odd", workers=1) as verify:
        with pytest.raises(ValueError, match="column 'answer' has 2 values for 3 completions"):
            verify(["a", "b", "c"], answer=["a", "b"])


def test_a_closed_verifier_raises_and_leaves_no_process(my):
    verify = rewards.Verifier(f"{my}:misbehaves", workers=2, timeout=30)
    handle = verify.submit(["hang"] * 3)
    while len(verify.pool.workers) < 2:
        time.sleep(0.1)
    pids = [verify.pool.fork_server.pid, *(w.pid for w in verify.pool.workers)]
    verify.close()
    with pytest.raises(RuntimeError, match="closed"):
        handle.result()
    with pytest.raises(RuntimeError, match="closed"):
        verify(["x"])
    assert len(pids) >= 3 and gone(pids)


def trainer(my, tail):
    """A process that has started workers. Returns (process, pids of the fork server and its workers)."""
    program = f"""import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r}); import rewards
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
verify = rewards.Verifier({str(my) + ':misbehaves'!r}, workers=2, timeout=60)
handle = verify.submit(["hang", "hang", "ok"])
while len(verify.pool.workers) < 2: time.sleep(0.1)
print(verify.pool.fork_server.pid, *[w.pid for w in verify.pool.workers], flush=True)
{tail}"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    lines = []
    while not lines or not lines[-1].split() or not lines[-1].split()[0].isdigit():
        lines.append(process.stdout.readline())
    return process, [int(x) for x in lines[-1].split()]


def gone(pids):
    for _ in range(600):
        stats = [Path(f"/proc/{p}/stat") for p in pids]
        if not any(stat.exists() and " Z " not in stat.read_text() for stat in stats):  # Z: zombie
            return True
        time.sleep(0.1)
    return False


def no_more(mark):
    """Whether the processes with this mark end."""
    for _ in range(600):
        if not processes_with(mark):
            return True
        time.sleep(0.1)
    return False


def descendants(pids):
    """Process ids of these processes and of all that they started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_and_what_they_started_end_with_a_trainer_that_was_killed(my, number):
    process, pids = trainer(my, """verify.submit(["child"])
while len(verify.pool.workers) < 3: time.sleep(0.1)
time.sleep(600)""")
    while len(family := descendants(pids)) < len(pids) + 2:  # one more worker, and its child
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate()
    assert gone(family)


@pytest.mark.parametrize("text", ["a daemon", "a daemon, stop"])
def test_a_daemon_ends_with_a_trainer_that_was_killed_even_if_all_above_it_is_stopped(my, text):
    process, pids = trainer(my, f"""verify([{text!r}], trainer=os.getpid())
print("daemon", flush=True)
time.sleep(600)""")
    while process.stdout.readline() != "daemon\n":  # after what the reward functions print
        assert process.poll() is None
    assert processes_with(f"my-child-{os.getpid()}")
    process.kill()
    process.communicate()
    assert gone(pids) and no_more(f"my-child-{os.getpid()}")


@pytest.mark.skipif(jail.isolation() is None, reason="this machine cannot build a jail")
def test_programs_in_the_jail_end_with_a_trainer_that_was_killed(tmp_path):
    program = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import rewards
verify = rewards.Verifier("code", workers=1, timeout=60)
print(verify.pool.fork_server.pid, flush=True)
verify(["```python\\nimport os\\nos.fork()\\nwhile True: pass\\n```"], tests=[["assert True"]])"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    server = int(process.stdout.readline())
    running = set()
    while len([p for p in running if Path(f"/proc/{p}/stat").read_text().split(") ")[1][0] == "R"]) < 2:
        time.sleep(0.1)
        running = descendants([server])
    process.kill()
    process.communicate()
    assert len(running) >= 5 and gone(running)  # fork server, worker, jail, supervisor, two programs


def test_workers_end_with_a_trainer_that_exits_without_close(my):
    process, pids = trainer(my, "")
    process.communicate(timeout=120)
    assert process.returncode == 0 and len(pids) >= 3 and gone(pids)


def test_ctrl_c_prints_one_traceback_not_one_per_worker(my):
    process, pids = trainer(my, "handle.result()")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    _, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err and gone(pids)


# -------------------------------------------------------------------------------- files that cannot be used


@pytest.mark.parametrize("source, says", [
    ("def f(completions) return []", "SyntaxError: .*my.py, line 1"),
    ("import os\n\nf = undefined", r"my.py:f: NameError: name 'undefined' is not defined \(line 3\)"),
    ("import no_such_module", r"No module named 'no_such_module' \(line 1\)"),
    ("import sys\nsys.exit('bye')", r"SystemExit: bye \(line 2\)"),
    ("raise RuntimeError('two\\nlines')", r"RuntimeError: two lines \(line 1\)"),
    ("class Odd(BaseException): pass\nraise Odd", "ended with status 1 when it imported"),
    ("import os\nos._exit(3)", "ended with status 3 when it imported"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
    ("f = input('? ')", r"EOFError: .* \(line 1\)"),
    ("def g(completions): return []", "has no attribute 'f'"),
    ("f = [1]", "is not a function"), ("from os import getcwd as f", "it is no reward function"),
    ("def f(texts): return []", r"it is no reward function, which is f\(completions, \*\*columns\)"),
    ("while True: pass", "not ready after 1 s: does a reward file loop"),
    ("import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass", "not ready"),
    ("def f(completions): return []\ndef warm(): return 1 / 0\nf.warm = warm", "^ZeroDivisionError"),
    ("def f(completions): return []\ndef check(**_): raise ValueError('n\\no')\nf.check = check", "^n o$"),
])
def test_a_reward_file_that_cannot_be_used_ends_in_one_line_at_the_start(tmp_path, monkeypatch, source, says):
    (tmp_path / "my.py").write_text(source)
    before = descendants([os.getpid()])
    monkeypatch.setattr(pool, "START_SECONDS", 1.0 if says.startswith("not ready") else 60.0)
    with pytest.raises((ValueError, RuntimeError), match=says) as caught:
        rewards.Verifier(f"{tmp_path}/my.py:f")
    assert "\n" not in str(caught.value)
    assert gone(descendants([os.getpid()]) - before)


@pytest.mark.parametrize("last", ["def f(completions): return [1.0]", "raise RuntimeError('no')"])
def test_a_thread_that_a_reward_file_starts_holds_nothing_up(tmp_path, last):
    (tmp_path / "my.py").write_text(
        f"import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()\n{last}")
    if "raise" in last:
        with pytest.raises(ValueError, match=r"RuntimeError: no \(line 3\)"):
            rewards.Verifier(f"{tmp_path}/my.py:f")
    else:
        verify = rewards.Verifier(f"{tmp_path}/my.py:f", workers=1)
        assert verify(["x"])[0] == [1.0]
        verify.close()
        assert gone([verify.pool.fork_server.pid])


def test_the_trainer_does_not_import_a_users_file(tmp_path):
    (tmp_path / "my_own_file.py").write_text(
        "import os\nprint('a line')\nhere = os.getpid()\ndef f(completions): return [float(here)]")
    with rewards.Verifier(f"{tmp_path}/my_own_file.py:f", workers=1) as verify:
        ((pid,), _, _), server = verify(["x"]), verify.pool.fork_server.pid
        assert pid in descendants([server]) - {server} - {w.pid for w in verify.pool.workers}
    assert "reward_file_my_own_file" not in sys.modules


def test_an_import_that_never_ends_ends_with_the_trainer(tmp_path):
    (tmp_path / "my.py").write_text(f"""import os
open({str(tmp_path / 'pid')!r}, "w").write(str(os.getpid()))
while True: pass""")
    program = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import rewards
rewards.Verifier({str(tmp_path / 'my.py') + ':f'!r})"""
    process = subprocess.Popen([sys.executable, "-c", program])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert gone([(tmp_path / "pid").read_text()])
