"""The decoder as functions of stacked parameters; `jax.lax.scan` goes through the layers."""

import jax
import optax
from jax import numpy as jnp

VOCAB, WIDTH, LAYERS, HEADS, GROUPS, SIZE, HIDDEN = 48, 24, 2, 4, 2, 8, 40
BASE = 10_000.0


def init(key):
    keys = iter(jax.random.split(key, 8))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) * 0.2

    return {
        "embedding": draw(VOCAB, WIDTH),
        "layers": {
            "attention_gain": jnp.ones((LAYERS, WIDTH)),
            "query": draw(LAYERS, WIDTH, HEADS * SIZE),
            "key": draw(LAYERS, WIDTH, GROUPS * SIZE),
            "value": draw(LAYERS, WIDTH, GROUPS * SIZE),
            "out": draw(LAYERS, HEADS * SIZE, WIDTH),
            "mlp_gain": jnp.ones((LAYERS, WIDTH)),
            "gate": draw(LAYERS, WIDTH, HIDDEN),
            "up": draw(LAYERS, WIDTH, HIDDEN),
            "down": draw(LAYERS, HIDDEN, WIDTH),
        },
        "gain": jnp.ones(WIDTH),
    }


def rms_norm(x, gain):
    return gain * x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)


def rotary(x):
    """Rotate x of (B, T, H, D) by angles that grow with the position."""
    half = x.shape[-1] // 2
    speeds = BASE ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None, None] * speeds
    left, right = x[..., :half], x[..., half:]
    turned = (left * jnp.cos(angles) - right * jnp.sin(angles), right * jnp.cos(angles) + left * jnp.sin(angles))
    return jnp.concatenate(turned, axis=-1)


def attend(layer, x):
    b, t, _ = x.shape
    q = rotary((x @ layer["query"]).reshape(b, t, HEADS, SIZE))
    k = rotary((x @ layer["key"]).reshape(b, t, GROUPS, SIZE))
    v = (x @ layer["value"]).reshape(b, t, GROUPS, SIZE)
    k, v = (jnp.repeat(y, HEADS // GROUPS, axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    visible = jnp.tril(jnp.ones((t, t), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, -1) @ layer["out"]


def mlp(layer, x):
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def logits_of(params, tokens):
    x = params["embedding"][tokens] * jnp.sqrt(WIDTH)

    def block(x, layer):
        x = x + attend(layer, rms_norm(x, layer["attention_gain"]))
        x = x + mlp(layer, rms_norm(x, layer["mlp_gain"]))
        return x, None

    x, _ = jax.lax.scan(block, x, params["layers"])
    return rms_norm(x, params["gain"]) @ params["embedding"].T


def jax_model():
    return init(jax.random.key(0))


def jax_loss(params, batch):
    tokens, counts = batch["tokens"], batch["answer"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, tokens[:, :-1]), tokens[:, 1:])
    return (losses * counts).sum() / counts.sum()


jax_optimizer = optax.adamw(3e-3, b1=0.9, b2=0.95, weight_decay=0.1)

names = {
    "embedding": "embed.weight",
    "layers.attention_gain": "layers.{}.input_norm.weight",
    "layers.query": "layers.{}.attn.q_proj.weight",
    "layers.key": "layers.{}.attn.k_proj.weight",
    "layers.value": "layers.{}.attn.v_proj.weight",
    "layers.out": "layers.{}.attn.o_proj.weight",
    "layers.mlp_gain": "layers.{}.post_norm.weight",
    "layers.gate": "layers.{}.mlp.gate_proj.weight",
    "layers.up": "layers.{}.mlp.up_proj.weight",
    "layers.down": "layers.{}.mlp.down_proj.weight",
    "gain": "norm.weight",
}
