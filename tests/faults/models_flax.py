"""Models and losses of the scenarios in flax.nnx, with an argument for each choice that can be wrong.

The defaults are correct: each module computes what torch's module of the same name computes, and has its attributes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.nn.layers import BatchNorm
from tests.support.layers import Conv, Linear

from . import policy, resnet
from .models_torch import (
    AUXILIARY,
    CLASSES,
    COLOURS,
    DROPOUT,
    EMBEDDING,
    FEATURES,
    HEIGHT,
    HIDDEN,
    IGNORED,
    LABEL_SMOOTHING,
    PADDING,
    PENALTY,
    VOCABULARY,
    WIDTH,
)

Batch = Mapping[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]

gelu: Activation = partial(nnx.gelu, approximate=False)
LayerNorm = partial(nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False)


class Mlp(nnx.Module):
    """Layers fc1, mask, fc2, fc3.

    Args:
        activations: activations after fc1 and fc2.
        linear: constructor of the layers.
        hidden: (fc2, input) -> output of fc2.
        temperature: divisor of the logits; None: no division.
    """

    def __init__(
        self,
        activations: tuple[Activation, Activation] = (gelu, gelu),
        linear: Callable[..., Any] = Linear,
        hidden: Callable[[nnx.Linear, jax.Array], jax.Array] = lambda layer, x: layer(x),
        temperature: float | None = None,
    ):
        rngs = nnx.Rngs(0)
        self.fc1 = linear(FEATURES, HIDDEN, rngs=rngs)
        self.fc2 = linear(HIDDEN, HIDDEN, rngs=rngs)
        self.fc3 = linear(HIDDEN, CLASSES, rngs=rngs)
        self.activations, self.hidden, self.temperature = activations, hidden, temperature

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        first, second = self.activations
        x = first(self.fc1(x)) * mask
        logits = self.fc3(second(self.hidden(self.fc2, x)))
        return logits if self.temperature is None else logits / self.temperature


class DropoutMlp(Mlp):
    """The same with dropout of the inputs.

    Args:
        rate: share of the inputs that are dropped.
        options: of `Mlp`.
    """

    def __init__(self, rate: float = DROPOUT, **options: Any):
        super().__init__(**options)
        self.drop = nnx.Dropout(rate, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return super().__call__(self.drop(x), mask)


def to_torch_order(x: jax.Array) -> jax.Array:
    """Flatten images (B, H, W, C) in the order of torch's (B, C, H, W)."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def norm_first(norm: Callable[..., jax.Array], activation: Activation, x: jax.Array) -> jax.Array:
    """Apply the norm, then the activation."""
    return activation(norm(x))


class ConvNet(nnx.Module):
    """Convolutional network on images (B, H, W, C).

    Args:
        activations: activations after bn1, conv2 and conv3.
        norm: constructor of bn1.
        conv: constructor of the convolutions.
        linear: constructor of the head.
        padding: padding of conv3, which has stride 2.
        block: (conv2, input) -> output of conv2.
        residual: (input, output) of the block -> their sum.
        normalise: (bn1, activation, input) -> output of both.
        flatten: images -> rows.
    """

    def __init__(
        self,
        activations: tuple[Activation, Activation, Activation] = (gelu, gelu, gelu),
        norm: Callable[..., Any] = BatchNorm,
        conv: Callable[..., Any] = Conv,
        linear: Callable[..., Any] = Linear,
        padding: Any = ((1, 1), (2, 2)),
        block: Callable[[nnx.Conv, jax.Array], jax.Array] = lambda layer, x: layer(x),
        residual: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add,
        normalise: Callable[..., jax.Array] = norm_first,
        flatten: Callable[[jax.Array], jax.Array] = to_torch_order,
    ):
        rngs = nnx.Rngs(0)
        self.conv1 = conv(COLOURS, 4, (3, 5), padding=((1, 1), (2, 2)), use_bias=False, rngs=rngs)
        self.bn1 = norm(4)
        self.conv2 = conv(4, 4, (3, 1), padding=((1, 1), (0, 0)), rngs=rngs)
        self.conv3 = conv(4, 6, (3, 5), strides=2, padding=padding, rngs=rngs)
        self.fc = linear(6 * HEIGHT // 2 * WIDTH // 2, CLASSES, rngs=rngs)
        self.activations, self.normalise, self.flatten = activations, normalise, flatten
        self.block, self.residual = block, residual

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second, third = self.activations
        x = self.normalise(self.bn1, first, self.conv1(x))
        x = self.residual(x, second(self.block(self.conv2, x)))
        return self.fc(self.flatten(third(self.conv3(x))))


def look_up(table: jax.Array, x: jax.Array) -> jax.Array:
    """Return rows of the table; the row of the padding gets no gradient."""
    rows = table[x]
    return jnp.where((x == PADDING)[..., None], jax.lax.stop_gradient(rows), rows)


class Embed(nnx.Module):
    """Embedding table."""

    def __init__(self) -> None:
        self.embedding = nnx.Param(jnp.zeros((VOCABULARY, EMBEDDING)))


class Tokens(nnx.Module):
    """Token model on tokens (B, T).

    Args:
        unused: add a layer that the loss does not depend on.
        activation: activation between up and down.
        norm: constructor of norm1 and norm2.
        look_up: (table, tokens) -> rows.
        output: table -> weights of the output layer.
        tied: use the table as the output layer, instead of a separate layer.
        branch: output of the residual block -> output that is added.
    """

    def __init__(
        self,
        unused: bool = False,
        activation: Activation = gelu,
        norm: Callable[..., Any] = LayerNorm,
        look_up: Callable[[jax.Array, jax.Array], jax.Array] = look_up,
        output: Callable[[jax.Array], jax.Array] = lambda table: table,
        tied: bool = True,
        branch: Callable[[jax.Array], jax.Array] = lambda x: x,
    ):
        rngs = nnx.Rngs(0)
        self.embed = Embed()
        self.norm1 = norm(EMBEDDING, rngs=rngs)
        self.up = Linear(EMBEDDING, 2 * EMBEDDING, rngs=rngs)
        self.down = Linear(2 * EMBEDDING, EMBEDDING, rngs=rngs)
        self.norm2 = norm(EMBEDDING, rngs=rngs)
        if not tied:
            self.head = Linear(EMBEDDING, VOCABULARY, use_bias=False, rngs=rngs)
        if unused:
            self.unused = Linear(EMBEDDING, EMBEDDING, rngs=rngs)
        self.activation, self.branch = activation, branch
        self.look_up, self.output, self.tied = look_up, output, tied

    def __call__(self, x: jax.Array) -> jax.Array:
        table = self.embed.embedding[...]
        x = self.look_up(table, x)
        x = x + x.mean(1, keepdims=True)
        x = x + self.branch(self.down(self.activation(self.up(self.norm1(x)))))
        x = self.norm2(x)
        return x @ self.output(table).T if self.tied else self.head(x)


def mlp_loss(model: Mlp, batch: Batch) -> jax.Array:
    """Compute the mean cross entropy."""
    logits = model(batch["x"], batch["mask"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def mlp_penalty_loss(model: Mlp, batch: Batch) -> jax.Array:
    """Add the squares of all parameters to the mean cross entropy."""
    squares = (jnp.square(p).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return mlp_loss(model, batch) + PENALTY * sum(squares)


def convnet_loss(model: ConvNet, batch: Batch, smoothing: float = LABEL_SMOOTHING) -> jax.Array:
    """Compute the mean cross entropy against smoothed labels."""
    labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], CLASSES), smoothing)
    return optax.softmax_cross_entropy(model(batch["x"]), labels).mean()


def token_losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy of every label, 0 where the label is ignored, and 1 where the label counts."""
    counts = labels != IGNORED
    values = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    return jnp.where(counts, values, 0), counts.astype(values.dtype)


def tokens_loss(model: Tokens, batch: Batch) -> jax.Array:
    """Compute the mean cross entropy over the labels that count."""
    values, counts = token_losses(model(batch["x"]), batch["y"])
    return values.sum() / counts.sum()


def tokens_global_loss(model: Tokens, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy of every label, and 1 where the label counts."""
    return token_losses(model(batch["x"]), batch["y"])


def tokens_sum_loss(model: Tokens, batch: Batch) -> jax.Array:
    """Divide the sum over this micro-batch by the number of labels of the whole step; add an auxiliary loss."""
    logits = model(batch["x"])
    values, _ = token_losses(logits, batch["y"])
    return values.sum() / batch["items"][0] * batch["parts"][0] + auxiliary(logits)


def auxiliary(logits: jax.Array) -> jax.Array:
    """Compute the mean over positions of a penalty on the size of the logits."""
    return AUXILIARY * jnp.square(jax.nn.logsumexp(logits, -1)).mean()


MODELS: dict[str, Any] = {
    "mlp": (Mlp, mlp_loss),
    "mlp_dropout": (DropoutMlp, mlp_loss),
    "mlp_penalty": (Mlp, mlp_penalty_loss),
    "convnet": (ConvNet, convnet_loss),
    "tokens": (Tokens, tokens_loss),
    "tokens_global": (Tokens, tokens_global_loss),
    "tokens_sum": (Tokens, tokens_sum_loss),
    "policy": (policy.FlaxPolicy, policy.jax_loss),
    "resnet": (resnet.FlaxResNet, resnet.jax_loss),
}
