"""Attention and a mixture of experts in flax.nnx, with einsum for every product."""

import jax
import optax
from flax import nnx
from jax import numpy as jnp

VOCAB, TAGS, LENGTH, DIM, HEADS, EXPERTS, HIDDEN, CHOICES = 18, 6, 6, 16, 4, 5, 20, 2


def kernel(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.query, self.key, self.value, self.out = (kernel(rngs, DIM, DIM) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(kernel: nnx.Param) -> jax.Array:
            y = jnp.einsum("bti,io->bto", x, kernel[...])
            return y.reshape(*y.shape[:2], HEADS, DIM // HEADS)

        q, k, v = heads(self.query), heads(self.key), heads(self.value)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(DIM / HEADS)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return jnp.einsum("bti,io->bto", mixed, self.out[...])


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.router = kernel(rngs, DIM, EXPERTS)
        self.inner = kernel(rngs, EXPERTS, DIM, HIDDEN)
        self.inner_bias = nnx.Param(jnp.zeros((EXPERTS, HIDDEN)))
        self.outer = kernel(rngs, EXPERTS, HIDDEN, DIM)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("btd,de->bte", x, self.router[...])
        best, chosen = jax.lax.top_k(scores, CHOICES)
        gates = jax.nn.softmax(best, axis=-1)
        onehot = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)  # (B, T, CHOICES, EXPERTS)
        routing = jnp.einsum("btk,btke->bte", gates, onehot)
        hidden = jnp.einsum("btd,edh->bteh", x, self.inner[...]) + self.inner_bias[...]
        hidden = jax.nn.gelu(hidden, approximate=False)
        mixed = jnp.einsum("bte,bteh,ehd->btd", routing, hidden, self.outer[...])

        shares = jax.nn.softmax(scores, axis=-1).mean(axis=(0, 1))
        loads = onehot[:, :, 0].mean(axis=(0, 1))
        balance = EXPERTS * jnp.dot(shares, loads)
        size = jax.nn.logsumexp(scores, axis=-1)
        return mixed, 0.05 * balance + 0.01 * jnp.mean(size**2)


def layer_norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(DIM, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class Tagger(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.places = nnx.Embed(LENGTH, DIM, rngs=rngs)
        self.attention_norm, self.attention = layer_norm(rngs), Attention(rngs)
        self.experts_norm, self.experts = layer_norm(rngs), Experts(rngs)
        self.tags = nnx.Linear(DIM, TAGS, rngs=rngs)

    def __call__(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.words(words) + self.places(jnp.arange(LENGTH))
        x += self.attention(self.attention_norm(x))
        y, penalty = self.experts(self.experts_norm(x))
        return self.tags(x + y), penalty


def jax_model():
    return Tagger(nnx.Rngs(0))


def jax_loss(model, batch):
    logits, penalty = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"]).mean() + penalty


jax_optimizer = optax.adam(2e-3)

names = {
    "words": "embed",
    "places": "pos",
    "attention_norm": "norm1",
    "attention.query": "attn.qkv.q.weight",
    "attention.key": "attn.qkv.k.weight",
    "attention.value": "attn.qkv.v.weight",
    "attention.out": "attn.proj.weight",
    "experts_norm": "norm2",
    "experts.router": "moe.router.weight",
    "experts.inner": "moe.w1",
    "experts.inner_bias": "moe.b1",
    "experts.outer": "moe.w2",
    "tags": "head",
}
