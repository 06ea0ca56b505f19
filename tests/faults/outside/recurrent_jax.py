"""A tagger in plain functions: an LSTM that reads a text in two chunks, then a bidirectional GRU."""

import jax
import numpy as np
import optax
from jax import numpy as jnp

from jaxddp.state import TrainState

VOCAB, WIDTH, HIDDEN, TAGS = 10, 6, 5, 4
RATE, LR, DECAY, MAX_NORM = 0.25, 1e-2, 0.05, 0.3


def cell(inputs, gates):
    """Make the arrays of a cell; they are torch's, transposed."""
    shapes = {"w_x": (inputs, gates * HIDDEN), "w_h": (HIDDEN, gates * HIDDEN)}
    shapes |= {"b_x": (gates * HIDDEN,), "b_h": (gates * HIDDEN,)}
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def jax_model():
    return {
        "embedding": np.zeros((VOCAB, WIDTH)),
        "lstm": cell(WIDTH, 4),
        "gru": cell(HIDDEN, 3),
        "gru_reverse": cell(HIDDEN, 3),
        "tags": {"kernel": np.zeros((2 * HIDDEN, TAGS)), "bias": np.zeros(TAGS)},
    }


def dropout(x, key):
    kept = jax.random.bernoulli(key, 1 - RATE, x.shape)
    return jnp.where(kept, x / (1 - RATE), 0.0)


def lstm(p, x, state):
    """Read a sequence (B, T, E) from a state; return the outputs (B, T, H) and the last state."""

    def step(state, x_t):
        h, c = state
        i, f, g, o = jnp.split(x_t @ p["w_x"] + p["b_x"] + h @ p["w_h"] + p["b_h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    state, outputs = jax.lax.scan(step, state, x.swapaxes(0, 1))
    return outputs.swapaxes(0, 1), state


def gru(p, x, reverse=False):
    def step(h, x_t):
        r_x, z_x, n_x = jnp.split(x_t @ p["w_x"] + p["b_x"], 3, axis=-1)
        r_h, z_h, n_h = jnp.split(h @ p["w_h"] + p["b_h"], 3, axis=-1)
        r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
        n = jnp.tanh(n_x + r * n_h)
        h = (1 - z) * n + z * h
        return h, h

    start = jnp.zeros((len(x), HIDDEN), x.dtype)
    return jax.lax.scan(step, start, x.swapaxes(0, 1), reverse=reverse)[1].swapaxes(0, 1)


def tagger(params, words, key):
    x = dropout(params["embedding"][words], key)
    first, second = jnp.split(x, 2, axis=1)
    zeros = jnp.zeros((len(x), HIDDEN), x.dtype)
    one, state = lstm(params["lstm"], first, (zeros, zeros))
    two, _ = lstm(params["lstm"], second, jax.lax.stop_gradient(state))
    x = jnp.concatenate([one, two], axis=1)
    forwards, backwards = gru(params["gru"], x), gru(params["gru_reverse"], x, reverse=True)
    both = jnp.concatenate([forwards, backwards], axis=-1)
    return both @ params["tags"]["kernel"] + params["tags"]["bias"]


def jax_loss(params, batch):
    logits = tagger(params, batch["words"], jax.random.key(0))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"])
    return (losses * batch["valid"]).sum() / batch["valid"].sum()


jax_optimizer = optax.adamw(LR, weight_decay=DECAY)


def clip(gradients):
    factor = jnp.minimum(1, MAX_NORM / (optax.tree.norm(gradients) + 1e-6))
    return jax.tree.map(lambda g: factor * g, gradients)


def jax_step(loss, optimizer, state, batch):
    (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    averaged = jax.lax.pmean(gradients, "replica")
    clipped = clip(averaged)
    updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    shown = {"local_loss": value, "local_gradients": gradients, "gradients": averaged, "clipped_gradients": clipped}
    return TrainState(state.step + 1, params, buffers, opt_state), shown


names = {
    "lstm.w_x": "lstm.weight_ih_l0",
    "lstm.w_h": "lstm.weight_hh_l0",
    "lstm.b_x": "lstm.bias_ih_l0",
    "lstm.b_h": "lstm.bias_hh_l0",
    "gru.w_x": "gru.weight_ih_l0",
    "gru.w_h": "gru.weight_hh_l0",
    "gru.b_x": "gru.bias_ih_l0",
    "gru.b_h": "gru.bias_hh_l0",
    "gru_reverse.w_x": "gru.weight_ih_l0_reverse",
    "gru_reverse.w_h": "gru.weight_hh_l0_reverse",
    "gru_reverse.b_x": "gru.bias_ih_l0_reverse",
    "gru_reverse.b_h": "gru.bias_hh_l0_reverse",
    "embedding": "embedding.weight",
}
