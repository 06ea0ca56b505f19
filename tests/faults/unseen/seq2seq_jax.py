"""The LSTM encoder-decoder in Haiku, with a cell of its own."""

import haiku as hk
import jax
import numpy as np
import optax
from jax import numpy as jnp

WORDS, EMBEDDING, WIDTH, MEMORY, STEPS = 20, 10, 16, 6, 5


class Cell(hk.Module):
    def __call__(self, x, state):
        h, c = state
        gates = hk.Linear(4 * WIDTH, name="inputs")(x)
        gates += hk.Linear(4 * WIDTH, with_bias=False, name="recurrent")(h)
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


def last(states, lengths):
    """Take the state after the last word of each sentence, from states (B, T, H)."""
    return jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]


def translate(source, previous):
    """Compute logits (B, T, WORDS) from padded source words and each previous target word."""
    is_word = source != 0
    words = hk.Embed(WORDS, EMBEDDING, name="source_words")(source)
    reader, writer = Cell(name="reader"), Cell(name="writer")
    state = (jnp.zeros((len(source), WIDTH), words.dtype),) * 2
    hidden, cells = [], []
    for t in range(MEMORY):
        state = reader(words[:, t], state)
        hidden.append(state[0])
        cells.append(state[1])
    memory, lengths = jnp.stack(hidden, axis=1), is_word.sum(axis=1)
    state = last(memory, lengths), last(jnp.stack(cells, axis=1), lengths)

    keys = hk.Linear(WIDTH, with_bias=False, name="keys")(memory)
    mix, head = hk.Linear(EMBEDDING, name="mix"), hk.Linear(WORDS, name="head")
    targets = hk.Embed(WORDS, EMBEDDING, name="target_words")(previous)
    outputs = []
    for t in range(STEPS):
        state = writer(targets[:, t], state)
        query = state[0]
        scores = (keys @ query[..., None])[..., 0]
        weights = jax.nn.softmax(jnp.where(is_word, scores, -1e30), axis=-1)
        context = jnp.einsum("bs,bsh->bh", weights, memory)
        outputs.append(head(jnp.tanh(mix(jnp.concatenate([query, context], axis=-1)))))
    return jnp.stack(outputs, axis=1)


network = hk.without_apply_rng(hk.transform(translate))


def jax_model():
    return network.init(jax.random.key(0), np.ones((1, MEMORY), int), np.ones((1, STEPS), int))


def jax_loss(params, batch):
    words = batch["tgt"]
    previous = jnp.concatenate([jnp.ones_like(words[:, :1]), words[:, :-1]], axis=1)
    logits = network.apply(params, batch["src"], previous)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, words)
    counted = words != 0
    return jnp.sum(losses * counted) / jnp.sum(counted)


jax_optimizer = optax.adam(5e-3)

names = {
    "source_words.embeddings": "src_embed.weight",
    "target_words.embeddings": "tgt_embed.weight",
    "reader.inputs": "encoder.ih",
    "reader.recurrent": "encoder.hh",
    "writer.inputs": "decoder.ih",
    "writer.recurrent": "decoder.hh",
    "keys": "score",
    "mix": "combine",
    "head": "out",
}
