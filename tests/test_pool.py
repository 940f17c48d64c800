"""The pool and the verifier: no call delays, stops or outlives the trainer; steps and row specs."""
import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rewards
from conftest import ROOT, descendants, gone, processes_with
from verify import pool, verifier

MARK = f"my-child-{os.getpid()}"
FUNCTIONS = """
import os, signal, subprocess, sys, threading, time
import numpy as np
from verify import jail
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
    if c == "die": os.kill(os.getpid(), signal.SIGKILL)
    if "child" in c: subprocess.Popen(CHILD)
    if "daemon" in c: subprocess.run([sys.executable, "-c", DAEMON])
    if "program" in c: jail.run_program(PROGRAM, [""], 600, allow_unsafe_code=True)
    if "hang" in c: time.sleep(600)
    if "leave" in c: os._exit(0)
    if c == "ask": return [float(len(sys.stdin.read()))]
    odd = {"none": [None], "nan": [float("nan")], "inf": [float("inf")], "two": [1, 2],
           "text": ["x"], "int": [True], "dict": {1: 1.0}, "str": "1", "number": 1.0,
           "nothing": None, "complex": [1j], "huge": [10 ** 400], "nested": [[1.0]],
           "numpy": np.ones(1)}
    return odd.get(c, [0.5])
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
def pid(completions, **_):
    return [float(os.getpid())]
def letters(completions, **_):  # a step per letter: 1 if it is upper case
    return [[(i + 1, float(c.isupper())) for i, c in enumerate(text)] for text in completions]
def size(completions, **_):
    return [float(len(c)) for c in completions]
def one(completions, **_):
    return [1.0] * len(completions)
def batch(completions, index, correct=None, **_):
    correct = correct or [-1] * len(index)
    return [[(1, float(i)), (2, float(c)), (3, float(len(index)))] for i, c in zip(index, correct)]
batch.whole_batch = True
def never(completions, **_):
    raise KeyError("never")
def code(completions, **_):
    return [0.0]
def asks(completions, **_):
    return [len(completions) + 1.0]
asks.waits = True
def kinds(completions, **_):
    kind, _, _ = completions[0].partition(" ")
    n = len(completions[0])
    return [{"empty": [], "list": [[1, True]], "whole": [(n, 1.0)], "none": None, "number": 0.25,
             "numpy": [(np.int64(3), np.float32(2))], "zero": [(0, 1.0)], "long": [(n + 1, 1.0)],
             "equal": [(2, 1.0), (2, 1.0)], "float": [(2.0, 1.0)], "nan": [(2, float("nan"))],
             "nothing": [(2, None)], "one": [(2,)], "bare": [1.0], "dict": {2: 1.0}}[kind]]
"""
ADDED = [  # spec, what it gives the text "aBcD"
    # a number is a step at the end
    ("letters:2,size:0.5", [(1, 0), (2, 2), (3, 0), (4, 2 + 0.5 * 4)]),
    ("letters:0,size", 4.0),  # without weight: no steps, only the part
    # correct: the mean of the letters' steps
    ("letters,batch:0.5", [(1, 0), (2, 1 + 0.5 * 0.5), (3, 0.5 * 1), (4, 1)]),
    ("letters,never", None),
]


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "my_own_file.py"
    path.write_text(FUNCTIONS.replace("MARK", repr(MARK)))
    return path


@pytest.fixture(scope="module")
def judge(my):
    """judge(spec, or one per text, texts, **columns) -> (rewards, parts of the specs, metrics)."""
    files = {"gsm8k": "", "math": "",
             "length_kimi": f"{ROOT}/examples/shaping_rewards.py:"}  # of all others: my
    specs = ["misbehaves", "misbehaves:0.5,odd:2", "odd", "late", "strict,later:0.5", "greedy",
             "pid", "modules", "length_kimi,gsm8k", "gsm8k,length_kimi:0.5", "length_kimi", "math",
             *dict(ADDED), "kinds:2", "kinds:0.5,size:0.1", "asks,size:0.5", "size"]
    full = {spec: ",".join(files.get(part.partition(":")[0], f"{my}:") + part
                           for part in spec.split(",")) for spec in specs}
    with rewards.Verifier(f"{my}:one", workers=2, row_specs=full.values()) as verify:
        def judge(specs, texts, **columns):
            specs = specs if isinstance(specs, list) else [specs] * len(texts)
            values, parts, metrics = verify(
                texts, reward=[spec and full[spec] for spec in specs], **columns)
            named = {part.partition(":")[0] for s in specs for part in (s or "one").split(",")}
            return values, {name: x for name, x in parts.items() if name in named}, metrics
        judge.verify, judge.full = verify, full
        yield judge


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
    crash = ["raise", "exit", "die", "inf", "two", "text", "dict", "str", "number", "nothing",
             "complex", "huge", "nested"]
    texts = [*crash, *wanted, "ok"]
    gold = [f"gold {text}" for text in texts]
    values, parts, metrics = judge("misbehaves", texts, answer=gold)
    assert values == [None] * len(crash) + [*wanted.values(), 0.5] == parts["misbehaves"]
    assert metrics == {"reward/timeouts": 1.0, "reward/crashes": len(crash)}
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


def test_a_user_file_is_imported_in_the_fork_server_without_torch_and_the_trainer(judge):
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


@pytest.mark.parametrize("text, value", [
    ("a daemon", 0.5), ("daemon, hang", None), ("daemon, leave", None)])
def test_what_a_function_started_ends_with_its_worker_or_the_pool(my, text, value):
    timeout = 60 if value else 1.5  # a worker whose call was slow for its time limit is replaced
    with rewards.Verifier(f"{my}:misbehaves", timeout=timeout, workers=1) as verify:
        assert verify([text, "ok"])[0] == [value, 0.5]
        assert becomes(bool(value))  # a daemon may be a server for the next calls
    assert becomes(False)


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


# ---- rewards per step

def test_steps_and_numbers_are_weighted_and_added_where_they_end(judge):
    means = {"letters": 0.5, "size": 4, "batch": (0 + 0.5 + 1) / 3}
    for spec, wanted in ADDED:
        (value,), parts, _ = judge(spec, ["aBcD"])
        assert value == wanted and type(value) is type(wanted)
        assert parts == {name: [means.get(name)] for name in parts}


def test_one_batch_may_hold_steps_numbers_and_no_verdicts(judge):
    texts = ["whole", "none", "number", "empty", "list", "numpy"]
    values, parts, metrics = judge("kinds:2", texts)
    assert values == [[(5, 2.0)], None, 0.5, None, [(1, 2.0)], [(3, 4.0)]]
    assert parts["kinds"] == [1.0, None, 0.25, None, 1.0, 2.0] and not any(metrics.values())
    values, _, _ = judge("kinds:0.5,size:0.1", texts)  # a number becomes a step only beside steps
    assert values[:3] == [[(5, 0.5 + 0.1 * 5)], 0.1 * 4, 0.5 * 0.25 + 0.1 * 6]
    assert values[3] == 0.1 * 5
    assert judge("letters:2,size:0.5", [""])[0] == [0.0]  # an empty completion has no steps


def test_malformed_steps_are_crashes_with_a_reason(judge):
    malformed = ["zero", "long", "equal", "float", "nan", "nothing", "one", "bare", "dict"]
    values, _, metrics = judge("kinds:0.5,size:0.1", [kind + " ......" for kind in malformed])
    assert values == [None] * 9 and metrics == {"reward/timeouts": 0.0, "reward/crashes": 9.0}
    text = verifier._call(lambda completions: [[(0, 1.0)]], ["aBcDe"], {})
    assert "ValueError: returned [(0, 1.0)]: the ends of the steps must rise within 1" in text
    text = verifier._call(lambda completions: ["yes"], ["aBcDe"], {})
    assert "TypeError: returned the text 'yes'; it must be a number or None" in text


def test_the_example_in_the_docs_gives_the_steps_that_they_name(tmp_path):
    page = (ROOT / "docs/data_and_rewards.md").read_text()
    (code,) = re.findall(r"```python\n(# my_steps.py.*?)```", page, re.S)
    (tmp_path / "my_steps.py").write_text(code)
    spec = f"gsm8k:1,{tmp_path}/my_steps.py:short_lines:0.1"
    with rewards.Verifier(spec, workers=1, messages=True) as verify:  # ends count the text
        values, _, _ = verify(["It is 6*12.\n" + "x" * 61 + "\n#### 72", ""], answer=["72"] * 2)
    assert values == [[(12, 0.1), (74, 0.0), (81, 0.1 + 1)], 0.0]


STEPS = st.dictionaries(st.integers(1, 9), st.integers(-4, 4), min_size=1)
STEPS = STEPS.map(lambda steps: sorted(steps.items()))


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), STEPS | st.integers(-4, 4)),
                min_size=1))
def test_a_character_gets_the_weighted_sum_of_what_each_function_gives_it(given_values):
    """It gets the values of the steps that end at or after it. All numbers are exact in binary."""
    def later(value, at):
        return sum(x for end, x in value if end > at) if isinstance(value, list) else value
    value = verifier._weighted(given_values, "123456789")
    has_steps = any(weight and isinstance(v, list) for weight, v in given_values)
    assert isinstance(value, list) == has_steps
    for at in range(9 if has_steps else 1):
        assert later(value, at) == sum(weight * later(v, at) for weight, v in given_values)


# ---- a reward per row


def test_each_row_is_judged_by_its_own_spec_alone(judge):
    """Also by a function that waits for a network, and by one that gets a whole batch."""
    specs = ["letters,never", None, "", "asks,size:0.5", "letters,batch:0.5", "letters,batch:0.5"]
    texts = ["a", "b", "x", "cd", "efg", "HIJ"]
    values, parts, metrics = judge(specs, texts)
    assert values[:4] == [None, 1.0, 1.0, 2.0 + 0.5 * 2]
    assert values[4:] == [[(1, 2.0), (2, 0), (3, 1)], [(1, 3.5), (2, 1.5), (3, 2)]]
    assert metrics["reward/crashes"] == 1
    assert parts["batch"][:4] == [None] * 4 and parts["one"] == [None, 1.0, 1.0, None, None, None]
    verify, spec = judge.verify, judge.full["asks,size:0.5"]
    assert verify.weights_of("") == {"one": 1.0}
    assert list(verify.weights_of(spec).items()) == [("asks", 1.0), ("size", 0.5)]
    assert verify(texts)[0] == [1.0] * 6  # without the column
    assert verify(texts, reward=spec)[0] == [2.0 + 0.5 * len(text) for text in texts]


def test_a_row_spec_that_cannot_be_used_is_named_in_one_line(my):
    for bad, says in ((0.5, "0.5 is no text such as math:1,format:0.1"),
                      (f"{my}:code", "'.*file.py:code': another reward is named 'code' too")):
        with pytest.raises(ValueError, match=f"^column 'reward'[,:] {says}$"):
            rewards.Verifier("code", allow_unsafe_code=True, row_specs=["format", bad])


def test_columns_are_checked_in_the_rows_that_a_function_judges():
    rows = [{"question": "q", "answer": "7", "tests": None, "reward": None, "prompt_ids": [1]},
            {"question": "q", "answer": None, "tests": ["assert True"], "reward": "code"}]
    with rewards.Verifier("gsm8k", allow_unsafe_code=True, row_specs=["code"]) as verify:
        verify.check_columns(rows, "x.jsonl")
        with pytest.raises(ValueError, match="^reward code: it reads the column 'tests', which x"):
            verify.check_columns([rows[0], rows[0] | {"reward": "code"}], "x.jsonl")
        with pytest.raises(ValueError, match="^reward gsm8k: it reads the column 'answer', "):
            verify.check_columns([rows[1], rows[1] | {"reward": None}], "x.jsonl")


# ---- a trainer that ends


def becomes(there):
    """Waits until there are processes with MARK, or none. Popen returns before they have it."""
    for _ in range(600):
        if bool(processes_with(MARK)) == there:
            return True
        time.sleep(0.1)
    return False


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
print("pids", verify.pool.fork_server.pid, *[w.pid for w in verify.pool.workers], flush=True)
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
