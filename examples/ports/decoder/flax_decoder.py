"""The GPT of `torch_decoder` in flax.linen: compact modules, and the logits by `nn.Embed.attend`."""

from dataclasses import dataclass

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 256
    vocab_size: int = 65
    num_layers: int = 6
    num_heads: int = 6
    num_embeds: int = 384
    dropout_rate: float = 0.2
    use_bias: bool = False


def layer_norm(config: GPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, use_bias=config.use_bias, use_fast_variance=False)


class SelfAttention(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        B, T, C = x.shape
        qkv = nn.Dense(3 * C, use_bias=c.use_bias)(x).reshape(B, T, 3 * c.num_heads, C // c.num_heads)
        q, k, v = jnp.split(qkv, 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(C // c.num_heads)
        mask = nn.make_causal_mask(jnp.ones((B, T)), dtype=bool)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        weights = nn.Dropout(c.dropout_rate)(weights, deterministic)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, C)
        y = nn.Dense(C, use_bias=c.use_bias)(y)
        return nn.Dropout(c.dropout_rate)(y, deterministic)


class MLP(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        y = nn.Dense(4 * c.num_embeds, use_bias=c.use_bias)(x)
        y = nn.Dense(c.num_embeds, use_bias=c.use_bias)(nn.gelu(y, approximate=True))
        return nn.Dropout(c.dropout_rate)(y, deterministic)


class Block(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = x + SelfAttention(self.config)(layer_norm(self.config)(x), deterministic)
        return x + MLP(self.config)(layer_norm(self.config)(x), deterministic)


class GPT(nn.Module):
    """Tokens (B, T) to logits (B, T, vocab_size)."""

    config: GPTConfig

    @nn.compact
    def __call__(self, idx: jax.Array, deterministic: bool = False) -> jax.Array:
        c = self.config
        wte = nn.Embed(c.vocab_size, c.num_embeds, name="wte")
        wpe = nn.Embed(c.block_size, c.num_embeds, name="wpe")
        x = wte(idx) + wpe(jnp.arange(idx.shape[1])[None])
        x = nn.Dropout(c.dropout_rate)(x, deterministic)
        for _ in range(c.num_layers):
            x = Block(c)(x, deterministic)
        return wte.attend(layer_norm(c)(x))


def make_optimizer(
    learning_rate: float,
    warmup_iters: int,
    lr_decay_iters: int,
    min_lr: float,
    weight_decay: float,
    b1: float,
    b2: float,
) -> optax.GradientTransformation:
    """Build AdamW, which decays matrices only, with linear warm-up and a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / (warmup_iters + 1), learning_rate, warmup_iters, lr_decay_iters, min_lr
    )

    def is_matrix(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    return optax.adamw(schedule, b1, b2, weight_decay=weight_decay, mask=is_matrix)
