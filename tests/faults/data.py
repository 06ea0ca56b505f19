"""Small data sets of the scenarios, without symmetries, and the order of their examples."""

from functools import cache

import numpy as np

from jaxddp.data.sampler import epoch_indices

from . import policy, resnet
from .models_torch import CLASSES, COLOURS, FEATURES, HEIGHT, IGNORED, LENGTH, PADDING, VOCABULARY, WIDTH

Arrays = dict[str, np.ndarray]
MEAN = 3.0  # of the inputs, whose standard deviation is 1
FIRST_SEED = 11  # smallest seed with which all replicas and micro-batches have unequal numbers of labels
KEPT = 0.75  # fraction of units that a dropout mask keeps


@cache
def dataset(family: str, size: int, seed: int) -> Arrays:
    """Return all examples of a scenario."""
    rng = np.random.default_rng((seed + FIRST_SEED, size))
    if family.startswith("tokens"):
        return _tokens(rng, size)
    if family == "policy":
        return policy.examples(rng, size)
    shapes = {"resnet": (resnet.HEIGHT, resnet.WIDTH, resnet.COLOURS), "convnet": (HEIGHT, WIDTH, COLOURS)}
    shape = shapes.get(family, (FEATURES,))
    return {"x": rng.normal(MEAN, 1.0, (size, *shape)), "y": rng.integers(0, CLASSES, size)}


def _tokens(rng: np.random.Generator, size: int) -> Arrays:
    """Return sequences padded on the left, with labels on a part at the end; "ids" numbers the sequences."""
    place = np.arange(LENGTH)[None]
    lengths = rng.integers(2, LENGTH + 1, (size, 1))
    labelled = rng.integers(1, lengths + 1)
    x = np.where(place >= LENGTH - lengths, rng.integers(1, VOCABULARY, (size, LENGTH)), PADDING)
    y = np.where(place >= LENGTH - labelled, rng.integers(1, VOCABULARY, (size, LENGTH)), IGNORED)
    return {"ids": np.arange(size), "x": x, "y": y}


def mask(seed: int, step: int, rank: int, batch_size: int, units: int) -> np.ndarray:
    """Return a replica's dropout mask of one step."""
    kept = np.random.default_rng((seed, step, rank)).random((batch_size, units)) < KEPT
    return kept / KEPT


def steps_per_epoch(size: int, world_size: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches per replica; without `drop_last` the last may be smaller."""
    per_replica = size // world_size if drop_last else -(-size // world_size)
    return per_replica // batch_size if drop_last else -(-per_replica // batch_size)


def indices(size: int, world_size: int, batch_size: int, seed: int, epoch: int, batch: int, drop_last: bool):
    """Return the indices of all replicas' examples in one batch, shape (world_size, batch_size)."""
    every = epoch_indices(size, world_size, seed=seed, epoch=epoch, drop_last=drop_last)
    return every[:, batch * batch_size : (batch + 1) * batch_size]
