"""Fit the values of faults, and compute the residual that remains.

A replay gives a vector of differences: the reference's step with the faults, minus JAX's step,
every stage over its norm. A value enters the vector almost linearly, so the first replay already
predicts the residual at the right value, and Broyden's method reaches that value in a few more.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.deviation import Deviating, Deviation
from jaxddp.parity.diagnosis.search.decide import is_plain

ITERATIONS = 16  # of Broyden's method; measured: 2 to 9 reach the floor
PATIENCE = 3  # iterations without progress that are tolerated: each improves the slopes
DIGITS = 4  # largest number of digits of a round value
# Errors of a replay in which a fault cannot be planted.
IMPOSSIBLE = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)

Stages = Mapping[str, Mapping[str, np.ndarray]]
Probe = tuple[int, tuple[int, ...]]  # a step and some replicas


class Item(ABC, Deviating):
    """A fault that a replay can plant, with a value to be fitted or without one."""

    @property
    @abstractmethod
    def deviations(self) -> tuple[Deviation, ...]:
        """What it is with its value, as one fault or several."""

    @abstractmethod
    def excludes(self, other: object) -> bool:
        """Return whether the two cannot be planted together."""

    def is_wider(self, other: object) -> bool:
        """Return whether this is the other fault in more places, where the further ones may make no difference."""
        return False

    @property
    def reference(self) -> float | None:
        """Value that changes nothing; None: there is nothing to fit."""
        return None

    @property
    def start(self) -> float:
        """Initial value of the fit."""
        return 0.0

    @property
    def value(self) -> float | None:
        """Value of the fault; None: it has none."""
        return None

    @property
    def tier(self) -> int:
        """Rank among explanations that do the same: 0 for a fault of the catalogue, more for other edits."""
        return 0

    @property
    def plausible(self) -> bool:
        """Return whether a programmer may have written such a value."""
        return self.value is None or is_plain(self.value)

    def at(self, value: float) -> "Item":
        """Return the fault with another value."""
        return self


class Subject(Protocol):
    """Stages of JAX's steps that are to be explained, and the reference's replay of them."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All replicas."""

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return the stages of JAX's step."""

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the stages of the reference's step with faults planted in it."""


class Budget:
    """Replays that a search may make.

    Attributes:
        left: replays left.
        refused: whether any was refused.
    """

    def __init__(self, replays: int):
        self.left = replays
        self.refused = False

    def allows(self, reserve: int = 0) -> bool:
        """Return whether more replays than a reserve are left."""
        self.refused |= self.left <= reserve
        return self.left > reserve


class Differences:
    """Predicted minus observed at some steps, as a vector: each stage over its norm.

    The norm is the larger of the observed stage's and of the reference's without faults.

    Args:
        subject: stages that are to be explained.
        probes: steps and replicas.
        budget: counts the replays, if given.
    """

    def __init__(self, subject: Subject, probes: Iterable[Probe], budget: Budget | None = None):
        self._subject, self._budget = subject, budget or Budget(0)
        self._parts: list[tuple[Probe, str, str, np.ndarray, float]] = []
        for probe in probes:
            observed, clean = subject.observed(*probe), subject.predicted(*probe, ())
            for stage, tensors in observed.items():
                common = [name for name in tensors if name in clean[stage]]
                scale = max(_norm(tensors[name] for name in common), _norm(clean[stage][name] for name in common))
                self._parts += [(probe, stage, name, tensors[name], scale) for name in common]

    def __call__(self, items: Sequence[Item] = ()) -> np.ndarray:
        """Return the vector; it is infinite where only one side is NaN.

        Raises:
            One of IMPOSSIBLE: the faults cannot be planted together here.
        """
        probes = dict.fromkeys(part[0] for part in self._parts)
        self._budget.left -= len(probes)
        predicted = {probe: self._subject.predicted(*probe, items) for probe in probes}
        pieces = []
        for probe, stage, name, observed, scale in self._parts:
            value = predicted[probe][stage][name]
            difference = (value - observed).ravel() / (scale or 1.0)
            if np.isnan(difference).any():
                both = np.isnan(value) & np.isnan(observed)
                difference = np.where(both.ravel(), 0.0, np.where(np.isnan(difference), np.inf, difference))
            pieces.append(difference)
        return np.concatenate(pieces) if pieces else np.zeros(0)

    def worst(self, vector: np.ndarray) -> float:
        """Return the largest norm of any tensor's part of a vector."""
        ends = np.cumsum([observed.size for *_, observed, _ in self._parts])[:-1]
        return max((float(np.linalg.norm(part)) for part in np.split(vector, ends)), default=0.0)


def _norm(tensors: Iterable[np.ndarray]) -> float:
    """Return the Euclidean norm of all elements together, NaNs left out."""
    return float(np.sqrt(sum(np.sum(np.square(np.where(np.isnan(tensor), 0.0, tensor))) for tensor in tensors)))


def residual_at(subject: Subject, probe: Probe, items: Sequence[Item] = ()) -> float:
    """Return the residual that faults, or none, leave at a step on some replicas."""
    differences = Differences(subject, [probe])
    return differences.worst(differences(items))


@dataclass(frozen=True, eq=False)
class Point:
    """Faults with their values, the differences there, and their derivative by each fitted value."""

    items: tuple[Item, ...]
    vector: np.ndarray
    slopes: tuple[np.ndarray, ...] = ()

    def step(self) -> np.ndarray:
        """Return the change of the values that leaves the least, if the slopes are constant."""
        # Slopes differ by orders of magnitude (an eps, a factor), so each is divided by its norm. A slope becomes 0
        # where a move by a last digit changed nothing; its value then stays.
        # The normal equations are small, where each slope is as long as the compared tensors together.
        norms = np.array([np.linalg.norm(slope) or 1.0 for slope in self.slopes])
        products = np.array([[first @ second for second in self.slopes] for first in self.slopes])
        towards = np.array([slope @ self.vector for slope in self.slopes])
        if not (np.isfinite(products).all() and np.isfinite(towards).all()):  # a wild value's squares overflow
            return np.zeros(len(self.slopes))
        return -np.linalg.lstsq(products / np.outer(norms, norms), towards / norms, rcond=None)[0] / norms

    def after(self, step: np.ndarray) -> np.ndarray:
        """Return the differences after a change of the values, if the slopes are constant."""
        return self.vector + sum(slope * move for slope, move in zip(self.slopes, step, strict=True))


class Fit:
    """Faults added one by one, their values fitted.

    Args:
        differences: predicted minus observed, at the probes.
        floor: the largest residual that counts as rounding.
    """

    def __init__(self, differences: Differences, floor: float):
        self._differences = differences
        self._floor = floor

    def add(self, point: Point, item: Item) -> Point | None:
        """Return the point with one more fault; None: the fault changes nothing there, or cannot be planted."""
        if item.reference is None:
            vector = self._try((*point.items, item))
            changed = vector is not None and not np.array_equal(vector, point.vector)
            return Point((*point.items, item), vector, point.slopes) if changed and vector is not None else None
        vector = self._try((*point.items, item.at(item.start)))
        if vector is None or not (np.isfinite(vector).all() and np.isfinite(point.vector).all()):
            return None
        # The reference's value changes nothing, so one replay gives the slope between the two values.
        slope = (vector - point.vector) / (item.start - item.reference)
        together = (*point.items, item.at(item.reference))
        return Point(together, point.vector, (*point.slopes, slope)) if slope.any() else None

    def promise(self, point: Point) -> float:
        """Return the residual at the best values, if the slopes are constant."""
        if not point.slopes or not np.isfinite(point.vector).all():
            return self.residual(point)
        return self._differences.worst(point.after(point.step()))

    def residual(self, point: Point) -> float:
        """Return the residual of the worst tensor."""
        return self._differences.worst(point.vector)

    def reach(self, point: Point) -> Point:
        """Minimise the differences by Gauss-Newton steps with Broyden's slopes, then round the values."""
        stalled = 0
        for _ in range(ITERATIONS if point.slopes and np.isfinite(point.vector).all() else 0):
            items = _moved(point.items, point.step())
            moved = np.array(_values(items)) - _values(point.items)  # less than the step where a value meets its bound
            vector = self._try(items) if moved.any() else None
            if vector is None or not np.isfinite(vector).all():
                break
            # The error of the predicted step is divided among the slopes by their shares in the step.
            shares = moved * [float(slope @ slope) for slope in point.slopes]
            wrong = (vector - point.after(moved)) / (shares @ moved)
            slopes = tuple(slope + wrong * share for slope, share in zip(point.slopes, shares, strict=True))
            gain = np.linalg.norm(vector) / np.linalg.norm(point.vector)
            point = Point(items, vector, slopes) if gain < 1 else Point(point.items, point.vector, slopes)
            stalled += int(gain >= 1)
            if stalled == PATIENCE or (stalled and self.residual(point) <= self._floor):
                break
        return self._rounded(point)

    def _rounded(self, point: Point) -> Point:
        """Return the point with each value as round as the residual allows."""
        # Rounder values may leave ten times the residual; a fit above the floor explains nothing and stays as it is.
        allowed = max(10 * self.residual(point), self._floor / 100)
        if allowed > 10 * self._floor:
            return point
        for position, item in enumerate(point.items):
            if item.reference is not None and item.value is not None:
                for value in _round_numbers(item.value, item.reference):
                    items = (*point.items[:position], item.at(value), *point.items[position + 1 :])
                    vector = self._try(items)
                    if vector is not None and self._differences.worst(vector) <= allowed:
                        point = Point(items, vector, point.slopes)
                        break
        return point

    def _try(self, items: tuple[Item, ...]) -> np.ndarray | None:
        try:
            return self._differences(items)
        except IMPOSSIBLE:
            return None


def _values(items: Sequence[Item]) -> list[float]:
    return [item.value for item in items if item.reference is not None and item.value is not None]


def _moved(items: Sequence[Item], step: np.ndarray) -> tuple[Item, ...]:
    """Return the items with the fitted values changed."""
    moves = iter(step)
    return tuple(
        item if item.reference is None or item.value is None else item.at(item.value + float(next(moves)))
        for item in items
    )


def _round_numbers(value: float, reference: float) -> Iterator[float]:
    """Yield candidates, the roundest first: 0 if the value is nearly 0, then one digit, two digits, and so on.

    >>> list(_round_numbers(0.10000000002, 0.0))
    [0.1, 0.1, 0.1, 0.1]
    """
    if abs(value) < 1e-3 * (abs(reference) or 1.0):
        yield 0.0
    for digits in range(1, DIGITS + 1):
        yield float(f"{value:.{digits}g}")


@dataclass(frozen=True, kw_only=True)
class Scaling(Item):
    """A fault that may multiply gradients by a number that is to be fitted.

    Attributes:
        known: what it is, without a fitted number; (): no fault, or one with a fitted number.
        quantity: what the number multiplies ("gradients").
        value: the number; None: there is none.
        sizes: sizes of the batch, in words.
    """

    known: tuple[Deviation, ...] = ()
    quantity: str = ""
    value: float | None = None
    sizes: tuple[tuple[int, str], ...] = ()

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        """The fault, with the fitted factor."""
        return self.known if self.value is None else (scaled(self.quantity, self.value, dict(self.sizes)),)

    @property
    def reference(self) -> float | None:
        """Factor that changes nothing; None: no factor is fitted."""
        return None if self.value is None else 1.0

    @property
    def start(self) -> float:
        """Initial factor of the fit."""
        return 2.0

    @property
    def times(self) -> float:
        """Factor, 1 if none is fitted."""
        return 1.0 if self.value is None else self.value

    @property
    def plausible(self) -> bool:
        """Return whether the factor, or its inverse, is an integer or has few digits, so that a programmer chose it.

        Other factors have other origins, such as the share of labels that are ignored.
        """
        factor = abs(self.times) or 1.0
        return any(math.isclose(x, float(f"{x:.3g}")) or math.isclose(x, round(x)) for x in (factor, 1 / factor))

    def at(self, value: float) -> Self:
        """Return the fault with another factor."""
        return replace(self, value=value)
