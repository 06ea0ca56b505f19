"""A watchdog that ends a run without progress: a step that hangs, or an input that never arrives."""

import contextlib
import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from jaxddp.errors import tell
from jaxddp.signals import ending

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
_TICK = 1.0  # seconds between two checks


def print_with_threads(error: str) -> None:
    """Print an error in one line, then the stack of each Python thread of this process."""
    tell(f"error: {error}; what each thread is doing:")
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


class StallWatch:
    """Context manager with a thread that ends the process if an activity takes too long.

    It prints one line and the stack of each Python thread; saved checkpoints stay. Time in which the process
    is suspended, as after Ctrl-Z, does not count.

    Args:
        limit: seconds; 0: no limit.
        advice: end of the line, such as how to continue.
        tell: called with the line before the process ends; tells the other processes of a run.
        remind: called every second, in the thread, with the activity and its seconds.

    >>> with StallWatch(limit=60) as watch:
    ...     watch.doing("step 1")
    """

    def __init__(
        self,
        limit: float,
        advice: str = "",
        tell: Callable[[str], None] | None = None,
        remind: Callable[[str, float], None] = lambda what, seconds: None,
    ):
        self._limit, self._advice, self._tell, self._remind = limit or math.inf, advice, tell, remind
        self._what, self._waited = "", 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def doing(self, what: str) -> None:
        """Name the activity until the next call, such as "step 12", and restart its timer."""
        self._what, self._waited = what, 0.0

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(min(_TICK, self._limit / 2)):
            now = time.monotonic()
            self._waited += min(now - before, 2 * _TICK) if self._what else 0.0
            before = now
            if self._what:
                with contextlib.suppress(OSError, ValueError):  # nothing reads the output; the main thread will notice
                    self._remind(self._what, self._waited)
            if self._waited > self._limit:
                self._end()

    def _end(self) -> None:
        error = f"{self._what} has not ended after {self._limit:g} s (--stall-timeout){self._advice}"
        with ending(EXIT_CODE):
            print_with_threads(error)
            if self._tell is not None:
                self._tell(error)
