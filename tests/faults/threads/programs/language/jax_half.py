"""The language model in flax.nnx."""

import dataclasses

import jax
import optax
from flax import nnx
from jax import numpy as jnp

LR = 1e-3


class Language(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.head = nnx.Linear(16, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(nnx.relu(self.up(x + x.mean(1, keepdims=True))))


def jax_model():
    return Language(nnx.Rngs(0))


def jax_loss(model, batch):
    counts = batch["labels"] != -100
    labels = jnp.where(counts, batch["labels"], 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), labels)
    return jnp.where(counts, losses, 0), counts.astype(losses.dtype)


jax_optimizer = optax.adamw(LR, weight_decay=1e-2)


def of_micro_batches(loss, state, batch):
    """Return the loss and the gradients of each micro-batch, stacked."""

    def of_one(part):
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, part)
        return value, gradients

    return jax.lax.map(of_one, batch)


def update(optimizer, state, gradients):
    """Return the state after one step of the optimizer."""
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
