"""The MLP-Mixer of `torch_equinox_mlp_mixer` in Equinox, after its example docs.kidger.site/equinox/examples/mlp_mixer.

A model is a function of one image; the loss maps it over the batch.
"""

import equinox as eqx
import jax
import optax
from jax import numpy as jnp

gelu = jax.tree_util.Partial(jax.nn.gelu, approximate=False)


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, num_patches: int, hidden_size: int, mix_patch_size: int, mix_hidden_size: int, key: jax.Array):
        pkey, hkey = jax.random.split(key)
        self.patch_mixer = eqx.nn.MLP(num_patches, num_patches, mix_patch_size, 1, gelu, key=pkey)
        self.hidden_mixer = eqx.nn.MLP(hidden_size, hidden_size, mix_hidden_size, 1, gelu, key=hkey)
        self.norm1 = eqx.nn.LayerNorm(hidden_size, eps=1e-6)
        self.norm2 = eqx.nn.LayerNorm(hidden_size, eps=1e-6)

    def __call__(self, y: jax.Array) -> jax.Array:
        y = y + jax.vmap(self.patch_mixer, 1, 1)(jax.vmap(self.norm1)(y))
        return y + jax.vmap(self.hidden_mixer)(jax.vmap(self.norm2)(y))


class Mixer(eqx.Module):
    """An image (3, H, W) to logits (num_classes,)."""

    conv_in: eqx.nn.Conv2d
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    fc_out: eqx.nn.Linear

    def __init__(
        self,
        num_classes: int,
        img_size: int,
        num_blocks: int,
        patch_size: int = 16,
        hidden_size: int = 512,
        *,
        key: jax.Array,
    ):
        inkey, outkey, *bkeys = jax.random.split(key, 2 + num_blocks)
        num_patches = (img_size // patch_size) ** 2
        self.conv_in = eqx.nn.Conv2d(3, hidden_size, patch_size, stride=patch_size, key=inkey)
        self.blocks = [MixerBlock(num_patches, hidden_size, hidden_size // 2, 4 * hidden_size, bkey) for bkey in bkeys]
        self.norm = eqx.nn.LayerNorm(hidden_size, eps=1e-6)
        self.fc_out = eqx.nn.Linear(hidden_size, num_classes, key=outkey)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv_in(x)
        y = y.reshape(len(y), -1).T  # (channels, height, width) to (patches, channels)
        for block in self.blocks:
            y = block(y)
        return self.fc_out(jax.vmap(self.norm)(y).mean(axis=0))


def is_matrix(params: optax.Params) -> optax.Params:
    """Return which parameters decay: the bias of a convolution has three axes, of which two have size 1."""
    return jax.tree.map(lambda p: p.size > max(p.shape), params)


def smoothed_cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return -(targets * jax.nn.log_softmax(logits)).sum(axis=-1)


def mean_loss(model: Mixer, x: jax.Array, y: jax.Array, smoothing: float) -> jax.Array:
    return jnp.mean(smoothed_cross_entropy(jax.vmap(model)(x), y, smoothing))
