"""The U-Net in flax.linen, for images with the channels last."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

WIDTH, TIME = 8, 12


def group_norm(**options) -> nn.GroupNorm:
    return nn.GroupNorm(num_groups=4, epsilon=1e-5, use_fast_variance=False, **options)


def waves(time: jax.Array) -> jax.Array:
    """Embed times (B,) as cosines and sines of geometric frequencies."""
    half = TIME // 2
    frequencies = 1000.0 ** (-jnp.arange(half, dtype=time.dtype) / half)
    angles = jnp.outer(time, frequencies)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class ResidualBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, code: jax.Array) -> jax.Array:
        y = nn.swish(group_norm(name="norm_in")(x))
        y = nn.Conv(self.channels, (3, 3), padding=1, name="conv_in")(y)
        modulation = nn.Dense(2 * self.channels, name="modulation")(nn.swish(code))
        gain, offset = jnp.split(modulation[:, None, None, :], 2, axis=-1)
        y = group_norm(name="norm_out")(y)
        y = y * (1 + gain) + offset
        y = nn.Conv(self.channels, (3, 3), padding=1, name="conv_out")(nn.swish(y))
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), name="shortcut")(x)
        return x + y


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array, time: jax.Array) -> jax.Array:
        code = nn.Dense(TIME, name="time")(waves(time))
        x = nn.Conv(WIDTH, (3, 3), padding=1, name="first")(image)
        fine = ResidualBlock(WIDTH, name="encoder")(x, code)
        coarse = nn.Conv(WIDTH, (3, 3), strides=2, padding=1, name="shrink")(fine)
        coarse = ResidualBlock(2 * WIDTH, name="bottom")(coarse, code)
        batch, height, width, channels = coarse.shape
        grown = jax.image.resize(coarse, (batch, 2 * height, 2 * width, channels), "nearest")
        grown = nn.Conv(WIDTH, (3, 3), padding=1, name="grow")(grown)
        joined = jnp.concatenate([grown, fine], axis=-1)
        x = ResidualBlock(WIDTH, name="decoder")(joined, code)
        return nn.Conv(2, (3, 3), padding=1, name="last")(nn.swish(group_norm(name="last_norm")(x)))


def jax_model():
    return Denoiser()


def jax_loss(model, batch):
    image, noise = (jnp.moveaxis(batch[name], 1, -1) for name in ("image", "noise"))
    signal = jnp.cos(0.5 * jnp.pi * batch["time"]) ** 2
    kept = signal.reshape(-1, 1, 1, 1)
    noisy = jnp.sqrt(kept) * image + jnp.sqrt(1 - kept) * noise
    error = model(noisy, 1000 * batch["time"]) - noise
    ratio = signal / (1 - signal)
    weights = jnp.clip(ratio, max=5.0) / ratio
    return jnp.mean(weights[:, None, None, None] * error**2)


def rate(step):
    return 2e-3 * jnp.minimum(1.0, (step + 1.0) / 5)


jax_optimizer = optax.adam(rate)

names = {
    "first": "conv_in",
    "shrink": "pool",
    "grow": "upconv",
    "last_norm": "norm_out",
    "last": "conv_out",
}
for ours, reference in {"encoder": "down1", "bottom": "middle", "decoder": "up1"}.items():
    names |= {
        f"{ours}.norm_in": f"{reference}.norm1",
        f"{ours}.conv_in": f"{reference}.conv1",
        f"{ours}.modulation": f"{reference}.emb",
        f"{ours}.norm_out": f"{reference}.norm2",
        f"{ours}.conv_out": f"{reference}.conv2",
        f"{ours}.shortcut": f"{reference}.skip",
    }
