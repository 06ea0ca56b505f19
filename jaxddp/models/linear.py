"""A linear classifier."""

import jax
from flax import nnx

from jaxddp.data.torch_rng import Generator
from jaxddp.nn import layers


class Linear(nnx.Module):
    """Linear classifier x W + b, for x (B, ...) flattened to (B, in_features)."""

    def __init__(self, in_features: int, num_classes: int, *, generator: Generator):
        self.fc = layers.Linear(in_features, num_classes, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x.reshape(len(x), -1))
