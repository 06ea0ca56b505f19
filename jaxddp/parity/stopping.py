"""End a check early, at a signal or a limit of time."""

import _thread
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ONE = 0.2  # seconds within which signals count as one: `timeout` sends two


class Stopped(KeyboardInterrupt):
    """Raised where a check is asked to end early, at a place from which it can report what it has found."""


class Stop:
    """A request to end early, made by a signal or a limit of time; several checks may share one.

    Args:
        limit: seconds from now; None: no limit.

    Attributes:
        why: reason of the request; "": none was made.

    Example:
        >>> stop = Stop(limit=0.0)
        >>> time.sleep(0.01)
        >>> try:
        ...     stop.poll()
        ... except Stopped:
        ...     print(stop.why)
        the limit of 0 s
    """

    def __init__(self, limit: float | None = None):
        self.why = ""
        self._limit = math.inf if limit is None else limit
        self._until = time.monotonic() + self._limit
        self._may_raise = self._has_ctrl_c = self._timed_out = False
        self._received = -math.inf

    def poll(self) -> None:
        """Raise `Stopped` if the check is to end."""
        if time.monotonic() > self._until:
            self.why = self.why or f"the limit of {self._limit:g} s"
        if self.why:
            raise Stopped

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within the `with` statement a signal raises `Stopped` at once; elsewhere `poll` does."""
        self.poll()
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    @contextmanager
    def listening(self, *signals: signal.Signals) -> Iterator[None]:
        """In the main thread, treat these signals as requests unless they have a handler; a second one interrupts."""
        handlers, default = {}, (signal.SIG_DFL, signal.default_int_handler)
        if threading.current_thread() is threading.main_thread():
            handlers = {n: signal.getsignal(n) for n in signals if signal.getsignal(n) in default}
        for number in handlers:
            signal.signal(number, self._receive)
        timer = threading.Timer(max(0.0, self._until - time.monotonic()), self._time_out)
        timer.daemon = True
        if self._limit < threading.TIMEOUT_MAX:
            timer.start()
        self._has_ctrl_c = signal.SIGINT in handlers
        try:
            yield
        finally:
            self._has_ctrl_c = False
            timer.cancel()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._timed_out:  # it is not a signal of the user's
            self._timed_out = False
        elif not self.why:
            self.why = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._received = time.monotonic()
        elif time.monotonic() > self._received + ONE:
            raise KeyboardInterrupt
        if self._may_raise:
            self.poll()

    def _time_out(self) -> None:
        """Interrupt a computation of the main thread; a wait for other processes polls instead."""
        if self._has_ctrl_c:
            self._timed_out = True
            _thread.interrupt_main()
