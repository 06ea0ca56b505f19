"""Denoising diffusion (Ho et al. 2020) of handwritten digits: a U-Net that predicts noise, in Flax and in PyTorch.

    jaxddp train examples/diffusion.py --output runs/jax        # 13 s, half of it compiles
    python -m torch_ref.train examples/diffusion.py --output runs/torch   # 6 s

Both end with train loss 0.129206, test loss 0.133121, and 0.128678 with averaged weights (two CPU cores, 2026-11-25).
With `--dtype float64` their losses of each epoch are equal to 1e-15, and `jaxddp check` says equal. On the
8 GPUs of a node, or the same after `torchrun --nproc-per-node 8 -m torch_ref.train`:

    jaxddp train examples/diffusion.py --width 128 --global-batch-size 512 --epochs 2000 --lr 2e-4 \
        --ema-decay 0.9999 --amp bf16 --output runs/diffusion
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp import TrainConfig, layers
from jaxddp.data import digits
from jaxddp.data.torch_rng import Generator

epochs, global_batch_size, optimizer, lr, ema_decay = 12, 64, "adam", 2e-3, 0.95
IMAGES = digits()["x"].reshape(-1, 8, 8) * 2 - 1
KEPT = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))  # share of the image's variance after each of 1,000 steps


@dataclass
class Options:
    width: int = 16
    """Channels of the first layer; a multiple of 8."""


def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw a time and mix the image with noise; the same numbers in both frameworks, as a run's data are."""
    time, noise = rng.integers(0, len(KEPT)), rng.standard_normal((8, 8))
    x = np.sqrt(KEPT[time]) * example["x"] + np.sqrt(1 - KEPT[time]) * noise
    return {"x": x.astype(np.float32), "time": time, "noise": noise.astype(np.float32)}


def train_data() -> dict[str, np.ndarray]:
    return {"x": IMAGES[:1437]}


def test_data() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [augment({"x": image}, rng) for image in IMAGES[1437:]]  # the same noise in each test


def waves(width: int) -> np.ndarray:
    """Return the frequencies (1, width / 2) of the sines and cosines of a time."""
    return np.exp(-np.log(10_000) * np.arange(width // 2) / (width // 2)).astype("f4").reshape(1, -1)


def loss(model: Any, batch: dict[str, Any]) -> Any:
    return ((model(batch["x"], batch["time"]) - batch["noise"]) ** 2).mean((1, 2))


class TorchBlock(nn.Module):
    def __init__(self, channels: int, out: int, width: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time, self.norm2 = nn.Linear(width, out), nn.GroupNorm(8, out)
        self.conv2, self.skip = nn.Conv2d(out, out, 3, padding=1), nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class TorchUNet(nn.Module):
    waves: Tensor

    def __init__(self, options: Options):
        super().__init__()
        width = options.width
        self.time, self.first = nn.Linear(width, width), nn.Conv2d(1, width, 3, padding=1)
        self.down, self.halve = TorchBlock(width, width, width), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle, self.up = TorchBlock(width, 2 * width, width), TorchBlock(3 * width, width, width)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 1, 3, padding=1)
        self.register_buffer("waves", torch.tensor(waves(width)), persistent=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.waves
        t = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)))
        fine = self.down(self.first(x[:, None]), t)
        coarse = self.middle(self.halve(fine), t)
        y = self.up(torch.cat([fine, coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)], 1), t)
        return self.last(F.silu(self.norm(y)))[:, 0]


def norm(channels: int) -> nnx.GroupNorm:  # torch's
    return nnx.GroupNorm(channels, 8, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self, channels: int, out: int, width: int, rng: Generator):
        conv = partial(layers.Conv, padding=1, generator=rng)
        self.norm1, self.conv1 = norm(channels), conv(channels, out, (3, 3))
        self.time, self.norm2 = layers.Linear(width, out, generator=rng), norm(out)
        self.conv2, self.skip = conv(out, out, (3, 3)), layers.Conv(channels, out, (1, 1), generator=rng)

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = self.conv1(nnx.silu(self.norm1(x))) + self.time(time)[:, None, None]
        return self.skip(x) + self.conv2(nnx.silu(self.norm2(y)))


class UNet(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        width, rng = options.width, Generator(config.seed)  # torch's initial weights
        conv = partial(layers.Conv, padding=1, generator=rng)
        self.time, self.first = layers.Linear(width, width, generator=rng), conv(1, width, (3, 3))
        self.down, self.halve = Block(width, width, width, rng), conv(width, width, (3, 3), stride=2)
        self.middle, self.up = Block(width, 2 * width, width, rng), Block(3 * width, width, width, rng)
        self.norm, self.last = norm(width), conv(width, 1, (3, 3))
        self.waves = waves(width)

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time[:, None] * self.waves.astype(x.dtype)
        t = nnx.silu(self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)))
        fine = self.down(self.first(x[..., None]), t)
        coarse = self.middle(self.halve(fine), t)
        y = self.up(jnp.concatenate([fine, coarse.repeat(2, 1).repeat(2, 2)], -1), t)
        return self.last(nnx.silu(self.norm(y)))[..., 0]


torch_loss = jax_loss = loss
torch_model, jax_model = TorchUNet, UNet
