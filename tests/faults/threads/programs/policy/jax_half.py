"""The loss of the soft actor with flax.linen."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp


class Actor(nn.Module):
    @nn.compact
    def __call__(self, observations):
        x = nn.relu(nn.Dense(16, name="hidden")(observations))
        return nn.Dense(2, name="mean")(x), jnp.tanh(nn.Dense(2, name="log_std")(x))


def jax_model():
    return Actor()


def jax_loss(model, batch):
    mean, log_std = model(batch["observations"])
    raw = mean + jnp.exp(log_std) * batch["noise"]
    action = jnp.tanh(raw)
    density = jax.scipy.stats.norm.logpdf(raw, mean, jnp.exp(log_std))
    density = (density - jnp.log(1 - action**2 + 1e-6)).sum(-1)
    value = (action * batch["observations"][:, :2]).sum(-1)
    return (0.2 * density - value).mean()


jax_optimizer = optax.adam(3e-4)
