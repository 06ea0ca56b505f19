"""Vectors of torch whose sum is one jax array, such as the two biases of an LSTM where jax's cell has one.

The gradient of a sum is that of each summand. Records of torch are read as if the first summand were the sum, and the
others 0, which is how jax's arrays are converted: torch's optimizer would move that sum by one update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxddp.parity.lazy_arrays import Arrays

VALUES = ("params", "update", "averaged")  # stages that add up; of others, such as gradients, the first counts


class Summand(NamedTuple):
    """Elements of a vector that jax adds to those of another.

    Attributes:
        first, elements: the vector that stands for the sum, and places in it.
        other, others: the vector that is added, and places in it.
    """

    first: str
    elements: np.ndarray
    other: str
    others: np.ndarray


def folded(stage: str, tensors: Arrays, summands: Sequence[Summand]) -> Arrays:
    """Return torch's tensors of a stage with each sum in its first summand, and 0 in the others.

    >>> both = {"a": np.ones(3), "b": np.full(2, 5.0)}
    >>> one = [Summand("a", np.array([0, 1]), "b", np.array([0, 1]))]
    >>> folded("params", both, one)
    {'a': array([6., 6., 1.]), 'b': array([0., 0.])}
    >>> folded("gradients", both, one)
    {'a': array([1., 1., 1.]), 'b': array([0., 0.])}
    """
    changed: dict[str, np.ndarray] = {}
    for first, elements, other, others in summands:
        for name in (name for name, x in tensors.items() if name.rpartition(":")[2] == other and x.ndim):
            changed[name] = changed.get(name, tensors[name]).copy()
            if stage in VALUES:
                changed[first] = changed.get(first, tensors[first]).copy()
                changed[first][..., elements] += changed[name][..., others]
            changed[name][..., others] = 0.0
    return {**tensors, **changed} if changed else tensors


def unfolded(gradients: Arrays, summands: Sequence[Summand]) -> Arrays:
    """Return gradients of jax as torch computes them: each summand has the gradient of the sum."""
    copies = {summand.other: gradients[summand.other].copy() for summand in summands if summand.other in gradients}
    for first, elements, other, others in summands:
        if other in copies:
            copies[other][..., others] = gradients[first][..., elements]
    return {**gradients, **copies}
