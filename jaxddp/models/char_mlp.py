"""A character model that predicts the next letter from the last few."""

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.data.torch_rng import Generator
from jaxddp.nn import layers


class CharMLP(nnx.Module):
    """Embedding, linear, BatchNorm, tanh, (dropout,) linear, for x (B, context_length) integer.

    Source: Bengio et al., A Neural Probabilistic Language Model, 2003, with BatchNorm.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        embedding_size: int,
        hidden_size: int,
        *,
        dropout: float = 0.0,
        sync_batch_norm: bool = False,
        generator: Generator,
    ):
        self.embedding = layers.Embed(vocab_size, embedding_size, generator=generator)
        self.fc1 = layers.Linear(context_length * embedding_size, hidden_size, generator=generator)
        self.bn = layers.BatchNorm(hidden_size, sync=sync_batch_norm)
        self.dropout = layers.dropout(dropout, generator.seed)
        self.fc2 = layers.Linear(hidden_size, vocab_size, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embedding(x).reshape(len(x), -1)
        return self.fc2(self.dropout(jnp.tanh(self.bn(self.fc1(x)))))
