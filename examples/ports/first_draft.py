"""A training loop and a first draft of its translation, in which `jaxddp check` reports two mistakes."""

import numpy as np
import optax
import torch
from flax import nnx


def torch_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def jax_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 4, rngs=rngs))


def torch_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def jax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


jax_optimizer = optax.adamw(1e-3)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (32, 8)), "y": rng.integers(0, 4, 32)}


names = {"layers": ""}  # Flax's names that differ from torch's
