"""Model and batches, in NumPy: the same numbers for JAX and for torch."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.torch_rng import Generator

Arrays = dict[str, NDArray[Any]]

CONTEXT, EMBEDDING, HIDDEN = 3, 10, 64
PER_REPLICA = 32  # examples
SEED = 5

# Names of the parameters here -> those of jaxddp.models.CharMLP and its torch twin.
LAYERS = {
    "C": "embedding.weight",
    "W1": "fc1.weight",
    "b1": "fc1.bias",
    "bngain": "bn.weight",
    "bnbias": "bn.bias",
    "W2": "fc2.weight",
    "b2": "fc2.bias",
}


@cache
def names() -> datasets.Dataset:
    """Load the data set: predict a letter from the three before it."""
    return datasets.load(TrainConfig(model="char_mlp", dataset="names", context_length=CONTEXT))


def draw_parameters(normal: Callable[[tuple[int, ...]], Any]) -> dict[str, Any]:
    """Draw parameters none of which is zero or one, so that no mistake in a gradient can hide.

    Args:
        normal: draws an array of a shape from N(0, 1).
    """
    vocab_size, fan_in = names().num_classes, CONTEXT * EMBEDDING
    return {
        "C": normal((vocab_size, EMBEDDING)),
        "W1": 5 / 3 / fan_in**0.5 * normal((fan_in, HIDDEN)),  # tanh's gain
        "b1": 0.1 * normal((HIDDEN,)),
        "W2": 0.1 * normal((HIDDEN, vocab_size)),
        "b2": 0.1 * normal((vocab_size,)),
        "bngain": 1 + 0.1 * normal((1, HIDDEN)),
        "bnbias": 0.1 * normal((1, HIDDEN)),
    }


def parameters() -> Arrays:
    """Draw the parameters as torch would, in float32."""
    return draw_parameters(Generator(SEED).normal)


def batch(size: int) -> Arrays:
    """Draw examples x (size, CONTEXT) and y (size,) from the names; a larger batch begins with the smaller one."""
    train = names().train
    chosen = Generator(SEED + 1).randint(0, len(train["y"]), (size,))
    return {name: array[chosen] for name, array in train.items()}


def split(examples: Arrays, count: int) -> list[Arrays]:
    """Split a batch into `count` equal, contiguous parts."""
    parts = {name: np.split(array, count) for name, array in examples.items()}
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def state_dict(arrays: Mapping[str, NDArray[Any]], batch_norm: bool) -> Arrays:
    """Convert the parameters to torch's names and layout.

    Args:
        arrays: the parameters by the names of `parameters`.
        batch_norm: whether the model has BatchNorm.
    """
    layouts: dict[str, Callable[..., NDArray[Any]]] = dict.fromkeys(("W1", "W2"), np.transpose)
    layouts |= dict.fromkeys(("bngain", "bnbias"), np.ravel)
    kept = {name: layer for name, layer in LAYERS.items() if batch_norm or not layer.startswith("bn")}
    return {layer: np.ascontiguousarray(layouts.get(name, np.asarray)(arrays[name])) for name, layer in kept.items()}
