"""A small residual convolutional network."""

from collections.abc import Sequence

import jax
from flax import nnx

from jaxddp.data.torch_rng import Generator
from jaxddp.nn import layers
from jaxddp.nn.pooling import max_pool


class Block(nnx.Module):
    """Residual block relu(x + bn2(conv2(relu(bn1(conv1(x)))))), on (B, H, W, C)."""

    def __init__(self, channels: int, *, sync_batch_norm: bool, generator: Generator):
        self.conv1 = layers.Conv(channels, channels, (3, 3), padding=1, bias=False, generator=generator)
        self.bn1 = layers.BatchNorm(channels, sync=sync_batch_norm)
        self.conv2 = layers.Conv(channels, channels, (3, 3), padding=1, bias=False, generator=generator)
        self.bn2 = layers.BatchNorm(channels, sync=sync_batch_norm)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.bn1(self.conv1(x)))
        return jax.nn.relu(x + self.bn2(self.conv2(y)))


class Stage(nnx.Module):
    """A 3x3 convolution, BatchNorm, ReLU, and a residual block."""

    def __init__(self, in_channels: int, channels: int, *, sync_batch_norm: bool, generator: Generator):
        self.conv = layers.Conv(in_channels, channels, (3, 3), padding=1, bias=False, generator=generator)
        self.bn = layers.BatchNorm(channels, sync=sync_batch_norm)
        self.block = Block(channels, sync_batch_norm=sync_batch_norm, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.block(jax.nn.relu(self.bn(self.conv(x))))


class ConvNet(nnx.Module):
    """Stages with 2x2 max-pooling between them, the mean over the image, (dropout,) and a linear layer.

    For x (B, H, W) or (B, H, W, in_channels).

    Args:
        channels: number of channels of each stage.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        num_classes: int,
        *,
        dropout: float = 0.0,
        sync_batch_norm: bool = False,
        generator: Generator,
    ):
        before = [in_channels, *channels[:-1]]
        self.stages = nnx.List(
            [
                Stage(a, b, sync_batch_norm=sync_batch_norm, generator=generator)
                for a, b in zip(before, channels, strict=True)
            ]
        )
        self.dropout = layers.dropout(dropout, generator.seed)
        self.fc = layers.Linear(channels[-1], num_classes, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:3], -1)
        for number, stage in enumerate(self.stages):
            x = stage(max_pool(x, 2) if number else x)
        return self.fc(self.dropout(x.mean(axis=(1, 2))))
