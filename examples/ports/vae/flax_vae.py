"""A variational autoencoder in Flax Linen, written like flax/examples/vae."""

import jax
from flax import linen as nn
from jax import numpy as jnp
from jax import random


class Encoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Dense(400, name="fc1")(x)
        x = nn.relu(x)
        mean_x = nn.Dense(self.latents, name="fc2_mean")(x)
        logvar_x = nn.Dense(self.latents, name="fc2_logvar")(x)
        return mean_x, logvar_x


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        z = nn.Dense(400, name="fc1")(z)
        z = nn.relu(z)
        return nn.Dense(784, name="fc2")(z)


class VAE(nn.Module):
    """Images (B, 784) to the logits of their reconstructions, and the means and log variances (B, latents)."""

    latents: int = 20

    def setup(self) -> None:
        self.encoder = Encoder(self.latents)
        self.decoder = Decoder()

    def __call__(self, x: jax.Array, z_rng: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean, logvar = self.encoder(x)
        z = self.reparameterize(z_rng, mean, logvar)
        return self.decoder(z), mean, logvar

    def reparameterize(self, rng: jax.Array, mean: jax.Array, logvar: jax.Array) -> jax.Array:
        std = jnp.exp(0.5 * logvar)
        eps = random.normal(rng, logvar.shape)
        return mean + eps * std


@jax.vmap
def kl_divergence(mean: jax.Array, logvar: jax.Array) -> jax.Array:
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy_with_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_p = nn.log_sigmoid(logits)
    return -jnp.sum(labels * log_p + (1.0 - labels) * jnp.log(-jnp.expm1(log_p)))
