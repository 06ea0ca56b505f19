"""The ResNet in flax.nnx."""

import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.nn.layers import BatchNorm

LR, MOMENTUM = 0.05, 0.1


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(3, 6, (7, 7), strides=2, padding=3, use_bias=False, rngs=rngs)
        self.bn1 = BatchNorm(6, momentum=MOMENTUM)
        self.conv2 = nnx.Conv(6, 6, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.bn2 = BatchNorm(6, momentum=MOMENTUM)
        self.fc = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.relu(x + self.bn2(self.conv2(x)))
        return self.fc(x.mean((1, 2)))


def jax_model():
    return ResNet(nnx.Rngs(0))


def jax_loss(model, batch):
    logits = model(jnp.moveaxis(batch["image"], 1, -1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


jax_optimizer = optax.sgd(LR, momentum=0.9)
