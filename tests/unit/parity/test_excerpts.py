"""An excerpt of a large tensor holds elements of all rows and columns, the same ones on both sides."""

import numpy as np
import pytest
import torch

from jaxddp.parity.excerpts import KEPT, LARGE, distance, excerpt, norms_of_large
from jaxddp.parity.torch_side.rank_recorder import excerpt_of

SHAPES = [(768, 768), (50257, 768), (512, 512, 3, 3), (400, 333), (131, 1024), (200_000,), (2, 100_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_excerpt_is_small_and_holds_elements_of_every_row_and_column(shape: tuple[int, ...]) -> None:
    positions = np.arange(np.prod(shape)).reshape(shape)
    kept = excerpt(positions)
    assert kept.ndim == positions.ndim and 0 < kept.size < positions.size
    for axis, places in enumerate(np.unravel_index(kept.ravel(), shape)):
        assert len(set(places.tolist())) == min(shape[axis], kept.size)
    assert np.prod(shape) / distance(shape) <= max(KEPT, 2 * shape[0] if len(shape) > 1 else 2)


def test_torchs_excerpt_is_numpys() -> None:
    x = np.random.default_rng(0).normal(size=(400, 333))
    np.testing.assert_array_equal(excerpt_of(torch.from_numpy(x)).numpy(), excerpt(x))


def test_a_small_tensor_is_kept_whole() -> None:
    x = np.ones(LARGE)
    assert excerpt(x) is x and norms_of_large({"x": x}) == {}
