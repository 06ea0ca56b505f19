"""The network that finds edges in flax.linen."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

LR = 1e-3


class Segmenter(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jax.image.resize(x, (len(x), 4, 5, 3), "bilinear")
        x = nn.relu(nn.Conv(4, (3, 3), padding=1, name="conv")(x))
        x = nn.ConvTranspose(4, (2, 2), strides=(2, 2), padding="VALID", transpose_kernel=True, name="up")(x)
        x = jax.image.resize(nn.relu(x), (len(x), 16, 20, 4), "bilinear")
        return nn.Conv(1, (1, 1), name="head")(x)[..., 0]


def jax_model():
    return Segmenter()


def jax_loss(model, batch):
    edges = batch["edges"]
    weight = jnp.where(edges > 0.5, 1.5, 0.5)
    losses = optax.sigmoid_binary_cross_entropy(model(jnp.moveaxis(batch["image"], 1, -1)), edges)
    return (weight * losses).mean()


jax_optimizer = optax.adam(LR)
