"""The classifier of `torch_fine_tune` in flax.nnx: layers compute in bfloat16, parameters are float32."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jax import numpy as jnp

DTYPE = jnp.bfloat16
Linear = partial(nnx.Linear, dtype=DTYPE)
Embed = partial(nnx.Embed, dtype=DTYPE)
LayerNorm = partial(nnx.LayerNorm, epsilon=1e-12, dtype=jnp.float32, use_fast_variance=False)


@dataclass(frozen=True)
class Config:
    vocab: int = 30522
    width: int = 256
    depth: int = 4
    heads: int = 4
    mlp_width: int = 1024
    dropout: float = 0.1
    positions: int = 512
    labels: int = 2


class Embeddings(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.words = Embed(config.vocab, config.width, rngs=rngs)
        self.positions = Embed(config.positions, config.width, rngs=rngs)
        self.segments = Embed(2, config.width, rngs=rngs)
        self.norm = LayerNorm(config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, ids: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.words(ids) + self.segments(segments) + self.positions(jnp.arange(ids.shape[1])[None])
        return self.dropout(self.norm(x))


class Layer(nnx.Module):
    """Attention and an MLP, each with a norm behind the sum."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(config.heads, config.width, decode=False, dtype=DTYPE, rngs=rngs)
        self.norm1 = LayerNorm(config.width, rngs=rngs)
        self.up = Linear(config.width, config.mlp_width, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, rngs=rngs)
        self.norm2 = LayerNorm(config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm1(x + self.dropout(self.attention(x, mask=mask)))
        y = self.down(jax.nn.gelu(self.up(x), approximate=False))
        return self.norm2(x + self.dropout(y))


class Classifier(nnx.Module):
    """Words (B, T) with their mask and segments, to logits (B, labels)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.depth)])
        self.pooler = Linear(config.width, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = Linear(config.width, config.labels, rngs=rngs)

    def __call__(self, ids: jax.Array, mask: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.embeddings(ids, segments)
        mask = nnx.make_attention_mask(jnp.ones_like(mask), mask, dtype=bool)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.dropout(jnp.tanh(self.pooler(x[:, 0]))))


Choice = Callable[[Any, jax.Array], Any]  # (path, parameter) -> a choice


def is_kernel(path: Any, _: jax.Array) -> bool:
    return "kernel" in jax.tree_util.keystr(path)


def part_of(path: Any, _: jax.Array) -> str:
    return "frozen" if "embeddings" in jax.tree_util.keystr(path) else "trained"


def make_optimizer(
    learning_rate: float, steps: int, weight_decay: float, decays: Choice = is_kernel
) -> optax.GradientTransformation:
    """Build AdamW whose rate falls in a line; the embeddings stay as they are, and biases and norms do not decay."""
    by_path = jax.tree_util.tree_map_with_path
    schedule = optax.linear_schedule(learning_rate, 0.0, steps)
    adamw = optax.adamw(schedule, weight_decay=weight_decay, mask=lambda params: by_path(decays, params))
    return optax.multi_transform(
        {"trained": adamw, "frozen": optax.set_to_zero()}, lambda params: by_path(part_of, params)
    )
