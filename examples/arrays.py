"""Arrays of all ranks stacked into one, and distances between arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]  # name -> array of either framework


def of_all_ranks(of_ranks: list[Any]) -> Any:
    """Stack the ranks' trees of tensors into one tree of arrays with a leading axis of ranks."""
    if isinstance(of_ranks[0], dict):
        return {name: of_all_ranks([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}
    return np.stack([tensor.numpy() for tensor in of_ranks])


def distance(actual: Any, expected: Any) -> float:
    """Compute max |actual - expected| / max |expected| over all elements.

    >>> distance(np.array([1.0, 4.0]), np.array([2.0, 4.0]))
    0.25
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def furthest(actual: Arrays, expected: Arrays) -> float:
    """Return the largest `distance` between arrays of the same name."""
    assert actual.keys() == expected.keys()
    return max(distance(actual[name], expected[name]) for name in expected)


def part_off(actual: Arrays, expected: Arrays) -> float:
    """Compute ||actual - expected|| / ||expected||, with all arrays as one vector.

    >>> part_off({"weight": np.array([3.0, 5.0])}, {"weight": np.array([3.0, 4.0])})
    0.2
    """
    assert actual.keys() == expected.keys()
    apart, length = (
        sum(np.square(of, dtype=np.float64).sum() for of in arrays)
        for arrays in ([np.subtract(actual[name], expected[name]) for name in expected], expected.values())
    )
    return float(np.sqrt(apart / length))
