"""The autoencoder in flax.nnx."""

import optax
from flax import nnx

LR = 1e-3


class Autoencoder(nnx.Module):
    def __init__(self, rngs):
        self.encode = nnx.Linear(8, 3, rngs=rngs)
        self.decode = nnx.Linear(3, 8, rngs=rngs)

    def __call__(self, x):
        return self.decode(self.encode(x))


def jax_model():
    return Autoencoder(nnx.Rngs(0))


def jax_loss(model, batch):
    return optax.squared_error(model(batch["x"]), batch["x"]).mean()


jax_optimizer = optax.adam(LR)
