# mypy: allow-untyped-defs
"""The program of docs/check_your_port.md: the two halves of a port, for `jaxddp check`."""

import numpy as np
import tutorial_jax
import tutorial_torch
from flax import nnx
from torch import nn, optim

from jaxddp.data import digits

torch_model = tutorial_torch.Classifier  # without DDP, which the check adds
jax_loss, jax_optimizer = tutorial_jax.loss_fn, tutorial_jax.optimizer
total_steps = 5 * 29  # of the whole training


def torch_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def torch_optimizer(parameters):
    return optim.AdamW(parameters, lr=1e-3)


def torch_scheduler(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))


def jax_model():
    return tutorial_jax.Classifier(nnx.Rngs(0))


def batch(step, rank):  # one replica's examples, as NumPy arrays
    rows = np.random.default_rng((step, rank)).integers(0, 1797, 32)
    return {name: array[rows] for name, array in digits().items()}
