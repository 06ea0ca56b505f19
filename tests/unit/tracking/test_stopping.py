"""Early stopping: NaN is worse than any number, whichever comes first."""

import math

import pytest

from jaxddp.config import TrainerConfig
from jaxddp.tracking.stopping import Stopping, is_better

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_nan_is_worse_than_any_number(mode: str, sign: int) -> None:
    for number in (sign * INF, 0.0, sign * -INF):
        assert is_better(number, NAN, mode) and not is_better(NAN, number, mode)
    assert not is_better(NAN, NAN, mode) and not is_better(NAN, None, mode)
    assert is_better(sign * INF, None, mode) and is_better(sign * 1.0, sign * 2.0, mode)
    assert not is_better(sign * 2.0, sign * 1.0, mode) and not is_better(1.0, 1.0, mode)


@pytest.mark.parametrize(("mode", "values"), [("max", [NAN, 1.0, 2.0, 3.0]), ("min", [NAN, NAN, 3.0, 2.0])])
def test_a_metric_that_is_nan_at_first_blocks_nothing(mode: str, values: list[float]) -> None:
    config = TrainerConfig(early_stopping_patience=3, best_metric="score", best_mode=mode)
    stopping = Stopping(config)
    for value in values:
        stopping.tested({"score": value})
        assert stopping.reason is None
    assert stopping.notes == (values[-1], 0)
    older = Stopping(config, {"stopping": (NAN, 2)})  # notes of an earlier version
    older.tested({"score": 5.0})
    assert older.notes == (5.0, 0)


def test_nan_in_every_test_ends_the_run() -> None:
    stopping = Stopping(TrainerConfig(early_stopping_patience=2))
    for _ in range(2):
        stopping.tested({"loss": NAN})
    assert stopping.reason == "stopped early: no smaller loss in 2 tests"
