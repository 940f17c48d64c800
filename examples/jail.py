"""A jail for the programs that a model writes, built with Linux namespaces (unshare, setpriv).

Inside there is no network, no environment variable, process or file of ours, and one small writable
folder. A program ends together with everything it started. ALLOW_UNSAFE_CODE=1 in the environment
lets programs run without a jail where none can be built.

Two things are not hidden: /proc/self/mountinfo names the path of our interpreter, and programs that
run at the same time can lock files of it, and so tell each other something.
"""
import contextlib
import functools
import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

JAIL_MEMORY = 512 << 20  # bytes: the limit of a process, and of all of a program's together
JAIL_DISK = 64 << 20  # bytes in the scratch folder, the only writable one
JAIL_PROCESSES = 32
SCRATCH = "/scratch"


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

    A call from a test takes 0.1 ms more than in one process. The tests' globals are not the
    program's, which cannot see what a test defines unless it is an argument.

    >>> run_asserts("def f(a): return a + 1", ["assert f(2) == 3", "assert f(1) == 3"])
    [True, False]
    """
    harness = Path(__file__).with_name("asserts.py").read_text()
    job = {"program": program, "harness": harness, "output": 0, "runs": [["", json.dumps(tests)]]}
    (_, _, report), = _run(job, seconds, check())
    return json.loads(report or "null") or [False] * len(tests)


def check():
    """Whether the jail works here. Where not, raises RuntimeError unless ALLOW_UNSAFE_CODE is 1."""
    works = isolates()
    if not works and os.environ.get("ALLOW_UNSAFE_CODE") != "1":
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
    (status, out, _), = _run({"program": probe, "runs": [["", ""]], "output": 99}, 20, True)
    return (status, out) == (0, SCRATCH + "\n")


def _run(job, seconds, jailed):
    """Returns (exit status, standard output, report) per run.

    With jailed=False only the limits protect us.
    """
    job |= {"jailed": jailed, "seconds": seconds, "memory": JAIL_MEMORY,
            "processes": JAIL_PROCESSES}
    command = ["-S", "-s", "-B", "-X", "utf8", "-c", _source(_supervise)]
    command = _jailed(command) if jailed else [os.path.realpath(sys.executable), *command]
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": SCRATCH, "LANG": "C.UTF-8",
           "PYTHONHASHSEED": "0", "LD_LIBRARY_PATH": "/python/lib",
           "MALLOC_ARENA_MAX": "1"}  # glibc reserves 64 MB of the limit for each thread
    with contextlib.nullcontext("/") if jailed else tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=not jailed,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            out, _ = process.communicate(json.dumps(job).encode(), timeout=seconds + 2)
            return json.loads(out)
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: the jail failed
            return [(-1, "", "")] * len(job["runs"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                (os.kill if jailed else os.killpg)(process.pid, signal.SIGKILL)
            process.communicate()


def _source(function):
    return f"{inspect.getsource(function)}{function.__name__}()"


def _jailed(arguments):
    """The command that runs our interpreter with these arguments in the jail.

    The new root is built on /sys: it exists everywhere, and no interpreter is installed below it.
    """
    # what a program may read, {path outside: inside}: system libraries and the interpreter
    system = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
              "/dev/null", "/dev/urandom")  # not zero: see refused_calls about shared memory
    paths = {path: path for path in system if os.path.exists(path)}
    python, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr"):  # perhaps below /root, closed to the jail's user
        paths[prefix] = "/python"
        python = python.replace(prefix, "/python", 1)
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
    user = 1_000_000_000 + os.getpid()
    namespaces = ["--mount", "--net", "--pid", "--ipc", "--uts"]
    if os.getuid() == 0:  # an unused user id: RLIMIT_NPROC does not apply to user 0
        drop += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    else:
        namespaces += ["--user", "--map-root-user"]
    return ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script, "sh", *drop,
            python, *arguments]


def _supervise():
    """Process 1 of the jail: starts the program once per run, in a new interpreter.

    Its source is passed to the jail's interpreter as text, hence the imports in here.
    """
    import contextlib
    import ctypes
    import errno
    import json
    import os
    import resource
    import signal
    import struct
    import sys
    import time

    job = json.load(sys.stdin)
    end, jailed = time.monotonic() + job["seconds"], job["jailed"]
    if jailed and os.getpid() != 1:
        sys.exit("not process 1: kill(-1) below would kill processes outside")

    def refused_calls():
        """A filter of system calls (seccomp(2)). Those fail that give a program memory which no
        process owns, because memory() below cannot see it, or that leave data for the next program.
        """
        arch, clone, mmap = 0xC000003E, 56, 9  # the numbers of x86-64
        # memfd_create memfd_secret shmget semget msgget vmsplice bpf, io_uring_setup (its requests
        # pass the filter), socket setsockopt (buffers), add_key request_key keyctl, unshare clone3,
        # io_setup (the machine has 65,536 events for all)
        calls = 319, 447, 29, 64, 68, 278, 321, 425, 41, 54, 248, 249, 250, 272, 435, 206
        load, equal, has, mask = 0x20, 0x15, 0x45, 0x54  # then: lines to skip if true, false; value
        fail, allow = (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)
        lines = [(load, 0, 0, 4), (equal, 1, 0, arch), fail,
                 (load, 0, 0, 0), (has, 0, 1, 0x40000000), fail,  # x32, other numbers for the calls
                 *(line for call in calls for line in ((equal, 0, 1, call), fail)),
                 # CLONE_NEWUSER: there the program could mount a tmpfs
                 (equal, 0, 4, clone), (load, 0, 0, 16), (has, 0, 1, 0x10000000), fail, allow,
                 # MAP_SHARED with MAP_ANONYMOUS: after munmap of a part all of it is kept
                 (equal, 0, 4, mmap), (load, 0, 0, 40), (mask, 0, 0, 0x21), (equal, 0, 1, 0x21),
                 fail, allow]
        return b"".join(struct.pack("HBBI", *line) for line in lines)

    prctl = ctypes.CDLL(None).prctl
    # PR_SET_PDEATHSIG: end with the worker. Set again: a new user id has reset it
    prctl(1, signal.SIGKILL)
    prctl(4, 0)  # PR_SET_DUMPABLE: no program in the jail may trace this process or its files
    if jailed:
        code = ctypes.create_string_buffer(refused_calls())
        # PR_SET_SECCOMP
        if prctl(22, 2, struct.pack("HP", len(code) // 8, ctypes.addressof(code))):
            sys.exit("the kernel has no filter of system calls")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    with open("program.py", "wb") as f:
        f.write(job["program"].encode("utf-8", "surrogatepass"))
    args = [sys.executable, "-S", "-s", "-B", "-X", "utf8"]
    # exit and quit, which many programs call, come from `site`, which -S leaves out
    main = ("import builtins, sys; builtins.exit = builtins.quit = sys.exit; del builtins, sys; "
            "exec(compile(open('program.py', 'rb').read(), 'program.py', 'exec'))")
    args += ["-c", job.get("harness", main)]
    limits = {"CORE": 0, "AS": job["memory"], "NPROC": job["processes"], "FSIZE": 1 << 24,
              "NOFILE": 64, "CPU": int(job["seconds"]) + 2}

    def file(text=""):
        f = open(".io", "x+b")
        os.unlink(".io")
        f.write(text.encode("utf-8", "replace"))
        f.seek(0)
        return f

    def memory():
        """Bytes in use by all processes of the program, their page tables included."""
        kilobytes = 0
        for name in os.listdir("/proc") if jailed else []:
            if name.isdigit() and name != "1":
                # OSError: it has just ended
                with contextlib.suppress(OSError), open(f"/proc/{name}/status") as f:
                    kilobytes += sum(int(line.split()[1]) for line in f
                                     if line.startswith(("VmRSS", "VmSwap", "VmPTE")))
        return kilobytes << 10

    def reap(flags):
        with contextlib.suppress(ChildProcessError):  # none is left
            while (child := os.waitpid(-1, flags))[0]:
                ended[child[0]] = os.waitstatus_to_exitcode(child[1])

    results = []
    for text, tests in job["runs"]:
        ended = {}  # pid: exit status
        # descriptors 0 to 4: standard input, output, error, the tests and their report
        files = file(text), file(), open(os.devnull, "wb"), file(tests), file()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                for n, f in enumerate(files):
                    os.dup2(f.fileno(), n)
                os.closerange(5, 64)
                for name, value in limits.items():
                    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                os.execv(args[0], args)
            finally:
                os._exit(127)
        while pid not in ended and time.monotonic() < end and memory() < job["memory"]:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            reap(os.WNOHANG)
        status = ended.get(pid, -1)
        with contextlib.suppress(ProcessLookupError):  # no process is left
            os.kill(-1, signal.SIGKILL) if jailed else os.killpg(pid, signal.SIGKILL)
        reap(0)
        output = [os.pread(files[n].fileno(), size, 0).decode("utf-8", "replace")
                  for n, size in ((1, job["output"]), (4, 1 << 16))]
        results.append([status, *output])
    print(json.dumps(results))
