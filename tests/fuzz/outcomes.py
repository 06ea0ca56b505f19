"""Outcomes that bad input may have: a value or an `InputError` of one line, within a time limit."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from jaxddp.errors import InputError

SECONDS = 60  # for one case; measured: 0.5 at most, and 10 once, in a garbage collection beside six busy processes
LITTLE = 2**26  # bytes of memory that the fuzzed code sees, so that no case computes for long


class Late(BaseException):
    """A case has taken too long; no `except Exception` takes it for an error of the input."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Late` in this thread after `seconds`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Late(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_outcome(call: Callable[[], Any], about: Any) -> bool:
    """Call; fail the test unless the call returns, asks for help, or raises an `InputError`.

    Args:
        about: the input, for the message.

    Returns:
        Whether the input was taken.
    """
    try:
        with time_limit(SECONDS):
            call()
    except InputError as error:
        assert str(error).isprintable() and str(error), about
        return False
    except SystemExit as stop:
        assert stop.code == 0, about
        return False
    except (Exception, Late) as error:
        pytest.fail(f"{about!r}: {type(error).__name__}: {error}")
    return True
