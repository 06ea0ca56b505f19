"""Digests by which a resumed run, or another process, knows its data."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 64  # rows or examples that represent data too large to be read at the start
PROBES = 8  # of them, read twice
CHUNK = 2**26  # bytes


def array_digest(arrays: Mapping[str, NDArray[Any]], sampled: bool = False) -> str:
    """Return the SHA-256 of arrays: of their names, types, shapes and values, or of a few rows of each.

    >>> array_digest({"x": np.zeros((2, 3), np.float32)})[:8]
    'c5aaf333'
    """
    digest = hashlib.sha256(b"sampled\n" if sampled else b"")
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        if sampled and array.ndim:
            digest.update(_bytes(array[places(len(array))]))
        elif not array.ndim:
            digest.update(_bytes(array))
        else:
            rows = max(1, CHUNK // max(1, array[:1].nbytes))
            for first in range(0, len(array), rows):
                digest.update(_bytes(array[first : first + rows]))
    return digest.hexdigest()


def example_digest(size: int, read: Callable[[int], Mapping[str, NDArray[Any]]], sampled: bool = True) -> str:
    """Return the SHA-256 of a number of examples, and of all or a few of them.

    Each is read once, and `PROBES` of them again: where one is another then, as of a data set that augments by
    itself, the types and shapes of all count.
    """
    digest = hashlib.sha256(f"{'sampled ' * sampled}{size}\n".encode())
    values, kinds = digest, digest.copy()
    probes = {*places(size, PROBES).tolist()}
    stays = True
    for index in places(size).tolist() if sampled else range(size):
        example = read(index)
        first = array_digest(example)
        values.update(first.encode())
        kinds.update(str({name: (array.dtype.str, array.shape) for name, array in example.items()}).encode())
        stays = stays and (index not in probes or first == array_digest(read(index)))
    return (values if stays else kinds).hexdigest()


def places(size: int, most: int = SAMPLES) -> NDArray[np.int64]:
    """Return evenly spaced places, the first and the last among them.

    >>> places(3), len(places(10**12))
    (array([0, 1, 2]), 64)
    """
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
