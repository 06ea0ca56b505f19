"""A classifier of small images in flax.nnx: a path at half resolution, gated by channel, joins the full one."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.nn.layers import BatchNorm

WEIGHTS = [1.0, 2.0, 0.5]


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(2, 4, (3, 3), padding="CIRCULAR", rngs=rngs)
        self.bn1 = BatchNorm(4)
        self.conv2 = nnx.Conv(4, 4, (3, 3), padding=1, rngs=rngs)
        self.gn = nnx.GroupNorm(4, num_groups=2, epsilon=1e-5, rngs=rngs)
        self.squeeze = nnx.Linear(4, 4, rngs=rngs)
        self.fuse = nnx.Conv(8, 4, (1, 1), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn1(self.conv1(x)))
        low = nnx.max_pool(x, (2, 2), (2, 2))
        low = nnx.elu(self.gn(self.conv2(low)), alpha=0.5)
        gate = nnx.sigmoid(self.squeeze(low.mean((1, 2))))
        low = low * gate[:, None, None, :]
        batch, height, width, channels = x.shape
        up = jax.image.resize(low, (batch, height, width, channels), "nearest")
        x = nnx.relu(self.fuse(jnp.concatenate([up, x], axis=-1)))
        x = nnx.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        return self.head(x.mean((1, 2)))


def jax_model():
    return ConvNet(nnx.Rngs(0))


def jax_loss(model, batch):
    logits = model(batch["image"].transpose(0, 2, 3, 1))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    weights = jnp.array(WEIGHTS)[batch["label"]]
    return (weights * losses).sum() / weights.sum()


jax_optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
