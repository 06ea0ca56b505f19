"""Operations of a program: their results, what made their inputs, and their lines in the user's files."""

import linecache
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np

import jaxddp
from jaxddp import scripts

_PACKAGE = Path(jaxddp.__file__).parent
# jaxddp's models count as a user's code; its other modules, and torch_ref's, do not.
_MODELS = (f"{_PACKAGE / 'models'}/", f"{_PACKAGE.parent / 'torch_ref' / 'models'}")


class SourceLine(NamedTuple):
    """A line of a file.

    >>> print(SourceLine("/home/me/model.py", 21))
    model.py:21
    """

    path: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.number}"

    @property
    def text(self) -> str:
        """Return the line without its indentation; "" if the file is gone."""
        return linecache.getline(self.path, self.number).strip()


def line_of_user(frames: Iterable[tuple[str, int]]) -> SourceLine | None:
    """Return the innermost (path, line number) that is in a user's file: in no library, and not in this package."""
    return next((SourceLine(path, number) for path, number in frames if is_of_user(path)), None)


def lines_of_user(frames: Iterable[tuple[str, int]]) -> tuple[SourceLine, ...]:
    """Return all that are in a user's file, the innermost first; see `line_of_user`."""
    return tuple(SourceLine(path, number) for path, number in frames if is_of_user(path))


def calling_lines() -> Iterator[tuple[str, int]]:
    """Yield path and line number of each function on the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def variables_of_user() -> Mapping[str, object]:
    """Return the local variables of the innermost function of a user's file on the call stack."""
    frame = _frame_of_user()
    return {} if frame is None or frame.f_code.co_name == "<module>" else frame.f_locals


def place_of_user() -> int:
    """Return which instruction of the innermost function of a user's file is running; -1: none is.

    A line may make several calls of a function.
    """
    frame = _frame_of_user()
    return -1 if frame is None else frame.f_lasti


def _frame_of_user() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def library_function() -> str:
    """Return the name of the library's function that the innermost user's line calls; "" if it is a private one."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        name = frame.f_code.co_name
        frame = frame.f_back
    return "" if name.startswith(("_", "<", "wrap")) else name  # wrapped, wrapper: a decorator's


def is_of_user(path: str) -> bool:
    """Return whether a file is a user's, or one of this project's models."""
    return path.startswith(_MODELS) or scripts.is_of_user(path)


def is_of_package(path: str) -> bool:
    """Return whether a file is this project's."""
    return path.startswith((f"{_PACKAGE}/", f"{_PACKAGE.parent / 'torch_ref'}/"))


class Lines(NamedTuple):
    """Lines of both sides that do the same, or should.

    Attributes:
        jax, torch: the lines; None: unknown.
    """

    jax: SourceLine | None = None
    torch: SourceLine | None = None


@dataclass(frozen=True)
class SegmentText:
    """Operations of both sides that get equal inputs and give other outputs, as text.

    Attributes:
        jax, torch: the operations, with the numbers that they are given; (): this side has none here.
        lines: the last line of each side.
        element: index of the element of the output that differs most, in torch's layout.
        values: its value, in jax and in torch.
        places: number of places that have the same operations at the same lines.
        code: what the port and the reference compute there, as code; "": too long.
    """

    jax: tuple[str, ...]
    torch: tuple[str, ...]
    lines: Lines
    element: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    places: int = 1
    code: tuple[str, str] = ("", "")


class OptimizerLines(NamedTuple):
    """Lines of one side at which an optimizer and its schedule are made.

    Attributes:
        optimizer, schedule: the lines; None: unknown, or there is no schedule.
        rates: what lines of the user's files compute for the rate of a step: numbers, each with its line.
    """

    optimizer: SourceLine | None = None
    schedule: SourceLine | None = None
    rates: tuple[tuple[SourceLine, "Moments"], ...] = ()


class Moments(NamedTuple):
    """Statistics of an array that do not depend on the order of its values, which differs between the frameworks.

    Attributes:
        size: number of values.
        finite: number of finite values below `LARGE`; the other moments are theirs.
        total, absolute, squares: sums of x, |x| and x^2.
        least, largest: the smallest and the largest value; 0 for an empty array.
    """

    size: int
    finite: int
    total: float
    absolute: float
    squares: float
    least: float
    largest: float


LARGE = 1e8  # from which a number counts as infinity, as in masks of -1e9 or of the lowest number of a dtype
NEAR = 1e-9  # relative; measured: equal results of correct ports are within 4e-15 in float64


def moments(x: np.ndarray) -> Moments:
    """Compute the moments of an array of numbers or bools.

    >>> moments(np.array([[1.0, -2.0], [np.inf, 3.0]]))
    Moments(size=4, finite=3, total=2.0, absolute=6.0, squares=14.0, least=-2.0, largest=3.0)
    """
    with np.errstate(invalid="ignore"):  # memory that is not yet written, as of torch.empty, may hold signalling NaNs
        values = np.asarray(x, dtype=np.float64).ravel()
        finite, ends = values, _ends(values)
        if not (ends[0] > -LARGE and ends[1] < LARGE):  # or there is a NaN
            finite = values[np.abs(values) < LARGE]
            ends = _ends(finite)
    sums = float(finite.sum()), float(np.abs(finite).sum()), float(np.square(finite).sum())
    return Moments(values.size, finite.size, *sums, *ends)


def _ends(values: np.ndarray) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def are_near(one: Moments, other: Moments) -> bool:
    """Return whether two arrays may hold the same values."""
    if one[:2] != other[:2]:
        return False
    scale = max(one.absolute, other.absolute)
    peak = max(abs(one.least), abs(one.largest), abs(other.least), abs(other.largest))
    return (
        abs(one.total - other.total) <= NEAR * scale
        and abs(one.absolute - other.absolute) <= NEAR * scale
        and abs(one.squares - other.squares) <= NEAR * max(one.squares, other.squares)
        and abs(one.least - other.least) <= NEAR * peak
        and abs(one.largest - other.largest) <= NEAR * peak
    )


@dataclass(frozen=True)
class Operation:
    """An operation of a program: a call of a torch function, or an equation of a jaxpr.

    Attributes:
        name: name of the function or of the primitive.
        inputs: indices of the operations that made its inputs.
        numbers: numbers that the program gives it.
        line: the user's line; None: unknown.
        results: moments of its results.
        callers: the user's lines that call the function of `line`, the innermost first.
    """

    name: str
    inputs: tuple[int, ...]
    numbers: tuple[float, ...]
    line: SourceLine | None
    results: tuple[Moments, ...]
    callers: tuple[SourceLine, ...] = ()


Operations = tuple[Operation, ...]
"""Operations in the order of their execution; the last one computes the loss."""


class Results:
    """Results of a program, to look others up.

    >>> one, two = (Operation("add", (), (), None, (moments(np.array(x)),)) for x in ([1.0, 2.0], [3.0, 3.0]))
    >>> known = Results((one,))
    >>> known.has(one), known.has(two)
    (True, False)
    """

    def __init__(self, program: Operations):
        self._of_size: dict[tuple[int, int], list[Moments]] = {}
        for operation in program:
            for result in operation.results:
                self._of_size.setdefault(result[:2], []).append(result)

    def has(self, operation: Operation) -> bool:
        """Return whether the program computes all of an operation's results somewhere."""
        return all(map(self.has_value, operation.results))

    def has_value(self, value: Moments) -> bool:
        """Return whether the program computes a value somewhere."""
        return any(are_near(value, result) for result in self._of_size.get(value[:2], ()))


def differing(program: Operations, other: Operations) -> list[int]:
    """Return the operations on which the loss depends, and whose results the other program does not compute.

    An operation whose result is equal hides those before it: they make no difference.

    Returns:
        Indices in the order of execution; empty if the losses are equal.
    """
    known = Results(other)
    found: set[int] = set()
    waiting = [len(program) - 1] if program else []
    while waiting:
        index = waiting.pop()
        if index not in found and not known.has(program[index]):
            found.add(index)
            waiting += program[index].inputs
    return sorted(found)


def origins(program: Operations, region: Iterable[int]) -> list[int]:
    """Return the operations of a region that have no input from it: there the programs part."""
    inside = set(region)
    return sorted(index for index in inside if not inside.intersection(program[index].inputs))


def needed_by(program: Operations, ends: Iterable[int] = (-1,)) -> list[int]:
    """Return the indices of some operations, the last by default, and of all on which they depend, in order.

    >>> needed_by(tuple(Operation("add", inputs, (), None, ()) for inputs in ((), (), (0,))))
    [0, 2]
    """
    found = {end % len(program) for end in ends} if program else set()
    for k in range(len(program) - 1, -1, -1):
        found |= {*program[k].inputs} if k in found else set()
    return sorted(found)


def readings(number: float) -> list[float]:
    """Return what Python may have made of a number before an operation got it, or the other way round.

    Returns:
        x, 1 / x, sqrt(x), 1 / sqrt(x), x^2, 1 - x, -x and log(x); x itself where one is not defined.

    >>> readings(4.0)
    [4.0, 0.25, 2.0, 0.5, 16.0, -3.0, -4.0, 1.3862943611198906]
    """
    inverse = 1 / number if number else number
    root, logarithm = (math.sqrt(number), math.log(number)) if number > 0 else (number, number)
    return [number, inverse, root, 1 / root if root else number, number * number, 1 - number, -number, logarithm]
