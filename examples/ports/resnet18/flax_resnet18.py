"""ResNet-18 in Flax Linen, written like flax/examples/imagenet; comments mark what torch defines otherwise."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp

ModuleDef = Callable[..., Any]


class TorchBatchNorm(nn.Module):
    """BatchNorm with torch's running variance, the unbiased one; nn.BatchNorm's is biased."""

    use_running_average: bool
    momentum: float = 0.9  # 1 - torch's
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features, axes = x.shape[-1], tuple(range(x.ndim - 1))
        scale = self.param("scale", nn.initializers.ones, (features,))
        bias = self.param("bias", nn.initializers.zeros, (features,))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (features,))
        running_var = self.variable("batch_stats", "var", jnp.ones, (features,))
        if self.use_running_average:
            mean, var = running_mean.value, running_var.value
        else:
            mean, var = x.mean(axes), x.var(axes)
            if not self.is_initializing():
                count = x.size // features
                running_mean.value = self._moved(running_mean.value, mean)
                running_var.value = self._moved(running_var.value, var * count / (count - 1))
        return jax.nn.standardize(x, mean=mean, variance=var, epsilon=self.epsilon) * scale + bias

    def _moved(self, running: jax.Array, batch: jax.Array) -> jax.Array:
        return self.momentum * running + (1 - self.momentum) * batch


def torch_conv(features: int, kernel_size: Sequence[int], strides: int = 1) -> nn.Conv:
    """Build a convolution padded on all sides by half its size; nn.Conv's default is "SAME"."""
    padding = [(size // 2, size // 2) for size in kernel_size]
    return nn.Conv(features, kernel_size, strides, padding=padding, use_bias=False)


class ResNetBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    filters: int
    conv: ModuleDef
    norm: ModuleDef
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        residual = x
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.norm()(self.conv(self.filters, (3, 3))(y))
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides)(residual)
            residual = self.norm()(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    """Images (B, H, W, 3) to logits (B, num_classes)."""

    stage_sizes: Sequence[int]
    num_classes: int
    conv: ModuleDef = torch_conv

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        norm = partial(TorchBatchNorm, use_running_average=not train)
        x = nn.relu(norm()(torch_conv(64, (7, 7), strides=2)(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1), (1, 1)])
        for i, block_count in enumerate(self.stage_sizes):
            for j in range(block_count):
                strides = 2 if i > 0 and j == 0 else 1
                x = ResNetBlock(64 * 2**i, self.conv, norm, strides)(x)
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


ResNet18 = partial(ResNet, stage_sizes=[2, 2, 2, 2])
