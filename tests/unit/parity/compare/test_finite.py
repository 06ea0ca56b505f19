"""The first numbers that are not finite are found, by step, stage, side and tensor."""

import math
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.compare.finite import NotFinite, first_not_finite

RANKS, STEPS = 2, 3
NAN, INF = math.nan, math.inf
START = {"mask": np.array([-INF, 0.0]), "bn.bias": np.zeros(2)}
# Stage -> a key in the records of each side.
SHARED = {
    "gradients": ("fc.bias", "fc.bias"),
    "clipped_gradients": ("fc.bias", "fc.bias"),
    "update": ("fc.bias", "fc.bias"),
    "buffers": ("bn.bias", "bn.bias"),
    "optimizer_state": ("exp_avg_sq:fc.bias", "nu:fc.bias"),
}


def records() -> tuple[list[Any], list[Any]]:
    """Make records of both sides without a number that is not finite, but in a constant."""
    sides: tuple[list[Any], list[Any]] = [], []
    for side, of_side in enumerate(sides):
        for _ in range(STEPS):
            record: dict[str, dict[str, np.ndarray]] = {
                "local_loss": {"loss": np.ones(RANKS)},
                "local_gradients": {name: np.ones((RANKS, 2)) for name in ("fc.bias", "fc.weight")},
            }
            for stage, keys in SHARED.items():
                record[stage] = {name: np.ones(2) for name in (keys[side], keys[side].replace("bias", "weight"))}
            record["buffers"] |= {"mask": START["mask"].copy(), "steps": np.array(3)}
            record["optimizer_state"] |= {"best:value": np.array([INF])}  # a kind that only optax may have
            of_side.append(record)
    return sides


def spoil(sides: tuple[list[Any], list[Any]], stage: str, side: int, step: int, value: float = NAN) -> None:
    sides[side][step][stage][SHARED[stage][side]][1] = value


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("stage", ["update", "buffers", "optimizer_state"])
def test_numbers_that_are_not_finite_on_both_sides_are_found(stage: str, value: float) -> None:
    sides = records()
    for side in (0, 1):
        spoil(sides, stage, side, 1, value)
    name = SHARED[stage][0].rpartition(":")[2]
    assert first_not_finite(*sides, START) == NotFinite(1, stage, "both", (name,), False, 0)


@pytest.mark.parametrize(("side", "name"), [(0, "torch"), (1, "jax")])
@pytest.mark.parametrize("stage", SHARED)
def test_numbers_that_are_not_finite_on_one_side_are_found(stage: str, side: int, name: str) -> None:
    sides = records()
    spoil(sides, stage, side, 2)
    found = first_not_finite(*sides, START)
    assert (found.step, found.stage, found.side) == (2, stage, name)


@pytest.mark.parametrize("side", [0, 1])
def test_all_tensors_of_a_side_are_told_as_such(side: int) -> None:
    sides = records()
    sides[1][0]["update"]["tied"] = np.ones(2)  # a second array of flax for one tensor of torch
    for array in sides[side][0]["update"].values():
        array.fill(NAN)
    assert first_not_finite(*sides, START).where == "all tensors"


def test_a_replica_whose_loss_is_not_finite_is_found() -> None:
    sides = records()
    for of_side in sides:
        of_side[0]["local_loss"]["loss"][1] = NAN
    found = first_not_finite(*sides, START)
    assert found == NotFinite(0, "local_loss", "both", ("loss",), True, 1) and found.where == "loss"


def test_the_first_stage_of_the_first_step_counts() -> None:
    sides = records()
    for side in (0, 1):
        spoil(sides, "update", side, 1)
    sides[1][1]["local_gradients"]["fc.weight"][0, 0] = NAN
    spoil(sides, "gradients", 0, 2)
    assert first_not_finite(*sides, START) == NotFinite(1, "local_gradients", "jax", ("fc.weight",), False, 0)


def test_gradients_that_both_sides_skip_do_not_count() -> None:
    """Scaled losses overflow now and then; such a step leaves the parameters as they are."""
    sides = records()
    assert first_not_finite(*sides, START) is None
    for side in (0, 1):
        spoil(sides, "gradients", side, 0, INF)
    assert first_not_finite(*sides, START) is None


def test_the_norm_of_a_large_tensor_counts_for_its_excerpt() -> None:
    sides = records()
    for of_side in sides:
        of_side[0]["norms"] = {"gradients:fc.weight": np.array(NAN)}
    spoil(sides, "update", 0, 0)
    spoil(sides, "update", 1, 0)
    assert first_not_finite(*sides, START) == NotFinite(0, "gradients", "both", ("fc.weight",), False, 0)
