"""Excerpts of large tensors, so that the records of a large model stay small.

For a tensor with more than `LARGE` elements, a record holds evenly spaced elements, some from every row and column, and
the norm of all elements. Excerpts suffice to judge elementwise computations, such as the mean over the replicas or an
optimizer's update; `jaxddp.parity.projections` show differences in the elements that are left out.
"""

import math
from collections.abc import Mapping

import numpy as np

LARGE = 2**17  # elements; a larger tensor is kept as an excerpt
KEPT = 2**16  # elements of an excerpt, about


def distance(shape: tuple[int, ...], largest: int = LARGE) -> int:
    """Return the distance between the elements of an excerpt; 1: all elements are kept.

    It has no divisor in common with the sizes, so that the elements come from all columns, and is at most a row.

    Args:
        shape: shape of the tensor.
        largest: elements of the largest tensor that is kept in full.

    >>> distance((768, 768)), distance((50257, 768)), distance((64, 64))
    (11, 589, 1)
    >>> distance((50257, 768), 2**14)
    767
    """
    size = math.prod(shape)
    if size <= largest:
        return 1
    row = size // shape[0] if len(shape) > 1 else size
    apart = min(-(-size * LARGE // (largest * KEPT)), row)
    steps = (*range(apart, row + 1), *range(apart, 1, -1))
    return next((step for step in steps if math.gcd(step, size) == 1), 1)


def is_large(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape is recorded as an excerpt."""
    return distance(shape) > 1


def excerpt(x: np.ndarray, largest: int = LARGE) -> np.ndarray:
    """Return the excerpt of a tensor, (elements, 1, ..., 1) with as many axes; all of one with `largest` elements.

    >>> excerpt(np.zeros((768, 768))).shape
    (53621, 1)
    """
    apart = distance(x.shape, largest)
    return x if apart == 1 else x.reshape(-1)[::apart].reshape(-1, *(1,) * (x.ndim - 1)).copy()


def excerpts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the excerpt of each tensor."""
    return {name: excerpt(x) for name, x in tensors.items()}


def norms_of_large(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the norms of the tensors that have an excerpt."""
    return {name: np.asarray(np.linalg.norm(x)) for name, x in tensors.items() if is_large(x.shape)}
