"""A multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx

from jaxddp.data.torch_rng import Generator
from jaxddp.nn import layers


class MLP(nnx.Module):
    """Linear layers with ReLU (and dropout) between them, for x (B, ...) flattened to (B, in_features).

    >>> model = MLP(2, (30, 20), 2, generator=Generator(0))
    >>> [layer.kernel.shape for layer in model.layers]
    [(2, 30), (30, 20), (20, 2)]
    """

    def __init__(
        self,
        in_features: int,
        hidden_sizes: Sequence[int],
        num_classes: int,
        *,
        dropout: float = 0.0,
        generator: Generator,
    ):
        sizes = [in_features, *hidden_sizes, num_classes]
        self.layers = nnx.List([layers.Linear(a, b, generator=generator) for a, b in pairwise(sizes)])
        self.dropout = layers.dropout(dropout, generator.seed)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        for layer in self.layers[:-1]:
            x = self.dropout(jax.nn.relu(layer(x)))
        return self.layers[-1](x)
