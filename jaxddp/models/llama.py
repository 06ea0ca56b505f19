"""A Llama decoder that classifies sequences, the twin of Hugging Face's LlamaForSequenceClassification.

Attributes have the names of transformers, so that `jaxddp.nn.torch_weights` maps a checkpoint name by name.

Sources: transformers, models/llama/modeling_llama.py and modeling_layers.py; Touvron et al., LLaMA, 2023;
Su et al., RoFormer, 2021 (rotary positions); Ainslie et al., GQA, 2023 (grouped queries).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax import numpy as jnp

from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError
from jaxddp.models.llama_config import LlamaConfig
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import from_torch, load_weights

Rotation = tuple[jax.Array, jax.Array]  # cos and sin of the angles at each position, (1, T, 1, head_dim)


class LlamaForSequenceClassification(nnx.Module):
    """Llama with a linear classifier on the last token of each sequence that is not padding.

    Args:
        config: sizes.
        generator: source of the initial weights; None: all 0, to be replaced by a checkpoint's.

    >>> tiny = LlamaConfig(50, 12, 16, 1, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    >>> model = LlamaForSequenceClassification(tiny, generator=Generator(0))
    >>> jax.eval_shape(model, jnp.array([[7, 8, 9], [7, 8, 0]])).shape
    (2, 2)
    """

    def __init__(self, config: LlamaConfig, *, generator: Generator | None):
        self.config = config
        self.model = Llama(config, generator=generator)
        self.score = linear(config.hidden_size, config.num_labels, config, generator)

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Compute logits (B, C).

        Args:
            input_ids: tokens (B, T), padded on the left or on the right.
            attention_mask: (B, T), 1 for tokens to attend to, 0 for tokens to mask; None: attend to all.

        Raises:
            InputError: several sequences without a `pad_token_id` in the config.
        """
        hidden = self.model(input_ids, attention_mask)
        ends = last_tokens(input_ids, self.config.pad_token_id)
        return self.score(jnp.take_along_axis(hidden, ends[:, None, None], axis=1)[:, 0])


def from_pretrained(folder: str | Path, config: LlamaConfig, *, generator: Generator) -> LlamaForSequenceClassification:
    """Load the weights of a classifier or of a language model from a checkpoint.

    As in transformers, the `lm_head` of a language model is dropped, and the missing `score` is drawn at random: with
    the numbers that transformers draws after `torch.manual_seed`.

    Args:
        folder: folder with the checkpoint's model.safetensors.
        config: contents of its config.json, see `LlamaConfig.from_folder`.
        generator: source of `score`.

    Raises:
        InputError: the file is missing, or tensors are missing, left over or of another shape; the message lists
            all of them.
    """
    tensors = load_weights(Path(folder) / "model.safetensors", option="--model-folder")
    tensors.pop("lm_head.weight", None)
    if "score.weight" not in tensors:
        shape = (config.num_labels, config.hidden_size)
        tensors["score.weight"] = generator.normal(shape, std=config.initializer_range)
    empty = Functional(LlamaForSequenceClassification(config, generator=None))
    model: Any = empty.module(*from_torch(tensors, empty.params, empty.buffers))
    return model


class Llama(nnx.Module):
    """Decoder from tokens (B, T) to features (B, T, hidden_size)."""

    def __init__(self, config: LlamaConfig, *, generator: Generator | None):
        self.config = config
        init = drawn(config, generator)
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=init, rngs=nnx.Rngs(0))
        self.embed_tokens.dtype = None  # flax would return float32 rows even of a bfloat16 table
        if config.pad_token_id is not None:  # transformers begins with 0 in its row
            table = self.embed_tokens.embedding
            table[...] = table[...].at[config.pad_token_id].set(0.0)
        self.layers = nnx.List([DecoderLayer(config, generator=generator) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config)

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids)
        if self.config.pad_token_id is not None:  # torch's padding_idx: its row gets no gradient
            x = jnp.where((input_ids == self.config.pad_token_id)[..., None], lax.stop_gradient(x), x)
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        if attention_mask is not None:
            mask &= attention_mask[:, None, :] > 0
        rotation = rotary(length, self.config, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, rotation)
        return self.norm(x)


class DecoderLayer(nnx.Module):
    """Decoder layer x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, *, generator: Generator | None):
        self.self_attn = Attention(config, generator=generator)
        self.mlp = LlamaMLP(config, generator=generator)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def __call__(self, x: jax.Array, mask: jax.Array, rotation: Rotation) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), mask, rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nnx.Module):
    """Causal grouped-query attention: groups of neighbouring query heads share a key and value head."""

    def __init__(self, config: LlamaConfig, *, generator: Generator | None):
        self.head_dim, self.key_value_heads = config.head_dim, config.num_key_value_heads
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, config.hidden_size, config, generator)
        self.k_proj = linear(config.hidden_size, keys, config, generator)
        self.v_proj = linear(config.hidden_size, keys, config, generator)
        self.o_proj = linear(config.hidden_size, config.hidden_size, config, generator)

    def __call__(self, x: jax.Array, mask: jax.Array, rotation: Rotation) -> jax.Array:
        """Compute features (B, T, hidden_size); token t attends to token s if mask[b, t, s]."""
        q, k, v = (proj(x).reshape(*x.shape[:2], -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotated(heads, rotation).astype(v.dtype) for heads in (q, k))
        q = q.reshape(*q.shape[:2], self.key_value_heads, -1, self.head_dim)
        # Not jax.nn.dot_product_attention, which computes the softmax in float32 even for float64.
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=_at_least_float32(v.dtype))
        scores = jnp.where(mask[:, None, None], scores * self.head_dim**-0.5, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return self.o_proj(jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(x.shape))


class LlamaMLP(nnx.Module):
    """Gated multilayer perceptron down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, *, generator: Generator | None):
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, config, generator)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, config, generator)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, config, generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation x / sqrt(mean(x^2) + eps) * scale, over the last axis of (B, T, hidden_size).

    As in transformers, and unlike `nnx.RMSNorm`, 16-bit inputs are rounded before the product with the scale.
    """

    def __init__(self, config: LlamaConfig):
        self.scale = nnx.Param(jnp.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(_at_least_float32(x.dtype))
        wide *= lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return self.scale[None, None] * wide.astype(x.dtype)


def linear(in_features: int, out_features: int, config: LlamaConfig, generator: Generator | None) -> nnx.Linear:
    """Make a linear layer y = x W, without a bias."""
    init = drawn(config, generator)
    return nnx.Linear(in_features, out_features, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))


def drawn(config: LlamaConfig, generator: Generator | None) -> Callable[..., jax.Array]:
    """Return an initializer that draws from N(0, initializer_range^2), or one of zeros without a generator."""
    if generator is None:
        return nnx.initializers.zeros
    return lambda key, shape, dtype, **_: jnp.asarray(generator.normal(shape, std=config.initializer_range), dtype)


def rotary(length: int, config: LlamaConfig, dtype: Any) -> Rotation:
    """Compute cos and sin of the angles t theta^(-2i / head_dim) at position t, repeated as in transformers."""
    wide = _at_least_float32(dtype)
    powers = np.arange(0, config.head_dim, 2, dtype=wide) / config.head_dim
    angles = np.arange(length, dtype=wide)[:, None] * (config.rope_theta**-powers)[None]
    angles = np.concatenate([angles, angles], axis=1)[None, :, None]
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def rotated(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate heads (B, T, N, head_dim), features i and i + head_dim / 2 as a pair."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def last_tokens(input_ids: jax.Array, pad_token_id: int | None) -> jax.Array:
    """Return the position of each sequence's rightmost token that is not padding, (B,); 0 if all tokens are padding.

    >>> print(last_tokens(jnp.array([[5, 6, 0], [0, 5, 6], [5, 0, 6]]), 0))
    [1 2 2]
    """
    batch, length = input_ids.shape
    if pad_token_id is None:
        if batch > 1:
            raise InputError(f"pad_token_id None: must be set to locate the last tokens of {batch} sequences")
        return jnp.full(1, length - 1)
    return jnp.argmax(jnp.arange(length)[None] * (input_ids != pad_token_id), axis=1)


def _at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
