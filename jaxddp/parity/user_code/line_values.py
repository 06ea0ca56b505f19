"""Values that lines of the user's functions compute, and the first that only one of two functions computes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np

from jaxddp.parity.operations import Moments, SourceLine, are_near, is_of_user, moments

MOST_STEPS = 64  # of a run, before one whose rate is computed line by line
MOST_LINES = 5000  # that are followed
MOST_VALUES = 64  # of a container
MOST_ELEMENTS = 2**16  # of an array; of a larger one, some are noted
NUMBERS = "biufc"  # kinds of dtypes

Noted = tuple[SourceLine, Moments]


class LineValues:
    """Context manager that notes what lines of the user's files compute: new values of variables, and what is returned.

    Attributes:
        noted: for each value the line that computes it, and its moments, in the order of their computation.
    """

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self._lines = 0

    @property
    def numbers(self) -> tuple[Noted, ...]:
        """The values that are single numbers."""
        return tuple((line, x) for line, x in self.noted if x.size == 1)

    def __enter__(self) -> "LineValues":
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        if not is_of_user(frame.f_code.co_filename):
            return None
        path, at, held = frame.f_code.co_filename, frame.f_lineno, _held(frame.f_locals)

        def followed(frame: FrameType, event: str, given: Any) -> Any:
            nonlocal at, held
            self._lines += 1
            if self._lines > MOST_LINES:
                return None
            now = _held(frame.f_locals)
            fresh = [x for name, x in now.items() if held.get(name) != x]
            fresh += [tuple(_moments_in(given))] if event == "return" else []
            self.noted += [(SourceLine(path, at), x) for values in fresh for x in values]
            at, held = frame.f_lineno, now
            return followed

        return followed


def first_apart(one: Sequence[Noted], other: Sequence[Noted]) -> SourceLine | None:
    """Return the line of the first value that one function computes and the other does not; None: there is none.

    Lines that both run (one function calls the other, or both a third) make no difference: the call's line does.

    >>> with LineValues() as values:
    ...     pass
    >>> first_apart(values.noted, [])
    """
    shared = {line for line, _ in other}
    own = ((line, x) for line, x in one if line not in shared)
    return next((line for line, x in own if not any(are_near(x, y) for _, y in other)), None)


def _held(variables: Mapping[str, Any]) -> dict[str, tuple[Moments, ...]]:
    return {name: tuple(_moments_in(x)) for name, x in variables.items()}


def _moments_in(x: Any) -> Iterator[Moments]:
    """Yield the moments of an array or number, and of those in containers."""
    waiting, count = [x], 0
    while waiting and count < MOST_VALUES:
        x, count = waiting.pop(0), count + 1
        if isinstance(x, Mapping):
            waiting += x.values()
        elif isinstance(x, tuple | list):
            waiting += x
        elif (isinstance(x, int | float) and not isinstance(x, bool)) or hasattr(x, "shape"):
            array = _array(x)
            if array is not None:
                yield moments(array)


def _array(x: Any) -> np.ndarray | None:
    """Return an array of numbers; None: it has none, as a value that jax traces."""
    try:
        array = np.asarray(x)
    except Exception:  # each library has errors of its own
        return None
    if array.dtype.kind not in NUMBERS:
        return None
    array = array if array.size <= MOST_ELEMENTS else array.flat[:: -(-array.size // MOST_ELEMENTS)]
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array
