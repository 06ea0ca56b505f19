"""The language model in flax.linen."""

import optax
from flax import linen as nn
from jax import numpy as jnp

LR = 1e-3
NORMAL = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        token = nn.Embed(11, 32, embedding_init=nn.initializers.normal(0.02), name="token")
        position = nn.Embed(6, 32, embedding_init=nn.initializers.normal(0.01), name="position")
        x = token(tokens) + position(jnp.arange(6))
        x = nn.relu(nn.Dense(24, kernel_init=NORMAL, name="up")(x))
        x = nn.Dropout(0.25, deterministic=False)(x)
        return nn.Dense(11, kernel_init=NORMAL, name="head")(x)


def jax_model():
    return Decoder()


def jax_loss(model, batch, key):
    logits = model(batch["tokens"], rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


jax_optimizer = optax.adam(LR)
