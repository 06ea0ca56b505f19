"""The update of two critics with flax.linen."""

import dataclasses

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

LR = 1e-3


class Critic(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x = nn.relu(nn.Dense(12)(inputs))
        return nn.Dense(1)(x)[:, 0]


def jax_model():
    keys = jax.random.split(jax.random.key(0))
    inputs = jnp.zeros((1, 6))
    return {name: Critic().init(key, inputs)["params"] for name, key in zip(("one", "two"), keys, strict=True)}


jax_optimizer = {"one": optax.adam(LR), "two": optax.adam(LR)}


def critic_loss(params, batch):
    values = Critic().apply({"params": params}, batch["inputs"])
    return ((values - batch["targets"]) ** 2).mean()


def jax_step(optimizers, state, batch):
    params, opt_state = dict(state.params), dict(state.opt_state)
    losses, gradients = {}, {}
    for name in ("one", "two"):
        losses[name], gradient = jax.value_and_grad(critic_loss)(params[name], batch)
        gradients[name] = jax.lax.pmean(gradient, "replica")
    for name in ("one", "two"):
        updates, opt_state[name] = optimizers[name].update(gradients[name], opt_state[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
    return dataclasses.replace(state, params=params, opt_state=opt_state), losses
