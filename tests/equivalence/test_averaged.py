"""The moving average of the parameters is torch's AveragedModel, step by step."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.trajectories import compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 1.5e-16
FAULT = 1e-4  # of the parameters, with a planted fault, at least; measured: 4e-4
STAGES = ("params", "averaged")


def case(decay: float | None, world_size: int) -> Any:
    return even_case("char_mlp", "sgd", world_size, steps=8, ema_decay=decay, accumulation_steps=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_average_is_torchs(world_size: int, pool: TorchPool) -> None:
    asked = case(0.9, world_size)
    weights = asked.initial_weights()
    ours, theirs = run_jax(asked, weights), pool.run(asked, weights)
    comparison = compare(ours, theirs, TOLERANCE, STAGES)
    assert comparison.equal, comparison
    first, last = theirs.records[0], theirs.records[-1]
    assert all(np.array_equal(first["averaged"][name], first["params"][name]) for name in first["params"])
    assert any(not np.allclose(last["averaged"][name], last["params"][name]) for name in last["params"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("decay", [0.89, 1.0, 0.0])
def test_another_average_would_be_noticed(decay: float, pool: TorchPool) -> None:
    weights = case(0.9, 2).initial_weights()
    comparison = compare(run_jax(case(decay, 2), weights), pool.run(case(0.9, 2), weights), TOLERANCE, STAGES)
    assert comparison.first is not None and comparison.first[0] == "averaged" and comparison.first[1].step == 2
    assert comparison.worst["averaged"].value > FAULT


@pytest.mark.large
def test_a_run_without_one_keeps_none() -> None:
    asked = case(None, 2)
    assert "averaged" not in run_jax(dataclasses.replace(asked, steps=1), asked.initial_weights()).records[0]
