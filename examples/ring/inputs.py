"""Inputs of each replica, in both frameworks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float64]]

# Collective -> its options. A replica passes one number to the first five, a slice per replica to the others.
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
    """Return the ring's inputs by name, each (W, size).

    Element i of replica r is (i + 1) 10^r in "even", whose chunks hold one number, and in "uneven", whose size W does
    not divide, so each digit of a sum stands for one replica. The elements of "large" are random.
    """

    def digits(size: int) -> NDArray[np.float64]:
        return np.outer(10.0 ** np.arange(world_size), np.arange(1.0, size + 1))

    large = np.random.default_rng(0).normal(size=(world_size, 250 * world_size))
    return {"even": digits(world_size), "uneven": digits(2 * world_size - 1), "large": large}


def given(world_size: int) -> Arrays:
    """Return the input of each collective, (W,) or (W, slices)."""
    ranks = np.arange(1.0, world_size + 1)
    slices = 10 * ranks[:, None] + ranks
    return {name: slices if name in OF_SLICES else ranks for name in COLLECTIVES}
