"""A transformer encoder that tags the words of padded sentences, in PyTorch and in Flax.

    jaxddp check examples/ports/transformer_encoder.py

The loss is the mean over all words of all replicas, not the mean of the replicas' means: replicas hold unequal
numbers of words. The optimizer is AdamW with a linear warm-up. Comments mark where the two frameworks differ.
"""

import math
from collections.abc import Iterable, Mapping

import jax
import numpy as np
import optax
import torch
from flax import nnx
from jax import numpy as jnp
from torch import nn
from torch.nn import functional as F

PAD, WORDS, TAGS, LENGTH = 0, 12, 4, 10
WIDTH, HEADS, HIDDEN, LAYERS = 16, 2, 32, 2
LR, WEIGHT_DECAY, WARMUP_STEPS = 1e-2, 0.01, 4

loss_normalization = "global"  # sum of all losses / sum of all weights, over all replicas


# ---- PyTorch


class TorchTagger(nn.Module):
    """Words (B, LENGTH), padded with PAD, to logits (B, LENGTH, TAGS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.position
        return self.head(self.encoder(x, src_key_padding_mask=words == PAD))


def torch_model() -> nn.Module:
    return TorchTagger()


def torch_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of every word, and its weight: 0 for padding."""
    logits = model(batch["words"])
    losses = F.cross_entropy(logits.transpose(1, 2), batch["tags"], reduction="none")
    return losses, batch["words"] != PAD


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS)


def torch_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY)


def torch_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)


# ---- Flax


def layer_norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Build a LayerNorm with torch's epsilon (Flax: 1e-6) and torch's two-pass variance, which keeps more digits."""
    return nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class SelfAttention(nnx.Module):
    """Self-attention, equivalent to nn.MultiheadAttention.

    It is written out because nnx.MultiHeadAttention computes the softmax in float32 whatever the dtype of its inputs,
    which is fine for training but off by 2e-7 in a float64 comparison.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)  # torch stores these three in one in_proj_weight
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, is_word: jax.Array) -> jax.Array:
        q, k, v = (_split(project(x)) for project in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        # True marks the words to attend to; in torch's key_padding_mask, True marks the padding.
        scores = jnp.where(is_word[:, None, None, :], scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return self.out(mixed.reshape(x.shape))


def _split(x: jax.Array) -> jax.Array:
    """Reshape (B, T, WIDTH) to (B, T, HEADS, WIDTH / HEADS), torch's order of the heads."""
    return x.reshape(*x.shape[:-1], HEADS, -1)


class EncoderLayer(nnx.Module):
    """nn.TransformerEncoderLayer with its default norm_first=False: norms follow the residual sums."""

    def __init__(self, rngs: nnx.Rngs):
        self.self_attn = SelfAttention(rngs)
        self.norm1 = layer_norm(rngs)
        self.linear1 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.linear2 = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm2 = layer_norm(rngs)

    def __call__(self, x: jax.Array, is_word: jax.Array) -> jax.Array:
        x = self.norm1(x + self.self_attn(x, is_word))
        hidden = nnx.gelu(self.linear1(x), approximate=False)  # torch's "gelu" is exact; Flax's default is not
        return self.norm2(x + self.linear2(hidden))


class FlaxTagger(nnx.Module):
    """Words (B, LENGTH) to logits (B, LENGTH, TAGS)."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.layers = nnx.List([EncoderLayer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, TAGS, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        is_word = words != PAD
        x = self.embed(words)
        # torch's padding_idx: that row of the table gets no gradient. Flax has no such argument. (Here no word
        # attends to padding; a model that averages over positions would differ without this line.)
        x = jnp.where(is_word[..., None], x, jax.lax.stop_gradient(x))
        x = x + self.position[...][None]
        for layer in self.layers:
            x = layer(x, is_word)
        return self.head(x)


def jax_model() -> nnx.Module:
    return FlaxTagger(nnx.Rngs(0))


def jax_loss(model: FlaxTagger, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["words"]), batch["tags"])
    return losses, batch["words"] != PAD


def flax_warmup(step: jax.Array) -> jax.Array:
    """Compute `warmup` in jax. optax.linear_schedule is equivalent, but computes in float32."""
    return LR * jnp.minimum(1.0, (step + 1.0) / WARMUP_STEPS)


# The decay must be given: torch's default is 1e-2, optax's 1e-4.
jax_optimizer = optax.adamw(flax_warmup, weight_decay=WEIGHT_DECAY)
names = {"layers": "encoder.layers"}


# ---- Data


def batch(step: int, rank: int) -> dict[str, np.ndarray]:
    """Draw sentences of 2 to LENGTH words; a tag depends on the word and on the length of its sentence."""
    rng = np.random.default_rng((step, rank))
    words = rng.integers(1, WORDS, (8, LENGTH))
    lengths = rng.integers(2, LENGTH + 1, (8, 1))
    tags = (words + (lengths > LENGTH // 2)) % TAGS
    return {"words": np.where(np.arange(LENGTH) < lengths, words, PAD), "tags": tags}
