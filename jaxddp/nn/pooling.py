"""Pooling with torch's values and gradients, written with slices, since `lax.reduce_window` is slow on CPU."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from jaxddp.errors import InputError

__all__ = ["avg_pool", "max_pool"]

_Size = int | Sequence[int]


def max_pool(x: jax.Array, window: _Size, stride: _Size | None = None, padding: _Size = 0) -> jax.Array:
    """Compute the maximum of each window, like torch's `max_pool1d`, `max_pool2d` and `max_pool3d`.

    The gradient goes to the first of equal maxima, in row-major order. Positions that a stride skips at the end are
    left out.

    Args:
        x: (B, *spatial, C).
        window: size of the window on each spatial axis, or one size for all.
        stride: distance of windows; None: `window`.
        padding: positions of -inf on both sides of each spatial axis; at most half of the window.

    Returns:
        (B, *pooled, C), with pooled = (spatial + 2 padding - window) // stride + 1.

    Raises:
        InputError: a size does not fit x.

    >>> max_pool(jnp.arange(8.0).reshape(1, 2, 4, 1), 2)[0, ..., 0].tolist()
    [[5.0, 7.0]]
    """
    windows = _check("max_pool", x, window, stride, padding)
    return _maximum(windows, x)


def avg_pool(x: jax.Array, window: _Size, stride: _Size | None = None, padding: _Size = 0) -> jax.Array:
    """Compute the mean of each window, like torch's `avg_pool1d`, `avg_pool2d` and `avg_pool3d`.

    Padding counts, as zeros (torch's `count_include_pad=True`).

    Args:
        x: (B, *spatial, C), floating-point.
        window, stride, padding: see `max_pool`.

    Returns:
        (B, *pooled, C), see `max_pool`.

    Raises:
        InputError: a size does not fit x.

    >>> avg_pool(jnp.arange(8.0).reshape(1, 2, 4, 1), 2)[0, ..., 0].tolist()
    [[2.5, 4.5]]
    """
    windows = _check("avg_pool", x, window, stride, padding)
    return functools.reduce(operator.add, windows.places(x, 0)) / math.prod(windows.size)


class _Windows(NamedTuple):
    """Windows over the spatial axes; one number per axis in each field."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def places(self, x: jax.Array, value: Any) -> list[jax.Array]:
        """Pad x with `value`; return for each place in a window, in row-major order, the elements of all windows."""
        x = jnp.pad(x, ((0, 0), *((n, n) for n in self.padding), (0, 0)), constant_values=value)
        limits = [n - size + 1 for n, size in zip(x.shape[1:-1], self.size, strict=True)]
        return [
            lax.slice(x, (0, *first, 0), (len(x), *map(operator.add, first, limits), x.shape[-1]), (1, *self.stride, 1))
            for first in itertools.product(*map(range, self.size))
        ]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _maximum(windows: _Windows, x: jax.Array) -> jax.Array:
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return functools.reduce(jnp.maximum, windows.places(x, lowest))


@_maximum.defjvp
def _maximum_jvp(windows: _Windows, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    first, *others = windows.places(primals[0], -jnp.inf)
    maximum, place = first, jnp.zeros(first.shape, jnp.int32)
    for number, values in enumerate(others, 1):
        place = jnp.where((values > maximum) | jnp.isnan(values), number, place)
        maximum = jnp.maximum(maximum, values)
    of_places = enumerate(windows.places(tangents[0], 0))
    chosen = (jnp.where(place == number, tangent, 0) for number, tangent in of_places)
    return maximum, functools.reduce(operator.add, chosen)


def _check(name: str, x: jax.Array, window: _Size, stride: _Size | None, padding: _Size) -> _Windows:
    axes = x.ndim - 2

    def sizes(argument: str, value: _Size, least: int) -> tuple[int, ...]:
        each = (value,) * axes if isinstance(value, int) else tuple(value)
        if len(each) != axes or axes < 1:
            raise InputError(f"{name}: {argument} {value}: needs one size per spatial axis of x {x.shape}")
        if min(each) < least:
            raise InputError(f"{name}: {argument} {value}: must be at least {least}")
        return each

    lengths = sizes("window", window, 1)
    windows = _Windows(lengths, lengths if stride is None else sizes("stride", stride, 1), sizes("padding", padding, 0))
    for size, pad, length in zip(windows.size, windows.padding, x.shape[1:-1], strict=True):
        if 2 * pad > size:
            raise InputError(f"{name}: padding {padding}: must be at most half of the window {window}")
        if size > length + 2 * pad:
            raise InputError(f"{name}: window {window}: larger than x {x.shape} with padding {padding}")
    return windows
