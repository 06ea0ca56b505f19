"""The network of the oscillator in flax.nnx."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

DAMPING, STIFFNESS = 4.0, 400.0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(1, 12, rngs=rngs)
        self.second = nnx.Linear(12, 12, rngs=rngs)
        self.last = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, t):
        return self.last(jnp.tanh(self.second(jnp.tanh(self.first(t)))))


def jax_model():
    return Net(nnx.Rngs(0))


def jax_loss(model, batch):
    t = batch["t"]
    direction = jnp.ones_like(t)

    def speed_of(t):
        return jax.jvp(model, (t,), (direction,))

    (u, speed), (_, acceleration) = jax.jvp(speed_of, (t,), (direction,))
    physics = acceleration + DAMPING * speed + STIFFNESS * u
    return 1e-4 * (physics**2).mean() + ((u - batch["u"]) ** 2).mean()


jax_optimizer = optax.adam(1e-3)
