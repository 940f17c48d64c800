"""A pool of processes for calls that may hang, crash or use too much memory. It knows no rewards.

    trainer (Pool) -> fork server (imports the functions) -> workers (3 ms per fork)

Why not a library: 20 hung answers among 1,024 at a limit of 5 s take pebble 54 s on 2 cores, and it
does not kill what a worker started; loky has no limit per call. A fork of the trainer would copy
CUDA state. Python's signal handlers never run while sympy computes 9**9**9 inside C code.
"""
import contextlib
import ctypes
import gc
import itertools
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import psutil

START_SECONDS = 120.0  # limit of make_handler: importing torch from a network disk takes 60
FORK_SECONDS = 10.0  # limit of a fork: a fork server that was stopped, or hangs, is replaced
MAX_SLOW = 32  # slow calls that may run beside the others at one time (see Pool._slow_at)
WAITING = 64  # calls that wait for a network, at one time
PROCESSES = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks that share the cores
CPUS = getattr(os, "sched_getaffinity", lambda _: [0])(0)  # read before vLLM pins its threads


@dataclass
class Task:
    payload: bytes
    waits: bool  # for a network, more than it computes
    result: object = None


@dataclass
class Worker:
    pid: int  # of its parent and of their process group
    conn: Connection
    task: Task | None = None
    started: float = 0.0  # when it got the task
    slow: bool = False  # it keeps its task, at low priority; another worker takes its place


class Pool:
    """Runs calls in processes that can be killed.

        pool = Pool(make_handler, args)
        results = pool.run(tasks)

    `make_handler(*args)` of a module is called once, in the fork server, and returns the function
    `handle` and `facts`, what the caller must know. The result of a task is handle(task), or text:
    Pool.TIMEOUT after `timeout` seconds, up to three times as many with more load than cores,
    Pool.DIED if the worker ended, or why it did not start. Raises ValueError with make_handler's
    message, RuntimeError if it takes too long or ends the process.

    A slow call does not delay the others: another worker is forked to go on with them, so 20 calls
    that hang cost little more time than one. A call that allocates more than `memory` bytes gets
    MemoryError: 10^{10^{10}} takes 4 GB, and 20 such calls at once would fill the machine."""

    TIMEOUT, DIED = "timeout", "its process died"

    def __init__(self, make_handler, args=(), workers=None, timeout=5.0, memory=512 << 20):
        self.setup = pickle.dumps((list(sys.path), CPUS, memory, make_handler, args))
        self.timeout = timeout
        self.size = workers or max(1, len(CPUS) // PROCESSES)
        self.workers = []
        self.mean_seconds = 0.0  # running mean of the time of a task that computes
        self.lock = threading.Lock()  # one `run` at a time
        self._start_fork_server()

    def run(self, tasks, waits=itertools.repeat(False)):
        """The results of tasks, in their order. `waits`: for each, whether it waits for a network.

        As many tasks run at a time as the pool has workers, and WAITING tasks that wait. Raises
        OSError if no process can be started."""
        tasks = [Task(pickle.dumps(task), wait) for task, wait in zip(tasks, waits)]
        busy = os.getloadavg()[0] / len(CPUS)  # on a busy machine a call gets less of a core
        self.limit = self.timeout * min(max(busy, 1), 3)
        pending = {False: deque(), True: deque()}  # by Task.waits
        for task in tasks:
            pending[task.waits].append(task)
        with self.lock:
            for worker in self.workers[:]:
                if worker.conn.poll():  # end of file: it has died since the last run
                    self._remove(worker)
            try:
                while any(pending.values()) or any(worker.task for worker in self.workers):
                    self._assign(pending)
                    self._step()
            except BaseException:  # Ctrl-C too: the next run starts new processes
                self._end_fork_server()
                self.workers.clear()
                raise
        return [task.result for task in tasks]

    def close(self):
        """Kill all processes of the pool, after a `run` of another thread."""
        with self.lock:
            self._end_fork_server()

    def _assign(self, pending):
        """Give tasks to workers. pending: {waits: deque of tasks}."""
        for waits, limit in (False, self.size), (True, WAITING):
            busy = sum(w.task is not None and w.task.waits == waits and not w.slow
                       for w in self.workers)
            for _ in range(min(limit - busy, len(pending[waits]))):
                idle = [worker for worker in self.workers if not worker.task]
                worker = idle[0] if idle else self._fork_worker()
                worker.task, worker.started = pending[waits].popleft(), time.monotonic()
                with contextlib.suppress(OSError):  # it has just died: _step reads end of file
                    worker.conn.send_bytes(worker.task.payload)

    def _step(self):
        """Wait for the next event and handle it."""
        events = [min(self._slow_at(w), w.started + self.limit) for w in self.workers if w.task]
        seconds = max(0.0, min(events) - time.monotonic())
        ready = wait([worker.conn for worker in self.workers], seconds)
        now = time.monotonic()
        for worker in self.workers[:]:
            if worker.conn in ready:
                self._receive(worker)
            elif worker.task and now >= worker.started + self.limit:
                self._remove(worker, Pool.TIMEOUT)
            elif worker.task and now >= self._slow_at(worker):
                worker.slow = True
                with contextlib.suppress(OSError):  # it may have ended meanwhile
                    os.setpriority(os.PRIO_PGRP, worker.pid, 10)

    def _receive(self, worker):
        try:
            worker.task.result = worker.conn.recv()
        except (EOFError, OSError):
            return self._remove(worker, Pool.DIED)
        if not worker.task.waits:
            self.mean_seconds += (time.monotonic() - worker.started - self.mean_seconds) / 20
        worker.task = None
        if worker.slow:  # another worker has its place, and its priority cannot rise again
            self._remove(worker)

    def _slow_at(self, worker):
        """When the task of this worker counts as slow. Relative to the mean: where every call takes
        long, replacing every worker would start more processes than there are cores."""
        if worker.slow or worker.task.waits or sum(w.slow for w in self.workers) >= MAX_SLOW:
            return float("inf")
        return worker.started + max(self.timeout / 25, 4 * self.mean_seconds)

    def _remove(self, worker, result=None):
        """Kill the worker. Its task gets the result."""
        self.workers.remove(worker)
        with socket.socket(fileno=os.dup(worker.conn.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)  # close() does not end it if the trainer has forked
        worker.conn.close()
        with contextlib.suppress(OSError):  # it has ended
            os.kill(worker.pid, signal.SIGCONT)  # its function may have stopped the parent
        if worker.task:
            worker.task.result = result

    def _fork_worker(self):
        for last_try in False, True:
            ours, theirs = Pipe()
            reply = b""  # the fork server has died, or hangs
            with theirs, contextlib.suppress(OSError):  # also TimeoutError
                socket.send_fds(self.control, [b"F"], [theirs.fileno()])
                reply = self.control.recv(200)
            if reply.isdigit():
                self.workers.append(Worker(int(reply), ours))
                return self.workers[-1]
            ours.close()
            if last_try or reply:
                raise OSError(f"a process for the rewards did not start: {reply.decode()}")
            self._end_fork_server()
            self._start_fork_server()

    def _end_fork_server(self):
        """Kill the fork server, its workers and all that they have started."""
        with contextlib.suppress(OSError):  # closed before
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        self.fork_server.send_signal(signal.SIGCONT)  # a function may have stopped all above it
        self.fork_server.wait()

    def _start_fork_server(self):
        root = str(Path(__file__).resolve().parents[2])
        self.control, theirs = socket.socketpair()
        # os._exit does not wait for threads of a user's file, but drops buffers, hence -u
        code = (f"import os, sys; sys.path.insert(0, {root!r}); from runtime.verify import pool; "
                "pool._serve(); os._exit(0)")
        command = [sys.executable, "-u", "-c", code, str(theirs.fileno())]
        # One thread each and no GPU, whatever a user's reward function imports. A session of its
        # own: Ctrl-C reaches only the trainer, which then closes the pool or exits.
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                            "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.fork_server = subprocess.Popen(command, stdin=subprocess.PIPE, env=env,
                                                pass_fds=[theirs.fileno()], start_new_session=True)
        with contextlib.suppress(BrokenPipeError), self.fork_server.stdin as pipe:
            pipe.write(self.setup)
        self.control.settimeout(START_SECONDS)
        try:
            reply = self.control.recv(65536)
        except TimeoutError:
            self._end_fork_server()
            raise RuntimeError(
                f"the verifier process was not ready after {START_SECONDS:g} s: does a reward file "
                "loop, download or wait when it is imported?") from None
        self.control.settimeout(FORK_SECONDS)
        if not reply:
            raise RuntimeError(f"the verifier process ended with status {self.fork_server.wait()} "
                               "when it imported the reward functions")
        error, self.facts = pickle.loads(reply)
        if error:
            self.fork_server.wait()
            raise ValueError(error)


def _serve():
    """The fork server: makes the handler, then forks a worker for each socket that it gets."""
    control = socket.socket(fileno=int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:], cpus, memory, make_handler, args = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that asks for input gets end of file
    os.sched_setaffinity(0, cpus)
    try:
        _keep(control)
        handle, facts = make_handler(*args)
    except Exception as e:  # it runs code of users: any type
        error = str(e) if isinstance(e, (ValueError, RuntimeError)) else f"{type(e).__name__}: {e}"
        return control.sendall(pickle.dumps((" ".join(error.split())[:2000], None)))
    # otherwise the garbage collector writes to every page, and each worker gets its own copy
    gc.freeze()
    control.sendall(pickle.dumps((None, facts)))
    forked = []
    while True:
        _, fds, *_ = socket.recv_fds(control, 1, 1)
        if not fds:  # the pool is closed, or the trainer has ended
            return
        try:
            pid = os.fork()
        except OSError as e:
            control.sendall(str(e).encode())
            continue
        if pid == 0:
            control.close()
            _work(fds[0], handle, memory)
        os.close(fds[0])
        control.sendall(b"%d" % pid)
        forked = [pid for pid in [*forked, pid] if not os.waitpid(pid, os.WNOHANG)[0]]


def _keep(line):
    """Fork, and return in the child only.

    When the child has ended or the other end of the socket `line` is closed, the parent kills all
    that the child has started, daemons too, and ends as the child did."""
    prctl, hung_up, status = ctypes.CDLL(None).prctl, select.poll(), None
    hung_up.register(line, 0)
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    prctl(1, signal.SIGCONT)  # PR_SET_PDEATHSIG, should a reward function have stopped this process
    pid = os.fork()
    if pid == 0:
        prctl(1, signal.SIGKILL)  # end with the parent
        return
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if status is not None or hung_up.poll(100):
                for child in Path("/proc/thread-self/children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
                time.sleep(0.01)
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == pid else status
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def data_bytes():
    """Bytes of this process that count for RLIMIT_DATA: also those that it has not touched yet."""
    return psutil.Process().memory_info().data


def _work(fd, handle, memory):
    """A worker: run tasks from the socket until the pool closes it. Never returns."""
    try:
        os.setpgid(0, 0)
        conn = Connection(fd)
        try:
            _keep(fd)
            resource.setrlimit(resource.RLIMIT_DATA, [data_bytes() + memory] * 2)
        except (OSError, ValueError) as e:  # a limit of the user
            conn.recv()
            return conn.send(f"its process did not start: {e}")
        worker = os.getpid()
        while True:
            result = handle(conn.recv())
            if os.getpid() != worker:  # the function has forked, and has returned twice
                os._exit(1)
            conn.send(result)
    except (EOFError, OSError):
        os._exit(0)  # the pool has closed its end
    finally:
        os._exit(1)  # nothing may reach the fork server's loop, of which this process is a copy
