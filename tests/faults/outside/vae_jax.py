"""A variational autoencoder in flax.nnx, with a floor under the divergence and bounds of the variance."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

INPUTS, HIDDEN, LATENT = 8, 8, 3
BETA, FREE_BITS = 0.5, 0.125


def softplus(x, beta):
    return jax.nn.softplus(beta * x) / beta


class VAE(nnx.Module):
    def __init__(self, rngs):
        self.encode = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.mean = nnx.Linear(HIDDEN, LATENT, rngs=rngs)
        self.logvar = nnx.Linear(HIDDEN, LATENT, rngs=rngs)
        self.decode = nnx.Linear(LATENT, HIDDEN, rngs=rngs)
        self.pixels = nnx.Linear(HIDDEN, INPUTS, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        h = softplus(self.encode(x), 2.0)
        mean, logvar = self.mean(h), jnp.clip(self.logvar(h), -0.3, 0.2)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.pixels(jax.nn.mish(self.decode(z))), mean, logvar


def jax_model():
    return VAE(nnx.Rngs(0, noise=1))


def jax_loss(model, batch):
    logits, mean, logvar = model(batch["x"])
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(axis=-1)
    divergence = -0.5 * (1 + logvar - jnp.square(mean) - jnp.exp(logvar))
    divergence = jnp.maximum(divergence, FREE_BITS).sum(axis=-1)
    return (reconstruction + BETA * divergence).mean()


jax_optimizer = optax.adamax(1e-2)
