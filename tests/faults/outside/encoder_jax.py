"""A text classifier in flax.linen: an encoder with padding masks, sinusoidal positions, lower rates in lower layers."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

WIDTH, HEADS, LAYERS, CLASSES = 8, 2, 2, 3
LR, STEPS = 3e-3, 8


def positions(length):
    """Return sines and cosines of the positions, (T, WIDTH)."""
    rates = 100.0 ** (-jnp.arange(0, WIDTH, 2) / WIDTH)
    angles = jnp.arange(length)[:, None] * rates
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, WIDTH)


class Layer(nn.Module):
    """Post-norm, as in the first transformer."""

    def setup(self):
        self.query, self.key, self.value, self.out, self.down = (nn.Dense(WIDTH) for _ in range(5))
        self.up = nn.Dense(2 * WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(epsilon=1e-5), nn.LayerNorm(epsilon=1e-5)

    def __call__(self, x, valid):
        b, t, _ = x.shape
        q, k, v = (f(x).reshape(b, t, HEADS, -1) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(valid[:, None, None, :], scores, -jnp.inf)
        y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
        x = self.norm1(x + self.out(y.reshape(b, t, WIDTH)))
        return self.norm2(x + self.down(nn.gelu(self.up(x), approximate=False)))


class Encoder(nn.Module):
    def setup(self):
        self.tokens, self.segments = nn.Embed(12, WIDTH), nn.Embed(2, WIDTH)
        self.norm = nn.LayerNorm(epsilon=1e-5)
        self.layers = [Layer() for _ in range(LAYERS)]
        self.pooler = nn.Dense(WIDTH)
        self.classifier = nn.Dense(CLASSES)

    def __call__(self, tokens, segments, valid):
        x = self.tokens(tokens) + self.segments(segments) + positions(tokens.shape[1])
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, valid)
        mean = (x * valid[..., None]).sum(axis=1) / valid.sum(axis=1, keepdims=True)
        first = jnp.tanh(self.pooler(x[:, 0]))
        return self.classifier(jnp.concatenate([mean, first], axis=-1))


def jax_model():
    return Encoder()


def jax_loss(model, batch):
    logits = model(batch["tokens"], batch["segments"], batch["valid"])
    targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


DEPTHS = {"tokens": 0, "segments": 0, "norm": 0, "layers_0": 1, "layers_1": 2, "pooler": 3, "classifier": 3}


def depths(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: DEPTHS[path[0].key], params)


def adam(depth):
    return optax.adam(optax.polynomial_schedule(LR * 0.5 ** (3 - depth), 0.0, 1.0, STEPS))


jax_optimizer = optax.partition({depth: adam(depth) for depth in range(4)}, depths)

names = {"layers_0": "layers.0", "layers_1": "layers.1"}
