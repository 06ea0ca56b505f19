"""The masked auto-encoder in Equinox: a function of one image, mapped over the batch."""

import equinox as eqx
import jax
import optax
from jax import numpy as jnp

SIDE, PATCH, KEPT, HEADS = 4, 2, 6, 2
COUNT = SIDE * SIDE


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, width, key):
        self.query, self.key, self.value, self.out = (
            eqx.nn.Linear(width, width, key=k) for k in jax.random.split(key, 4)
        )

    def __call__(self, x):
        def heads(layer):
            return jax.vmap(layer)(x).reshape(len(x), HEADS, -1).swapaxes(0, 1)

        def one_head(q, k, v):
            scores = q @ k.T / jnp.sqrt(q.shape[-1])
            return jax.nn.softmax(scores, axis=-1) @ v

        mixed = jax.vmap(one_head)(heads(self.query), heads(self.key), heads(self.value))
        return jax.vmap(self.out)(mixed.swapaxes(0, 1).reshape(x.shape))


class Layer(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        first, second = jax.random.split(key)
        self.attention_norm, self.mlp_norm = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = Attention(width, first)
        gelu = jax.tree_util.Partial(jax.nn.gelu, approximate=False)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, gelu, key=second)

    def __call__(self, x):
        x += self.attention(jax.vmap(self.attention_norm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Restorer(eqx.Module):
    """One image's patches (COUNT, D), and the order of its patches, to what the patches look like."""

    embed: eqx.nn.Linear
    summary: jax.Array
    places: jax.Array
    encoder: list[Layer]
    encoder_norm: eqx.nn.LayerNorm
    narrow: eqx.nn.Linear
    blank: jax.Array
    decoder_places: jax.Array
    decoder: Layer
    decoder_norm: eqx.nn.LayerNorm
    pixels: eqx.nn.Linear

    def __init__(self, width, narrow, key):
        keys = iter(jax.random.split(key, 10))
        size = 3 * PATCH * PATCH
        self.embed = eqx.nn.Linear(size, width, key=next(keys))
        self.summary = 0.2 * jax.random.normal(next(keys), (width,))
        self.places = 0.2 * jax.random.normal(next(keys), (COUNT + 1, width))
        self.encoder = [Layer(width, next(keys)), Layer(width, next(keys))]
        self.encoder_norm = eqx.nn.LayerNorm(width)
        self.narrow = eqx.nn.Linear(width, narrow, key=next(keys))
        self.blank = 0.2 * jax.random.normal(next(keys), (narrow,))
        self.decoder_places = 0.2 * jax.random.normal(next(keys), (COUNT + 1, narrow))
        self.decoder = Layer(narrow, next(keys))
        self.decoder_norm = eqx.nn.LayerNorm(narrow)
        self.pixels = eqx.nn.Linear(narrow, size, key=next(keys))

    def __call__(self, patches, order):
        visible = order[:KEPT]
        x = jax.vmap(self.embed)(patches[visible]) + self.places[1:][visible]
        x = jnp.concatenate([(self.summary + self.places[0])[None], x])
        for layer in self.encoder:
            x = layer(x)
        x = jax.vmap(self.narrow)(jax.vmap(self.encoder_norm)(x))

        y = jnp.tile(self.blank, (COUNT, 1))
        y = y.at[visible].set(x[1:])
        y = jnp.concatenate([x[:1], y]) + self.decoder_places
        y = jax.vmap(self.decoder_norm)(self.decoder(y))
        return jax.vmap(self.pixels)(y)[1:]


def cut(image):
    """Cut one image (3, H, W) into patches (COUNT, PATCH PATCH 3)."""
    pieces = image.reshape(3, SIDE, PATCH, SIDE, PATCH)
    return pieces.transpose(1, 3, 2, 4, 0).reshape(COUNT, -1)


def hidden_error(model, image, noise):
    """Sum the errors of the patches that the encoder does not see."""
    patches, order = cut(image), jnp.argsort(noise)
    hidden = order[KEPT:]
    centred = patches - patches.mean(axis=1, keepdims=True)
    wanted = centred / jnp.sqrt(patches.var(axis=1, ddof=1, keepdims=True) + 1e-6)
    errors = jnp.square(model(patches, order) - wanted).mean(axis=1)
    return errors[hidden].mean()


def jax_model():
    return Restorer(16, 12, jax.random.key(0))


def jax_loss(model, batch):
    return jax.vmap(hidden_error, in_axes=(None, 0, 0))(model, batch["image"], batch["order"]).mean()


jax_optimizer = optax.adamw(1.5e-3, b2=0.95, weight_decay=0.05)

names = {
    "embed": "patch_embed",
    "summary": "cls_token",
    "places": "pos_embed",
    "encoder_norm": "norm",
    "narrow": "decoder_embed",
    "blank": "mask_token",
    "decoder_places": "decoder_pos_embed",
    "pixels": "decoder_pred",
}
for ours, reference in {"encoder.0": "blocks.0", "encoder.1": "blocks.1", "decoder": "decoder_block"}.items():
    names |= {
        f"{ours}.attention_norm": f"{reference}.norm1",
        f"{ours}.attention.query": f"{reference}.attn.q",
        f"{ours}.attention.key": f"{reference}.attn.k",
        f"{ours}.attention.value": f"{reference}.attn.v",
        f"{ours}.attention.out": f"{reference}.attn.proj",
        f"{ours}.mlp_norm": f"{reference}.norm2",
        f"{ours}.mlp.layers.0": f"{reference}.fc1",
        f"{ours}.mlp.layers.1": f"{reference}.fc2",
    }
