"""A jail for the programs that a model writes, built with Linux namespaces (unshare, setpriv).

Inside there is no network, no environment variable, process or file of ours, and one small writable
folder. A program ends together with everything it started. ALLOW_UNSAFE_CODE=1 in the environment
lets programs run without a jail where none can be built.

A program may import Python's library and those of PACKAGES that are installed beside the trainer.

Two things are not hidden: /proc/self/mountinfo names the paths of our interpreter and of packages,
and programs that run at the same time can lock files of them, and so tell each other something.
"""
import contextlib
import ctypes
import errno
import functools
import importlib.util
import inspect
import json
import os
import re
import resource
import secrets
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JAIL_MEMORY = 512 << 20  # bytes: the limit of a process, and of all of a program's together
JAIL_DISK = 64 << 20  # bytes in the scratch folder, the only writable one
JAIL_PROCESSES = 32
SCRATCH = "/scratch"
STARTED = "started"  # what process 1 of a jail writes before it runs the program
PACKAGES = {  # beside Python's library: {name in an import: what it has in site-packages}
    "numpy": ["numpy", "numpy.libs"],
    "sortedcontainers": ["sortedcontainers"],
    "pytest": ["pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments"],
}


def run_program(program, inputs, seconds=4.0, output=1 << 16):
    r"""Run a Python program in a jail, once for each text of `inputs`, which is its standard input.

    Returns a list with the standard output of each run, cut at `output` bytes; None if the run
    failed, was killed or did not end within `seconds`, which all runs share. Raises RuntimeError
    where no jail can be built, see check.

    >>> run_program("print(int(input()) + 1)", ["1", "41", "x"])
    ['2\n', '42\n', None]
    """
    job = {"program": program, "runs": [[text, ""] for text in inputs], "output": output}
    results = _run(job, seconds, check())
    return [out if status == 0 else None for status, out, _ in results]


def run_asserts(program, tests, seconds=4.0):
    """Run a Python program, then each of `tests` (source with asserts) with its names.

    Returns a bool per test. The program and the tests run in two processes (asserts.py), so that
    a program passes no test by exiting early, by replacing Python's functions or modules, by
    reading or writing what the tests read and report, or by returning what is equal to everything:

    - Numbers, texts, None, lists, tuples, dicts, sets and the standard library's Counter, deque,
      OrderedDict, defaultdict, Fraction, Decimal, UUID, Path, dates and times reach a test as new
      objects of these types, also from within each other. An object of a subclass counts as one of
      its plain type.
    - A test in which another object of the program is compared with such a value fails (None may be
      compared), as does one in which arithmetic with both gives a number or decides something.
    - Two objects of the program compare themselves, if the test has made one of them by a class
      that it names with a capital letter: `Point(1, 2) + Point(0, 1) == Point(1, 3)` trusts Point.
      So does `x in Bag()`. What a method says, such as `stack.is_empty()`, is the program's word.
    - A name of Python's in a test is Python's, unless the program defines it and the test names
      nothing else of the program: sum(10, 15) is then about the program's sum.

    - If a test names `Solution`, program and tests have the names that LeetCode imports for a
      program: List, Optional, Counter, inf, cache, math, ListNode and others.

    A call from a test takes 0.1 ms more than in one process. The tests' globals are not the
    program's, which cannot see what a test defines unless it is an argument.

    >>> run_asserts("def f(a): return a + 1", ["assert f(2) == 3", "assert f(1) == 3"])
    [True, False]
    """
    leetcode = any(re.search(r"\bSolution\b", test) for test in tests)
    harness = Path(__file__).with_name("asserts.py").read_text() + f"main({leetcode})"
    job = {"program": program, "harness": harness, "output": 0,
           "runs": [["", json.dumps(tests)]]}
    [[_, _, report]] = _run(job, seconds, check())
    return json.loads(report or "null") or [False] * len(tests)


def check():
    """Whether the jail works here. Where not, raises RuntimeError unless ALLOW_UNSAFE_CODE is 1."""
    works = isolates()
    allowed = os.environ.get("ALLOW_UNSAFE_CODE") == "1"
    if not works and not allowed:
        raise RuntimeError(
            "no isolation for the model's programs on this machine: allow Linux namespaces "
            "(unshare), or accept the risk with ALLOW_UNSAFE_CODE=1")
    return works


@functools.cache
def isolates():
    """Whether the jail hides our processes and files, cannot write to / and has no network."""
    if not all(map(shutil.which, ("unshare", "setpriv"))):
        return False
    probe = f"""if True:
        import os, socket
        assert sum(name.isdigit() for name in os.listdir('/proc')) < 5
        assert not os.path.exists({os.path.abspath(__file__)!r}) and not os.access('/', os.W_OK)
        try: socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 9))
        except OSError: print(os.getcwd())"""
    job = {"program": probe, "runs": [["", ""]], "output": 99}
    with contextlib.suppress(RuntimeError):
        [[status, out, _]] = _run(job, 20, True)
        return status == 0 and out == SCRATCH + "\n"
    return False


@functools.cache
def package_folder(name):
    """The folder (Path) in which the package `name` is installed; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parents[1] if spec else None


def installed_packages():
    """Those of PACKAGES that are installed."""
    return [name for name in PACKAGES if package_folder(name)]


def _run(job, seconds, jailed):
    """Returns [exit status, standard output, report] per run.

    With jailed=False only the limits protect us. Raises RuntimeError if the jail was not built.
    """
    job |= {"jailed": jailed, "seconds": seconds, "memory": JAIL_MEMORY,
            "processes": JAIL_PROCESSES}
    text = json.dumps([job["program"], job["runs"]])
    packages = [name for name in installed_packages() if name in text]
    command = ["-S", "-s", "-B", "-X", "utf8", "-c", SUPERVISOR]
    if jailed:
        command = _jailed(command, packages)
        path = "/packages"
    else:
        command = [os.path.realpath(sys.executable), *command]
        path = ":".join(str(package_folder(name)) for name in packages)
    env = {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": SCRATCH,
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": "/python/lib",
        "PYTHONPATH": path,
        "PYTHONHASHSEED": "0",
        "PYTHONINTMAXSTRDIGITS": "0",  # a program may print an integer of 5,000 digits
        "MALLOC_ARENA_MAX": "1",  # glibc reserves 64 MB of the limit for each thread
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads need memory too
    }
    with contextlib.nullcontext("/") if jailed else tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=not jailed,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            out, _ = process.communicate(json.dumps(job).encode(), timeout=seconds + 2)
        except subprocess.TimeoutExpired as e:
            out = e.output or b""
        finally:
            kill = os.kill if jailed else os.killpg
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
            process.communicate()
    started, _, report = out.partition(b"\n")
    if started != STARTED.encode():  # no fault of the program, which has not begun
        raise RuntimeError("the jail of a program was not built: is the machine too busy, or full?")
    try:
        return json.loads(report)
    except ValueError:  # cut off
        return [[-1, "", ""] for _ in job["runs"]]


def _jailed(arguments, packages):
    """The command that runs our interpreter with these arguments in the jail.

    The new root is built on /sys: it exists everywhere, and no interpreter is installed below it.
    """
    # what a program may read, {path outside: inside}: system libraries, interpreter and packages
    system = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
              "/dev/null", "/dev/urandom")  # not zero: see _refused_calls about shared memory
    paths = {path: path for path in system if os.path.exists(path)}
    python = os.path.realpath(sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr"):  # perhaps below /root, closed to the jail's user
        paths[prefix] = "/python"
        python = python.replace(prefix, "/python", 1)
    for name in packages:
        for folder in PACKAGES[name]:
            path = package_folder(name) / folder
            if path.exists():
                paths[str(path)] = f"/packages/{folder}"
    show = "; ".join(shlex.join(("show", outside, inside)) for outside, inside in paths.items())
    script = f"""set -e
        options=size={JAIL_DISK},nosuid,nodev
        mount -t tmpfs -o $options,mode=755 tmpfs /sys; cd /sys; mkdir dev proc old
        mkdir -m 1777 .{SCRATCH}; mount -t tmpfs -o $options,mode=1777 tmpfs .{SCRATCH}
        show() {{
            mkdir -p ".$(dirname "$2")"
            if [ -L "$1" ]; then cp -P "$1" ".$2"; return; fi
            if [ -d "$1" ]; then mkdir ".$2"; else touch ".$2"; fi
            mount --bind "$1" ".$2"
            [ -c "$1" ] || mount -o remount,bind,ro ".$2"
        }}
        {show}
        mount -t proc proc proc; ln -s {SCRATCH} tmp; mount -o remount,bind,ro /sys
        pivot_root . old; cd {SCRATCH}; umount -l /old
        exec "$@" """
    drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    # of its own: what a former jail left to the kernel counts for another user
    user = 1_000_000_000 + secrets.randbits(30)
    namespaces = ["--mount", "--net", "--pid", "--ipc", "--uts"]
    if os.getuid() == 0:  # an unused user id: RLIMIT_NPROC does not apply to user 0
        drop += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    else:
        namespaces += ["--user", "--map-root-user"]
    return ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script, "sh", *drop,
            python, *arguments]


# ---------------------------------------------- process 1 of the jail, which gets this part as text

def _refused_calls():
    """A filter of system calls (seccomp(2)). Those fail that give a program memory which no
    process owns, because _memory cannot see it, or that leave data for the next program.
    """
    arch, clone, mmap = 0xC000003E, 56, 9  # the numbers of x86-64
    # memfd_create memfd_secret shmget semget msgget vmsplice bpf, io_uring_setup (its requests
    # pass the filter), socket setsockopt (buffers), add_key request_key keyctl, unshare clone3,
    # io_setup (the machine has 65,536 events for all)
    calls = 319, 447, 29, 64, 68, 278, 321, 425, 41, 54, 248, 249, 250, 272, 435, 206
    # of a line: what it does; lines to skip if true, if false; a value
    load, equal, has, mask, end = 0x20, 0x15, 0x45, 0x54, 0x06
    fail = (end, 0, 0, 0x50000 | errno.ENOSYS)
    allow = (end, 0, 0, 0x7FFF0000)
    lines = [
        (load, 0, 0, 4), (equal, 1, 0, arch), fail,
        (load, 0, 0, 0), (has, 0, 1, 0x40000000), fail,  # x32, other numbers for the calls
    ]
    for call in calls:
        lines += (equal, 0, 1, call), fail
    # CLONE_NEWUSER: there the program could mount a tmpfs
    lines += (equal, 0, 4, clone), (load, 0, 0, 16), (has, 0, 1, 0x10000000), fail, allow
    # MAP_SHARED with MAP_ANONYMOUS: after munmap of a part all of it is kept
    lines += (equal, 0, 4, mmap), (load, 0, 0, 40), (mask, 0, 0, 0x21), (equal, 0, 1, 0x21)
    lines += fail, allow
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _protect(jailed):
    """Prepares this process, which must survive the program."""
    prctl = ctypes.CDLL(None).prctl
    # PR_SET_PDEATHSIG: end with the worker. Set again: a new user id has reset it
    prctl(1, signal.SIGKILL)
    prctl(4, 0)  # PR_SET_DUMPABLE: no program in the jail may trace this process or its files
    if jailed:
        code = ctypes.create_string_buffer(_refused_calls())
        rules = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
        if prctl(22, 2, rules):  # PR_SET_SECCOMP
            sys.exit("the kernel has no filter of system calls")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})


def _file(text=""):
    """An open file without a name, with this text."""
    f = open(".io", "x+b")
    os.unlink(".io")
    f.write(text.encode("utf-8", "replace"))
    f.seek(0)
    return f


def _started(job, files):
    """Starts the program in a new interpreter; the files become its descriptors 0, 1, ... Returns
    its process id.
    """
    # exit and quit, which many programs call, come from `site`, which -S leaves out
    main = """import builtins, sys
builtins.exit = builtins.quit = sys.exit
del builtins, sys
exec(compile(open('program.py', 'rb').read(), 'program.py', 'exec'))"""
    python = [sys.executable, "-S", "-s", "-B", "-X", "utf8", "-c", job.get("harness", main)]
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_FSIZE: 1 << 24,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CPU: int(job["seconds"]) + 2,
    }
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for n, f in enumerate(files):
            os.dup2(f.fileno(), n)
        os.closerange(5, 64)
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.execv(python[0], python)
    finally:
        os._exit(127)


def _memory():
    """Bytes in use by all processes of the program, their page tables included."""
    kilobytes = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        with contextlib.suppress(OSError):  # it has just ended
            with open(f"/proc/{name}/status") as f:
                for line in f:
                    if line.startswith(("VmRSS", "VmSwap", "VmPTE")):
                        kilobytes += int(line.split()[1])
    return kilobytes << 10


def _reap(ended, flags):
    """Enters the exit status of each child that has ended: ended[process id]."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, flags)
            if not pid:
                return
            ended[pid] = os.waitstatus_to_exitcode(status)


def _watched(pid, job, end):
    """Waits until the program ends or reaches a limit, and ends all that it started. Returns its
    exit status, -1 at a limit.
    """
    ended = {}
    while pid not in ended and time.monotonic() < end:
        if job["jailed"] and _memory() >= job["memory"]:
            break
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        _reap(ended, os.WNOHANG)
    status = ended.get(pid, -1)
    with contextlib.suppress(ProcessLookupError):  # no process is left
        if job["jailed"]:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)
    _reap(ended, 0)
    return status


def _supervise():
    """Process 1 of the jail: starts the program once per run, and reports."""
    job = json.load(sys.stdin)
    end = time.monotonic() + job["seconds"]
    if job["jailed"] and os.getpid() != 1:
        sys.exit("not process 1: the kill(-1) of _watched would kill processes outside")
    _protect(job["jailed"])
    with open("program.py", "wb") as f:
        f.write(job["program"].encode("utf-8", "surrogatepass"))
    print(STARTED, flush=True)
    results = []
    for text, tests in job["runs"]:
        # standard input, output, error, the tests and their report
        files = [_file(text), _file(), open(os.devnull, "wb"), _file(tests), _file()]
        pid = _started(job, files)
        status = _watched(pid, job, end)
        output = os.pread(files[1].fileno(), job["output"], 0).decode("utf-8", "replace")
        report = os.pread(files[4].fileno(), 1 << 16, 0).decode("utf-8", "replace")
        results.append([status, output, report])
    print(json.dumps(results))


PARTS = (_refused_calls, _protect, _file, _started, _memory, _reap, _watched, _supervise)
SUPERVISOR = "".join([
    "import contextlib, ctypes, errno, json, os, resource, signal, struct, sys, time\n",
    f"STARTED = {STARTED!r}\n",
    *map(inspect.getsource, PARTS),
    "_supervise()"])
