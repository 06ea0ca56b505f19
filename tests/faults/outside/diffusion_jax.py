"""A denoising diffusion model in flax.nnx: linear noise schedule, weighted loss, an average of the weights (EMA)."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

WIDTH, INPUTS, TIMES = 8, 4, 10


def alphas_bar():
    """Return the part of the signal's variance that is left at each time."""
    betas = jnp.linspace(1e-4, 0.2, TIMES)
    return jnp.cumprod(1 - betas)


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.time = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.into = nnx.Linear(INPUTS, WIDTH, rngs=rngs)
        self.mid = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, INPUTS, rngs=rngs)

    def __call__(self, x, t):
        rates = 1000.0 ** (-jnp.arange(WIDTH // 2) / (WIDTH // 2))
        angles = t[:, None] * rates
        time = nnx.silu(self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)))
        h = nnx.silu(self.into(x)) + time
        return self.out(nnx.silu(self.mid(h)))


def jax_model():
    return {"net": Denoiser(nnx.Rngs(0)), "ema": Denoiser(nnx.Rngs(0))}


def jax_optimizer(model):
    return nnx.Optimizer(model["net"], optax.adam(1e-2), wrt=nnx.Param)


def diffusion_loss(net, x, t, noise):
    signal = alphas_bar()[t][:, None]
    noisy = jnp.sqrt(signal) * x + jnp.sqrt(1 - signal) * noise
    predicted = net(noisy, t)
    snr = signal / (1 - signal)
    weights = jnp.minimum(snr, 5.0) / snr
    return (weights * jnp.square(predicted - noise)).mean()


def jax_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(diffusion_loss)(model["net"], batch["x"], batch["t"], batch["noise"])
    averaged = jax.lax.pmean(gradients, "replica")
    optimizer.update(model["net"], averaged)
    old, new = nnx.state(model["ema"], nnx.Param), nnx.state(model["net"], nnx.Param)
    nnx.update(model["ema"], jax.tree.map(lambda average, x: 0.99 * average + 0.01 * x, old, new))
    return loss
