"""Modules of the benchmark in torch, as a user writes them: twins of `benchmarks.models_jax`, with channels first."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads import Arrays, Workload
from jaxddp.data import datasets
from torch_ref import models

CLASSES = 10


def build(workload: Workload, weights: Mapping[str, np.ndarray]) -> nn.Module:
    """Build the module of a workload with the weights of its twin, by torch's names and in torch's layout."""
    if workload.config is not None:
        module = models.build(workload.config, datasets.load(workload.config))
    else:
        module = _CLASSES[str(workload.model)](**workload.sizes)
    loaded = {name: torch.tensor(array) for name, array in weights.items()}
    if isinstance(module, TwoConvs):  # the twin's linear layer sees the channels last
        channels = module.conv2.out_channels
        side = int((module.fc.in_features // channels) ** 0.5)
        last = loaded["fc.weight"].reshape(CLASSES, side, side, channels)
        loaded["fc.weight"] = last.permute(0, 3, 1, 2).flatten(1)
    module.load_state_dict(loaded)
    return Logits(module) if workload.model == "llama" else module


def tensors(workload: Workload, arrays: Arrays) -> dict[str, Tensor]:
    """Convert a training set to tensors: integers to int64, a module's images to channels first."""
    if workload.model in ("two_convs", "residual"):
        arrays = {**arrays, "x": np.ascontiguousarray(np.moveaxis(arrays["x"], -1, 1))}
    converted = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: x if x.is_floating_point() else x.long() for name, x in converted.items()}


class TwoConvs(nn.Module):
    """Two 3x3 convolutions, each with ReLU and 2x2 max-pooling, and a linear layer."""

    def __init__(self, size: int, inputs: int, channels: Sequence[int]):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels[0], 3, padding=1)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 3, padding=1)
        self.fc = nn.Linear(channels[1] * (size // 4) ** 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc(x.flatten(1))


def _conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs, 3, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.is_projected = stride > 1 or inputs != outputs
        if self.is_projected:
            self.projection = _conv(inputs, outputs, 1, stride)
            self.projection_bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (self.projection_bn(self.projection(x)) if self.is_projected else x)).relu()


class ResidualNet(nn.Module):
    """A convolution, a block per number of channels, of which all but the first halve the image, and a linear layer."""

    def __init__(self, size: int, inputs: int, channels: Sequence[int]):
        super().__init__()
        self.conv = _conv(inputs, channels[0], 3, 1)
        self.bn = nn.BatchNorm2d(channels[0])
        before = [channels[0], *channels[:-1]]
        sizes = zip(before, channels, [1] + [2] * (len(channels) - 1), strict=True)
        self.blocks = nn.Sequential(*(Block(*of_block) for of_block in sizes))
        self.fc = nn.Linear(channels[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.bn(self.conv(x)).relu())
        return self.fc(x.mean(dim=(2, 3)))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout after each."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attention(self.norm1(x)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh")))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, vocabulary) of the next token."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(DecoderLayer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(x)))


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).logits


def _llama(**sizes: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")  # takes seconds, which other workloads do without
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    config = transformers.LlamaConfig(rope_parameters=rope, rms_norm_eps=1e-5, num_labels=2, **sizes)
    return transformers.LlamaForSequenceClassification(config)


_CLASSES: dict[str, Callable[..., nn.Module]] = {
    "two_convs": TwoConvs,
    "residual": ResidualNet,
    "decoder": Decoder,
    "llama": _llama,
}
