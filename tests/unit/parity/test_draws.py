"""Draws of both sides are paired in their order, and a pair's numbers are the same on both sides, in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.errors import InputError
from jaxddp.parity.port import Port, PortFile
from jaxddp.parity.port.draws import ENTRY, Draw, DrawnPort, DrawnSource, Pair, Served, examples_of, numbers, paired
from tests.support.small_port import write

Shape = tuple[int, ...]


def of_shapes(torch: Shape, jax: Shape, kind: str = "normal") -> dict[Any, np.ndarray]:
    """Return the numbers of a pair of draws."""
    return numbers(*paired([Draw(kind, torch)], [Draw(kind, jax)]), np.random.default_rng(1))


@pytest.mark.parametrize(
    ("torch", "jax", "order"),
    [
        ((4, 3), (4, 3), (0, 1)),
        ((4, 3, 5, 6), (4, 5, 6, 3), (0, 2, 3, 1)),  # NCHW, NHWC
        ((4, 3, 1, 1), (4, 1, 1, 3), (0, 2, 3, 1)),
        ((7, 4, 3), (4, 7, 3), (1, 0, 2)),  # (T, B, F), (B, T, F)
        ((5, 3), (3, 5), (1, 0)),  # a kernel
    ],
)
def test_numbers_move_with_the_axes(torch: Shape, jax: Shape, order: Shape) -> None:
    both = of_shapes(torch, jax)
    assert (both["torch"].shape, both["jax"].shape) == (torch, jax)
    assert np.array_equal(both["torch"].transpose(order), both["jax"])
    assert len(np.unique(both["torch"])) == both["torch"].size


@pytest.mark.parametrize(
    ("shape", "orders", "different"),
    [
        ((4, 3, 3, 3), [(0, 2, 3, 1)], 4 * 11),  # of 27 numbers, 3 stay in place and 8 are in cycles of three
        ((4, 3, 3), [(0, 2, 1)], 4 * 6),
        ((3, 3), [(1, 0)], 6),
        ((3, 3, 5), [(1, 0, 2)], 6 * 5),
    ],
)
def test_numbers_are_the_same_in_each_layout_that_is_possible(
    shape: Shape, orders: list[Shape], different: int
) -> None:
    both = of_shapes(shape, shape)
    for order in [tuple(range(len(shape))), *orders]:
        assert np.array_equal(both["torch"].transpose(order), both["jax"])
    assert len(np.unique(both["torch"])) == different


def test_heads_may_be_part_of_the_batch() -> None:
    both = of_shapes((8, 5, 5), (2, 4, 5, 5), "bernoulli")
    assert np.array_equal(both["torch"].ravel(), both["jax"].ravel())


@pytest.mark.parametrize("kind", ["normal", "uniform", "bernoulli"])
def test_numbers_are_what_float32_holds(kind: str) -> None:
    drawn = of_shapes((100_000,), (100_000,), kind)["torch"]
    assert drawn.dtype == np.float64
    assert np.array_equal(drawn.astype(np.float32), drawn)
    # Measured with this seed: 0.001 and 0.997; 0.501 and 0.289.
    mean, deviation = (0.0, 1.0) if kind == "normal" else (0.5, 12**-0.5)
    assert abs(drawn.mean() - mean) < 0.01 and abs(drawn.std() - deviation) < 0.01
    assert kind == "normal" or (drawn.min() > 0 and drawn.max() < 1)


MASK, NOISE = Draw("bernoulli", (12, 5), "drop", 0.9), Draw("normal", (12, 5), "encoder")
SMALLER, WIDE = Draw("bernoulli", (1, 5), "layers.2"), Draw("normal", (6, 10), "3")
ALIKE = "must be of one kind and size, in the same order"


@pytest.mark.parametrize(
    ("torch", "jax", "message"),
    [
        ([NOISE], [], "torch draws a normal (12, 5) in encoder, jax none"),
        ([WIDE], [], "torch draws a normal (6, 10) in layer 3, jax none"),
        ([], [Draw("uniform", ())], "jax draws a uniform (), torch none"),
        ([MASK, NOISE], [MASK], "torch draws a normal (12, 5) in encoder, jax none after draw 1"),
        ([MASK, NOISE], [NOISE, MASK], f"torch draws {MASK}, jax {NOISE} as draw 1; {ALIKE}"),
        ([MASK], [SMALLER], f"torch draws {MASK}, jax {SMALLER} as draw 1; {ALIKE}"),
        ([WIDE], [Draw("normal", (4, 15))], f"torch draws {WIDE}, jax a normal (4, 15) as draw 1; {ALIKE}"),
        ([MASK, Draw("randperm", (3,), refused="no")], [MASK], "torch draws a randperm (3,): no"),
        ([MASK], [Draw("normal", (3,), refused="no")], "jax draws a normal (3,): no"),
    ],
)
def test_draws_without_partners_are_refused(torch: list[Draw], jax: list[Draw], message: str) -> None:
    with pytest.raises(InputError) as raised:
        paired(torch, jax)
    assert str(raised.value) == message


def test_another_rate_is_no_reason_to_refuse() -> None:
    other = Draw("bernoulli", (12, 5), "drop", 0.8)
    assert paired([MASK], [other]) == (Pair(MASK, other),)


PAIRS = (Pair(MASK, MASK), Pair(Draw("normal", (4, 3, 2)), Draw("normal", (4, 2, 3))))


def drawn_port(folder: Path, seed: int = 0, more: str = "accumulation_steps = 2") -> DrawnPort:
    return DrawnSource(PortFile(str(write(folder, more=more))), PAIRS, seed).port()


def test_numbers_travel_in_the_batch_which_keeps_its_examples(tmp_path: Path) -> None:
    port = drawn_port(tmp_path)
    plain = PortFile(str(tmp_path / "port.py")).port()
    for side in ("torch", "jax"):
        pieces = port.micro_batches(1, 1, side)  # type: ignore[arg-type]
        assert [set(piece) for piece in pieces] == [{"x", "y", f"{ENTRY}0", f"{ENTRY}1"}] * 2
        assert pieces[0][f"{ENTRY}1"].shape == ((4, 3, 2) if side == "torch" else (4, 2, 3))
        for piece, original in zip(pieces, plain.micro_batches(1, 1), strict=True):
            examples = examples_of(piece)
            assert examples.keys() == original.keys()
            assert all(np.array_equal(examples[name], original[name]) for name in original)


def test_each_step_replica_micro_batch_draw_and_seed_has_its_numbers(tmp_path: Path) -> None:
    port = drawn_port(tmp_path)
    same = drawn_port(tmp_path)

    def first(port: Port, step: int, rank: int, piece: int, k: int = 0) -> float:
        return float(port.micro_batches(step, rank)[piece][f"{ENTRY}{k}"].ravel()[0])

    places = [(step, rank, piece, k) for step in range(2) for rank in range(2) for piece in range(2) for k in range(2)]
    assert len({first(port, *place) for place in places}) == len(places)
    assert [first(same, *place) for place in places] == [first(port, *place) for place in places]
    assert first(drawn_port(tmp_path, seed=1), 0, 0, 0) != first(port, 0, 0, 0)


BATCH = {f"{ENTRY}0": np.full((12, 5), 0.25)}


@pytest.mark.parametrize(
    ("batch", "takes", "message"),
    [
        (BATCH, [("normal", (12, 5))], r"^jax draws a normal \(12, 5\), and a bernoulli \(12, 5\) in drop for the"),
        (BATCH, [("bernoulli", (7, 5))], r"^jax draws a bernoulli \(7, 5\), and a bernoulli \(12, 5\) in drop for"),
        (BATCH, [("bernoulli", (12, 5))] * 2, r"^jax draws a bernoulli \(12, 5\), and did not for the first batch"),
        (BATCH, [], r"^jax draws a bernoulli \(12, 5\) in drop for the first batch, and not for another; must dep"),
        ({}, [("bernoulli", (12, 5))], "^jax_step: must give the loss all entries of the batch, with their shapes"),
        ({f"{ENTRY}0": np.ones(60)}, [("bernoulli", (12, 5))], "^jax_step: must give the loss all entries of the ba"),
    ],
)
def test_a_loss_that_draws_otherwise_than_for_the_first_batch_is_refused(
    batch: dict[str, np.ndarray], takes: list[tuple[str, Shape]], message: str
) -> None:
    served = Served(batch, [MASK], "jax")
    with pytest.raises(InputError, match=message):
        for kind, shape in takes:
            assert served.take(kind, shape) is batch[f"{ENTRY}0"]
        served.check()
