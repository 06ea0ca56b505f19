"""Jax on its own may drift as far as rounding grows, step by step; a state that is wrong makes a jump."""

import math

import pytest

from jaxddp.parity.compare.free_running import ALLOWED, GROWTH, ROUNDING, drifts, grown_rounding
from jaxddp.parity.findings import StageResult

CHAOTIC = [3e-15 * 4.0**step for step in range(16)]  # as a ResNet-18 with BatchNorm at a large rate; ends at 3e-6


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([2e-15] * 6, None),
        (CHAOTIC, None),
        ([2e-15, 3e-5, 4e-5], 2),  # a state that is not carried over
        ([2e-15, 5e-9, 8e-9, 2e-8], 4),  # a small one, which begins at step 2 and grows
        ([CHAOTIC[0], CHAOTIC[1], 3e-4], 3),
        ([2e-15, math.nan], 2),
        ([2 * GROWTH * ROUNDING, 4e-9, 2e-8], 3),  # different from the first step on
    ],
)
def test_a_jump_is_a_difference_and_growth_is_not(values: list[float], step: int | None) -> None:
    free = {"params": StageResult(ALLOWED, tuple(values))}
    assert [found.step for found in drifts(free, 20)] == ([] if step is None else [step])
    assert bool([*grown_rounding(free)]) == (values is CHAOTIC)


def test_the_rounding_of_a_rate_is_no_jump() -> None:
    rounding = 1e-7  # of the rate, ten times of which is allowed
    free = {"params": StageResult(ALLOWED + 10 * rounding, (2e-8, 5e-7, 2e-6))}
    assert not [*drifts(free, 3)]
    assert [*drifts({"params": StageResult(ALLOWED, (2e-8, 5e-7, 2e-6))}, 3)]
