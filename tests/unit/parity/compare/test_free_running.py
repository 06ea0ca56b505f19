"""Jax on its own may drift as far as rounding grows, step by step; a state that is wrong makes a jump."""

import math
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.compare.free_running import (
    ALLOWED,
    GROWTH,
    ROUNDING,
    drifts,
    free_running,
    grown_rounding,
    rounding_of_gradients,
    with_drift_of_rounding,
)
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


def test_a_counter_that_torch_alone_has_is_not_compared() -> None:
    start: Any = {"w": np.zeros(2), "bn.num_batches_tracked": np.array(0)}
    stages = {"gradients": {"w": np.ones(2)}, "params": {"w": np.ones(2)}, "buffers": {}}
    torch = [{**stages, "buffers": {"bn.num_batches_tracked": np.array(1)}}]
    free: Any = free_running(start, torch, [stages], 1, 0.0)  # type: ignore[arg-type]
    assert free == {"params": StageResult(ALLOWED, (0.0,))}


def test_the_rounding_of_a_rate_is_no_jump() -> None:
    rounding = 1e-7  # of the rate, ten times of which is allowed
    free = {"params": StageResult(ALLOWED + 10 * rounding, (2e-8, 5e-7, 2e-6))}
    assert not [*drifts(free, 3, rounding)]
    assert [*drifts({"params": StageResult(ALLOWED, (2e-8, 5e-7, 2e-6))}, 3)]


@pytest.mark.parametrize(
    ("values", "moved", "step", "allowed"),
    [
        ((6e-8, 4e-8), (6e-8, 4e-8), None, 6e-7),
        ((6e-8, 5e-7), (6e-8, 1e-9), None, 6e-7),  # as far as it was before
        ((6e-8, 1e-6), (6e-8, 9e-8), 2, 9e-7),
        ((7e-7, 1e-6), (6e-8, 1e-3), 1, 6e-7),  # what comes later explains nothing
        ((2e-8, 5e-4), (1e-15, 1e-15), 1, ALLOWED),  # a state that is wrong does not move the reference
    ],
)
def test_rounding_that_moves_the_reference_as_far_is_no_drift(
    values: tuple[float, ...], moved: tuple[float, ...], step: int | None, allowed: float
) -> None:
    free, rounded = ({"params": StageResult(ALLOWED, of_run)} for of_run in (values, moved))
    results = with_drift_of_rounding(free, rounded)
    assert [found.step for found in drifts(results, 2)] == ([] if step is None else [step])
    assert results["params"].allowed == pytest.approx(allowed)
    assert bool([*grown_rounding(results)]) == (step is None)


HIDDEN = {"pure_local_gradients": {"w": np.array([[1.0, 3.0], [1.0, 5.0]])}}


@pytest.mark.parametrize(
    ("jax", "rounding"),
    [
        ({"gradients": {"w": np.array([1.0, 3.5])}, "clipped_gradients": {"w": np.array([0.5, 2.5])}}, [0.0, 0.5]),
        ({"gradients": {"w": np.array([1.0, 3.5])}}, [0.0, -0.25]),  # at the scale of what torch's optimizer gets
        (HIDDEN, [0.0, 0.0]),
    ],
    ids=["shown", "clipped inside", "hidden"],
)
def test_the_rounding_of_gradients_is_that_of_the_forced_steps(jax: Any, rounding: list[float]) -> None:
    gradients = {"local_gradients": {"w": np.array([[1.0, 4.0], [1.0, 4.0]])}, "gradients": {"w": np.array([1.0, 4.0])}}
    torch: Any = gradients | {"clipped_gradients": {"w": np.array([0.5, 2.0])}}
    assert rounding_of_gradients(torch, jax)["w"] == pytest.approx(rounding)
