"""A small GPT in flax.linen: rotary positions, a mixture of experts, tied embeddings, AdamW with warm-up and cosine."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

VOCAB, WIDTH, HEADS, LAYERS, EXPERTS, TOP = 11, 8, 2, 2, 3, 2
LR, WARMUP, STEPS, LAST = 1e-2, 2, 8, 0.1


def rotary(x):
    """Rotate the two halves of each head by the position, (B, T, H, D)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nn.Module):
    number: int

    @nn.compact
    def __call__(self, x):
        b, t, c = x.shape
        qkv = jnp.split(nn.Dense(3 * WIDTH, name="qkv")(x), 3, axis=-1)
        q, k, v = (y.reshape(b, t, HEADS, c // HEADS) for y in qkv)
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotary(q), rotary(k)) / jnp.sqrt(c // HEADS)
        visible = jnp.tril(jnp.ones((t, t), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(WIDTH, name="proj")(mixed.reshape(b, t, c))


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x), approximate=False))


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        values, chosen = jax.lax.top_k(nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x)), TOP)
        values = values / values.sum(axis=-1, keepdims=True)
        shares = (jax.nn.one_hot(chosen, EXPERTS) * values[..., None]).sum(axis=-2)
        outputs = jnp.stack([Expert(name=f"experts_{i}")(x) for i in range(EXPERTS)], axis=-1)
        return (outputs * shares[..., None, :]).sum(axis=-1)


class Block(nn.Module):
    """Attention, and one expert or several; every second block has several."""

    number: int

    @nn.compact
    def __call__(self, x):
        norm1, norm2 = (nn.LayerNorm(epsilon=1e-5, name=name) for name in ("ln1", "ln2"))
        attn = Attention(self.number, name="attn")
        mlp = Experts(name="mlp") if self.number % 2 else Expert(name="mlp")
        x = x + attn(norm1(x))
        return x + mlp(norm2(x))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        x = embed(tokens) * jnp.sqrt(WIDTH)
        for number in range(LAYERS):
            x = Block(number, name=f"blocks_{number}")(x)
        logits = embed.attend(nn.LayerNorm(epsilon=1e-5, name="ln")(x))
        return 5.0 * jnp.tanh(logits / 5.0)


def jax_model():
    return GPT()


def jax_loss(model, batch):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()


def rate(count):
    cosine = LAST + (1 - LAST) * 0.5 * (1 + jnp.cos(jnp.pi * (count - WARMUP) / (STEPS - WARMUP)))
    return LR * jnp.where(count < WARMUP, (count + 1) / WARMUP, cosine)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


jax_optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)

names = {f"blocks_{i}": f"blocks.{i}" for i in range(LAYERS)}
names |= {f"blocks_1.mlp.experts_{i}": f"blocks.1.mlp.experts.{i}" for i in range(EXPERTS)}
