"""Fit of a fault's value: it reaches the value of least differences, and survives a slope of zero."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.diagnosis.search.fit import Fit, Point


@dataclass(frozen=True)
class Fault:
    """A fault with a value."""

    value: float = 0.0
    reference: float = 0.0
    start: float = 1.0

    def at(self, value: float) -> "Fault":
        return replace(self, value=value)


class Curve:
    """Differences that a function of the values predicts."""

    def __init__(self, function: Any):
        self._function = function

    def __call__(self, items: tuple[Fault, ...]) -> np.ndarray:
        return np.asarray(self._function(*(item.value for item in items)), float)

    def worst(self, vector: np.ndarray) -> float:
        return float(np.abs(vector).max())


@pytest.mark.parametrize("bend", [0.0, 0.1], ids=["line", "curve"])
def test_the_value_of_least_differences_is_found_and_rounded(bend: float) -> None:
    curve: Any = Curve(lambda x=0.0: [x - 0.3 + bend * (x - 0.3) ** 2, 2 * (x - 0.3)])
    fault: Any = Fault()
    fit = Fit(curve, floor=1e-12)
    point = fit.add(Point((), curve(())), fault)
    assert point is not None and fit.reach(point).items[0].value == 0.3


def test_a_slope_of_zero_moves_nothing() -> None:
    slopes = (np.zeros(2), np.array([0.0, 2.0]))
    items: Any = (Fault(), Fault())
    point = Point(items, np.array([1.0, 3.0]), slopes)
    np.testing.assert_array_equal(point.step(), [0.0, -1.5])
