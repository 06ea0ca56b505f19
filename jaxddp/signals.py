"""Signals that end a run: after a first one the training loop saves a checkpoint, a second one ends it at once."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self

from jaxddp.errors import tell

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # the last one through Slurm and mpirun
SAVED = 75  # EX_TEMPFAIL of sysexits.h: the same command continues with --resume
PATIENCE = 1.0  # seconds for the last words of a process


@contextlib.contextmanager
def ending(code: int) -> Iterator[None]:
    """End this process at once after the context, in which it may say why, or after `PATIENCE` seconds.

    It ends even if the last words fail (a closed terminal) or block (a full pipe).
    """
    try:
        timer = threading.Timer(PATIENCE, os._exit, (code,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # from Python 3.12 on, no thread starts while the interpreter ends
            timer.start()
        yield
    finally:
        os._exit(code)


@contextlib.contextmanager
def needing_no_reader() -> Iterator[None]:
    """Let prints succeed after the reader of stdout or stderr is gone.

    Ctrl-C ends `tee` together with the run that it reads from, and a terminal is closed when it sends SIGHUP: the
    next line would raise an error, and end the run without its checkpoint.
    """
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    for name, stream in before.items():
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it has no file, as in a test
                setattr(sys, name, _unread(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)


def _unread(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    with contextlib.suppress(OSError):  # no one reads it
        stream.flush()  # what was printed before comes first
    file = io.BufferedWriter(_Unread(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)


class _Unread(io.FileIO):
    """File whose writes never fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class Interruption:
    """Context manager that waits for a signal in a thread, once `listen` is called.

    A thread, because Python calls a signal handler between two lines of the main thread, which may wait for a step
    that takes minutes or has hung. In a thread other than the main one, and for signals that the process ignores (as
    under nohup), nothing changes.

    Exit codes: with a checkpoint 130 after SIGINT and 75 after the others, without one 128 + the signal's number.

    Args:
        folder: run folder; None: there is nothing to save, so the first signal ends the process at once.
        quiet: print nothing, as in all processes of a run but one.
    """

    def __init__(self, folder: str | None, quiet: bool = False):
        self._folder = folder
        self._quiet = quiet
        self._handlers: dict[int, Any] = {}
        self._stopped_by: int | None = None
        self.signal: signal.Signals | None = None
        """Signal received, after which the loop is to save and `stop`; None: none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._handlers:
            return
        to_come = self._stopped_by if self.signal is None else None
        for number, handler in self._handlers.items():
            signal.signal(number, _after_one(handler) if number == to_come else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._wakeup)

    def listen(self) -> None:
        """Begin to wait for signals; a second call has no effect."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        received, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        handlers = {number: signal.getsignal(number) for number in NUMBERS}
        self._handlers = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        for number in self._handlers:  # the system writes the number of a signal to the pipe, if it has a handler
            signal.signal(number, _ignore)
        threading.Thread(target=self._watch, args=(received,), name="signals", daemon=True).start()

    def stop(self, number: int, step: int) -> NoReturn:
        """End the run after its checkpoint is saved, with a line that says how to continue.

        A launcher signals one process after the other; a process that stops before its own signal comes ignores it.

        Args:
            number: the signal, which this process or another one has received.
            step: step of the checkpoint.
        """
        name = signal.Signals(number).name
        self._stopped_by = number
        self._tell(f"{name}: saved the checkpoint of step {step}; continue with --resume {self._folder}")
        raise SystemExit(128 + number if number == signal.SIGINT else SAVED)

    def _watch(self, received: int) -> None:
        with open(received, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in self._handlers:
                    self._come(signal.Signals(number[0]))

    def _come(self, number: signal.Signals) -> None:
        if self._folder is None:
            self._end(number, "nothing is saved without --output")
        if self.signal is not None:
            self._end(number, f"ended at once; continue with --resume {self._folder}")
        self.signal = number
        line = f"{number.name}: saving a checkpoint after this step; a second signal ends the run at once"
        # In a thread, since a full pipe would hold this one, which waits for the second signal.
        threading.Thread(target=self._tell, args=(line,), daemon=True).start()

    def _end(self, number: signal.Signals, why: str) -> None:
        with ending(128 + number):
            self._tell(f"{number.name}: {why}")

    def _tell(self, line: str) -> None:
        if not self._quiet:
            tell(line)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replace the default handler; the thread of `Interruption` reads the signal from a pipe and acts on it."""


def _after_one(handler: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that ignores a signal once, and leaves the next to `handler`."""

    def ignore(number: int, frame: FrameType | None) -> None:
        signal.signal(number, handler)

    return ignore
