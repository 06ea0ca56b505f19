"""Variational autoencoder (Kingma & Welling 2013) of handwritten digits, in Flax and in PyTorch.

    jaxddp train examples/vae.py --output runs/jax        # 4 s
    python -m torch_ref.train examples/vae.py --output runs/torch   # 5 s

In 20 epochs the test's negative lower bound falls from 30.46 to 24.83 in both (two CPU cores, 2026-11-25). With
`--dtype float64` their losses of each epoch are equal to 1e-15, and `jaxddp check` says equal. On the 8
GPUs of a node, or the same after `torchrun --nproc-per-node 8 -m torch_ref.train`:

    jaxddp train examples/vae.py --width 1024 --code 32 --global-batch-size 512 --epochs 200 --output runs/vae
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp import TrainConfig, layers
from jaxddp.data import digits
from jaxddp.data.torch_rng import Generator

epochs, global_batch_size, optimizer, lr = 20, 64, "adam", 2e-3


@dataclass
class Options:
    width: int = 128
    """Width of the hidden layers."""
    code: int = 8
    """Number of latent variables."""


IMAGES = digits()["x"]


def augment(example: dict[str, Any], rng: np.random.Generator, options: Options) -> dict[str, Any]:
    # Noise in the data is the same in both frameworks, on any number of devices and after a resume. A model may draw
    # its own, by nnx.Rngs and torch.randn: each trainer then has other losses, and the check serves both the same.
    return {**example, "noise": rng.standard_normal(options.code, np.float32)}


def train_data() -> dict[str, np.ndarray]:
    return {"x": IMAGES[:1437]}


def test_data(options: Options) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [augment({"x": image}, rng, options) for image in IMAGES[1437:]]  # the same noise in each test


class TorchVAE(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, options.width), nn.Linear(options.width, 2 * options.code)
        self.fc3, self.fc4 = nn.Linear(options.code, options.width), nn.Linear(options.width, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.fc2(F.relu(self.fc1(x))).chunk(2, dim=1)
        code = mean + torch.exp(log_variance / 2) * noise
        return self.fc4(F.relu(self.fc3(code))), mean, log_variance


def torch_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits, mean, log_variance = model(batch["x"], batch["noise"])
    error = F.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none").sum(1)
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
    return error + divergence, {"divergence": divergence}


class VAE(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        rng = Generator(config.seed)  # torch's initial weights
        self.fc1 = layers.Linear(64, options.width, generator=rng)
        self.fc2 = layers.Linear(options.width, 2 * options.code, generator=rng)
        self.fc3 = layers.Linear(options.code, options.width, generator=rng)
        self.fc4 = layers.Linear(options.width, 64, generator=rng)

    def __call__(self, x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean, log_variance = jnp.split(self.fc2(nnx.relu(self.fc1(x))), 2, axis=1)
        code = mean + jnp.exp(log_variance / 2) * noise
        return self.fc4(nnx.relu(self.fc3(code))), mean, log_variance


def jax_loss(model: VAE, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits, mean, log_variance = model(batch["x"], batch["noise"])
    error = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(1)
    divergence = 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum(1)
    return error + divergence, {"divergence": divergence}


torch_model, jax_model = TorchVAE, VAE
