"""Vectors of torch whose sum is one jax array, such as the two biases of an LSTM where jax's cell has one.

Each summand has the sum's gradient. Records of torch are read as if the first summand were the sum and the others 0,
as jax's arrays are converted, so that torch's optimizer, replayed on them, moves the sum by one update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxddp.parity.lazy_arrays import Arrays

FAULT = "sum_moved_once"  # in the catalogue
VALUES = (
    "params",
    "update",
    "averaged",
    "buffers",
)  # beginnings of stages that add up; of others the first counts


class Summand(NamedTuple):
    """Elements of a vector that jax adds to those of another."""

    first: str  # the vector that holds the sum
    elements: np.ndarray  # places in it
    other: str  # the vector that is added
    others: np.ndarray  # places in it


def folded(stage: str, tensors: Arrays, summands: Sequence[Summand]) -> Arrays:
    """Return torch's tensors of a stage with each sum in its first summand, and 0 in the others.

    >>> both, places = {"a": np.ones(3), "b": np.full(2, 5.0)}, np.array([0, 1])
    >>> [folded(stage, both, [Summand("a", places, "b", places)]) for stage in ("params", "gradients")]
    [{'a': array([6., 6., 1.]), 'b': array([0., 0.])}, {'a': array([1., 1., 1.]), 'b': array([0., 0.])}]
    """
    if not summands:
        return tensors
    changed = dict(tensors)
    for first, elements, other, others in summands:
        for name in [name for name, x in changed.items() if name.rpartition(":")[2] == other and x.ndim]:
            changed |= {one: changed[one].copy() for one in (name, first) if one in changed}
            if stage.startswith(VALUES):
                changed[first][..., elements] += changed[name][..., others]
            changed[name][..., others] = 0.0
    return changed
