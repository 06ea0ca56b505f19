"""The loss of the detector with flax.linen."""

import jax
import optax
from flax import linen as nn


class Detector(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="trunk")(x))
        return nn.Dense(5, name="classes")(x), nn.Dense(4, name="boxes")(x)


def jax_model():
    return Detector()


def jax_loss(model, batch):
    logits, boxes = model(batch["x"])
    labels = jax.nn.one_hot(batch["classes"], 5, dtype=logits.dtype)
    focal = optax.sigmoid_focal_loss(logits, labels, gamma=2.0)
    return focal.mean() + optax.huber_loss(boxes, batch["boxes"], delta=1.0).mean()


jax_optimizer = optax.sgd(0.05, momentum=0.9)
