"""The jail: a program reads and writes nothing of ours, ends in time, and forges no result."""
import os
import socket
import textwrap

import pytest

import rewards
from conftest import ROOT, descendants, gone
from examples import code_reward, jail

pytestmark = pytest.mark.skipif(not jail.isolates(), reason="this machine cannot build a jail")
CODE = f"{ROOT}/examples/code_reward.py:code"


def run(program, text="", **settings):
    return jail.run_program(textwrap.dedent(program), [text], **settings)[0]


# each prints what it should not be able to do
ESCAPES = {
    "environment": """
        print("hf_secret" in str(os.environ) or "HOME" not in os.environ)
        path = "/proc/1/environ"
        print(os.access(path, os.R_OK) and "hf_secret" in open(path).read())""",
    "files": """
        for path in (SECRET, FILE, "/etc/passwd", "/home", "/work", "/var", "/root/.bashrc",
                     "/old/passwd", "/proc/1/root/etc/passwd", "/proc/1/cwd/../etc/passwd"):
            print(os.path.exists(path))""",
    "processes": """
        print(len([p for p in os.listdir("/proc") if p.isdigit()]) > 3)
        for pid in (PID, PARENT, -1, 1):
            try: os.kill(pid, signal.SIGKILL)  # and so are process 1 and this test
            except OSError: pass""",
    "writing": """
        for path in ("/", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/sys",
                     "/python", "/lib", "/proc/sys/kernel/core_pattern"):
            for name in path, path + "/x":
                try: print(open(name, "w"))
                except OSError: pass
        open("mine", "w").write("x")
        open("/tmp/mine2", "w").write("x")
        print(sorted(os.listdir("/scratch")) != ["mine", "mine2", "program.py"])""",
    "network": """
        for address in (("127.0.0.1", PORT), ("1.1.1.1", 53), ("8.8.8.8", 443)):
            try: print("connected", socket.create_connection(address, 1))
            except OSError: pass
        try: print("resolved", socket.getaddrinfo("example.com", 80))
        except OSError: pass""",
    "privileges": """
        libc = ctypes.CDLL(None)
        print(libc.mount(b"x", b"/scratch", b"tmpfs", 0, b"") != -1)
        print(libc.chroot(b"/scratch") != -1, libc.ptrace(16, 1, 0, 0) != -1)
        try: os.setuid(0)
        except OSError: pass
        else: # uid 0 of a user namespace, without capabilities
            print("CapEff:\\t0000000000000000" not in open("/proc/self/status").read())""",
    "the report": """
        for pid in ("1", str(os.getppid())):
            for fd in range(10):
                try: print(os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), b'[[0, "", ""]]'))
                except OSError: pass""",
    "files and keys of the one before": """
        print(os.path.exists("left"))
        open("left", "w").write("x")
        call = ctypes.CDLL(None).syscall
        print(call(250, 10, -4, b"user", b"left", 0) > 0)  # KEYCTL_SEARCH in the user's keyring
        call(248, b"user", b"left", b"data", 4, -4)""",
}


@pytest.mark.parametrize("way", ESCAPES)
def test_a_program_sees_and_reaches_nothing_of_ours(way, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""import ctypes, os, signal, socket
SECRET, FILE, PID = {str(tmp_path / "secret")!r}, {__file__!r}, {os.getpid()}
PARENT, PORT = {os.getppid()}, {server.getsockname()[1]}
{textwrap.dedent(ESCAPES[way])}
print("alive")"""
        for _ in range(2):
            lines = run(program, seconds=60).splitlines()  # enough on a busy machine
            assert set(lines[:-1]) <= {"False", "False False"} and lines[-1] == "alive"


# name: (a program, its seconds, what it prints). Without the limit it would print more, or end well
# after its seconds.
LIMITED = {
    "memory": ("x = bytearray(4 << 30); print('got it')", 4, None),
    "memory of 8 processes, each below the limit": ("""
        import os, time
        for _ in range(8):
            if os.fork() == 0: x = b"x" * (200 << 20); time.sleep(60)
        time.sleep(60)""", 600, None),
    "disk": ("""
        n = 0
        try:
            while n < 100:
                with open(f"f{n}", "wb") as f: f.write(b"x" * (8 << 20))
                n += 1
        except OSError: pass
        import os
        os.remove("f0"); print(1 <= n <= 8)""", 4, "True\n"),  # 64 MB
    "processes": ("""
        import os
        n = 0
        try:
            while n < 500:
                if os.fork() == 0: import time; time.sleep(60)
                n += 1
        except OSError: pass
        print(1 <= n < 64)""", 4, "True\n"),
    "endless output": ("while True: print('x' * 10000)", 3, None),
    "endless, deaf to signals": ("""
        import signal
        for s in range(1, 32):
            try: signal.signal(s, lambda *_: 0)
            except (OSError, ValueError): pass
        while True: pass""", 1, None),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_program_ends_at_its_limits_with_its_children_and_the_next_one_runs(name):
    program, seconds, prints = LIMITED[name]
    before = descendants([os.getpid()])
    assert run(program, seconds=seconds) == prints
    assert gone(descendants([os.getpid()]) - before)
    assert run("print('x' * 100)", output=10) == "x" * 10


# Each does 15 MB of what could be repeated: the limit of memory counts only what a process owns.
HIDDEN_MEMORY = [
    "os.write(os.memfd_create('x'), data)",
    "mmap.mmap(-1, len(data)).write(data)",
    "mmap.mmap(os.open('/dev/zero', os.O_RDWR), len(data)).write(data)",
    "sure(libc.shmget(0, len(data), 0o1600))",
    "sure(libc.msgget(0, 0o1600))",
    "sure(libc.semget(0, 32000, 0o1600))",
    "sure(libc.vmsplice(os.pipe()[1], struct.pack('PL', id(data), 9), 1, 0))",
    "socket.socket(socket.AF_UNIX)",
    "socket.socketpair()[0].setsockopt(1, socket.SO_SNDBUF, 1 << 20)",
    "sure(libc.unshare(0x10000000))",  # a user namespace, for a tmpfs; also of clone and clone3
    "sure(libc.syscall(56, 0x10000011, 0, 0, 0, 0)) or os._exit(0)",
    "sure(libc.syscall(435, struct.pack('11Q', 1 << 28, *[0] * 10), 88))",
    "sure(libc.syscall(425, 8, bytes(120)))", "sure(libc.syscall(206, 9, bytes(8)))",  # io_uring
]


def test_memory_that_no_process_owns_is_refused():
    program = f"""import ctypes, mmap, os, socket, struct, sys
libc, data = ctypes.CDLL(None, use_errno=True), b"x" * (15 << 20)
def sure(result):
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
for way in {HIDDEN_MEMORY!r}:
    try: exec(way)
    except OSError: pass
    else: print(way)
print("end")"""
    assert run(program) == "end\n"


def test_what_ordinary_programs_use_is_not_refused():
    program = """
        import asyncio, multiprocessing, sqlite3, subprocess, sys, time
        from concurrent.futures import ThreadPoolExecutor
        def work(end): end.send(sum(range(10)))
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=work, args=[theirs]).start()
        print(ours.recv(), *ThreadPoolExecutor(20).map(time.sleep, [0.5] * 20))
        print(asyncio.run(asyncio.sleep(0, 3)))
        print(subprocess.check_output([sys.executable, "-c", "print(4)"], text=True).strip())
        print(*sqlite3.connect("x.db").execute("select 5"))"""
    assert run(program, seconds=20) == f"45{' None' * 20}\n3\n4\n(5,)\n"


def test_text_that_is_not_a_program_fails_without_an_error():
    for text in "", "\0\ud800", "(" * 10**5:
        assert jail.run_program(text, [""])[0] in (None, "")
        assert jail.run_asserts(text, ["assert False"]) == [False]


# a program; what is true of its results; what no program in FORGERIES may pass
HONEST, RIGHT, FORGED = (ROOT / "tests/asserts.txt").read_text().strip().split("\n\n")


def test_asserts_are_run_one_by_one_and_see_what_they_would_see_in_one_process():
    right = [*RIGHT.split("\n"),
             "1\ntry: Stack().pop()\nexcept Empty as e: assert str(e) == 'nothing' and e.code == 3",
             "1\nwith redirect_stdout(io.StringIO()) as f: sum(1, 2)\nassert f.getvalue() > 'sum'"]
    wrong = ["[1] == (1,)", "{'a': 1} == {'a': 2}", "'1' == 1", "Money(1) == Money(2)", "P('x')",
             "f(", "Money(1) == 1", "same([1]) is None", "same(x := [1]) is not x"]
    start = "import asyncio, io\nfrom contextlib import redirect_stdout\nassert "
    passed = jail.run_asserts(HONEST, [start + test for test in wrong + right], 30)
    assert passed == [False] * len(wrong) + [True] * len(right)


SOLUTION = """
class Solution:
    def counted(self, text: str, most: Optional[int] = None) -> Dict[str, int]:
        return Counter(text)

    @cache
    def fibonacci(self, n: int) -> int:
        return n if n < 2 else self.fibonacci(n - 1) + self.fibonacci(n - 2)

    def names(self, nums: List[int]) -> Tuple:
        heapify(nums)
        return (-inf, math.inf, heapq.nsmallest(1, nums), bisect_left([1, 2], 2), comb(4, 2),
                reduce(add, accumulate(nums)), deque(nums), digits, pow(2, 3, 5), sys.maxsize,
                [a + b for a, b in pairwise(nums)], defaultdict(int), datetime.date(2024, 1, 2))

    def reversed_list(self, head: Optional[ListNode]) -> Optional[ListNode]:
        before = None
        while head:
            before = ListNode(head.val, before)
            head = head.next
        return before

    def mirrored(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        return root and TreeNode(root.val, self.mirrored(root.right), self.mirrored(root.left))
"""


def test_a_solution_has_the_names_that_leetcode_imports():
    right = [
        "assert Solution().counted('aab') == {'a': 2, 'b': 1} == Counter('aab')",
        "def check(candidate):\n    assert candidate(n=30) == 832040\ncheck(Solution().fibonacci)",
        "assert Solution().names([3, 1]) == (-inf, 9e999, [1], 1, 6, 5, deque([1, 3]), digits, 3,"
        " 2**63 - 1, [4], {}, datetime.date(2024, 1, 2))",
        "assert is_same_list(Solution().reversed_list(list_node([1, 2])), list_node([2, 1]))",
        "tree = Solution().mirrored(tree_node([1, 2, 3, None, 4]))\n"
        "assert is_same_tree(tree, tree_node([1, 3, 2, None, None, 4]))"]
    wrong = [
        "assert is_same_list(Solution().reversed_list(list_node([1, 2])), list_node([2]))",
        "assert is_same_list(Solution().reversed_list(list_node([1])), list_node([1, 2]))",
        "assert is_same_tree(Solution().mirrored(tree_node([1, 2])), tree_node([1, 2]))"]
    assert jail.run_asserts(SOLUTION, right + wrong, 20) == [True] * 5 + [False] * 3


def test_a_test_may_name_the_solution_at_the_beginning_of_a_line():
    program = "class Solution:\n    def turn(self, nums: List[int]) -> None: nums.reverse()"
    test = "nums = [1, 2]\nSolution().turn(nums)\nassert nums == [2, 1]"
    assert jail.run_asserts(program, [test]) == [True]


def test_a_name_of_the_program_goes_before_leetcodes_and_without_a_solution_there_are_none():
    program = "inf = 3\nclass Solution: f = inf\ndef root(x): return math.sqrt(x)"
    assert jail.run_asserts(program, ["assert Solution.f == 3"]) == [True]
    assert jail.run_asserts(program, ["import math\nassert root(4) == 2"]) == [False]


def test_programs_and_tests_may_import_packages_and_a_number_of_numpy_is_one_of_python():
    program = """
import numpy as np, pytest, sortedcontainers
def f(x): return np.int64(2 * x)
def g(x): return 2 * np.array(x)
def h(x): raise ValueError(x)
"""
    right = ["f(2) == 4", "sorted([f(2), f(1)]) == [2, 4]", "{f(1): 3} == {2: 3}",
             "np.allclose(g([1, 2]), [2, 4])", "g([1, 2]).shape == (2,)", "list(g([1])) == [2]",
             "True\nwith pytest.raises(ValueError): h(1)"]
    wrong = ["f(2) == 5", "np.allclose(g([1, 2]), [2, 5])", "False"]
    tests = [f"import numpy as np, pytest\nassert {test}" for test in right + wrong]
    assert jail.run_asserts(program, tests, 20) == [True] * len(right) + [False] * len(wrong)
    assert run("import os\nprint(os.path.exists('/packages'))") == "False\n"


@pytest.mark.parametrize("name, lines", [
    ("torch", "import torch"), ("solution", "from solution import f"),
    ("scipy", "def check(f):\n    import scipy.stats")])
def test_a_test_that_imports_what_the_jail_lacks_is_refused_with_a_sentence(name, lines):
    with pytest.raises(ValueError, match=f"^a test imports {name}, which is not in the jail"):
        code_reward.known_tests([f"{lines}\nassert f(1)"])
    known = ["import math, numpy.linalg\nfrom program import f\nassert f(1)"]
    assert code_reward.known_tests(known) == known


def test_an_integer_of_5000_digits_is_read_printed_and_compared():
    digits = "7" * 5000
    assert run("print(int(input()) + 1)", digits) == digits[:-1] + "8\n"
    test = f"assert f({digits}) == {digits[:-1]}8 and str(f(0)) == '1'"
    program = "```python\ndef f(x): return x + 1\n```"
    assert code_reward.code([program], [[test]], timeout=20) == [1.0]


FENCED = {  # where a fence is: (program, what follows it)
    "in a docstring": (
        "def f(x):\n    '''Doubles.\n\n    ~~~python\n    f(2)\n    ~~~\n    '''\n    return 2 * x",
        "\n~~~\nIt prints:\n~~~\n4\n~~~"),
    "in a comment and a text": ("'''\n~~~\nf(2)\n~~~\n'''\n# ~~~ is a fence\nprint(4)", "\n~~~"),
    "on the last line of the program": ("print(4)", "~~~\nIt prints:\n~~~\n4\n~~~"),
    "after a program that Python cannot parse": ("print(4", "\n~~~\nIt prints:\n~~~text\n4\n~~~"),
}


@pytest.mark.parametrize("place", FENCED)
def test_a_fence_ends_a_program_only_where_python_can_parse_it(place):
    program, after = [text.replace("~~~", "```") for text in FENCED[place]]
    assert code_reward.program_of(f"Here:\n```python\n{program}{after}") == program


LIAR = "class Same:\n" + "".join(
    f"    __{name}__ = lambda s, *a: {value}\n" for names, value in (
        ("eq ne lt le gt ge contains bool", True), ("sub rsub mod abs getitem round call", "s"),
        ("len hash", 2), ("iter", "iter([s, s])")) for name in names.split())
PATCHES = "abs=lambda x: 0, len=lambda x: 2, sorted=lambda x: [1, 2], isinstance=T, all=T, any=T"
FORGERIES = [
    "raise SystemExit(0)", "import os\ndef f(*a): os._exit(0)",
    "from unittest.mock import ANY\ndef f(*a): return ANY",
    *(LIAR + line for line in (
        "Same.__sub__, Same.__class__ = lambda s, x: 0.0, int\ndef f(*a): return Same()",
        "f = type('f', (Same,), {'__init__': lambda s, *a: None})",
        "def f(*a): return [Same(), Same()]", "def f(*a): yield from (Same(), {Same(): Same()})")),
    *(LIAR.replace("Same", f"Same({kind})") + f"def f(*a): return Same({value})"
      for kind, value in (("int", 8), ("float", 8), ("str", 8), ("list", [8]), ("dict", ""))),
    LIAR.replace("Same", "Meta(type)") + "Same = Meta('Same', (), {})\ndef f(*a): return Same()",
    f"import math\nT = lambda *a: True\nglobals().update({PATCHES})\nclass math: isclose = T\n"
    "def f(*a): return None",
    "import builtins, fractions, math\nT = math.isclose = fractions.Fraction.__eq__ = abs\n"
    f"def f(*a): vars(builtins).update({PATCHES})",
    "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[true]')\n    except OSError: pass",
    "open('fractions.py', 'w').write('import os; os.write(4, b\"[1]\"); os._exit(0)')",
    "import os\ndef f(*a): open(f'/proc/{os.getppid()}/mem', 'r+b').close(); return 9",
]


def test_no_test_is_passed_by_exiting_early_or_by_what_is_equal_to_everything():
    forged = *FORGED.split("\n"), "1\ntry: f(1) == 4\nexcept TypeError: pass\nassert f(2) == 5"
    tests = [f"import math\nfrom fractions import Fraction\nassert {test}" for test in forged]
    for program in FORGERIES:
        assert not any(jail.run_asserts(program, tests, seconds=20)), program
    assert jail.run_asserts("def f(x):\n    while True: pass", ["assert f(3) == 9"], 1) == [False]


def test_without_isolation_code_raises_a_one_line_error(monkeypatch, tmp_path):
    monkeypatch.setattr(jail, "isolates", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no unshare, also in the pool
    with pytest.raises(RuntimeError, match="^no isolation .*ALLOW_UNSAFE_CODE=1$"):
        jail.run_program("print(1)", [""])
    with pytest.raises(ValueError, match="^no isolation .*ALLOW_UNSAFE_CODE=1$"):
        rewards.Verifier(CODE)
    monkeypatch.setenv("ALLOW_UNSAFE_CODE", "1")
    rewards.Verifier(CODE).close()
    assert jail.run_program("print(input())", ["a"], 60) == ["a\n"]
    assert jail.run_program("while True: pass", ["a"], 1) == [None]


def test_a_jail_that_was_not_built_is_no_wrong_program(monkeypatch):
    """A busy or full machine fails to build jails: the completion has no verdict, not 0."""
    row = dict(tests=[[{"input": "", "output": "1"}]])
    text = "```python\nprint(1)\n```"
    assert code_reward.code([text], **row) == [1.0]
    for command in (["false"], ["sh", "-c", "cat > /dev/null; echo startling"], ["sleep", "9"]):
        monkeypatch.setattr(jail, "_jailed", lambda arguments, packages: command)
        for program in "print(1)", "print(2)":
            with pytest.raises(RuntimeError, match="jail of a program was not built"):
                jail.run_program(program, [""], seconds=-1.5)
        with pytest.raises(RuntimeError, match="jail of a program was not built"):
            code_reward.code([text], **row, timeout=0.1)
