"""What each replica gives, in both frameworks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float64]]

# Collective -> its options. The first five are given a number by each replica, the others a slice for each.
COLLECTIVES: dict[str, dict[str, Any]] = {
    "broadcast": {"src": 1},
    "reduce": {"dst": 1},
    "all_reduce": {},
    "gather": {"dst": 1},
    "all_gather": {},
    "scatter": {"src": 1},
    "reduce_scatter": {},
    "all_to_all": {},
}
OF_SLICES = ("scatter", "reduce_scatter", "all_to_all")


def buffers(world_size: int) -> Arrays:
    """What the ring adds up, by name, each (W, size).

    Element i of replica r is (i + 1) 10^r in "even", with a chunk of one number, and in "uneven", which W does not
    divide: so a digit of a sum tells of one replica. In "large" it is random.
    """

    def digits(size: int) -> NDArray[np.float64]:
        return np.outer(10.0 ** np.arange(world_size), np.arange(1.0, size + 1))

    large = np.random.default_rng(0).normal(size=(world_size, 250 * world_size))
    return {"even": digits(world_size), "uneven": digits(2 * world_size - 1), "large": large}


def given(world_size: int) -> Arrays:
    """What each collective is called with, each (W,) or (W, slices)."""
    ranks = np.arange(1.0, world_size + 1)
    slices = 10 * ranks[:, None] + ranks
    return {name: slices if name in OF_SLICES else ranks for name in COLLECTIVES}
