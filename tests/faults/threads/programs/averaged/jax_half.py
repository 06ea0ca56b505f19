"""The step with flax.linen."""

import dataclasses

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

LR, DECAY = 1e-3, 0.999


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(12)(x))
        return nn.Dense(1)(x)[:, 0]


def jax_model():
    params = Network().init(jax.random.key(0), jnp.zeros((1, 6)))["params"]
    return {"network": params, "average": params}


jax_optimizer = {"network": optax.adam(LR)}


def loss_of(params, batch):
    return optax.squared_error(Network().apply({"params": params}, batch["x"]), batch["y"]).mean()


def jax_step(optimizers, state, batch):
    params, opt_state = dict(state.params), dict(state.opt_state)
    loss, gradients = jax.value_and_grad(loss_of)(params["network"], batch)
    gradients = jax.lax.pmean(gradients, "replica")
    updates, opt_state["network"] = optimizers["network"].update(gradients, opt_state["network"], params["network"])
    params["network"] = optax.apply_updates(params["network"], updates)
    params["average"] = jax.tree.map(lambda a, p: a + (1 - DECAY) * (p - a), params["average"], params["network"])
    return dataclasses.replace(state, params=params, opt_state=opt_state), loss
