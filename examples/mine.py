"""Your own model and data in one file: trained in JAX, mirrored in PyTorch, and checked against it."""

from dataclasses import dataclass

import optax
import torch
from flax import nnx
from torch.nn import functional as F

from jaxddp.data import digits

epochs, global_batch_size, optimizer, lr = 5, 32, "adamw", 1e-3  # flags of the trainer, with this file's values


@dataclass
class Options:
    width: int = 64
    """Width of the hidden layer."""


def train_data():
    return {name: array[:1437] for name, array in digits().items()}


def test_data():
    return {name: array[1437:] for name, array in digits().items()}


def jax_model(options, config):
    rngs = nnx.Rngs(config.seed)
    return nnx.Sequential(nnx.Linear(64, options.width, rngs=rngs), nnx.relu, nnx.Linear(options.width, 10, rngs=rngs))


def jax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def torch_model(options):
    return torch.nn.Sequential(torch.nn.Linear(64, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 10))


def torch_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


names = {"layers": ""}  # flax.nnx's layers.0.kernel is torch's 0.weight


def predict(model, batch):
    return model(batch["x"])


def metrics(logits, batch):
    return {"accuracy": logits.argmax(-1) == batch["y"]}
