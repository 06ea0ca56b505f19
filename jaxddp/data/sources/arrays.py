"""Arrays by name as data, in memory or mapped from disk."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jaxddp.data.batches import from_arrays
from jaxddp.data.sources.digests import array_digest

Arrays = dict[str, NDArray[Any]]


@runtime_checkable
class Gathered(Protocol):
    """Data whose examples are read many at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def gather(self, indices: NDArray[np.int64]) -> Arrays:
        """Return the examples of indices (...) as arrays (..., *shape of the example)."""

    def digest(self, verify: bool) -> str:
        """Return a digest of all contents or, without `verify`, one that takes less than a second."""


class ArrayData:
    """Arrays by name, in memory or mapped from disk, leaves of shape (N, ...).

    >>> ArrayData({"x": np.arange(6).reshape(3, 2)}).gather(np.array([[2], [0]]))["x"].tolist()
    [[[4, 5]], [[0, 1]]]
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]):
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Any:
        return from_arrays({name: np.asarray(array[index]) for name, array in self.arrays.items()})

    def gather(self, indices: NDArray[np.int64]) -> Arrays:
        """Return the examples of indices (...) as arrays (..., *shape of the example)."""
        return {name: np.asarray(array[indices]) for name, array in self.arrays.items()}

    def digest(self, verify: bool) -> str:
        """Return the digest of all values; of arrays mapped from disk, without `verify`, of a few rows."""
        return array_digest(self.arrays, sampled=not verify and is_mapped(self.arrays))


def is_mapped(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether any of the arrays is mapped from a file, or a view of one that is."""
    return any(mapping(array) is not None for array in arrays.values())


def mapping(array: Any) -> np.memmap | None:
    """Return the array mapped from a file of which this one is a view; None for an array in memory.

    >>> mapping(np.zeros(3)) is None
    True
    """
    found = None
    array = array if isinstance(array, np.ndarray) else None
    while array is not None:  # a view of windows has a base of another type in between
        found = array if isinstance(array, np.memmap) and array.filename is not None else found
        array = getattr(array, "base", None)
    return found
