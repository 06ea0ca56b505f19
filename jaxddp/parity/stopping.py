"""End a check early, at a signal or a limit of time."""

import _thread
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ONE = 0.2  # seconds within which signals count as one: `timeout` sends two


class Stopped(KeyboardInterrupt):
    """Raised where a check is asked to end early, at a place from which it can report what it has found."""


class Stop:
    """A request to end early, made by a signal or a limit of time; several checks may share one.

    Args:
        limit: seconds; None: no limit.
        clock: seconds.
        began: time by `clock` from which the limit counts; None: now.

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

    def __init__(
        self, limit: float | None = None, clock: Callable[[], float] = time.monotonic, began: float | None = None
    ):
        self.why = ""
        self._limit, self._clock = math.inf if limit is None else limit, clock
        self._until, self._share_until = (clock() if began is None else began) + self._limit, math.inf
        self._may_raise = self._has_ctrl_c = self._timed_out = False
        self._received = -math.inf

    def poll(self) -> None:
        """Raise `Stopped` if the check is to end, or if the share of the time that is left is spent; see `share`."""
        if not self.left:
            self.why = self.why or f"the limit of {self._limit:g} s"
        if self.why or self.spent:
            raise Stopped

    @property
    def spent(self) -> bool:
        """Return whether the share of the time that is left is spent, and not all of it."""
        return not self.why and self._clock() > self._share_until

    @property
    def left(self) -> float:
        """Return the seconds that are left until the limit, 0 after it."""
        return max(0.0, self._until - self._clock())

    @contextmanager
    def share(self, parts: int) -> Iterator[None]:
        """Within the `with` statement, `poll` raises once one of so many parts of the time that is left is spent.

        >>> stop = Stop(limit=60.0, clock=iter([0.0, 20.0, 39.0, 39.0, 41.0, 41.0]).__next__)
        >>> with stop.share(2):
        ...     stop.poll()
        ...     try:
        ...         stop.poll()
        ...     except Stopped:
        ...         print("spent")
        spent
        """
        now = self._clock()
        self._share_until = now + max(0.0, self._until - now) / parts
        try:
            yield
        finally:
            self._share_until = math.inf

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within the `with` statement a signal raises `Stopped` at once; elsewhere `poll` does."""
        self.poll()
        before, self._may_raise = self._may_raise, True
        try:
            yield
        finally:
            self._may_raise = before

    @contextmanager
    def listening(self, *signals: signal.Signals) -> Iterator[None]:
        """In the main thread, treat these signals as requests unless they have a handler; a second one interrupts."""
        handlers, default = {}, (signal.SIG_DFL, signal.default_int_handler)
        if threading.current_thread() is threading.main_thread():
            handlers = {n: signal.getsignal(n) for n in signals if signal.getsignal(n) in default}
        for number in handlers:
            signal.signal(number, self._receive)
        timer = threading.Timer(self.left, self._time_out)
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
