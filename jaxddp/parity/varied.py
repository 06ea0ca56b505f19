"""Parameters with other values, so that no two tensors of a program are equal by chance, as those that are 1 or 0."""

import zlib
from collections.abc import Collection

import numpy as np

from jaxddp.parity.lazy_arrays import Arrays

WAYS = ("near", "turned")  # factors of 0.5 to 1.5; and for about half of the elements the other sign
SMALL = 0.1  # standard deviation of what takes the place of a tensor of zeros


def varied(arrays: Arrays, parameters: Collection[str], way: str) -> dict[str, np.ndarray]:
    """Return tensors of which the parameters have other values, the same ones in every process.

    Args:
        arrays: tensors by name.
        parameters: names of those that change.
        way: one of `WAYS`.

    >>> x = varied({"scale": np.ones(2), "mean": np.ones(2)}, ["scale"], "near")
    >>> bool((np.abs(x["scale"] - 1) < 0.5).all()), x["mean"]
    (True, array([1., 1.]))
    """
    return {name: _varied(name, x, way) if name in parameters else x for name, x in arrays.items()}


def _varied(name: str, x: np.ndarray, way: str) -> np.ndarray:
    if x.dtype.kind != "f":
        return x
    rng = np.random.default_rng([zlib.crc32(name.encode()), WAYS.index(way)])
    factors = rng.uniform(0.5, 1.5, x.shape)
    if way == "turned":
        factors *= rng.choice([-1.0, 1.0], x.shape) if x.size > 1 else -1.0
    return np.asarray(x * factors if x.any() else SMALL * rng.standard_normal(x.shape), x.dtype)
