"""A learning rate of any size at each step, for schedules that no edit of the reference's schedule makes."""

from dataclasses import replace

import numpy as np

from jaxddp.parity.compare.clipping import NOT_CLIPPED
from jaxddp.parity.compare.rates import share_of
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.optimizer.edit import both, number
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.schedules import FAULT, STRAIGHT, column_of
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence, replay, residuals
from jaxddp.parity.diagnosis.search.decide import Hypothesis


def free_rates(evidence: OptimizerEvidence, program: OptimizerProgram) -> Hypothesis | None:
    """Return the hypothesis that the port's updates are the reference's at other learning rates.

    An update is u_t = r_t d_t, whose direction d_t does not depend on the rates; so r_t = <u_t, d_t> / <d_t, d_t>.

    Returns:
        The hypothesis, with the first rate that differs; None if no rate differs, or all by the same factor, or the
        reference clips, which is a factor of each step too, or if updates are skipped.
    """
    column = column_of(program)
    peak = float(column.max())
    if evidence.clipping != NOT_CLIPPED or len(evidence.steps) < 2 or peak <= 0:
        return None
    of_groups = program.rates[int(column.argmax())]
    highest = replace(program, rates=np.broadcast_to(of_groups, (len(column), len(of_groups))))
    found, worst = [], 0.0
    for step, predicted, _ in replay(highest, evidence):
        factor = share_of(step.update, predicted, [*predicted])
        found.append(peak * factor)
        worst = max(worst, *residuals(step.update, {name: factor * x for name, x in predicted.items()}).values())
    rates, expected = np.array(found), column[np.clip(program.index, 0, len(column) - 1)]
    differs = ~np.isclose(rates, expected, rtol=STRAIGHT, atol=STRAIGHT * peak)
    if not differs.any() or rates.min() < -STRAIGHT * peak or _are_scaled(rates, expected, peak):
        return None
    if _are_skipped(differs & (rates <= STRAIGHT * peak)):
        return None
    first = int(differs.argmax())
    values = both(rates[first], expected[first], key="lr")
    return Hypothesis((Deviation(FAULT, _in_words(rates, expected, differs), values),), worst, len(rates))


def _are_scaled(rates: np.ndarray, expected: np.ndarray, peak: float) -> bool:
    """Return whether all rates are the expected ones times one factor."""
    squares = float(expected @ expected)
    return bool(squares and np.allclose(rates, expected * (rates @ expected) / squares, atol=STRAIGHT * peak))


def _are_skipped(zero: np.ndarray) -> bool:
    """Return whether steps without an update lie between others: a schedule is 0 at its beginning or its end.

    >>> [_are_skipped(np.array(zero, bool)) for zero in ([1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0])]
    [False, False, True, True]
    """
    begins, ends = np.flatnonzero(~zero)[[0, -1]] if not zero.all() else (0, -1)
    return bool(zero[begins : ends + 1].any())


def _in_words(rates: np.ndarray, expected: np.ndarray, differs: np.ndarray) -> str:
    """Describe rates by the first one that differs.

    >>> rates, expected = np.array([0.1, 0.1, 0.01]), np.array([0.1, 0.01, 0.01])
    >>> _in_words(rates, expected, rates != expected)
    "the learning rate is 0.1 at step 2, the reference's 0.01; it differs at 1 of 3 steps"
    """
    first = int(differs.argmax())
    often = f"it differs at {int(differs.sum())} of {len(rates)} steps"
    one, other = number(rates[first]), number(expected[first])
    return f"the learning rate is {one} at step {first + 1}, the reference's {other}; {often}"
