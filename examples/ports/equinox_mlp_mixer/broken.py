"""The Equinox port of timm's MLP-Mixer with one mistake in jax_loss.

    jaxddp check examples/ports/equinox_mlp_mixer/broken.py

It trains, and its loss falls. Run the check before you read on.
"""

import jax
from jax import numpy as jnp
from port import *  # noqa: F403
from port import CLASSES, SMOOTHING


def jax_loss(model, batch):
    right = jax.nn.one_hot(batch["label"], CLASSES)
    targets = jnp.where(right == 1, 1 - SMOOTHING, SMOOTHING / (CLASSES - 1))
    return -(targets * jax.nn.log_softmax(jax.vmap(model)(batch["image"]))).sum(axis=-1).mean()
