"""Rounding is the distance of a float32 run from the same side's float64 run, and is compared between the sides."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.parity.compare.numerics import ALLOWED, EPSILON, STAGES, compare_numerics, rounds_only
from jaxddp.parity.findings import Difference
from jaxddp.parity.port import Facts
from jaxddp.parity.records import Records, RecordWriter

STEPS = 2


def run(folder: Path, error: float = 0.0, stage: str = "", at: int = 0, factor: float = 1.0, **more: Any) -> Records:
    """Record a run whose stages are ones with a relative `error`, `factor` times as large in one stage at one step."""
    records: list[Any] = [{} for _ in range(STEPS)]
    for step, record in enumerate(records):
        for name in (*STAGES, "params"):
            off = error * (factor if (name, step) == (stage, at) else 1.0)
            record[name] = {"a": np.full(12, 1 + off), "b": np.ones(4), "count": np.array(step)}
        record |= more
    return written(folder, records)


def written(folder: Path, records: Iterable[Any]) -> Records:
    writer = RecordWriter(folder)
    for record in records:
        writer.write(record)
    return Records([folder])


def of_errors(folder: Path, stage: str, *errors: float) -> Records:
    """Record a run whose stage is ones with a relative error at each step."""
    records = [{stage: {"w": np.full(4, 1 + error)}} for error in errors]
    return written(folder / f"{stage}-{errors}", records)


def compared(folder: Path, factor: float, side: str, custom_step: bool = False, **more: Any) -> Any:
    exact, rounded = run(folder / "exact", **more), run(folder / "rounded", EPSILON, **more)
    worse = run(folder / "worse", EPSILON, "local_loss", 1, factor, **more)
    jax, torch = (worse, rounded) if side == "jax" else (rounded, worse)
    return compare_numerics((exact, jax), (exact, torch), Facts(custom_step=custom_step))


def test_two_sides_with_similar_rounding_are_equal(tmp_path: Path) -> None:
    results, differences = compared(tmp_path, 0.9 * ALLOWED, "jax")
    assert not differences and results.keys() == set(STAGES)
    expected = EPSILON * np.sqrt(12) / 4  # of the stage's norm, which is 4
    assert results["update"].jax == pytest.approx(expected) == results["update"].torch
    assert results["local_loss"].jax == pytest.approx(0.9 * ALLOWED * expected)
    assert results["local_loss"].allowed == ALLOWED


@pytest.mark.parametrize("side", ["jax", "torch"])
def test_a_side_that_rounds_far_worse_is_reported_with_step_and_tensor(side: str, tmp_path: Path) -> None:
    _, differences = compared(tmp_path, 1.3 * ALLOWED, side)
    (difference,) = differences
    assert (difference.stage, difference.step, difference.tensor, difference.kind) == ("local_loss", 2, "a", "numeric")
    assert difference.detail.startswith(f"in float32 {side} is")
    assert difference.cause is None and difference.residual > difference.allowed


def test_distances_below_float32_rounding_are_equal(tmp_path: Path) -> None:
    exact = run(tmp_path / "exact")
    lucky, usual = run(tmp_path / "lucky", 1e-12), run(tmp_path / "usual", EPSILON)
    results, differences = compare_numerics((exact, usual), (exact, lucky), Facts())
    assert all(result.jax <= result.allowed * result.torch for result in results.values())
    assert not differences  # 2e5 times as far, yet within float32 rounding


def test_the_tolerance_of_updates_grows_with_the_parameters(tmp_path: Path) -> None:
    large = {"params": {"a": np.full(16, 1e3)}}
    exact, rounded = run(tmp_path / "exact", **large), run(tmp_path / "rounded", EPSILON, **large)
    worse = run(tmp_path / "worse", EPSILON, "update", 0, 100.0, **large)
    assert not compare_numerics((exact, worse), (exact, rounded), Facts())[1]
    exact, rounded = run(tmp_path / "exact1"), run(tmp_path / "rounded1", EPSILON)
    worse = run(tmp_path / "worse1", EPSILON, "update", 0, 100.0)
    assert compare_numerics((exact, worse), (exact, rounded), Facts())[1][0].stage == "update"


def test_runs_with_nan_are_not_compared_in_float32(tmp_path: Path) -> None:
    exact, rounded = run(tmp_path / "exact"), run(tmp_path / "rounded", EPSILON)
    broken = run(tmp_path / "broken", np.nan)
    assert compare_numerics((exact, broken), (exact, rounded), Facts()) == ({}, [])


def test_updates_of_a_jax_step_and_stages_that_a_side_does_not_show_are_left_out(tmp_path: Path) -> None:
    results, differences = compared(tmp_path, 1.0, "jax", custom_step=True, buffers={})
    assert results.keys() == set(STAGES) - {"buffers", "update"} and not differences


@pytest.mark.parametrize(
    ("residual", "error", "expected"),
    [
        (1e-11, EPSILON, True),  # grows as float32 rounds
        (1e-11, 1e-11, False),  # no larger in float32: a difference in meaning
        (1e-8, 1e-3, False),  # too large for rounding in float64
    ],
)
def test_rounding_grows_in_float32_and_meaning_does_not(
    residual: float, error: float, expected: bool, tmp_path: Path
) -> None:
    difference = Difference("gradients", 2, "b", residual, 1e-12)
    jax32, torch32 = run(tmp_path / "jax", error), run(tmp_path / "torch")
    assert rounds_only(difference, jax32, torch32) is expected
    assert not rounds_only(Difference("samples", 2, "", residual, 0.0), jax32, torch32)
    assert not rounds_only(Difference("gradients", STEPS + 1, "b", residual, 1e-12), jax32, torch32)


@pytest.mark.parametrize(
    ("stage", "far", "differs"),
    [
        ("local_loss", (1,), False),
        ("local_loss", (0, 2), True),
        ("local_gradients", (0, 2), False),  # two kinks of a ReLU, as in resnet18 on one processor
        ("local_gradients", (0, 1, 2), True),
    ],
)
@pytest.mark.parametrize("side", ["jax", "torch"])
def test_a_step_in_which_a_side_is_far_may_be_chance(
    side: str, stage: str, far: tuple[int, ...], differs: bool, tmp_path: Path
) -> None:
    exact, usual = of_errors(tmp_path, stage, 0.0, 0.0, 0.0), of_errors(tmp_path, stage, *[EPSILON] * 3)
    off = of_errors(tmp_path, stage, *(70 * EPSILON if step in far else EPSILON for step in range(3)))
    jax, torch = (off, usual) if side == "jax" else (usual, off)
    results, differences = compare_numerics((exact, jax), (exact, torch), Facts())
    assert [(one.stage, one.step) for one in differences] == ([(stage, far[0] + 1)] if differs else [])
    assert (max(results[stage].jax, results[stage].torch) > 60 * EPSILON) == differs


def test_a_loss_of_digits_is_no_chance_where_the_other_side_meets_a_kink(tmp_path: Path) -> None:
    def of_steps(*errors: float) -> Records:
        return of_errors(tmp_path, "gradients", *errors)

    exact = of_steps(0.0, 0.0, 0.0)
    kinks, coarse = of_steps(EPSILON, 1e-4, EPSILON), of_steps(1e-3, 1e-3, 2e-2)
    assert compare_numerics((exact, coarse), (exact, kinks), Facts())[1]
    jax, torch = of_steps(1e-4, EPSILON, 1e-4), of_steps(EPSILON, 1e-4, 1e-7)  # every step is far on a side
    results, differences = compare_numerics((exact, jax), (exact, torch), Facts())
    assert not differences and results["gradients"].jax == pytest.approx(EPSILON, rel=0.1)


@pytest.mark.parametrize("near", [True, False])
def test_losses_of_a_torch_step_may_round_as_its_updates_do(near: bool, tmp_path: Path) -> None:
    def of_step(folder: str, loss: float, update: float) -> Records:
        arrays = {"local_loss": {"loss": np.full(2, 1 + loss)}, "update": {"a": np.full(4, 1 + update)}}
        return written(tmp_path / folder, [arrays | {"params": {"a": np.ones(4)}}] * STEPS)

    exact, usual = of_step("exact", 0.0, 0.0), of_step("usual", EPSILON, EPSILON)
    # Optax computes Adam's 1 - beta^t in float32.
    coarse = of_step("coarse", 50 * EPSILON, 9 * EPSILON if near else EPSILON)
    results, differences = compare_numerics((exact, coarse), (exact, usual), Facts(multi_loss=True))
    assert [difference.stage for difference in differences] == ([] if near else ["local_loss"])
    loss = results["local_loss"]
    assert (loss.jax <= loss.allowed * loss.torch) is near  # what the report says agrees with the verdict
    assert (loss.allowed > ALLOWED) is near
