"""Moving average of the parameters against torch's AveragedModel, step by step."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.trajectories import check_differs, check_equal, compare, run_in_both, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 1.5e-16
FAULT = 1e-4  # smallest difference of the average that a planted fault must cause; measured: 4e-4
STAGES = ("params", "averaged")


def case_of(decay: float | None, world_size: int) -> Any:
    return even_case("char_mlp", "sgd", world_size, steps=8, ema_decay=decay, accumulation_steps=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_moving_average_equals_torchs_averaged_model(world_size: int, pool: TorchPool) -> None:
    jax_run, torch_run = run_in_both(case_of(0.9, world_size), pool)
    check_equal((jax_run, torch_run), TOLERANCE, STAGES)
    first, last = torch_run.records[0], torch_run.records[-1]
    assert all(np.array_equal(first["averaged"][name], first["params"][name]) for name in first["params"])
    assert any(not np.allclose(last["averaged"][name], last["params"][name]) for name in last["params"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("decay", [0.89, 1.0, 0.0])
def test_another_decay_is_detected(decay: float, pool: TorchPool) -> None:
    runs = run_in_both(case_of(0.9, 2), pool, case_of(decay, 2))
    check_differs(compare(*runs, TOLERANCE, STAGES), "averaged", FAULT, step=2)


@pytest.mark.large
def test_a_run_without_ema_decay_records_no_average() -> None:
    case = case_of(None, 2)
    assert "averaged" not in run_jax(dataclasses.replace(case, steps=1), case.initial_weights()).records[0]
