"""The two towers in flax.linen: compact modules."""

import jax
import numpy as np
import optax
from flax import linen as nn
from jax import numpy as jnp

WIDTH, SHARED = 20, 12


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x)
        y = nn.gelu(nn.Dense(2 * WIDTH)(y), approximate=False)
        return x + nn.Dense(WIDTH)(y)


class Pictures(nn.Module):
    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(features)
        for _ in range(2):
            x = Residual()(x)
        return nn.Dense(SHARED, use_bias=False, name="shared")(x)


class Captions(nn.Module):
    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        places = self.param("places", nn.initializers.normal(0.3), (words.shape[1], WIDTH))
        x = Residual()(nn.Embed(25, WIDTH)(words) + places)
        is_word = (words != 0)[..., None]
        mean = jnp.where(is_word, x, 0).sum(axis=1) / is_word.sum(axis=1)
        return nn.Dense(SHARED, use_bias=False, name="shared")(mean)


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))


class Pair(nn.Module):
    """Similarities (B, B) of pictures, in rows, and captions."""

    @nn.compact
    def __call__(self, image: jax.Array, text: jax.Array) -> jax.Array:
        pictures = unit(Pictures(name="pictures")(image))
        captions = unit(Captions(name="captions")(text))
        log_scale = self.param("log_scale", nn.initializers.constant(np.log(1 / 0.07)), (1,))
        scale = jnp.exp(log_scale)
        return scale * jnp.einsum("id,jd->ij", pictures, captions)


def jax_model():
    return Pair()


def jax_loss(model, batch):
    logits = model(batch["image"], batch["text"])
    of_pictures = -jnp.diag(jax.nn.log_softmax(logits, axis=1))
    of_captions = -jnp.diag(jax.nn.log_softmax(logits, axis=0))
    return 0.5 * (of_pictures.mean() + of_captions.mean())


jax_optimizer = optax.adamw(1e-3, b2=0.98, eps=1e-6, weight_decay=0.2)

names = {
    "pictures.Dense_0": "visual.stem",
    "pictures.Residual_0.LayerNorm_0": "visual.blocks.0.ln",
    "pictures.Residual_0.Dense_0": "visual.blocks.0.fc1",
    "pictures.Residual_0.Dense_1": "visual.blocks.0.fc2",
    "pictures.Residual_1.LayerNorm_0": "visual.blocks.1.ln",
    "pictures.Residual_1.Dense_0": "visual.blocks.1.fc1",
    "pictures.Residual_1.Dense_1": "visual.blocks.1.fc2",
    "pictures.shared": "visual.proj",
    "captions.places": "textual.position",
    "captions.Embed_0": "textual.token",
    "captions.Residual_0.LayerNorm_0": "textual.block.ln",
    "captions.Residual_0.Dense_0": "textual.block.fc1",
    "captions.Residual_0.Dense_1": "textual.block.fc2",
    "captions.shared": "textual.proj",
    "log_scale": "logit_scale",
}
