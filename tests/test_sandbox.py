"""The two walls: nothing gets out of the jail, and no call in the pool can hold up, kill or outlive the trainer."""
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import rewards
import sandbox

ROOT = Path(sandbox.__file__).parent
JAILS = [make for make in (sandbox._bwrap, sandbox._unshare) if sandbox._holds(make)]


@pytest.fixture(params=JAILS or [None], ids=lambda make: make.__name__[1:] if make else "none")
def jail(request, monkeypatch):
    """Every kind of jail that this machine can build, one after the other."""
    if request.param is None:
        pytest.skip("neither bubblewrap nor unshare can build a jail on this machine")
    monkeypatch.setattr(sandbox, "isolation", lambda: request.param)
    return request.param


def run(program, text="", **settings):
    return sandbox.run_program(textwrap.dedent(program), [text], **settings)[0]


def processes(mark):
    """Command lines on this machine that contain a mark."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # it has just ended
            continue
    return [line for line in lines if mark.encode() in line]


# ------------------------------------------------------------------------------------------------ programs that escape


def test_a_program_reads_its_input_and_its_output_is_returned(jail):
    assert sandbox.run_program("print(sum(map(int, input().split())))", ["1 2", "3 4", "x"]) == ["3\n", "7\n", None]


def test_a_program_sees_none_of_our_environment(jail, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen = run("import os; print(dict(os.environ)); print(open('/proc/1/environ').read() if os.access('/proc/1/environ', 4) else '')")
    assert "HOME" in seen and "hf_secret" not in seen


def test_a_program_sees_none_of_our_files(jail, tmp_path):
    (tmp_path / "secret").write_text("secret")
    program = f"""
        import os
        for path in ({str(tmp_path / 'secret')!r}, {__file__!r}, "/etc/passwd", "/etc/shadow", "/home", "/work", "/var", "/root/.bashrc"):
            print(os.path.exists(path))
        for start in ("/old", "/proc/1/root/etc", "/proc/1/cwd/../etc/passwd", "/proc/self/root/work"):
            print(os.path.exists(start + "/passwd"))"""
    assert run(program) == "False\n" * 12


def test_a_program_sees_none_of_our_processes_and_cannot_kill_them(jail):
    program = f"""
        import os, signal
        print(len([p for p in os.listdir("/proc") if p.isdigit()]) <= 3)
        for pid in ({os.getpid()}, {os.getppid()}, -1, 1):
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
        print("alive")"""
    assert run(program) == "True\nalive\n"  # process 1, its judge, shrugs; we, for whom this test runs, are alive


def test_a_program_cannot_write_outside_its_scratch_folder(jail):
    program = """
        import os
        for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/python", "/sys", "/lib"):
            try: open(folder + "/x", "w"); print("wrote", folder)
            except OSError: pass
        try: open("/proc/sys/kernel/core_pattern", "w"); print("wrote core_pattern")
        except OSError: pass
        open("mine", "w").write("x"); open("/tmp/mine2", "w").write("x"); print(sorted(os.listdir("/scratch")))"""
    assert run(program) == "['mine', 'mine2', 'program.py']\n"


def test_what_one_program_wrote_the_next_does_not_find(jail):
    assert run("open('left', 'w').write('x'); print('ok')") == "ok\n"
    assert run("import os; print(os.path.exists('left'))") == "False\n"


def test_a_program_cannot_reach_the_network_not_even_this_machine(jail):
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
            import socket
            for address in (("127.0.0.1", {server.getsockname()[1]}), ("1.1.1.1", 53), ("8.8.8.8", 443)):
                try: socket.create_connection(address, 1); print("connected", address)
                except OSError: print("no")
            try: socket.getaddrinfo("example.com", 80); print("resolved")
            except OSError: print("no")"""
        assert run(program) == "no\n" * 4


def test_a_program_has_no_rights_to_mount_or_to_become_root(jail):
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        print(libc.mount(b"x", b"/scratch", b"tmpfs", 0, b""), libc.chroot(b"/scratch"), libc.ptrace(16, 1, 0, 0))
        try: os.setuid(0); print("root", open("/proc/self/status").read().count("CapEff:\\t0000000000000000"))
        except OSError: print("not root")"""
    assert run(program) in ("-1 -1 -1\nnot root\n", "-1 -1 -1\nroot 1\n")  # uid 0 of a user namespace, without a right


def test_a_fork_bomb_ends_with_its_program_and_leaves_us_room(jail):
    start = time.monotonic()
    assert run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", seconds=1) is None
    assert time.monotonic() - start < 10
    assert run("print(1)") == "1\n"


def test_a_program_has_few_processes(jail):
    program = """
        import os
        n = 0
        try:
            while n < 500:
                if os.fork() == 0: import time; time.sleep(60)
                n += 1
        except OSError: pass
        print(n)"""
    assert 1 <= int(run(program)) < 64


def test_a_memory_bomb_fails_alone(jail):
    assert run("x = bytearray(4 << 30); print('got it')") is None
    program = """
        import os, time
        for _ in range(8):
            if os.fork() == 0: x = b"x" * (200 << 20); time.sleep(60)
        time.sleep(60)"""
    start = time.monotonic()
    assert run(program, seconds=30) is None  # 8 × 200 MB: no single process is over the limit
    assert time.monotonic() - start < 20


def test_a_full_disk_is_the_programs_own(jail):
    program = """
        n = 0
        try:
            while n < 100:
                with open(f"f{n}", "wb") as f: f.write(b"x" * (8 << 20))
                n += 1
        except OSError: pass
        import os
        os.remove("f0"); print(n)"""
    assert 1 <= int(run(program)) <= 8  # 64 MB


def test_infinite_output_is_cut_and_ends(jail):
    assert run("while True: print('x' * 10000)", seconds=3) is None
    assert run("print('x' * 100000)", output=1000) == "x" * 1000


def test_sleeping_children_do_not_outlive_their_program(jail):
    mark = f"sandbox-test-{os.getpid()}"
    program = f"""
        import os, subprocess, sys
        for _ in range(5):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {mark!r}], start_new_session=True)
        print("started")"""
    assert run(program) == "started\n"
    assert processes(mark) == []


def test_an_endless_program_is_ended_at_the_limit(jail):
    for program in "while True: pass", "import time; time.sleep(600)", "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, lambda *_: 0)\n    except (OSError, ValueError): pass\nwhile True: pass":
        start = time.monotonic()
        assert run(program, seconds=1) is None
        assert time.monotonic() - start < 5


def test_a_program_cannot_speak_for_the_jail(jail):
    program = """
        import os
        for pid in ("1", str(os.getppid())):
            for fd in range(10):
                try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), b'[[0, "forged", ""]]')
                except OSError: pass
        os._exit(1)"""
    assert run(program) is None


def test_text_that_is_no_program_is_only_a_failure(jail):
    for text in "", "\0", "\ud800", "print(", "é" * 10000, "(" * 10**5, "x" * 10**6:
        assert sandbox.run_program(text, [""])[0] in (None, "")
        assert sandbox.run_asserts(text, ["assert False"]) == [False]


def test_asserts_are_run_one_by_one(jail):
    program = "def f(x): return x * x\n\nif __name__ == '__main__': raise SystemExit('not run as a script')"
    tests = ["assert f(3) == 9", "assert f(3) == 8", "assert f(2) == 4, 'two'", "assert f('x') == 1", "import math\nassert math.isqrt(f(5)) == 5", "f("]
    assert sandbox.run_asserts(program, tests) == [True, False, True, False, True, False]


@pytest.mark.parametrize("program", [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "def f(x): import os; os._exit(0)",
    "def f(x): raise SystemExit(0)",
    "class Same:\n    __eq__ = lambda a, b: True\n    __hash__ = None\ndef f(x): return Same()",
    "class Same(int):\n    __eq__ = lambda a, b: True\ndef f(x): return Same(3)",
    "class Same:\n    __class__ = int\n    __eq__ = lambda a, b: True\ndef f(x): return Same()",
    "class Same(list):\n    __eq__ = lambda a, b: True\n    __len__ = lambda a: 1\n    __iter__ = lambda a: iter([9])\ndef f(x): return Same()",
    "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
    "import builtins\nbuiltins.isinstance = builtins.issubclass = lambda *a: True\ndef f(x): return 0",
    "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "import ast\nast.parse = lambda *a, **k: ast.Module([], [])\ndef f(x): return 0",
    "import os\nos.write(4, b'[true]')\ndef f(x): return 0",
    "print('[true]')\ndef f(x): return 0",
    "_same = lambda a, b: True\ndef f(x): return 0",
    "def f(x):\n    while True: pass",
], ids=range(16))
def test_tests_are_not_passed_by_leaving_early_or_by_being_equal_to_everything(program, jail):
    assert sandbox.run_asserts(program, ["assert f(3) == 9"], seconds=1) == [False]
    assert sandbox.run_asserts(program, ["assert f(3) == [9]"], seconds=1) == [False]


def test_equality_of_honest_results_is_pythons(jail):
    program = """from collections import Counter, namedtuple, defaultdict
P = namedtuple("P", "x y")
class Money:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n"""
    tests = ["assert 1 == 1.0", "assert True == 1", "assert P(1, 2) == (1, 2)", "assert (1, 2) == P(1, 2)", "assert Counter('aab') == {'a': 2, 'b': 1}",
             "assert {1, 2} == {2, 1}", "assert Money(3) == Money(3)", "assert [1, [2.0, 'x']] == [1.0, [2, 'x']]", "assert None == None", "assert 'a' == 'a'"]
    assert sandbox.run_asserts(program, tests) == [True] * len(tests)
    assert sandbox.run_asserts(program, ["assert [1] == (1,)", "assert {'a': 1} == {'a': 2}", "assert '1' == 1", "assert Money(1) == Money(2)"]) == [False] * 4


def test_without_isolation_code_refuses_in_one_line(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: None)
    with pytest.raises(sandbox.NoIsolation, match="^no isolation .*--allow_unsafe_code$"):
        sandbox.run_program("print(1)", [""])
    with pytest.raises(sandbox.NoIsolation):
        rewards.Verifier("code")


def test_without_isolation_code_runs_when_told_to_and_is_still_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: None)
    assert sandbox.run_program("print(input())", ["a", "b"], allow_unsafe_code=True) == ["a\n", "b\n"]
    assert sandbox.run_program("while True: pass", [""], seconds=1, allow_unsafe_code=True) == [None]


# ------------------------------------------------------------------------------------------------ calls that hang


def test_twenty_hung_programs_cost_one_limit_and_the_rest_are_judged_right():
    if not JAILS:
        pytest.skip("neither bubblewrap nor unshare can build a jail on this machine")
    hung = ["```python\nwhile True: pass\n```", "```python\nimport time; time.sleep(600)\n```"] * 10
    right = "```python\nprint(int(input()) + 1)\n```"
    with rewards.Verifier("code", timeout=5.0, workers=2) as verify:
        start = time.monotonic()
        values, _, metrics = verify(hung + [right], tests=[[{"input": "1", "output": "2"}]] * 21)
        took = time.monotonic() - start
    assert values[-1] == 1.0 and all(v in (0.0, None) for v in values[:-1])
    assert took < 5 + 2  # 20 one after the other on two workers would take 45 s


def test_twenty_hung_answers_cost_one_limit_and_the_rest_are_judged_right():
    hung = [r"\boxed{10^{10^{10}}}", r"\boxed{9^{9^9}}", r"\boxed{\binom{10^9}{5*10^8}}", r"\boxed{(10^9)!}"] * 5
    with rewards.Verifier("math", timeout=4.0, workers=2) as verify:
        start = time.monotonic()
        values, _, metrics = verify(hung + [r"\boxed{72}", r"\boxed{\frac12}"], answer=["5"] * 20 + ["72", "0.5"])
        took = time.monotonic() - start
        assert values == [None] * 20 + [1.0, 1.0]
        assert metrics == {"reward/timeouts": 20.0, "reward/crashes": 0.0}
        assert took < 4 + 2
        assert verify([r"\boxed{72}"], answer=["72"])[0] == [1.0]  # the workers have been replaced


FUNCTIONS = """
import os, signal, subprocess, sys, time
def odd(completions, **_):
    return [float(len(c) % 2) for c in completions]
def misbehaves(completions, **_):
    (c,) = completions
    print("a reward function may print", c)
    if c == "hang": time.sleep(600)
    if c == "raise": raise KeyError("no such thing")
    if c == "exit": sys.exit(3)
    if c == "die": os.kill(os.getpid(), signal.SIGKILL)
    if c == "child": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK]); time.sleep(600)
    if c == "ask": return [float(len(sys.stdin.read()))]
    return {"none": [None], "nan": [float("nan")], "inf": [float("inf")], "two": [1, 2], "text": ["x"], "int": [True]}.get(c, [0.5])
async def later(completions, **_):
    return [2.0]
def modules(completions, **_):
    return [float(any(m in sys.modules for m in ("torch", "vllm", "transformers", "deepspeed", "nano_rlvr", "pytest")))]
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
    told = capfd.readouterr().err
    assert told.count("crashed") == 1  # once, naming the function, the example and where it happened; then only counted
    assert "'misbehaves'" in told and "'raise'" in told and "gold 2" in told and 'KeyError: \'no such thing\'' in told and "my.py" in told


def test_a_part_without_verdict_is_left_out_but_a_crash_takes_the_sample(my):
    with rewards.Verifier(f"{my}:misbehaves:0.5,{my}:odd:2", timeout=1.5, workers=1) as verify:
        assert verify(["ok", "none", "raise", "hang"])[0] == [0.25, 0.0, None, None]


def test_what_a_hung_reward_function_started_is_killed_with_it(my):
    with rewards.Verifier(f"{my}:misbehaves", timeout=1.0, workers=1) as verify:
        assert verify(["child"])[0] == [None]
        time.sleep(0.5)
        assert processes(f"my-child-{os.getpid()}") == []


def test_a_worker_that_died_between_batches_is_replaced(my):
    with rewards.Verifier(f"{my}:pid", workers=1) as verify:
        (pid,), _, _ = verify(["x"])
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.2)
        (other,), _, metrics = verify(["x"])
    assert other != pid and metrics["reward/crashes"] == 0


def test_the_mother_that_died_is_replaced(my):
    with rewards.Verifier(f"{my}:pid", workers=1) as verify:
        verify(["x"])
        verify.pool.mother.kill()
        time.sleep(0.5)
        assert verify(["x", "y"])[0][0] is not None


def test_workers_import_neither_torch_nor_the_trainer(my):
    with rewards.Verifier(f"gsm8k:0,math:0,language:0,{my}:modules", workers=1) as verify:
        assert verify(["x"], answer=["1"], question=["Why?"])[1]["modules"] == [0.0]


def test_functions_without_var_keywords_and_coroutines_work_too(my):
    with rewards.Verifier(f"{my}:strict,{my}:later:0.5", workers=1) as verify:
        assert verify(["a", "b"], answer=["a", "a"], prompts=["p", "p"])[0] == [2.0, 1.0]


def test_whole_batch_functions_see_every_completion_and_the_first_part(my):
    with rewards.Verifier(f"{my}:odd,{my}:centred", workers=2) as verify:
        assert verify(["a", "bb", "c"])[1] == {"odd": [1.0, 0.0, 1.0], "centred": [1.0, 1.0, 3.0]}


def test_whole_batch_functions_may_come_first_or_alone():
    columns = {"answer": ["72"] * 2, "prompts": ["p"] * 2}
    texts = [r"\boxed{72}", r"it is \boxed{72}"]
    with rewards.Verifier("length_kimi,gsm8k", workers=1) as verify:  # correct is gsm8k's, the first that judges one by one
        assert verify(texts, **columns)[1] == {"length_kimi": [0.5, -0.5], "gsm8k": [1.0, 1.0]}
    with rewards.Verifier("length_kimi", workers=1) as verify:
        assert verify(texts, **columns)[0] == [0.5, -0.5]


def test_what_cannot_be_sent_to_a_worker_is_refused_where_it_is_submitted(my):
    with rewards.Verifier(f"{my}:odd", workers=1) as verify:
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            verify(["a"], log=lambda: 0)
        assert verify(["a"])[0] == [1.0]  # and the pool goes on


def test_a_greedy_reward_function_gets_memory_error_unless_allowed(my):
    for memory, expected in (64, None), (512, 1.0):
        with rewards.Verifier(f"{my}:greedy", workers=1, memory_mb=memory) as verify:
            assert verify(["x"])[0] == [expected]


def test_an_answer_that_exhausts_the_memory_has_no_verdict_though_math_verify_says_unequal():
    with rewards.Verifier("math", workers=1, timeout=30, memory_mb=64) as verify:
        values, _, metrics = verify([r"\boxed{(x+1)^{10^6}}", r"\boxed{6}", r"\boxed{(x+1)^{10^6}}", r"\boxed{x+1}", r"\boxed{5}"], answer=["5"] * 5)
    assert values == [None, 0.0, None, 0.0, 1.0] and metrics == {"reward/timeouts": 0.0, "reward/crashes": 2.0}


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


def test_a_closed_verifier_says_so_and_leaves_no_process(my):
    verify = rewards.Verifier(f"{my}:misbehaves", workers=2, timeout=30)
    handle = verify.submit(["hang"] * 3)
    time.sleep(0.3)
    pids = [verify.pool.mother.pid, *(w.pid for w in verify.pool.workers)]
    verify.close()
    with pytest.raises(RuntimeError, match="closed"):
        handle.result()
    with pytest.raises(RuntimeError, match="closed"):
        verify(["x"])
    assert len(pids) >= 3 and gone(pids)


def trainer(my, tail):
    """A process that has started workers, one of them hung; -> (process, pids of mother and workers)."""
    program = f"""import os, sys, time; sys.path.insert(0, {str(ROOT)!r}); import rewards
verify = rewards.Verifier({str(my) + ':misbehaves'!r}, workers=2, timeout=60)
handle = verify.submit(["hang", "hang", "ok"])
time.sleep(0.5)
print(verify.pool.mother.pid, *[w.pid for w in verify.pool.workers], flush=True)
{tail}"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    lines = []
    while not lines or not lines[-1].split() or not lines[-1].split()[0].isdigit():
        lines.append(process.stdout.readline())
    return process, [int(x) for x in lines[-1].split()]


def gone(pids):
    for _ in range(50):
        if not any(Path(f"/proc/{p}").exists() and " Z " not in Path(f"/proc/{p}/stat").read_text() for p in pids):
            return True
        time.sleep(0.1)
    return False


def test_workers_end_with_a_trainer_that_was_killed(my):
    process, pids = trainer(my, "time.sleep(600)")
    process.kill()
    process.communicate()
    assert len(pids) >= 3 and gone(pids)


def test_workers_end_with_a_trainer_that_just_ends(my):
    process, pids = trainer(my, "")
    process.communicate(timeout=20)
    assert process.returncode == 0 and len(pids) >= 3 and gone(pids)


def test_ctrl_c_prints_one_traceback_not_one_a_worker(my):
    process, pids = trainer(my, "handle.result()")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    _, err = process.communicate(timeout=20)
    assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err and gone(pids)


def test_a_reward_file_that_fails_to_load_says_so_at_the_start(tmp_path):
    (tmp_path / "bad.py").write_text("import os, sys\nif 'pytest' not in sys.modules: raise RuntimeError('only in a worker')\ndef f(completions): return []\n")
    with pytest.raises(RuntimeError, match="only in a worker"):
        rewards.Verifier(f"{tmp_path}/bad.py:f")
