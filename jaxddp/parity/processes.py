"""Child processes that answer jobs: each with a time limit, all of them ended whatever happens.

What a port brings runs here and never in the process that judges it, so a port that raises, hangs
or dies costs its own part of the report and nothing else.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxddp.errors import TrainingError
from jaxddp.parity.port import errors_located

Tell = Callable[[str], None]  # keeps the parent informed of where a child is
STARTING = 120.0  # seconds for importing a framework, before any code of a port runs; measured: 3, and 12 when busy


class Child:
    """A process, and what was last heard of it.

    Args:
        name: as it is called in messages ("torch rank 1").
        target: called in the process with `args` and a connection, on which it answers each job by
            any number of ("at", where) and one ("done", answer) or ("failed", (message, traceback)).
        preload: what takes long to import, and is imported once for all children that are given the same.
    """

    def __init__(self, name: str, target: Callable[..., None], args: tuple[Any, ...], preload: Sequence[str] = ()):
        context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            context.set_forkserver_preload(list(preload))
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        # Not a daemon: a port's loader may have workers of its own.
        self._process = context.Process(target=_quietly, args=(target, *args, theirs))
        self._process.start()
        theirs.close()  # so that a dead child reads as the end of the connection
        self.name = name
        self.where = "starting"

    def give(self, job: Any) -> None:
        """Send a job, or None to end; a child that is dead already is noticed by `answers`."""
        self.where = "starting"
        with contextlib.suppress(ConnectionError):
            self.connection.send(job)

    def died(self) -> str:
        """What became of it, for a message."""
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def end(self, patience: float = 0.0) -> None:
        """Wait so many seconds for its end, and then make an end, also of what it has started."""
        multiprocessing.connection.wait([self._process.sentinel], timeout=patience)
        assert self._process.pid is not None, "it was started"
        self._process.kill()  # it may have no group of its own yet
        # Before anybody joins it, and its number is free for others.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()


class ChildError(TrainingError):
    """A child failed, died or hung.

    Attributes:
        child: its name.
        where: what it was doing.
        what: what happened, in a line.
        trace: where in the code; "" if it did not raise.
    """

    def __init__(self, child: str, where: str, what: str, trace: str = ""):
        super().__init__(f"{child}: {where}: {what}")
        self.child, self.where, self.what, self.trace = child, where, what, trace


def answers(children: Sequence[Child], timeout: float) -> list[Any]:
    """One answer of each.

    Args:
        timeout: seconds without a word from any of them after which they count as hanging.

    Raises:
        ChildError: one failed, died or hung. The others may wait for it: end them.
    """
    waiting = {child.connection: child for child in children}
    found: dict[str, Any] = {}
    failed: dict[str, ChildError] = {}
    deadline = time.monotonic() + timeout
    while waiting:
        for ready in multiprocessing.connection.wait(list(waiting), timeout=0.2):
            child = waiting[ready]  # type: ignore[index]
            try:
                kind, answer = child.connection.recv()
            except (EOFError, ConnectionError):
                raise ChildError(child.name, child.where, child.died()) from None
            if kind == "failed":
                failed[child.name] = ChildError(child.name, child.where, *answer)
            # Once one has failed the others may fail too, or wait for it in vain.
            deadline = min(deadline, time.monotonic() + 2.0) if failed else time.monotonic() + timeout
            if kind == "at":
                child.where = answer
                continue
            found[child.name] = answer
            del waiting[ready]  # type: ignore[arg-type]
        if time.monotonic() > deadline:
            break
    if failed:
        raise failed[min(failed)]
    if waiting:
        names = ", ".join(child.name for child in waiting.values())
        raise ChildError(names, next(iter(waiting.values())).where, f"no answer for {timeout:.0f} s")
    return [found[child.name] for child in children]


@contextlib.contextmanager
def reported(connection: Connection, origin: str) -> Iterator[None]:
    """In a child: whatever is raised becomes the job's answer.

    Args:
        origin: the file of the port that runs; errors in it are told with their line.
    """
    try:
        with errors_located(origin):
            yield
    except Exception as error:
        connection.send(("failed", (str(error), traceback.format_exc())))


def _quietly(target: Callable[..., None], *args: Any) -> None:
    """Run in the child: Ctrl-C is the parent's business, who ends its children; without it they end themselves."""
    os.setsid()  # a group of its own, with all that it starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionError):  # the parent is gone
        target(*args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child"
    parent.join()
    os.killpg(0, signal.SIGKILL)
