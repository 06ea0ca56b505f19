"""The depthwise convolution in flax.linen."""

import optax
from flax import linen as nn


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(6, (4,), feature_group_count=6, padding=((3, 0),), name="conv")(x)


def jax_model():
    return Block()


def jax_loss(model, batch):
    return optax.squared_error(model(batch["x"]), batch["y"]).mean()


jax_optimizer = optax.sgd(0.1)
