"""Options that did nothing in the run are told in the report."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.checking import _idle
from jaxddp.parity.report.report import Report

NOT_TESTED = "Clipping at 5 was not tested: the largest norm of the gradients is 4."


@pytest.mark.parametrize(
    ("most", "norms", "said"),
    [(None, [4.0], ()), (5.0, [3.0, 4.0], (NOT_TESTED,)), (5.0, [3.0, 6.0], ()), (4.0, [4.0], ()), (5.0, [], ())],
    ids=["no clipping", "never", "once", "by the epsilon alone", "no steps"],
)
def test_clipping_that_never_acts_is_told(most: float | None, norms: list[float], said: tuple[str, ...]) -> None:
    records = [{"gradients": {"w": np.array([norm])}} for norm in norms]
    runs: Any = SimpleNamespace(facts=SimpleNamespace(clip_grad_norm=most), torch=records)
    assert _idle(runs) == said
    report = Report("port.py", 2, 10, "float64", idle=said)
    assert (NOT_TESTED in str(report)) == bool(said)
