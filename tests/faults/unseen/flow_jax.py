"""The flow in Equinox: each part is a function of one example."""

import equinox as eqx
import jax
import optax
from jax import numpy as jnp

SIZE, OBSERVED, CODE, CODES, HIDDEN, DEPTH = 6, 5, 4, 7, 32, 5


class Codebook(eqx.Module):
    vectors: jax.Array

    def __call__(self, z):
        """Return the nearest vector, whose gradient goes straight to z, and its costs."""
        nearest = self.vectors[jnp.argmin(jnp.sum((self.vectors - z) ** 2, axis=-1))]
        pull = jnp.mean((nearest - jax.lax.stop_gradient(z)) ** 2)
        push = jnp.mean((z - jax.lax.stop_gradient(nearest)) ** 2)
        code = z + jax.lax.stop_gradient(nearest - z)
        return code, pull + 0.25 * push


class Step(eqx.Module):
    """Shift and scale each element, reverse them, and move one half by a function of the other."""

    shift: jax.Array
    log_scale: jax.Array
    net: eqx.nn.MLP

    def __init__(self, key):
        self.shift, self.log_scale = jnp.zeros(SIZE), jnp.zeros(SIZE)
        self.net = eqx.nn.MLP(SIZE // 2 + CODE, SIZE, HIDDEN, 1, jax.nn.silu, key=key)

    def __call__(self, x, code):
        x = jnp.exp(self.log_scale) * (x + self.shift)
        x = x[::-1]
        fixed, moved = jnp.split(x, 2)
        log_gain, offset = jnp.split(self.net(jnp.concatenate([fixed, code])), 2)
        log_gain = 2 * jnp.tanh(0.5 * log_gain)
        moved = jnp.exp(log_gain) * (moved + offset)
        log_volume = self.log_scale.sum() + log_gain.sum()
        return jnp.concatenate([fixed, moved]), log_volume


class Density(eqx.Module):
    encoder: eqx.nn.Linear
    codebook: Codebook
    steps: list[Step]

    def __init__(self, key):
        keys = jax.random.split(key, DEPTH + 2)
        self.encoder = eqx.nn.Linear(OBSERVED, CODE, key=keys[0])
        self.codebook = Codebook(jax.random.normal(keys[1], (CODES, CODE)))
        self.steps = [Step(k) for k in keys[2:]]

    def __call__(self, x, observed):
        """Return the cost of x, the negative logarithm of its density, and that of the code."""
        code, code_cost = self.codebook(self.encoder(observed))
        volume = 0.0
        for step in self.steps:
            x, log_volume = step(x, code)
            volume += log_volume
        energy = 0.5 * (x @ x + len(x) * jnp.log(2 * jnp.pi))
        return energy - volume, code_cost


def jax_model():
    return Density(jax.random.key(0))


def jax_loss(model, batch):
    costs, code_costs = jax.vmap(model)(batch["x"], batch["observed"])
    return costs.mean() + code_costs.mean()


jax_optimizer = optax.adam(2e-3, b1=0.8, b2=0.99)

names = {"codebook.vectors": "quantizer.codebook.weight"}
for i in range(DEPTH):
    names |= {
        f"steps.{i}.shift": f"actnorms.{i}.loc",
        f"steps.{i}.log_scale": f"actnorms.{i}.log_scale",
        f"steps.{i}.net.layers.0": f"couplings.{i}.net.0",
        f"steps.{i}.net.layers.1": f"couplings.{i}.net.2",
    }
