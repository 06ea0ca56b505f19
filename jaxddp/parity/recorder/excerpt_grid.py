"""Excerpts that can be compared although each side records its own layout.

An excerpt has the elements at multiples of one power of 2 along every long axis. A transposed, reshaped, fused or
stacked array then has most of the same elements in its excerpt, whichever axis is where.
"""

import math
from collections.abc import Mapping

import numpy as np

from jaxddp.parity.projections import by_sizes

SHORT = 8  # axes of at most this size, such as a kernel's, are kept in full


def strides_of(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Return the distance between the elements of an excerpt along each axis; all 1: the tensor is kept in full.

    Args:
        shape: shape of the tensor.
        limit: largest number of elements of an excerpt.

    >>> strides_of((64, 64), 2**14), strides_of((768, 50257), 2**14), strides_of((3, 3, 512, 512), 2**14)
    ((1, 1), (64, 64), (1, 1, 16, 16))
    """
    long = [size > SHORT for size in shape]
    if not any(long) or math.prod(size for size in shape if size <= SHORT) > limit:
        long = [True] * len(shape)
    stride = 1
    while math.prod(-(-size // stride) if is_long else size for size, is_long in zip(shape, long, strict=True)) > limit:
        stride *= 2
    return tuple(stride if is_long else 1 for is_long in long)


def grid_of(shape: tuple[int, ...], limit: int) -> tuple[slice, ...]:
    """Return the index of a tensor's excerpt."""
    return tuple(slice(None, None, stride) for stride in strides_of(shape, limit))


def is_excerpt(shape: tuple[int, ...], limit: int) -> bool:
    """Return whether a tensor of this shape is recorded as an excerpt."""
    return math.prod(shape) > limit


def positions(shape: tuple[int, ...], limit: int) -> np.ndarray:
    """Return the flat positions of an excerpt's elements in the tensor, in the shape of the excerpt.

    >>> positions((3, 4), 2).tolist()
    [[0]]
    >>> positions((3, 4), 4).tolist()
    [[0, 2], [8, 10]]
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    steps = strides_of(shape, limit)
    flat = np.zeros((1,) * len(shape), np.int64)
    for axis, (size, stride, step) in enumerate(zip(shape, strides, steps, strict=True)):
        index = np.arange(0, size, step, dtype=np.int64) * stride
        flat = flat + index.reshape([-1 if other == axis else 1 for other in range(len(shape))])
    return flat


def kept(tensors: Mapping[str, np.ndarray], limit: int) -> dict[str, np.ndarray]:
    """Return the excerpts of NumPy arrays, as new arrays that `float32` or `float64` can hold."""
    return {name: storable(np.asarray(x)[grid_of(np.shape(x), limit)]) for name, x in tensors.items()}


def norms_of(stage: str, tensors: Mapping[str, np.ndarray], limit: int) -> dict[str, np.ndarray]:
    """Return "stage|name" -> norm of each tensor that `kept` takes an excerpt of."""
    large = {name: x for name, x in tensors.items() if is_excerpt(np.shape(x), limit)}
    return {f"{stage}|{name}": np.asarray(np.linalg.norm(np.asarray(x, np.float64))) for name, x in large.items()}


def projections_of(stage: str, tensors: Mapping[str, np.ndarray], limit: int) -> dict[str, np.ndarray]:
    """Return "stage|name" -> projections of each tensor of real numbers that `kept` takes an excerpt of."""
    large = {name: x for name, x in tensors.items() if is_excerpt(np.shape(x), limit)}
    wide = ((name, np.asarray(x, np.float64)) for name, x in large.items() if np.asarray(x).dtype.kind not in "biu")
    return {f"{stage}|{name}": by_sizes(x) for name, x in wide}


def storable(x: np.ndarray) -> np.ndarray:
    """Copy an array into a dtype that every reader knows: floating-point numbers of 16 bits become float32."""
    if x.dtype.kind in "biu":
        return np.array(x, order="C")
    return np.array(x, np.float64 if x.dtype == np.float64 else np.float32, order="C")
