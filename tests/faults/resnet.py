"""A narrow residual network with ImageNet's stem and three strided stages, in torch and in jax.

The jax half has an argument for each choice that can be wrong; the defaults are correct.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.nn.layers import BatchNorm
from tests.support.layers import Conv, Linear

HEIGHT, WIDTH, COLOURS = 32, 64, 2  # even in every layer with stride 2, so that 'SAME' pads only behind
STEM, STAGES = 3, (3, 4, 5, 6)  # channels
CLASSES = 5
PADDED = ("conv1", "maxpool", "layer2", "layer3", "layer4")  # layers that 'SAME' pads in another way


class TorchBlock(nn.Module):
    """Two convolutions with BatchNorm, and a projection where the shape changes."""

    def __init__(self, channels: int, features: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, features, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(features)
        self.downsample = None
        if stride > 1:
            projection = nn.Conv2d(channels, features, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(features))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(nn.Module):
    """Stem, four stages of one block, and a head, under torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(COLOURS, STEM, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        for number, features in enumerate(STAGES, start=1):
            block = TorchBlock((STEM, *STAGES)[number - 1], features, 1 if number == 1 else 2)
            self.add_module(f"layer{number}", nn.Sequential(block))
        self.fc = nn.Linear(STAGES[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x.permute(0, 3, 1, 2)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def torch_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean cross entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


class FlaxBlock(nnx.Module):
    """Twin of `TorchBlock`."""

    def __init__(self, channels: int, features: int, stride: int, padding: Any, norm: Callable[..., Any]):
        bare: dict[str, Any] = {"use_bias": False, "rngs": nnx.Rngs(0)}
        self.conv1 = Conv(channels, features, (3, 3), strides=stride, padding=padding, **bare)
        self.bn1 = norm(features)
        self.conv2 = Conv(features, features, (3, 3), padding=1, **bare)
        self.bn2 = norm(features)
        projection = [Conv(channels, features, (1, 1), strides=stride, **bare), norm(features)]
        self.downsample = nnx.List(projection if stride > 1 else [])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.bn2(self.conv2(jax.nn.relu(self.bn1(self.conv1(x)))))
        for layer in self.downsample:
            x = layer(x)
        return jax.nn.relu(y + x)


class FlaxResNet(nnx.Module):
    """Twin of `TorchResNet`.

    Args:
        same: layers of `PADDED` that are padded 'SAME'.
        norm: constructor of the BatchNorms.
    """

    def __init__(self, same: Collection[str] = (), norm: Callable[..., Any] = BatchNorm):
        rngs = nnx.Rngs(0)
        stem = "SAME" if "conv1" in same else 3
        self.conv1 = Conv(COLOURS, STEM, (7, 7), strides=2, padding=stem, use_bias=False, rngs=rngs)
        self.bn1 = norm(STEM)
        self.padding = "SAME" if "maxpool" in same else ((1, 1), (1, 1))
        for number, features in enumerate(STAGES, start=1):
            padding = "SAME" if f"layer{number}" in same else 1
            channels, stride = (STEM, *STAGES)[number - 1], 1 if number == 1 else 2
            setattr(self, f"layer{number}", nnx.List([FlaxBlock(channels, features, stride, padding, norm)]))
        self.fc = Linear(STAGES[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(jax.nn.relu(self.bn1(self.conv1(x))), (3, 3), (2, 2), self.padding)
        for number in range(1, len(STAGES) + 1):
            (block,) = getattr(self, f"layer{number}")
            x = block(x)
        return self.fc(x.mean((1, 2)))


def jax_loss(model: FlaxResNet, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Compute the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()
