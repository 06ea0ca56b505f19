"""Mistakes in an optimizer as changes of the reference's program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement, Value, as_code, number
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values


@dataclass(frozen=True)
class OptimizerEdit:
    """One mistake.

    Attributes:
        fault: a name of `catalogue.FAULTS`.
        change: function that makes the mistake, with values for the unknowns.
        what: function that returns what the port does, with the values.
        values: function that returns the values of both sides.
        detail: what else the fix depends on, see `Deviation`.
        unknowns: numbers to be fitted.
        excludes: faults with the same effect on this optimizer, not to be combined with this one.
        removes: the mistake is that a part of the reference is missing, which nothing replaces.
    """

    fault: str
    change: Callable[[OptimizerProgram, Values], OptimizerProgram]
    what: Callable[[Values], Statement]
    unknowns: tuple[Unknown, ...] = ()
    excludes: frozenset[str] = frozenset()
    removes: bool = False
    values: Callable[[Values], tuple[Value, ...]] = lambda values: ()
    detail: str = ""

    def deviation(self, values: Values) -> Deviation:
        """Return the mistake with its values."""
        return Deviation(self.fault, self.what(values), self.values(values), detail=self.detail)


def discrete(
    fault: str, what: Statement, change: Callable[[OptimizerProgram], OptimizerProgram], *values: Value, **fields: Any
) -> OptimizerEdit:
    """Return a mistake without unknowns."""
    return OptimizerEdit(fault, lambda program, _: change(program), lambda _: what, values=lambda _: values, **fields)


def extent(values: np.ndarray) -> tuple[float, ...]:
    """Return the reference's values, which may differ between tensors or steps; of many, two and the largest.

    >>> extent(np.array([0.9, 0.9])), extent(np.array([0.85, 0.9, 0.95, 0.92]))
    ((0.9,), (0.85, 0.9, 0.95))
    """
    few = [float(x) for x in np.unique(values)]
    return (*few[:2], *few[2:][-1:])


def both(value: float, reference: np.ndarray | float, call: str = "", key: str = "") -> tuple[Value, ...]:
    """Return a fitted value and the reference's, if all tensors and steps have the same.

    >>> both(0.1, np.array([0.01, 0.01])), both(0.1, np.array([0.01, 0.0]))
    ((Value(jax='0.1', torch='0.01', call='', key='', is_factor=False),), ())
    """
    same = np.unique(reference)
    return (Value(number(value), as_code(float(same[0])), call, key),) if len(same) == 1 else ()


def typical(values: np.ndarray) -> float:
    """Return the most frequent value.

    >>> typical(np.array([0.0, 0.1, 0.1]))
    0.1
    """
    distinct, counts = np.unique(values, return_counts=True)
    return float(distinct[np.argmax(counts)])
