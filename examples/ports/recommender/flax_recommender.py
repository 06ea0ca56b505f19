"""DeepFM in Flax NNX, with one table for each field."""

from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.nn.layers import BatchNorm  # torch's running variance, the unbiased one; nnx.BatchNorm's is biased


class Tables(nnx.Module):
    """Indices (B, fields) to rows (B, fields, features), with a table for each field."""

    def __init__(self, sizes: Sequence[int], features: int, rngs: nnx.Rngs):
        self.tables = nnx.List([nnx.Embed(size, features, rngs=rngs) for size in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.stack([table(x[:, field]) for field, table in enumerate(self.tables)], axis=1)


class HiddenLayer(nnx.Module):
    """Linear, BatchNorm, ReLU and dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float, rngs: nnx.Rngs):
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = BatchNorm(outputs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(nnx.relu(self.norm(self.linear(x))))


class DeepFM(nnx.Module):
    """Indices (B, fields) to the logit of a click (B,)."""

    def __init__(self, sizes: Sequence[int], features: int, widths: Sequence[int], dropout: float, rngs: nnx.Rngs):
        self.wide = Tables(sizes, 1, rngs)
        self.bias = nnx.Param(jnp.zeros(1))
        self.embed = Tables(sizes, features, rngs)
        inputs = [len(sizes) * features, *widths]
        self.hidden = nnx.List([HiddenLayer(*pair, dropout, rngs) for pair in pairwise(inputs)])
        self.out = nnx.Linear(inputs[-1], 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = self.embed(x)
        wide = self.wide(x).sum(axis=(1, 2)) + self.bias[...]
        pairs = 0.5 * (jnp.square(rows.sum(axis=1)) - jnp.square(rows).sum(axis=1)).sum(axis=1)
        deep = rows.reshape(len(rows), -1)
        for layer in self.hidden:
            deep = layer(deep)
        return wide + pairs + self.out(deep)[:, 0]
