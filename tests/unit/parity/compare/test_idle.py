"""Options and tensors that did nothing in a run are told in the report."""

import numpy as np
import pytest

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.compare.idle import idle
from jaxddp.parity.report.report import Report

NOT_TESTED = "Clipping at 5 was not tested: the largest norm of the gradients is 4."
DEAD = "All gradients of {} are 0, so their layers were not tested."


@pytest.mark.parametrize(
    ("most", "norms", "said"),
    [(None, [4.0], ()), (5.0, [3.0, 4.0], (NOT_TESTED,)), (5.0, [3.0, 6.0], ()), (4.0, [4.0], ()), (5.0, [], ())],
    ids=["no clipping", "never", "once", "by the epsilon alone", "no steps"],
)
def test_clipping_that_never_acts_is_told(most: float | None, norms: list[float], said: tuple[str, ...]) -> None:
    assert tuple(idle([{"gradients": {"w": np.array([norm])}} for norm in norms], Clipping(most))) == said
    report = Report("port.py", 2, 10, "float64", idle=said)
    assert (NOT_TESTED in str(report)) == bool(said)


@pytest.mark.parametrize(("most", "whole", "says"), [(5.0, True, True), (3.0, True, False), (5.0, False, False)])
def test_clipping_by_value_that_never_acts_is_told(most: float, whole: bool, says: bool) -> None:
    """Not where a record holds excerpts, whose largest element may not be that of the gradients."""
    norms = {} if whole else {"gradients:w": np.array(40.0)}
    told = [*idle([{"gradients": {"w": np.array([1.0, -4.0])}, "norms": norms}], Clipping(largest=most))]
    assert told == ["Clipping at 5 was not tested: the largest element of the gradients is 4."] * says


@pytest.mark.parametrize(
    ("steps", "norm", "said"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], 0.0, (DEAD.format("w"),)),
        ([[0.0, 0.0], [0.0, 1e-300]], 0.0, ()),
        ([[0.0, 0.0]], 1.0, ()),  # an excerpt that happens to hold zeros
        ([[0.0, np.nan]], 0.0, ()),
    ],
)
def test_a_tensor_whose_gradient_is_always_0_is_told(
    steps: list[list[float]], norm: float, said: tuple[str, ...]
) -> None:
    norms = {"gradients:w": np.array(norm)}
    records = [{"gradients": {"w": np.array(x), "alive": np.ones(1)}, "norms": norms} for x in steps]
    assert tuple(idle(records, NOT_CLIPPED)) == said
