"""Contrastive training of two towers in flax.linen: symmetric InfoNCE, a margin loss, a stopped target."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

WIDTH, OUT = 8, 5


def normalize(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(WIDTH, name="fc1")(x))
        h = h + nn.softplus(nn.Dense(WIDTH, name="fc2")(h))
        return normalize(nn.Dense(OUT, use_bias=False, name="project")(h))


class Towers(nn.Module):
    @nn.compact
    def __call__(self, image, text):
        a, b = Tower(name="image")(image), Tower(name="text")(text)
        return a, b, nn.Dense(OUT, name="predictor")(a)


def jax_model():
    return Towers()


def jax_loss(model, batch):
    a, b, predicted = model(batch["image"], batch["text"])
    logits = a @ b.T / 0.2
    labels = jnp.arange(len(a))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    contrastive = (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2
    others = jnp.where(jnp.eye(len(a), dtype=bool), -1.0, a @ b.T)
    hardest = jax.lax.top_k(others, 3)[0].mean(axis=-1)
    margin = nn.relu(0.3 + hardest - (a * b).sum(axis=-1)).mean()
    alignment = -optax.cosine_similarity(predicted, jax.lax.stop_gradient(b), epsilon=1e-8).mean()
    return contrastive + 0.5 * margin + 0.25 * alignment


jax_optimizer = optax.rmsprop(1e-3, decay=0.99, eps=1e-8, eps_in_sqrt=False)
