"""Arrays of all ranks as one, and how far arrays are from those that are right."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]  # name -> array of either framework


def of_all_ranks(of_ranks: list[Any]) -> Any:
    """Trees of tensors as one tree of arrays, with an axis of ranks in front."""
    if isinstance(of_ranks[0], dict):
        return {name: of_all_ranks([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}
    return np.stack([tensor.numpy() for tensor in of_ranks])


def distance(found: Any, right: Any) -> float:
    """The largest difference of any element, relative to the largest element of the right one.

    >>> distance(np.array([1.0, 4.0]), np.array([2.0, 4.0]))
    0.25
    """
    found, right = np.asarray(found), np.asarray(right)
    return float(np.abs(found - right).max() / np.abs(right).max())


def furthest(found: Arrays, right: Arrays) -> float:
    """The largest distance of any array of a name."""
    assert found.keys() == right.keys()
    return max(distance(found[name], right[name]) for name in right)


def part_off(found: Arrays, right: Arrays) -> float:
    """||found - right|| / ||right||, of all arrays as one vector.

    >>> part_off({"weight": np.array([3.0, 5.0])}, {"weight": np.array([3.0, 4.0])})
    0.2
    """
    assert found.keys() == right.keys()
    apart, length = (
        sum(np.square(of, dtype=np.float64).sum() for of in arrays)
        for arrays in ([np.subtract(found[name], right[name]) for name in right], right.values())
    )
    return float(np.sqrt(apart / length))
