"""Outputs are compared in torch's layout and example by example, metrics as means over all examples."""

from collections.abc import Mapping

import numpy as np
import pytest

from jaxddp.parity.compare.evaluation import compared, not_compared, padded
from jaxddp.parity.port.evaluation import Evaluated, cut, output_arrays, real

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 3, 5, 6))


def side(*outputs: np.ndarray) -> list[Evaluated]:
    return [Evaluated("", len(x), outputs={"predict": x}) for x in outputs]


def metrics(*sums: Mapping[str, float]) -> list[Evaluated]:
    return [Evaluated("", 4, sums=dict(of_batch)) for of_batch in sums]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3)])
def test_outputs_are_equal_in_another_order_of_axes(order: tuple[int, ...]) -> None:
    (output,) = compared(side(IMAGES), side(IMAGES.transpose(order))).values()
    assert (output.residual, output.differing, output.examples) == (0, 0, 4)


def test_an_axis_of_length_one_is_no_difference_and_another_shape_is_not_compared() -> None:
    column = IMAGES.reshape(-1, 1)
    (output,) = compared(side(column), side(column[:, 0])).values()
    assert output.residual == 0
    assert not compared(side(IMAGES), side(IMAGES[:, :2]))
    assert "torch returns predict (4, 3, 5, 6)" in not_compared(side(IMAGES), side(IMAGES[:, :2]))["predict"]


def test_the_examples_that_differ_are_counted_and_rows_that_jax_lacks_differ() -> None:
    jax = IMAGES.copy()
    jax[1] += 1e-3
    (output,) = compared(side(IMAGES, IMAGES), side(IMAGES, jax)).values()
    assert (output.differing, output.examples) == (1, 8) and output.only_last(1e-12)
    (output,) = compared(side(IMAGES, IMAGES), side(IMAGES, IMAGES[:3])).values()
    assert (output.residual, output.differing) == (np.inf, 1) and output.only_last(1e-12)


def test_numbers_that_both_sides_have_as_nan_are_equal_and_integers_must_be() -> None:
    x = np.array([1.0, np.nan])
    assert compared(side(x), side(x.copy()))["predict"].residual == 0
    assert compared(side(np.array([1, 2])), side(np.array([1, 3])))["predict"].residual == 1


def test_metrics_are_weighted_by_their_counts_over_all_batches() -> None:
    torch = metrics({"error": 4.0, "count:error": 4.0}, {"error": 3.0, "count:error": 1.0})
    assert (
        compared(torch, metrics({"error": 8.0, "count:error": 8.0}, {"error": 6.0, "count:error": 2.0}))[
            "error"
        ].residual
        == 0
    )
    means = compared(torch, metrics({"error": 1.0, "count:error": 1.0}, {"error": 3.0, "count:error": 1.0}))["error"]
    assert means.residual == pytest.approx(2 / 1.4 - 1) and means.of_batches == (0, 0)


def test_a_batch_that_one_side_lacks_is_left_out_of_the_means() -> None:
    torch = metrics({"loss": 4.0, "count": 4.0}, {"loss": 3.0, "count": 1.0})
    assert compared(torch, metrics({"loss": 4.0, "count": 4.0}, {}))["loss"].residual == 0


def test_sums_of_batches_that_the_trainer_fills_up_take_the_place_of_the_others() -> None:
    jax = [Evaluated("", 4, sums={"loss": 4.0}), Evaluated("", 1, sums={"loss": 1.0}, padded={"loss": 9.0})]
    assert [x.sums["loss"] for x in padded(jax)] == [4.0, 9.0] and not padded(jax[:1])


@pytest.mark.parametrize("size", [1, 2, 6, 8, 12, 16])
def test_the_last_batch_is_shorter_and_has_no_divisor_in_common_with_the_others(size: int) -> None:
    for examples in range(1, 60):
        count, batch = cut(examples, size)
        assert 1 <= count <= examples and batch <= size
        assert count > batch or examples <= 2 or size == 1
        assert count <= batch or np.gcd(count % batch, batch) == 1


def test_outputs_may_be_nested_complex_and_large() -> None:
    class Out(dict[str, np.ndarray]): ...

    outputs = {"a": (np.ones(2), [np.zeros(3), "text"]), "b": Out(c=np.ones(1))}
    assert [*output_arrays(outputs)] == ["predict.a.0", "predict.a.1.0", "predict.b.c"]
    assert real(np.array([1j])).tolist() == [[0.0, 1.0]]
    assert len(real(np.zeros((4, 3 * 2**20), np.float16))) == 4
