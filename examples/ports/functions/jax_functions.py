"""The language model of `torch_functions` as functions of a tree of parameters, without a framework.

params = {"embedding": (V, E), "cells": [{"w_x": (E, 4 H), "w_h": (H, 4 H), "b_x": (4 H,), "b_h": (4 H,)}, ...],
          "bias": (V,)}
"""

from typing import Any

import jax
from jax import numpy as jnp

Params = dict[str, Any]


def init(key: jax.Array, vocab: int, width: int, layers: int) -> Params:
    """Draw the parameters; the embedding is the output layer's weight, too."""
    keys = jax.random.split(key, 2 * layers + 1)
    bound = width**-0.5

    def uniform(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    cells = [
        {
            "w_x": uniform(keys[2 * layer], width, 4 * width),
            "w_h": uniform(keys[2 * layer + 1], width, 4 * width),
            "b_x": jnp.zeros(4 * width),
            "b_h": jnp.zeros(4 * width),
        }
        for layer in range(layers)
    ]
    return {"embedding": uniform(keys[-1], vocab, width), "cells": cells, "bias": jnp.zeros(vocab)}


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def lstm(cell: Params, x: jax.Array) -> jax.Array:
    """Go through a sequence (T, B, E), from a state of zeros; return the outputs (T, B, H)."""
    projected = x @ cell["w_x"] + cell["b_x"] + cell["b_h"]
    zeros = jnp.zeros((x.shape[1], len(cell["w_h"])), x.dtype)

    def step(state: tuple[jax.Array, jax.Array], x_t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = state
        i, f, g, o = jnp.split(x_t + h @ cell["w_h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (zeros, zeros), projected)[1]


def logits(params: Params, words: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Compute the logits (T, B, V) of words (T, B)."""
    keys = jax.random.split(key, len(params["cells"]) + 1)
    x = dropout(params["embedding"][words], rate, keys[0])
    for cell, cell_key in zip(params["cells"], keys[1:], strict=True):
        x = dropout(lstm(cell, x), rate, cell_key)
    return x @ params["embedding"].T + params["bias"]
