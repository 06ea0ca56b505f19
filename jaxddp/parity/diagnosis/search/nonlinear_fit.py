"""Fit values that enter a replay nonlinearly: least squares to the last digit, then round numbers.

An eps, a beta or a norm that clips bends an update, so that its fit needs several starts and slopes at every step; an
optimizer's replay on a sample is fast enough for these. A loss's replay is not, and its numbers enter almost linearly:
see `fit`.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Values = tuple[float, ...]
Misfit = Callable[[Values], np.ndarray]

ITERATIONS = 40
FEW = 6  # iterations that rank a start; from a wrong one, more only bend the other values until it looks right
STEP = 1e-5  # of the numeric derivative
SMALLEST_GAIN = 0.05  # share of the residual; the fit stops after an iteration that gains less
LAST_DIGITS = 1e-15  # relative size of a step that changes nothing
TINY = 1e-9
NEAR = 1e-2  # of a value's unit: distance from 0 at which 0 is tried; measured: 6e-3 of a decay in float32
SMALLEST = sys.float_info.min


@dataclass(frozen=True)
class Unknown:
    """A number to be fitted.

    Attributes:
        starts: initial values. A linear search also starts at 0 where 0 is valid: Adam's update is discontinuous
            there, so a search from elsewhere only gets close.
        along: coordinate of the search: "linear"; "log", for values above 0 that span decades; or
            "complement", for betas: the logarithm of 1 - x.
        unit: a typical size, for "linear".
        low, high: bounds of valid values, high excluded.
        likely: values preferred to round numbers.
        digits: largest number of digits of a round number; 0: only likely values are accepted.
        rounded: float32 rounds it at the size of `unit`, as a low rate on a line to a high one, so that it cannot be
            distinguished from a number that somebody writes.
    """

    starts: Values
    along: str = "linear"
    unit: float = 1.0
    low: float = 0.0
    high: float = math.inf
    likely: Values = ()
    digits: int = 3
    rounded: bool = False

    def __post_init__(self) -> None:
        if self.along == "linear" and self.low <= 0 and 0.0 not in self.starts:
            object.__setattr__(self, "starts", (*self.starts, 0.0))

    def inward(self, value: float) -> float:
        """Return a value's coordinate in the search."""
        if self.along == "linear":
            return value / self.unit
        return math.log(max(value if self.along == "log" else 1 - value, SMALLEST))  # a search may end at 0 or 1

    def outward(self, coordinate: float) -> float:
        """Return the value at a coordinate.

        >>> unknown = Unknown((0.9,), "complement")
        >>> round(unknown.outward(unknown.inward(0.9)), 12)
        0.9
        """
        if self.along == "linear":
            return coordinate * self.unit
        power = math.exp(min(coordinate, 700.0))  # exp overflows beyond 709
        return power if self.along == "log" else 1 - power

    def within(self, value: float) -> float:
        """Return the lower bound for a value that misses it by a little, as rounding makes one of 0 do.

        >>> [Unknown((0.9,)).within(value) for value in (-1e-5, -0.5, 1e-5)]
        [0.0, -0.5, 1e-05]
        """
        return self.low if self.low - NEAR * self.unit <= value < self.low else value

    def allows(self, value: float) -> bool:
        """Return whether the value is valid."""
        return self.low - TINY * self.unit <= value < self.high


def solve(misfit: Misfit, unknowns: Sequence[Unknown], iterations: int = ITERATIONS) -> Values:
    """Minimise the misfit by Levenberg-Marquardt from the best of all starts.

    The misfit is flat in a value that spans decades and is far off, and the best start of such a value
    shows only once the other values are right. So the others are fitted first, for every start of such a value.

    Args:
        misfit: values -> residuals, any shape.
        unknowns: one for each value.
        iterations: the largest number of them.

    >>> x = np.linspace(0, 1, 9)
    >>> [decay] = solve(lambda v: np.exp(-v[0] * x) - np.exp(-0.03 * x), [Unknown((1e-4, 1.0), "log")])
    >>> round(decay, 12)
    0.03
    """
    if not unknowns:
        return ()
    wide = [place for place, unknown in enumerate(unknowns) if unknown.along == "log"]
    if 0 < len(wide) < len(unknowns):
        held = itertools.product(
            *(unknown.starts if place in wide else (None,) for place, unknown in enumerate(unknowns))
        )
        starts = [_with_others(misfit, unknowns, values) for values in held]
    else:
        starts = [*itertools.product(*(unknown.starts for unknown in unknowns))]
    best = min(starts, key=lambda values: float(np.linalg.norm(misfit(values)))) if len(starts) > 1 else starts[0]

    def at(point: np.ndarray) -> np.ndarray:
        return misfit(tuple(u.outward(x) for u, x in zip(unknowns, point, strict=True))).ravel()

    point = np.array([u.inward(value) for u, value in zip(unknowns, best, strict=True)])
    return tuple(u.outward(x) for u, x in zip(unknowns, _descend(at, point, iterations), strict=True))


def _with_others(misfit: Misfit, unknowns: Sequence[Unknown], held: Sequence[float | None]) -> Values:
    """Fix the given values and fit the others, which are None."""

    def complete(others: Values) -> Values:
        left = iter(others)
        return tuple(next(left) if value is None else value for value in held)

    free = [unknown for unknown, value in zip(unknowns, held, strict=True) if value is None]
    return complete(solve(lambda others: misfit(complete(others)), free, FEW))


def polish(misfit: Misfit, unknowns: Sequence[Unknown], values: Values) -> Values:
    """Fit again from nearby values, in linear coordinates, in which a value can reach 0."""
    near = [Unknown((value,), unit=abs(value) or unknown.unit) for unknown, value in zip(unknowns, values, strict=True)]
    return solve(misfit, near)


def sensible(values: Values, unknowns: Sequence[Unknown]) -> bool:
    """Return whether every value is within its unknown's bounds."""
    return all(unknown.allows(value) for unknown, value in zip(unknowns, values, strict=True))


def far_off(values: Values, unknowns: Sequence[Unknown]) -> Iterator[Values]:
    """Yield the values with each one that spans decades multiplied by a thousand, and divided by a thousand.

    >>> [*far_off((2.0, 5.0), [Unknown((1.0,)), Unknown((1.0,), "log")])]
    [(2.0, 5000.0), (2.0, 0.005)]
    """
    for place, unknown in enumerate(unknowns):
        for times in (1e3, 1e-3) if unknown.along == "log" else ():
            yield (*values[:place], values[place] * times, *values[place + 1 :])


def _descend(at: Callable[[np.ndarray], np.ndarray], point: np.ndarray, iterations: int) -> np.ndarray:
    rest, damping = at(point), 1e-6
    for _ in range(iterations):
        norm = float(np.linalg.norm(rest))
        slopes = np.stack([(at(point + STEP * axis) - rest) / STEP for axis in np.eye(len(point))], axis=1)
        sizes = np.linalg.norm(slopes, axis=0)
        sizes[sizes == 0] = 1.0  # slopes of size 1 make the damping independent of the values' units
        gain = 0.0
        while damping < 1e6:
            # The damping is appended as rows: in normal equations, slopes would lose half of their digits.
            ridge = np.sqrt(damping) * np.eye(len(point))
            target = np.concatenate([-rest, np.zeros(len(point))])
            step = np.linalg.lstsq(np.concatenate([slopes / sizes, ridge]), target)[0] / sizes
            if (np.abs(step) <= LAST_DIGITS * np.abs(point)).all():
                return point
            new = at(point + step)
            gain = 1 - float(np.linalg.norm(new)) / norm if norm else 0.0
            if gain > 0:
                break
            damping *= 30
        if gain <= 0:
            return point
        point, rest = point + step, new
        # Only a step that the damping did not shorten shows by a small gain that nothing is left to gain.
        if gain < SMALLEST_GAIN and damping < 1:
            return point
        damping = max(damping / 100, 1e-18)
    return point


def round_values(
    misfit: Misfit, unknowns: Sequence[Unknown], values: Values, accepts: Callable[[Values], bool]
) -> tuple[Values, bool]:
    """Return the values with as few digits as `accepts` allows, and whether all of them are likely or round.

    Where one value compensates for another, rounding one may leave the other odd. So the values are
    rounded one after the other, in every order, and the remaining ones are fitted again.

    >>> def rest(values):
    ...     return np.array([sum(values) - 0.1001])
    >>> round_values(rest, [Unknown((0.1,))] * 2, (0.0999, 0.0002), lambda values: abs(rest(values)) < 1e-9)
    ((0.1, 0.0001), True)
    """
    orders = itertools.permutations(range(len(values)))
    attempts = (_rounded(misfit, unknowns, dict(enumerate(values)), accepts, order) for order in orders)
    return next(((rounded, True) for rounded in attempts if rounded is not None), (values, False))


def _rounded(
    misfit: Misfit,
    unknowns: Sequence[Unknown],
    values: dict[int, float],
    accepts: Callable[[Values], bool],
    order: Sequence[int],
) -> Values | None:
    """Round the values, which are keyed by position, in this order; None if one of them cannot be rounded."""

    def complete(changed: dict[int, float]) -> Values:
        return tuple(changed[place] for place in range(len(unknowns)))

    def fitted(place: int, candidate: float, rest: Sequence[int]) -> dict[int, float]:
        held = values | {place: candidate}
        others = polish(
            lambda others: misfit(complete(held | dict(zip(rest, others, strict=True)))),
            [unknowns[other] for other in rest],
            tuple(held[other] for other in rest),
        )
        return held | dict(zip(rest, others, strict=True))

    for done, place in enumerate(order, start=1):
        candidates = (fitted(place, c, order[done:]) for c in _rounder(values[place], unknowns[place]))
        accepted = (new for new in candidates if sensible(complete(new), unknowns) and accepts(complete(new)))
        changed = next(accepted, None)
        if changed is None:
            return None
        values = changed
    return complete(values)


def _rounder(value: float, unknown: Unknown) -> list[float]:
    """Return numbers near the value, the likelier first."""
    candidates = [x for x in unknown.likely if abs(x - value) < 1e-3 * abs(x)]
    candidates += [x for x in unknown.starts if abs(x - value) < 1e-3 * unknown.unit]
    candidates += [0.0] if unknown.along != "log" and abs(value) < NEAR * unknown.unit else []
    for digits in range(1, unknown.digits + 1):
        candidates.append(_digits(value, digits))
        if unknown.along == "complement":
            # A beta such as 0.9995 is round in 1 - x; 12 digits drop the rounding of the subtraction.
            candidates.append(_digits(1 - _digits(1 - value, digits), 12))
    return candidates


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")
