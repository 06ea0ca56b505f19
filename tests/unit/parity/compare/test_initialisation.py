"""Draws of initial weights: what is found, and that equal distributions raise no alarm."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxddp.parity.compare.initialisation import InitialDifference, differences
from jaxddp.parity.initial_draws import DrawnTensor, _overlap

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def truncated(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw normal numbers within two deviations, of deviation 1."""
    x = rng.normal(size=shape)
    while (outside := np.abs(x) > 2).any():
        x[outside] = rng.normal(size=int(outside.sum()))
    return x / 0.87962566


def orthogonal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw an orthogonal matrix."""
    rows, columns = shape[0], int(np.prod(shape[1:]))
    q, r = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))
    q = q * np.sign(np.diag(r))
    return (q if rows >= columns else q.T).reshape(shape)


KINDS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-(3**0.5), 3**0.5, shape),
    "truncated": truncated,
    "orthogonal": orthogonal,
    "signs": lambda rng, shape: rng.choice([-1.0, 1.0], shape),
    "one scale for all": lambda rng, shape: rng.normal(size=shape) * rng.uniform(0.1, 2),
    "a scale for each row": lambda rng, shape: rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1))),
    "unit rows": lambda rng, shape: (x := rng.normal(size=shape)) / np.linalg.norm(x, axis=1, keepdims=True),
    "log normal": lambda rng, shape: np.exp(rng.normal(size=shape)),
    "around 1": lambda rng, shape: 1 + 0.02 * rng.normal(size=shape),
}


def drawn(draw: Draw, seed: int, shape: tuple[int, ...] = (40, 25), count: int = 8, kind: str = "f4") -> DrawnTensor:
    """Return draws of a tensor."""
    rng = np.random.default_rng(seed)
    draws = [draw(rng, shape).astype(kind) for _ in range(count)]
    return DrawnTensor(shape, np.stack(draws).reshape(count, -1), np.array([*map(_overlap, draws)]))


def compared(torch: DrawnTensor, jax: DrawnTensor, trained: bool = True) -> list[InitialDifference]:
    """Return the differences of one tensor."""
    return [*differences({"w": torch}, {"w": jax}, ["w"] * trained)]


def kinds(torch: DrawnTensor, jax: DrawnTensor) -> list[str]:
    """Return the kinds of the differences of one tensor."""
    return [difference.kind for difference in compared(torch, jax)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 1), (5, 4), (40, 25), (150, 40)], ids=str)
def test_equal_distributions_raise_no_alarm(kind: str, shape: tuple[int, ...]) -> None:
    for seed in range(4 if shape[0] > 40 else 12):
        pair = (drawn(KINDS[kind], 2 * seed + number, shape) for number in range(2))
        assert compared(*pair) == []


@pytest.mark.parametrize("kind", ["normal", "uniform", "truncated", "around 1"])
def test_a_factor_of_1_2_in_the_deviation_of_a_thousand_elements_is_always_found(kind: str) -> None:
    centre = 1.0 if kind == "around 1" else 0.0
    for seed in range(20):
        torch = drawn(KINDS[kind], 2 * seed)
        for factor in (1.2, 1 / 1.2):
            jax = drawn(lambda *a, f=factor: centre + f * (KINDS[kind](*a) - centre), 2 * seed + 1)
            assert kinds(torch, jax) == ["deviation"]


def test_numbers_cut_off_at_two_deviations_are_told_from_all_others_by_8000() -> None:
    for seed in range(20):
        of = [drawn(KINDS[kind], seed + 100 * place) for place, kind in enumerate(("normal", "truncated", "uniform"))]
        assert [kinds(*pair) for pair in ((of[0], of[1]), (of[1], of[0]), (of[2], of[1]))] == [["shape"]] * 3


def test_a_few_hundred_numbers_tell_orthogonal_rows_from_others_of_equal_deviation() -> None:
    torch = drawn(orthogonal, 0, (8, 16))
    assert kinds(torch, drawn(lambda *a: KINDS["normal"](*a) / 4, 1, (8, 16))) == ["overlap"]
    assert kinds(torch, drawn(orthogonal, 2, (8, 16))) == []


@pytest.mark.parametrize("table", [np.zeros((40, 25)), np.ones((40, 25)), np.eye(40, 25)])
def test_constants_must_be_equal(table: np.ndarray) -> None:
    torch = drawn(lambda *_: table, 0)
    assert compared(torch, torch) == []
    assert kinds(torch, drawn(lambda *_: table + 0.01, 0)) == ["constant"]
    assert kinds(torch, drawn(lambda *_: np.full((40, 25), 0.5), 0)) == ["constant"]
    if not table.any():
        assert kinds(torch, drawn(KINDS["normal"], 0)) == kinds(drawn(KINDS["normal"], 0), torch) == ["constant"]


def test_a_table_in_float32_is_equal_and_another_frequency_is_not() -> None:
    def table(base: float) -> Draw:
        angles = np.arange(5000)[:, None] * base ** -(np.arange(8) / 8)
        return lambda *_: np.sin(angles)

    shape = (5000, 8)
    rounded = np.arange(5000, dtype="f4")[:, None] * np.float32(10000) ** -np.float32(np.arange(8) / 8)
    right, narrow = drawn(table(1e4), 0, shape), drawn(lambda *_: np.sin(rounded), 0, shape)
    assert compared(right, narrow, trained=False) == []
    assert [x.kind for x in compared(right, drawn(table(9e3), 0, shape), trained=False)] == ["constant"]


def padded(draw: Draw, row: int) -> Draw:
    """Return a draw whose row is 0, as that of a padding index."""

    def of_embedding(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = draw(rng, shape)
        x[row] = 0.0
        return x

    return of_embedding


def test_a_padding_row_of_one_side_is_found_and_one_of_both_is_not() -> None:
    padding, plain = drawn(padded(KINDS["normal"], 3), 0), drawn(KINDS["normal"], 1)
    assert [(x.kind, x.row, x.side) for x in compared(padding, plain)] == [("elements", 3, "torch")]
    assert [(x.kind, x.row, x.side) for x in compared(plain, padding)] == [("elements", 3, "jax")]
    assert kinds(padding, drawn(padded(KINDS["normal"], 3), 2)) == []
    assert kinds(padding, drawn(padded(KINDS["normal"], 4), 2)) == ["elements"]


def test_a_fused_part_that_is_drawn_otherwise_is_found() -> None:
    def parts(*scales: float) -> Draw:
        return lambda rng, shape: rng.normal(size=shape) * np.repeat(scales, shape[0] // 3)[:, None]

    even, uneven = drawn(parts(1, 1, 1), 0, (30, 25)), drawn(parts(1.3, 1, 0.6), 1, (30, 25))
    assert kinds(even, uneven) in (["row"], ["shape"])
    assert kinds(drawn(parts(1.3, 1, 0.6), 2, (30, 25)), drawn(parts(0.6, 1.3, 1), 3, (30, 25))) == ["row"]
    assert kinds(uneven, drawn(parts(1.3, 1, 0.6), 2, (30, 25))) == []


def test_one_sample_is_judged_by_the_distribution() -> None:
    def single(draw: Draw, seed: int) -> DrawnTensor:
        sample = drawn(draw, seed, count=1)
        return DrawnTensor(sample.shape, np.repeat(sample.values, 8, axis=0), np.repeat(sample.overlap, 8))

    for seed in range(20):
        torch = drawn(KINDS["uniform"], seed)
        assert kinds(torch, single(KINDS["uniform"], 100 + seed)) == []
        assert kinds(single(KINDS["uniform"], 100 + seed), torch) == []
        assert kinds(single(KINDS["uniform"], 100 + seed), single(KINDS["uniform"], 200 + seed)) == []
        assert kinds(torch, single(lambda *a: 1.5 * KINDS["uniform"](*a), seed)) == ["deviation"]


@pytest.mark.parametrize("count", [4, 8])
def test_values_in_16_bits_are_no_constants_by_chance(count: int) -> None:
    pair = [drawn(KINDS["normal"], seed, (100, 160), count) for seed in range(2)]
    coarse = [DrawnTensor(x.shape, (x.values.view("u4") & 0xFFFF0000).view("f4"), x.overlap) for x in pair]
    assert compared(*coarse) == compared(pair[0], coarse[1]) == []


def test_members_that_start_alike_on_one_side_are_found() -> None:
    first, second = drawn(KINDS["normal"], 0), drawn(KINDS["normal"], 1)
    apart, copies = {"0.w": first, "1.w": second}, {"0.w": second, "1.w": second}
    (difference,) = differences(apart, copies, [*apart])
    assert (difference.kind, difference.tensor, difference.others, difference.side) == ("alike", "0.w", ("1.w",), "jax")
    assert [x.side for x in differences(copies, apart, [*apart])] == ["torch"]
    assert [*differences(copies, {"0.w": first, "1.w": first}, [*apart])] == []
    wide = drawn(lambda *a: 2 * KINDS["normal"](*a), 2)
    (difference,) = differences(apart, {"0.w": drawn(KINDS["normal"], 3), "1.w": wide}, [*apart])
    assert (difference.kind, difference.tensor) == ("deviation", "1.w")


@pytest.mark.parametrize("values", [np.zeros((8, 0)), np.full((8, 4), np.nan)])
def test_tensors_without_numbers_are_left_out(values: np.ndarray) -> None:
    tensor = DrawnTensor(values.shape[1:], values, np.full(8, np.nan))
    assert compared(tensor, tensor) == []


def flax_kernel(numbers: np.ndarray, shape: tuple[int, ...]) -> DrawnTensor:
    """Return draws of a kernel that Flax fills with the first of some numbers, under torch's name and axes."""
    draws = numbers[:, : shape[0] * shape[1]].reshape(-1, *shape[::-1]).transpose(0, 2, 1)
    return DrawnTensor(shape, draws.reshape(len(draws), -1), np.zeros(len(draws)))


@pytest.mark.parametrize("draw", KINDS.values(), ids=KINDS)
def test_tensors_that_are_drawn_with_one_key_are_found_and_independent_ones_are_not(draw: Draw) -> None:
    rng = np.random.default_rng(1)
    numbers = np.stack([draw(rng, (1200, 1)).reshape(-1) for _ in range(8)])
    shapes = {"a": (40, 25), "b": (30, 40), "c": (40, 25)}
    torch, own = ({name: drawn(draw, ord(name) + k, shape) for name, shape in shapes.items()} for k in (0, 3))
    one_key = {"a": flax_kernel(numbers, (40, 25)), "b": flax_kernel(3 * numbers, (30, 40)), "c": own["c"]}
    assert [x for x in differences(torch, own, "abc") if x.kind == "one_key"] == []
    found = [x for x in differences(torch, one_key, "abc") if x.kind == "one_key"]
    assert [(x.tensor, x.others, x.side) for x in found] == [("a", ("b",), "jax")]
