"""Orders of an epoch: the index shuffle is a permutation and looks random; a sampler's order is dealt as torch's is."""

import numpy as np
import pytest
from torch.utils.data import DistributedSampler as TorchSampler

from jaxddp.data.order import IndexShuffle, deal, epoch_order
from jaxddp.data.sampler import epoch_indices
from jaxddp.errors import InputError


def test_the_index_shuffle_is_a_permutation_of_every_size() -> None:
    for size in (*range(1, 200), 1023, 1024, 1025, 100_003):
        assert sorted(IndexShuffle(size, seed=size)[np.arange(size)].tolist()) == list(range(size)), size


def test_the_index_shuffle_of_trillions_neither_repeats_nor_leaves_the_range() -> None:
    size = 3 * 2**40 + 1
    drawn = IndexShuffle(size, seed=1)[np.arange(size - 200_000, size)]
    assert len(np.unique(drawn)) == 200_000 and drawn.min() >= 0 and drawn.max() < size


def test_the_index_shuffle_looks_random() -> None:
    size, seeds = 1000, 2000
    drawn = np.stack([IndexShuffle(size, seed)[np.arange(size)] for seed in range(seeds)])
    counts = np.stack([np.bincount(column // 100, minlength=10) for column in drawn.T[::50]])  # where an example lands
    assert abs((((counts - seeds / 10) ** 2) / (seeds / 10)).sum() - 180) < 95  # chi-square, 5 sigma; measured: 14 off
    steps = np.diff(drawn, axis=1)
    assert abs((steps > 0).mean() - 0.5) < 0.005 and (np.abs(steps) == 1).mean() < 0.003  # measured: 0.4998, 0.0020
    assert not (drawn[0] == drawn[1]).mean() > 0.01


@pytest.mark.parametrize(("drop_last", "join"), [(False, False), (True, False), (False, True)])
def test_a_samplers_order_is_dealt_as_torchs_sampler_deals_its_own(drop_last: bool, join: bool) -> None:
    draws = np.random.default_rng(0).integers(0, 100, 23)
    ours = epoch_indices(100, 4, sampler=lambda epoch, seed, size: draws, drop_last=drop_last, join=join)
    ranks = [list(TorchSampler(range(23), 4, rank, False, drop_last=drop_last)) for rank in range(4)]
    expected = draws[np.array(ranks)]
    if join:
        expected[3, -1] = -1  # torch repeats the first example
    np.testing.assert_array_equal(ours, expected)


def test_the_sampler_gets_the_epoch_the_seed_and_the_size() -> None:
    order = epoch_order(
        9, True, seed=5, epoch=3, sampler=lambda *arguments: np.array([*arguments[:1], *arguments[2:]]) - 1
    )
    np.testing.assert_array_equal(order[np.arange(2)], [2, 8])


def test_epochs_of_the_index_shuffle_differ_and_padding_repeats_the_start() -> None:
    first, second = (epoch_indices(10, 4, shuffle="index", epoch=epoch).T.ravel() for epoch in range(2))
    assert first.tolist() != second.tolist()
    assert sorted(first[:10]) == list(range(10)) and first[10:].tolist() == first[:2].tolist()
    np.testing.assert_array_equal(deal(IndexShuffle(10, 0), 4, [1], 2, 3), first.reshape(3, 4)[2:, 1:2])


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ([[1, 2]], r"must be integers \(n,\), and is int64 \(1, 2\)"),
        ([0.5], "and is float64"),
        ([], r"\(0,\)"),
        ([3, 9], "entry 1 is 9; must be from 0 to 8"),
        ([-1], "entry 0 is -1"),
        (None, "and is object"),
    ],
)
def test_a_samplers_bad_indices_are_refused(drawn: object, message: str) -> None:
    with pytest.raises(InputError, match=rf"^sampler\(2, 1, 9\): .*{message}"):
        epoch_order(9, True, seed=1, epoch=2, sampler=lambda epoch, seed, size: drawn)  # type: ignore[arg-type,return-value]


def test_an_error_of_the_sampler_is_one_line() -> None:
    with pytest.raises(
        InputError, match=r"^sampler\(0, 0, 9\): ZeroDivisionError: integer division or modulo by zero$"
    ):
        epoch_order(9, True, 0, 0, sampler=lambda epoch, seed, size: 1 // 0)  # type: ignore[arg-type,return-value]
