"""Models in torch and in jax that compute the same, unless a fault is planted in the jax one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from jax import lax
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.nn.layers import BatchNorm
from tests.support.layers import Conv, Embed, Linear

F64: dict[str, Any] = {"param_dtype": np.float64}
VOCABULARY, WIDTH, HEADS, CLASSES = 11, 8, 2, 5


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.reshape(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.out(attended)
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList([TorchBlock(), TorchBlock()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def torch_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the smoothed cross-entropy over labels other than -100, and a penalty on the logits' norm."""
    logits, labels = model(batch["x"]), batch["y"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), labels, label_smoothing=0.1, reduction="sum")
    count = (labels != -100).sum()
    penalty = torch.logsumexp(logits, -1).square().mean()
    return {"loss": loss + 0.01 * penalty * count, "count": count}


class Planted:
    """Faults by name, with their values, which jax modules do not count as data."""

    def __init__(self, **faults: Any):
        self._faults = faults

    def __contains__(self, fault: str) -> bool:
        return fault in self._faults

    def get(self, fault: str, default: Any = None) -> Any:
        return self._faults.get(fault, default)


class FlaxBlock(nnx.Module):
    def __init__(self, faults: Planted, number: int):
        self.faults, self.number = faults, number
        eps = faults.get("eps", 1e-5)
        self.norm1 = layer_norm(faults.get(f"eps{number}", eps))
        self.norm2 = layer_norm(eps)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        faults, (b, t, _) = self.faults, x.shape
        q, k, v = (
            jnp.swapaxes(y.reshape(b, t, HEADS, -1), 1, 2)
            for y in jnp.split(self._dense(self.qkv, self.norm1(x)), 3, -1)
        )
        if "head_layout" in faults:  # the axis is read as (size of a head, heads)
            v = jnp.swapaxes(jnp.swapaxes(v, 1, 2).reshape(b, t, -1, HEADS), 2, 3).swapaxes(1, 2)
        scores = self._matmul(q, jnp.swapaxes(k, -1, -2)) / np.sqrt(WIDTH / HEADS) / faults.get("temperature", 1.0)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool))[None, None], scores, -jnp.inf)
        attended = self._matmul(jax.nn.softmax(scores, -1), v)
        if "not_moved_back" not in faults:
            attended = jnp.swapaxes(attended, 1, 2)
        attended = attended.reshape(b, t, WIDTH)
        if "stop_gradient" in faults and self.number == 0:
            attended = lax.stop_gradient(attended)
        attended = self._dense(self.out, attended)
        x = attended if "residual" in faults and self.number else x + attended
        hidden = self._dense(self.fc1, self.norm2(x))
        tanh = faults.get("gelu") in ("everywhere", self.number)
        hidden = jax.nn.relu(hidden) if "relu" in faults else jax.nn.gelu(hidden, approximate=tanh)
        return x + self._dense(self.fc2, hidden) * faults.get("branch", 1.0)

    def _dense(self, layer: nnx.Linear, x: jax.Array) -> jax.Array:
        assert layer.bias is not None
        return self._matmul(x, layer.kernel[...]) + layer.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))

    def _matmul(self, a: jax.Array, b: jax.Array) -> jax.Array:
        rounding = self.faults.get("rounding", lambda x: x)
        return jnp.matmul(rounding(a), rounding(b)[(None,) * (a.ndim - b.ndim)])


class FlaxTransformer(nnx.Module):
    def __init__(self, faults: Planted):
        self.faults = faults
        self.embed = Embed(VOCABULARY, WIDTH, dtype=np.float64, rngs=nnx.Rngs(0), **F64)
        self.blocks = nnx.List([FlaxBlock(faults, number) for number in range(2)])
        self.norm = layer_norm(faults.get("eps", 1e-5))
        if "untied" in faults:
            self.head = linear(WIDTH, VOCABULARY, use_bias=False)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        if "padding_idx" not in self.faults:  # as in torch, the row is read and gets no gradient
            x = jnp.where((ids == 0)[..., None], lax.stop_gradient(x), x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        rounding = self.faults.get("rounding", lambda x: x)
        head = self.head.kernel[...] if "untied" in self.faults else self.embed.embedding[...].T
        return jnp.matmul(rounding(x), rounding(head)[None])


def cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0) -> jax.Array:
    log_p = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    return -(1 - smoothing) * right - smoothing * log_p.mean(-1)


def flax_token_loss(faults: Planted) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    def loss(model: FlaxTransformer, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits, labels = model(batch["x"]), batch["y"]
        valid = labels != -100
        losses = cross_entropy(logits, jnp.where(valid, labels, 0), faults.get("smoothing", 0.1))
        count = labels.size if "ignored_count" in faults else valid.sum()
        penalty = jnp.square(jax.nn.logsumexp(logits, -1)).mean() * faults.get("penalty", 1.0)
        return jnp.where(valid, losses, 0.0).sum() + 0.01 * penalty * valid.sum(), count

    return loss


class TorchConvnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.fc = nn.Linear(4 * 3 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.bn1(self.conv1(x)))
        x = self.pool(torch.tanh(self.bn2(self.conv2(x))))
        return self.fc(x.flatten(1))


def torch_class_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss as a mean with count 1."""
    return {"loss": F.cross_entropy(model(batch["x"]), batch["y"]), "count": torch.tensor(1.0)}


class FlaxConvnet(nnx.Module):
    def __init__(self, faults: Planted):
        self.faults = faults
        padding = "SAME" if "same" in faults else ((1, 1), (1, 1))
        self.conv1 = Conv(2, 4, (3, 3), strides=2, padding=padding, rngs=nnx.Rngs(0), **F64)
        self.conv2 = Conv(4, 4, (3, 3), padding=1, rngs=nnx.Rngs(0), **F64)
        self.bn1, self.bn2 = (self._norm(size) for size in (4, 4))
        self.fc = linear(4 * 3 * 2, CLASSES)

    def _norm(self, size: int) -> nnx.Module:
        faults = self.faults
        options = {"eps": faults.get("eps", 1e-5), "momentum": faults.get("momentum", 0.1), "sync": "sync" in faults}
        if "biased" not in faults:
            return BatchNorm(size, **options)
        return nnx.BatchNorm(
            *(size,),
            momentum=1 - options["momentum"],
            epsilon=options["eps"],
            use_fast_variance=False,
            axis_name="replica" if options["sync"] else None,
            rngs=nnx.Rngs(0),
            **F64,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.bn1(self.conv1(jnp.moveaxis(x, 1, -1))))
        kernel = self.conv2.kernel[...]
        if "kernel" in self.faults:
            self.conv2.kernel[...] = jnp.swapaxes(kernel, 0, 1)
        x = jnp.tanh(self.bn2(self.conv2(x)))
        self.conv2.kernel[...] = kernel
        padding = "SAME" if "same_pool" in self.faults else ((1, 1), (1, 1))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=padding)
        x = x if "flatten" in self.faults else jnp.moveaxis(x, -1, 1)
        return self.fc(x.reshape(len(x), -1))


def flax_class_loss(faults: Planted) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    def loss(model: FlaxConvnet, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(model(batch["x"]), batch["y"]).mean(), jnp.ones(())

    return loss


class TorchRMSNorm(nn.Module):  # hand-written, as in many models
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class TorchMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.group = nn.Linear(CLASSES, WIDTH), TorchRMSNorm(), nn.GroupNorm(2, WIDTH)
        self.fc2 = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.fc2(torch.tanh(self.group(self.norm(self.fc1(x))))), -1)


def torch_mlp_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean negative log-likelihood; labels of 0 are ignored."""
    return {"loss": F.nll_loss(model(batch["x"]), batch["y"], ignore_index=0), "count": torch.tensor(1.0)}


class FlaxMLP(nnx.Module):
    def __init__(self, faults: Planted):
        options: dict[str, Any] = {"use_fast_variance": False, "rngs": nnx.Rngs(0), **F64}
        self.fc1, self.fc2 = linear(CLASSES, WIDTH), linear(WIDTH, CLASSES)
        self.norm = nnx.RMSNorm(WIDTH, epsilon=faults.get("rms_eps", 1e-6), **options)
        self.group = nnx.GroupNorm(WIDTH, 2, epsilon=faults.get("group_eps", 1e-5), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jnp.tanh(self.group(self.norm(self.fc1(x)))))


def flax_mlp_loss(faults: Planted) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    def loss(model: FlaxMLP, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        labels = batch["y"]
        valid = jnp.ones(labels.shape, bool) if "not_ignored" in faults else labels != 0
        losses = jnp.where(valid, cross_entropy(model(batch["x"]), labels, faults.get("smoothing", 0.0)), 0.0)
        return losses.sum() / (labels.size if "ignored_count" in faults else valid.sum()), jnp.ones(())

    return loss


def linear(inputs: int, outputs: int, **options: Any) -> nnx.Linear:
    return Linear(inputs, outputs, rngs=nnx.Rngs(0), **options, **F64)


def layer_norm(eps: float) -> nnx.LayerNorm:
    return nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=nnx.Rngs(0), **F64)


@dataclass(frozen=True)
class Twins:
    """A model in both frameworks, and the source of its batches."""

    torch_model: Callable[[], nn.Module]
    torch_loss: Callable[[Any, Any], dict[str, Tensor]]
    jax_model: Callable[[Planted], nnx.Module]
    jax_loss: Callable[[Planted], Callable[[Any, Any], tuple[jax.Array, jax.Array]]]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]


def tokens(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw ids and labels; a random share of the labels is ignored."""
    ids = random.integers(0, VOCABULARY, (3, 5))
    ignored = random.random((3, 5)) < random.uniform(0.0, 0.7)
    ignored[0, 0] = False
    return {"x": ids, "y": np.where(ignored, -100, (ids * 3 + 1) % VOCABULARY)}


def images(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": random.normal(0.5, 1.0, (4, 2, 12, 8)), "y": random.integers(0, CLASSES, 4)}


def vectors(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": random.normal(size=(9, CLASSES)), "y": random.integers(0, CLASSES, 9)}


TRANSFORMER = Twins(TorchTransformer, torch_token_loss, FlaxTransformer, flax_token_loss, tokens)
CONVNET = Twins(TorchConvnet, torch_class_loss, FlaxConvnet, flax_class_loss, images)
MLP = Twins(TorchMLP, torch_mlp_loss, FlaxMLP, flax_mlp_loss, vectors)
