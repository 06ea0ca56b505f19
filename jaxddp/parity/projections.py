"""Random-sign projections of whole tensors, which see what excerpts leave out.

A projection is the sum of all elements, each with a sign. It is linear: the projection of a difference is the
difference of the projections. That of a single element is the element, wherever it sits; of many, their norm about.
A sign is a product of one sign per axis, so that a tensor is read once, in whatever layout, and no array of signs has
its size.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

COUNT = 8  # projections of a tensor: the signs of an index are the bits of a byte
ROW = 1024  # a vector is read as rows of this length
BLOCK = 256  # neighbours along an axis among which no two have the same signs


@lru_cache(maxsize=64)
def signs(size: int, seed: int) -> np.ndarray:
    """Return the signs of an axis, (size, COUNT).

    >>> signs(3, 0).shape, sorted({*signs(3, 0).ravel().tolist()})
    ((3, 8), [-1.0, 1.0])
    """
    index = np.arange(size, dtype=np.uint32)
    neighbours = np.argsort(_hashed(np.arange(BLOCK, dtype=np.uint32), 2 * seed)).astype(np.uint8)
    patterns = neighbours[index % BLOCK] ^ (_hashed(index // BLOCK, 2 * seed + 1) >> np.uint32(24)).astype(np.uint8)
    return 1.0 - 2.0 * np.unpackbits(patterns[:, None], axis=1)


def projections(
    x: Any, seeds: Sequence[int] | None = None, library: Any = np, array: Callable[[np.ndarray], Any] = np.asarray
) -> Any:
    """Return the projections of a tensor of floating-point numbers, (COUNT,).

    Args:
        x: the tensor, with at least one axis.
        seeds: seeds of the signs of its axes; None: their numbers.
        library: module with `tensordot`: NumPy, torch or `jax.numpy`.
        array: makes one of the library's arrays of NumPy's, in the tensor's dtype.

    >>> x = np.zeros((300, 500))
    >>> x[7, 33] = 2.0
    >>> np.abs(projections(x)).tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """
    if len(x.shape) == 1:
        whole = len(x) // ROW * ROW
        rows = projections(x[:whole].reshape(-1, ROW), (*(seeds or (0,)), -1), library, array) if whole else 0.0
        return rows + (x[whole:, None] * array(signs(len(x) - whole, -2))).sum(0)
    of_axes = [signs(size, seed) for size, seed in zip(x.shape, seeds or range(len(x.shape)), strict=True)]
    longest = max(range(len(x.shape)), key=lambda axis: x.shape[axis])
    rest = np.ones((1, COUNT))
    for axis, of_axis in enumerate(of_axes):
        if axis != longest:
            rest = (rest[:, None] * of_axis).reshape(-1, COUNT)
    along = library.tensordot(x, array(of_axes[longest]), ([longest], [0]))
    return (along.reshape(-1, COUNT) * array(rest)).sum(0)


def by_sizes(x: Any, library: Any = np, array: Callable[[np.ndarray], Any] = np.asarray) -> Any:
    """Return projections that are equal for a tensor and its transpose, since signs depend on the sizes of axes.

    >>> x = np.arange(6.0).reshape(2, 3)
    >>> np.array_equal(by_sizes(x), by_sizes(x.T))
    True
    """
    return projections(x, tuple(x.shape), library, array)


def size_of(whole: np.ndarray) -> float:
    """Return about the norm of the tensor that has these projections."""
    return float(np.sqrt(np.mean(np.square(whole))))


def projections_of(
    tensors: Mapping[str, Any], is_large: Callable[[tuple[int, ...]], bool], library: Any = np
) -> dict[str, Any]:
    """Return the projections of NumPy's or jax's tensors that are large and hold floating-point numbers."""
    large = {name: x for name, x in tensors.items() if is_large(x.shape) and x.dtype.kind == "f"}
    return {n: projections(x, None, library, partial(library.asarray, dtype=x.dtype)) for n, x in large.items()}


def _hashed(index: np.ndarray, seed: int) -> np.ndarray:
    """Mix the bits of 32-bit integers, as the end of MurmurHash3 does."""
    x = index ^ np.uint32((seed * 0x9E3779B1) % 2**32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
