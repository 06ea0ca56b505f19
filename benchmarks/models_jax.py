"""Modules of the benchmark in Flax, as a user writes them; `benchmarks.models_torch` has their twins."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from benchmarks.workloads import Workload
from jaxddp import layers, models
from jaxddp.data import datasets
from jaxddp.data.torch_rng import Generator
from jaxddp.losses import Batch, Losses, cross_entropy
from jaxddp.models.llama import LlamaForSequenceClassification
from jaxddp.models.llama_config import LlamaConfig

CLASSES = 10


def build(workload: Workload) -> nnx.Module:
    """Build the module of a workload; every call draws the same weights."""
    if workload.config is not None:
        return models.build(workload.config, datasets.load(workload.config))
    return _CLASSES[str(workload.model)](**workload.sizes)


def logits_of(model: Any, batch: Batch) -> jax.Array:
    """Compute the logits of a batch, whose other arrays than the labels and "valid" are the model's arguments."""
    return model(**{name: array for name, array in batch.items() if name not in ("y", "valid")})


def loss_fn(model: Any, batch: Batch) -> Losses:
    """Compute the cross entropy and the accuracy of each label, as jaxddp.train does."""
    return cross_entropy(lambda logits: logits, {"x": logits_of(model, batch), "y": batch["y"]})


class TwoConvs(nnx.Module):
    """Two 3x3 convolutions, each with ReLU and 2x2 max-pooling, and a linear layer, on (B, H, W, C)."""

    def __init__(self, size: int, inputs: int, channels: Sequence[int]):
        rngs = nnx.Rngs(0)
        self.conv1 = nnx.Conv(inputs, channels[0], (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(channels[0], channels[1], (3, 3), rngs=rngs)
        self.fc = nnx.Linear(channels[1] * (size // 4) ** 2, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = layers.max_pool(nnx.relu(self.conv1(x)), 2)
        x = layers.max_pool(nnx.relu(self.conv2(x)), 2)
        return self.fc(x.reshape(len(x), -1))


def _conv(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    padding = size // 2
    return nnx.Conv(inputs, outputs, (size, size), strides=stride, padding=padding, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    """Two convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
        self.conv1 = _conv(inputs, outputs, 3, stride, rngs)
        self.bn1 = layers.BatchNorm(outputs)
        self.conv2 = _conv(outputs, outputs, 3, 1, rngs)
        self.bn2 = layers.BatchNorm(outputs)
        self.is_projected = stride > 1 or inputs != outputs
        if self.is_projected:
            self.projection = _conv(inputs, outputs, 1, stride, rngs)
            self.projection_bn = layers.BatchNorm(outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return nnx.relu(y + (self.projection_bn(self.projection(x)) if self.is_projected else x))


class ResidualNet(nnx.Module):
    """A convolution, a block per number of channels, of which all but the first halve the image, and a linear layer."""

    def __init__(self, size: int, inputs: int, channels: Sequence[int]):
        rngs = nnx.Rngs(0)
        self.conv = _conv(inputs, channels[0], 3, 1, rngs)
        self.bn = layers.BatchNorm(channels[0])
        before = [channels[0], *channels[:-1]]
        sizes = zip(before, channels, [1] + [2] * (len(channels) - 1), strict=True)
        self.blocks = nnx.List([Block(*of_block, rngs) for of_block in sizes])
        self.fc = nnx.Linear(channels[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(axis=(1, 2)))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout after each."""

    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.fc1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.fc2 = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self._dropped(self._attention(self.norm1(x)))
        return x + self._dropped(self.fc2(nnx.gelu(self.fc1(self.norm2(x)))))

    def _attention(self, x: jax.Array) -> jax.Array:
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.qkv(x), 3, axis=-1))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))

    def _dropped(self, x: jax.Array) -> jax.Array:
        return x if self.dropout is None else self.dropout(x)


class Decoder(nnx.Module):
    """Tokens (B, T) to logits (B, T, vocabulary) of the next token."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position = nnx.Embed(length, width, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(width, heads, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x) + self.position(jnp.arange(x.shape[1]))[None]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ManyLeaves(nnx.Module):
    """A linear layer on the sum of many small parameters' effects, to see what each leaf costs."""

    def __init__(self, size: int, inputs: int, leaves: int):
        rngs = nnx.Rngs(0)
        self.offsets = nnx.List([nnx.Param(jnp.full(inputs, 1 / leaves)) for _ in range(leaves - 2)])
        self.fc = nnx.Linear(inputs * size**2, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        return self.fc(x + sum(jnp.tanh(offset[None] * x) for offset in self.offsets))


def _llama(**sizes: Any) -> nnx.Module:
    return LlamaForSequenceClassification(LlamaConfig(**sizes), generator=Generator(0))


_CLASSES: dict[str, Callable[..., nnx.Module]] = {
    "two_convs": TwoConvs,
    "residual": ResidualNet,
    "decoder": Decoder,
    "llama": _llama,
    "many_leaves": ManyLeaves,
}
