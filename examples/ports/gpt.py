"""A GPT in PyTorch and in Flax: causal attention, pre-norm, output weights tied to the token embedding.

    python -m jaxddp.parity examples/ports/gpt.py

AdamW decays matrices only, gradients are clipped to a norm, and a step has two micro-batches. Comments mark where
the two frameworks differ.
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

TOKENS, LENGTH = 32, 16
WIDTH, HEADS, BLOCKS = 32, 4, 2
LR, BETAS, WEIGHT_DECAY, STEPS = 3e-3, (0.9, 0.95), 0.1, 100

accumulation_steps = 2  # split every batch into two halves and average their gradients
clip_grad_norm = 0.5  # after the mean over the replicas; divides by norm + 1e-6 like clip_grad_norm_ (optax: by norm)


# ---- PyTorch


class TorchBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class TorchGPT(nn.Module):
    """Tokens (B, T) to logits (B, T, TOKENS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([TorchBlock() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def torch_model() -> nn.Module:
    return TorchGPT()


def torch_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def torch_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]  # biases and norms
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS)


def torch_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)  # rises again after STEPS; optax's does not


# ---- Flax


def layer_norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Build a LayerNorm with torch's epsilon (Flax: 1e-6) and torch's two-pass variance, which keeps more digits."""
    return nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class FlaxBlock(nnx.Module):
    """Flax counterpart of `TorchBlock`."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = layer_norm(rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm2 = layer_norm(rngs)
        self.fc1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.fc2 = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))  # GPT-2 uses the tanh approximation, Flax's default

    def attention(self, x: jax.Array) -> jax.Array:
        # Written out: jax.nn.dot_product_attention and Flax's attention compute the softmax in float32, which
        # is fine for training but off by 2e-7 in a float64 comparison.
        batch, length, _ = x.shape
        q, k, v = (part.reshape(batch, length, HEADS, -1) for part in jnp.split(self.qkv(x), 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal[None, None], scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return self.out(mixed.reshape(x.shape))


class FlaxGPT(nnx.Module):
    """Tokens (B, T) to logits (B, T, TOKENS). `embed.attend` ties the weights, so there is no head."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([FlaxBlock(rngs) for _ in range(BLOCKS)])
        self.norm = layer_norm(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))

    def logits(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(x)


def flax_model() -> nnx.Module:
    return FlaxGPT(nnx.Rngs(0))


def flax_loss(model: FlaxGPT, batch: Mapping[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


# optax.adamw decays all parameters without a mask; torch uses parameter groups. `clip_grad_norm` does the clipping.
flax_optimizer = optax.adamw(
    optax.cosine_decay_schedule(LR, STEPS),
    *BETAS,
    weight_decay=WEIGHT_DECAY,
    mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
)


# ---- Data


def batch(step: int, rank: int) -> dict[str, np.ndarray]:
    """Draw sequences that count upwards with random strides and occasional mistakes."""
    rng = np.random.default_rng((step, rank))
    start, stride = rng.integers(0, TOKENS, (8, 1)), rng.integers(1, 4, (8, 1))
    tokens = start + stride * np.arange(LENGTH + 1)
    mistakes = rng.random(tokens.shape) < 0.1
    return {"tokens": (tokens + mistakes) % TOKENS}
