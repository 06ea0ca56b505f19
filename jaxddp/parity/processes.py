"""Child processes that run jobs, each with a time limit; all of them are ended whatever happens.

A port's code runs in children only, never in the process that judges it. A port that raises, hangs or dies
therefore costs its part of the report and nothing else.
"""

import contextlib
import ctypes
import errno
import gc
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxddp.errors import TrainingError, on_one_line
from jaxddp.parity.family import keep_family, kill_family, kill_group
from jaxddp.parity.port import FileError, errors_located
from jaxddp.scripts import refuse_itself

Tell = Callable[[str], None]  # reports to the parent what a child is doing
Frames = tuple[str, ...]
Watch = Callable[[Sequence["Child"]], None]  # is called while children work; may raise
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
MUCH = 2**20  # KiB of memory from which a process gives back what a job has used
ENDING = (signal.SIGINT, signal.SIGTERM)  # reach all processes that a terminal or `timeout` ends
UNGUARDED = 64  # exit code of a child that calls the check while it imports the script that calls the check
BLAS_THREADS = "OPENBLAS_NUM_THREADS"  # NumPy reads it when it is imported
STARTING = 120.0  # seconds for importing a framework, before any code of a port runs; measured: 3, and 12 when busy


def import_quickly(*modules: str) -> None:
    """Import modules and keep the garbage collector from what they make: little of it is garbage, and looking is slow.

    Measured with both frameworks: 2.3 instead of 2.8 s.
    """
    gc.disable()
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def start_imports() -> None:
    """Start the process from which children are forked, unless it runs; it imports once what they all need."""
    multiprocessing.set_forkserver_preload(["jaxddp.parity.preload"])
    # Blocked in its children, too, until `_quietly` has left the process group.
    with _signals_blocked(), _one_thread():
        forkserver.ensure_running()


def end_if_importing() -> None:
    """End this process if it is a child that runs a script's top level, where the script starts children itself."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)
    refuse_itself()


class Child:
    """A child process.

    Args:
        name: name in messages ("torch rank 1").
        target: called in the process with `args` and a connection, on which it answers each job by any number of
            ("at", (where, time)), see `telling`, and one ("done", answer) or ("failed", what `ChildError` has of it).
        args: first arguments of `target`.

    Attributes:
        name: name in messages.
        where: last reported activity.
        heard: time of the last message, or of the last job if there is none yet, by `time.monotonic`.
        reply: the answer to the last job, as sent; None: it is at work.
        connection: the parent's end of the pipe.
    """

    def __init__(self, name: str, target: Callable[..., None], args: tuple[Any, ...]):
        start_imports()
        context: Any = multiprocessing.get_context("forkserver")
        self.connection: Connection
        self.connection, far_end = context.Pipe()
        # Not a daemon: a port's loader may start workers.
        self._process = context.Process(target=_quietly, args=(dict(os.environ), target, *args, far_end))
        self._process.start()
        far_end.close()  # so that the connection reads as closed once the child is dead
        self.name = name
        self.where, self.heard = "starting", time.monotonic()
        self.reply: tuple[str, Any] | None = None

    def give(self, job: Any) -> None:
        """Send a job, or None to end; a dead child is reported by `answers`."""
        self.where, self.heard, self.reply = "starting", time.monotonic(), None
        with contextlib.suppress(ConnectionError):
            self.connection.send(job)

    def hear(self) -> None:
        """Take the messages that have come, up to the reply.

        Raises:
            EOFError, ConnectionError: the child is dead.
        """
        while self.reply is None and self.connection.poll():
            kind, answer = self.connection.recv()
            if kind == "at":
                self.where, self.heard = answer
            else:
                self.reply, self.heard = (kind, answer), time.monotonic()

    @property
    def failure(self) -> "ChildError | None":
        """Error that the child has replied with."""
        kind, answer = self.reply or ("done", ())
        return ChildError(self.name, self.where, *answer) if kind == "failed" else None

    def died(self) -> str:
        """Return how the process ended, as words for a message."""
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is not None and code < 0:
            memory = ", as when memory is used up" if -code == signal.SIGKILL else ""
            return f"died of {signal.Signals(-code).name}{memory}"
        if code == UNGUARDED:
            return 'child processes import the script: call the check under `if __name__ == "__main__":`'
        return f"ended with exit code {code}"

    def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the process to end, then kill it and every process that it has started."""
        multiprocessing.connection.wait([self._process.sentinel], timeout=patience)
        assert self._process.pid is not None, "started in __init__"
        # All before the join, after which its number may be reused; a dead child has a group, but no family any more.
        (kill_family if self._process.is_alive() else kill_group)(self._process.pid)
        self._process.kill()  # it may not have made its group yet
        self._process.join()
        self.connection.close()


def end_all(children: Sequence[Child], patience: float = 0.0) -> None:
    """Ask children to end, wait `patience` seconds in all, then kill them; without patience at once."""
    until = time.monotonic() + patience
    for child in children if patience else ():
        child.give(None)
    for child in children:
        child.end(max(0.0, until - time.monotonic()))


class ChildError(TrainingError):
    """Failure of a child: it raised, died or hung.

    Attributes:
        child: name of the child.
        where: activity of the child.
        what: the error, in one line.
        trace: traceback; "" if the child did not raise.
        frames: lines of the user's code, see `InputError`.
        of_file: whether the port's file cannot be loaded.
    """

    def __init__(self, child: str, where: str, what: str, trace: str = "", frames: Frames = (), of_file: bool = False):
        super().__init__(f"{child}: {where}: {what}")
        self.child, self.where, self.what, self.trace = child, where, what, trace
        self.frames, self.of_file = frames, of_file


def answers(children: Sequence[Child], timeout: float, watch: Watch = lambda children: None) -> list[Any]:
    """Wait for one answer of each child and return the answers in the order of the children.

    Args:
        children: children that were given a job.
        timeout: seconds without a message from any child after which they count as hanging, from the time at which the
            last message was sent: the caller may have waited for other children meanwhile.
        watch: is called with the children every 0.2 s, or more often.

    Raises:
        ChildError: a child raised, died or hung. The others may wait for it, so the caller has to end them.
    """
    deadline = math.inf
    while waiting := [child for child in children if child.reply is None]:
        watch(children)
        ready = multiprocessing.connection.wait([child.connection for child in waiting], timeout=0.2)
        for child in waiting:
            try:
                child.hear()
            except (EOFError, ConnectionError):
                raise ChildError(child.name, child.where, child.died()) from None
        failed = any(child.failure for child in children)
        now, silent_since = time.monotonic(), max(child.heard for child in children)
        # Once one child has failed, the others may fail too or wait for it in vain.
        deadline = min(deadline, now + 2.0) if failed else silent_since + timeout
        if now > deadline and (failed or not ready):  # else more messages may have come meanwhile
            break
    if failures := {child.name: child.failure for child in children if child.failure}:
        watch(children)
        raise failures[min(failures)]
    if waiting:
        names = ", ".join(child.name for child in waiting)
        raise ChildError(names, waiting[0].where, f"no answer for {timeout:.0f} s")
    return [child.reply[1] for child in children if child.reply is not None]


def telling(connection: Connection) -> Tell:
    """In a child: return a function that tells the parent what the child is doing, and since when.

    Args:
        connection: the child's end of the pipe.
    """
    return lambda where: connection.send(("at", (where, time.monotonic())))


@contextlib.contextmanager
def reported(connection: Connection, origin: str) -> Iterator[None]:
    """In a child: send whatever is raised as the job's answer.

    Args:
        connection: the child's end of the pipe.
        origin: file of the port that runs; an error in it is reported with its line number.
    """
    try:
        with errors_located(origin):
            yield
    except BaseException as error:  # a port may raise KeyboardInterrupt; Ctrl-C is left to the parent
        what = on_one_line(str(error)) or type(error).__name__
        frames = getattr(error, "frames", ())
        connection.send(("failed", (what, traceback.format_exc(), frames, isinstance(error, FileError))))
    finally:
        give_back_memory()


def free_at_once() -> None:
    """Let glibc give blocks of a MiB or more back to the system when they are freed; other systems do so themselves.

    Without it the memory of a large model's arrays is kept for later ones, in pieces.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def give_back_memory() -> None:
    """Give what a job or a compiler has freed back to the system, where glibc keeps it; other systems do so themselves.

    Measured with 14 million parameters: 0.9 of 2.1 GiB.
    """
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MUCH:
        return
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let NumPy's products take one thread in a process that starts meanwhile, since the children share the cores.

    Measured with all cores busy: a product of two vectors of 16,000 numbers took 3 ms with two threads, 2 us with one.
    """
    before = dict(os.environ)
    os.environ[BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[BLAS_THREADS]
        os.environ.update(before)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Keep the signals that end this process from one that starts meanwhile, which inherits the mask."""
    multiprocessing.resource_tracker.ensure_running()  # it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _quietly(environment: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """Run `target` in the child, which ends when its parent ends, and leaves Ctrl-C to the parent."""
    os.environ.clear()  # that of the fork server, which is as old as the parent's first child
    os.environ.update(environment)
    os.setsid()  # a new process group, for the child and every process that it starts
    keep_family()
    with contextlib.suppress(OSError):  # where memory is used up, Linux is to kill the port, not its judge
        Path("/proc/self/oom_score_adj").write_text("500")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(*args)
    except (EOFError, ConnectionError):  # the parent is gone
        pass
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        # A port has closed the connection, and with it files that the interpreter would close once more at its end.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _end_with_parent() -> None:
    """Wait until the process that judges the port has ended, then end this one, and all that it has started."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "runs in a child"
    parent.join()
    while _runs(parent.pid):  # a port may have closed the pipe on which `join` waits
        time.sleep(0.1)
    kill_family(os.getpid())


def _runs(process: int) -> bool:
    """Return whether a process has not ended; on Linux a zombie has."""
    try:
        os.kill(process, 0)
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # no /proc
        return True
