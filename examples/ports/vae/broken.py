"""port.py with another flax_model, which draws its noise by another formula.

    python -m jaxddp.parity examples/ports/vae/broken.py --steps 3

It trains, and its loss falls. Run the check before you read on.
"""

import jax
from flax_vae import VAE
from jax import numpy as jnp
from port import batch, flax_loss, flax_optimizer, names, torch_loss, torch_model, torch_optimizer  # noqa: F401


class BrokenVAE(VAE):
    def reparameterize(self, rng, mean, logvar):
        return mean + jnp.exp(logvar) * jax.random.normal(rng, mean.shape)


def flax_model():
    return BrokenVAE()
