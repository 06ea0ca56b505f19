"""ConvNeXt V2 in flax.nnx: own modules, with the channels last."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

CLASSES = 5


class ResponseNorm(nnx.Module):
    def __init__(self, channels: int):
        self.gain = nnx.Param(jnp.zeros(channels))
        self.shift = nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        energy = jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))
        share = energy / (energy.mean(-1, keepdims=True) + 1e-6)
        return x + self.shift[...] + self.gain[...] * x * share


def layer_norm(channels: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(channels, epsilon=1e-6, use_fast_variance=False, rngs=rngs)


class Mixer(nnx.Module):
    """A depthwise convolution and a bottleneck, inverted."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        self.depthwise = nnx.Conv(channels, channels, (5, 5), padding=2, feature_group_count=channels, rngs=rngs)
        self.norm = layer_norm(channels, rngs)
        self.expand = nnx.Linear(channels, 4 * channels, rngs=rngs)
        self.response = ResponseNorm(4 * channels)
        self.squeeze = nnx.Linear(4 * channels, channels, rngs=rngs)
        self.scale = nnx.Param(jnp.full(channels, 0.3))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.depthwise(x)
        y = nnx.gelu(self.expand(self.norm(y)), approximate=False)
        y = self.squeeze(self.response(y))
        return x + self.scale[...] * y


class TextureNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.stem_norm = layer_norm(8, rngs)
        self.early = nnx.List([Mixer(8, rngs)])
        self.shrink_norm = layer_norm(8, rngs)
        self.shrink = nnx.Conv(8, 16, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.late = nnx.List([Mixer(16, rngs), Mixer(16, rngs)])
        self.norm = layer_norm(16, rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.stem_norm(self.stem(image))
        for mixer in self.early:
            x = mixer(x)
        x = self.shrink(self.shrink_norm(x))
        for mixer in self.late:
            x = mixer(x)
        pooled = x.mean(axis=(1, 2))
        return self.head(self.norm(pooled))


def jax_model():
    return TextureNet(nnx.Rngs(0))


def jax_loss(model, batch):
    logits = model(batch["image"].transpose(0, 2, 3, 1))
    targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], CLASSES, dtype=logits.dtype), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


jax_optimizer = optax.adamw(2e-3, weight_decay=0.05, mask=is_matrix)

names = {
    "stem": "downsample_layers.0.0",
    "stem_norm": "downsample_layers.0.1",
    "shrink_norm": "downsample_layers.1.0",
    "shrink": "downsample_layers.1.1",
}
for ours, reference in {"early.0": "stages.0.0", "late.0": "stages.1.0", "late.1": "stages.1.1"}.items():
    names |= {
        f"{ours}.depthwise": f"{reference}.dwconv",
        f"{ours}.norm": f"{reference}.norm",
        f"{ours}.expand": f"{reference}.pwconv1",
        f"{ours}.response.gain": f"{reference}.grn.gamma",
        f"{ours}.response.shift": f"{reference}.grn.beta",
        f"{ours}.squeeze": f"{reference}.pwconv2",
        f"{ours}.scale": f"{reference}.gamma",
    }
