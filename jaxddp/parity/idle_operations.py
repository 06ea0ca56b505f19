"""Operations of a program that return one of their operands, and which of them only one side has."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxddp.parity.operations import LARGE, Moments, SourceLine, are_near

# Functions of either framework, as a user calls them, without underscores at their ends.
CLIPS = ("clip", "clamp", "clamp_min", "clamp_max", "relu6", "hard_tanh", "hardtanh", "nan_to_num")
EXTREMES = ("maximum", "minimum", "max", "min", "fmax", "fmin")
CHOICES = (*EXTREMES, "where", "select", "select_n", "cond", "switch")
MASKS = ("masked_fill", "dropout")
OPERATORS = {"mul": "multiplies by", "div": "divides by", "add": "adds", "sub": "subtracts"}
SYNONYMS = {"multiply": "mul", "subtract": "sub"} | dict.fromkeys(("truediv", "true_divide", "divide"), "div")
# Functions that return their operand where it is positive.
RECTIFIERS = ("relu", "leaky_relu", "prelu", "elu", "celu", "selu", "threshold", "abs", "absolute")
# Numbers that functions have without being given them.
NUMBERS = {"relu": (0.0,), "relu6": (0.0, 6.0), "hard_tanh": (-1.0, 1.0)}
NUMBER = "number"  # in place of a function's name, for a number that the program states
LISTED = frozenset((*CLIPS, *CHOICES, *MASKS, *RECTIFIERS))
KNOWN = frozenset((*LISTED, *OPERATORS))


class Called(NamedTuple):
    """All calls of a function at a line with the same numbers.

    Attributes:
        function: name of the function.
        numbers: numbers that the program gives it; `LARGE` for those that represent infinity.
        line: the user's line.
    """

    function: str
    numbers: tuple[float, ...]
    line: SourceLine


class Kept(NamedTuple):
    """Operands that all of these calls have returned.

    Attributes:
        operands: their positions; empty if no operand was always returned.
        results: moments of the calls' results on one micro-batch.
    """

    operands: frozenset[int]
    results: tuple[Moments, ...] = ()


Calls = dict[Called, Kept]


class Watched(NamedTuple):
    """Operations of one side in a run.

    Attributes:
        calls: operations of the loss, or of the whole step.
        members: transformations of the gradients, of an optimizer's chain or of a training loop; operand 0 is what
            they are given.
        numbers: numbers that torch's calls are given; of jax, those at which a change by 1 % changed no loss.
        functions: first lines of the functions in the port's folder that were called.
    """

    calls: Calls
    members: Calls
    numbers: Calls
    functions: frozenset[SourceLine] = frozenset()


def merged(of_all: Iterable[Calls]) -> Calls:
    """Merge what several replicas or micro-batches have seen; the results are those of the first.

    >>> line = SourceLine("port.py", 1)
    >>> clip = Called("clip", (-3.0, 3.0), line)
    >>> merged([{clip: Kept(frozenset({0}))}, {clip: Kept(frozenset())}])[clip].operands
    frozenset()
    """
    calls: Calls = {}
    for of_part in of_all:
        for called, kept in of_part.items():
            before = calls.get(called, kept)
            calls[called] = Kept(before.operands & kept.operands, before.results or kept.results)
    return calls


def merged_sides(of_all: Iterable[Watched]) -> Watched:
    """Merge what several ranks or steps have seen of one side."""
    every = [*of_all]
    calls, members, numbers = (merged(x) for x in zip(*(watched[:3] for watched in every), strict=True))
    return Watched(calls, members, numbers, frozenset().union(*(watched.functions for watched in every)))


def numbers_of(function: str, given: Iterable[float]) -> tuple[float, ...]:
    """Return the numbers of a call as a `Called` has them: ascending, with `LARGE` for all infinite ones.

    >>> numbers_of("where", [-1e9]) == numbers_of("where", [-math.inf])
    True
    >>> numbers_of("clip", [6, 0]), numbers_of("relu6", [])
    ((0.0, 6.0), (0.0, 6.0))
    """
    every = (*given, *NUMBERS.get(function, ()))
    return tuple(sorted(LARGE if math.isnan(x) or abs(x) >= LARGE else float(f"{x:.9g}") for x in every))


@dataclass(frozen=True)
class Idle:
    """Calls that changed nothing.

    Attributes:
        called: the calls.
        why: why they had no effect, as the end of a sentence ("never clips").
    """

    called: Called
    why: str


def without_twin(program: Calls, other: Calls) -> list[Idle]:
    """Return a program's calls that changed nothing, without those that the other program has at the same place.

    >>> x = Moments(2, 2, 3.0, 3.0, 5.0, 1.0, 2.0)
    >>> line, kept = SourceLine("port.py", 21), Kept(frozenset({0}), (x,))
    >>> clip, wider = Called("clip", (-3.0, 3.0), line), Called("clamp", (-5.0, 5.0), line)
    >>> [idle.why for idle in without_twin({clip: kept}, {wider: kept})]
    ['never clips']
    >>> without_twin({clip: kept}, {clip._replace(function="clamp"): kept})
    []
    """
    idle = [pair for pair in program.items() if is_idle(*pair)]
    twins = [(called, kept) for called, kept in other.items() if kept.operands]
    alone = (pair for pair in idle if not any(_are_twins(pair, twin) for twin in twins))
    return [Idle(called, _why(called, kept)) for called, kept in alone]


def is_idle(called: Called, kept: Kept) -> bool:
    """Return whether calls changed nothing, and are worth a line."""
    return bool(kept.operands) and is_listed(called)


def is_listed(called: Called) -> bool:
    """Return whether calls are worth a line if they change nothing: not the product with a mask."""
    by_number = called.function in OPERATORS and called.numbers in ((0.0,), (1.0,))
    return by_number or called.function in LISTED


def _are_twins(one: tuple[Called, Kept], other: tuple[Called, Kept]) -> bool:
    """Return whether two calls do the same at the same place: their results are equal, and so are their numbers."""
    (a, of_a), (b, of_b) = one, other
    if (a.function == "dropout") != (b.function == "dropout"):
        return False
    if a.numbers != b.numbers and (_is_clip(a) or _is_clip(b) or (a.numbers and b.numbers)):
        return False
    return bool(of_a.results) and all(any(are_near(x, y) for y in of_b.results) for x in of_a.results)


def _is_clip(called: Called) -> bool:
    return called.function in CLIPS or (called.function in EXTREMES and bool(called.numbers))


def _why(called: Called, kept: Kept) -> str:
    """Say why a call that has always returned an operand had no effect."""
    name, operand = called.function, min(kept.operands)
    if name == "nan_to_num":
        return "replaces nothing"
    if name in RECTIFIERS:
        return "never changes what it is given"
    if name in CLIPS:
        return "always returns its bound" if operand else "never clips"
    if name in EXTREMES:
        return f"always returns its {'second' if operand else 'first'} value"
    if name in OPERATORS:
        is_zero = bool(kept.results) and not any(result.absolute for result in kept.results)
        return "is always 0" if is_zero else f"{OPERATORS[name]} {0 if name in ('add', 'sub') else 1}"
    return {"masked_fill": "fills nothing", "dropout": "drops nothing"}.get(name, "always takes the same branch")
