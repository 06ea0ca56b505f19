"""Mistakes in an optimizer as changes of the reference's program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.deviation import Deviation, Value, as_code
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values


@dataclass(frozen=True)
class OptimizerEdit:
    """One mistake.

    Attributes:
        fault: a name of `catalogue.FAULTS`.
        change: function that makes the mistake, with values for the unknowns.
        says: function that describes the mistake, with the values.
        values: function that returns the values of both sides.
        detail: what else the fix depends on, see `Deviation`.
        unknowns: numbers to be fitted.
        excludes: faults with the same effect on this optimizer, not to be combined with this one.
        removes: the mistake is that a part of the reference is missing, which nothing replaces.
    """

    fault: str
    change: Callable[[OptimizerProgram, Values], OptimizerProgram]
    says: Callable[[Values], str]
    unknowns: tuple[Unknown, ...] = ()
    excludes: frozenset[str] = frozenset()
    removes: bool = False
    values: Callable[[Values], tuple[Value, ...]] = lambda values: ()
    detail: str = ""

    def deviation(self, values: Values) -> Deviation:
        """Return the mistake with its values."""
        return Deviation(self.fault, self.says(values), self.values(values), detail=self.detail)


def discrete(
    fault: str, says: str, change: Callable[[OptimizerProgram], OptimizerProgram], *values: Value, **fields: Any
) -> OptimizerEdit:
    """Return a mistake without unknowns."""
    return OptimizerEdit(fault, lambda program, _: change(program), lambda _: says, values=lambda _: values, **fields)


def number(value: float) -> str:
    """Format a number as a programmer would write it.

    >>> [number(x) for x in (0.0001, 1e-8, 2.0, 0.30000000000000004)]
    ['0.0001', '1e-8', '2', '0.3']
    """
    return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")


def numbers(values: np.ndarray) -> str:
    """Format the reference's values, which may differ between tensors or steps.

    >>> numbers(np.array([0.9, 0.9])), numbers(np.array([0.01, 0.0])), numbers(np.array([0.85, 0.9, 0.95]))
    ('0.9', '0 and 0.01', '0.85 to 0.95')
    """
    few = np.unique(values)
    return " and ".join(map(number, few)) if len(few) < 3 else f"{number(few[0])} to {number(few[-1])}"


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
