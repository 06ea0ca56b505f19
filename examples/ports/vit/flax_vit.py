"""A Vision Transformer in Flax Linen, written like google-research/vision_transformer's models_vit.py."""

from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp


class MlpBlock(nn.Module):
    """Two dense layers with GELU between them."""

    mlp_dim: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.shape[-1]
        x = nn.gelu(nn.Dense(self.mlp_dim)(x), approximate=False)  # nn.gelu's default is tanh
        return nn.Dense(features)(x)


class Encoder1DBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); LayerNorm's epsilon is 1e-6, like timm's."""

    mlp_dim: int
    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(use_fast_variance=False)(x)
        x = x + nn.MultiHeadDotProductAttention(self.num_heads)(y, y)
        y = nn.LayerNorm(use_fast_variance=False)(x)
        return x + MlpBlock(self.mlp_dim)(y)


class VisionTransformer(nn.Module):
    """Images (B, H, W, 3) to logits (B, num_classes), read off a class token."""

    num_classes: int
    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.hidden_size, patch, strides=patch, padding="VALID", name="embedding")(x)
        x = x.reshape(x.shape[0], -1, self.hidden_size)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.hidden_size))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for layer in range(self.num_layers):
            x = Encoder1DBlock(4 * self.hidden_size, self.num_heads, name=f"encoderblock_{layer}")(x)
        x = nn.LayerNorm(use_fast_variance=False, name="encoder_norm")(x)
        return nn.Dense(self.num_classes, name="head")(x[:, 0])


def vit_tiny(num_classes: int, patch_size: int, depth: int = 12) -> VisionTransformer:
    """Build ViT-Ti: 12 layers of 192, 3 heads."""
    return VisionTransformer(num_classes, patch_size, hidden_size=192, num_layers=depth, num_heads=3)


def decayed(params: Any) -> Any:
    """Return True for kernels: no biases and norms, class token and positions.

    Names decide, since biases of `MultiHeadDotProductAttention` have two axes, (heads, head_dim).
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
