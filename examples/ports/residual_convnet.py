"""A small ResNet in PyTorch and in Flax: convolutions, BatchNorm, a strided block with a projection.

    jaxddp check examples/ports/residual_convnet.py

SGD uses Nesterov momentum and decays kernels only; the learning rate falls every few steps. Comments mark where the
two frameworks differ.
"""

from collections.abc import Iterable, Mapping

import jax
import numpy as np
import optax
import torch
from flax import nnx
from jax import numpy as jnp
from torch import nn
from torch.nn import functional as F

from jaxddp.nn.layers import BatchNorm

CHANNELS, WIDER, CLASSES = 8, 16, 5
HEIGHT, WIDTH = 10, 8  # not square, so that swapped axes show
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
DECAY_EVERY, DECAY_BY = 5, 0.7


# ---- PyTorch


class TorchBlock(nn.Module):
    """Two convolutions and a shortcut, which is a 1 x 1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class TorchNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(CHANNELS)
        self.block1 = TorchBlock(CHANNELS, CHANNELS, stride=1)
        self.block2 = TorchBlock(CHANNELS, WIDER, stride=2)
        self.fc = nn.Linear(WIDER, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = self.block2(self.block1(x))
        return self.fc(x.mean((2, 3)))


def torch_model() -> nn.Module:
    return TorchNet()


def torch_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def torch_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    kernels = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim == 1]
    groups = [{"params": kernels, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, nesterov=True)


def torch_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, DECAY_EVERY, DECAY_BY)


# ---- Flax


def conv(inputs: int, outputs: int, size: int, stride: int = 1, *, rngs: nnx.Rngs) -> nnx.Conv:
    """Build a convolution padded like torch's, by size // 2 on every side.

    Flax's default, "SAME", aims at an output of ceil(input / stride). At stride 2 it pads an even height by no row
    above and one row below, which shifts every pixel of the output.
    """
    padding = size // 2
    return nnx.Conv(inputs, outputs, (size, size), strides=stride, padding=padding, use_bias=False, rngs=rngs)


class FlaxBlock(nnx.Module):
    """Flax counterpart of `TorchBlock`; `names` maps the projection's two layers to torch's numbers."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs):
        # jaxddp's BatchNorm follows torch. Flax's momentum is 1 - torch's (torch's default 0.1 is Flax's 0.9, but
        # Flax's default is 0.99), and its running variance is biased, where torch's is unbiased.
        self.conv1 = conv(inputs, outputs, 3, stride, rngs=rngs)
        self.bn1 = BatchNorm(outputs)
        self.conv2 = conv(outputs, outputs, 3, rngs=rngs)
        self.bn2 = BatchNorm(outputs)
        self.is_projected = stride > 1 or inputs != outputs
        if self.is_projected:
            self.projection = conv(inputs, outputs, 1, stride, rngs=rngs)
            self.projection_bn = BatchNorm(outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return nnx.relu(y + (self.projection_bn(self.projection(x)) if self.is_projected else x))


class FlaxNet(nnx.Module):
    """Images (B, H, W, 3) to logits (B, CLASSES): channels come last in Flax."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = conv(3, CHANNELS, 3, rngs=rngs)
        self.bn = BatchNorm(CHANNELS)
        self.block1 = FlaxBlock(CHANNELS, CHANNELS, stride=1, rngs=rngs)
        self.block2 = FlaxBlock(CHANNELS, WIDER, stride=2, rngs=rngs)
        self.fc = nnx.Linear(WIDER, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.bn(self.conv(x)))
        x = self.block2(self.block1(x))
        # Average over height and width. Flattening instead would need a transpose to (B, C, H, W) first.
        return self.fc(x.mean((1, 2)))


def jax_model() -> nnx.Module:
    return FlaxNet(nnx.Rngs(0))


def jax_loss(model: FlaxNet, batch: Mapping[str, jax.Array]) -> jax.Array:
    logits = model(jnp.moveaxis(batch["image"], 1, -1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def step_decay(step: jax.Array) -> jax.Array:
    """Compute StepLR's rate. optax.exponential_decay(staircase=True) is equivalent, but computes in float32."""
    return LR * DECAY_BY ** (step // DECAY_EVERY)


# Decay comes first: torch's SGD adds weight_decay * p to the gradient, before the momentum.
jax_optimizer = optax.chain(
    optax.add_decayed_weights(WEIGHT_DECAY, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    optax.sgd(step_decay, MOMENTUM, nesterov=True),
)
names = {"block2.projection": "block2.shortcut.0", "block2.projection_bn": "block2.shortcut.1"}


# ---- Data


def batch(step: int, rank: int) -> dict[str, np.ndarray]:
    """Draw images with a nonzero mean, different on each rank; the label is the density of their stripes."""
    rng = np.random.default_rng((step, rank))
    label = rng.integers(0, CLASSES, 8)
    stripes = np.sin(np.outer(1 + label, np.arange(HEIGHT) / 2))
    image = rng.normal(0.5, 0.5, (8, 3, HEIGHT, WIDTH)) + stripes[:, None, :, None]
    return {"image": image, "label": label}
