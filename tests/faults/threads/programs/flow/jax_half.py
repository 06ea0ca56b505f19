"""The policy in flax.nnx."""

import optax
from flax import nnx
from jax import numpy as jnp

LR = 2.5e-5


class Flow(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(9, 24, rngs=rngs)
        self.second = nnx.Linear(24, 24, rngs=rngs)
        self.last = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.first(x))
        return self.last(nnx.silu(self.second(x)))


def jax_model():
    return Flow(nnx.Rngs(0))


def jax_loss(model, batch):
    time, noise, actions = batch["time"], batch["noise"], batch["actions"]
    between = time * noise + (1 - time) * actions
    velocity = model(jnp.concatenate([batch["observations"], between, time], -1))
    return optax.squared_error(velocity, noise - actions).mean()


jax_optimizer = optax.adamw(LR, weight_decay=1e-10)
