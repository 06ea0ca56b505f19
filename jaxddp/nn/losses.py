"""Per-example losses, and their way to sums and counts.

A loss function looks at one replica's batch and returns a value per element; nothing is
averaged there. The step adds values and weights up and divides once, at the end, by what
`loss_normalization` says. So padding, masked tokens and uneven batches cannot distort a mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.choices import IGNORE_INDEX

Batch = Mapping[str, Any]  # arrays by name: NumPy's on the host, jax's in a step
Sums = dict[str, jax.Array]

RESERVED = {"loss", "count", "grad_norm", "scale", "skipped"}  # the step's own metrics


@dataclass(frozen=True)
class Losses:
    """The losses of one batch, element by element.

    Attributes:
        values: loss of each element, shape (B,) or (B, T).
        weights: 1 for an element that counts, 0 for one that does not; all count if None.
        metrics: further per-element values (1.0 for a right answer, say), averaged likewise.
    """

    values: jax.Array
    weights: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)


LossFunction = Callable[[Any, Batch], Losses | jax.Array]


def num_examples(batch: Batch) -> int:
    """How many examples a batch of leaves (B, ...) has: B."""
    return int(jax.tree.leaves(batch)[0].shape[0])


def summed(losses: Losses | jax.Array, valid: jax.Array | None = None) -> Sums:
    """Sums over a batch: `loss` = sum_i w_i l_i, `count` = sum_i w_i, and each metric's sum.

    Args:
        losses: per-element losses; a plain array counts every element.
        valid: shape (B,); 0 takes an example out (evaluation pads its last batch).

    Raises:
        ValueError: the losses were averaged already, or a metric has a name of the step's own.

    >>> {name: float(x) for name, x in summed(jnp.array([1.0, 5.0]), jnp.array([1.0, 0.0])).items()}
    {'count': 1.0, 'loss': 1.0}
    """
    if not isinstance(losses, Losses):
        losses = Losses(losses)
    values = losses.values
    if jnp.ndim(values) == 0:
        raise ValueError("the loss function must return one loss per example, shape (B, ...), and not their mean")
    dtype = jnp.promote_types(values.dtype, jnp.float32)  # bfloat16 cannot count beyond 256
    weights = jnp.ones(values.shape, dtype) if losses.weights is None else losses.weights.astype(dtype)
    if valid is not None:
        weights *= valid.astype(dtype).reshape(valid.shape + (1,) * (values.ndim - valid.ndim))

    def total(element_values: jax.Array) -> jax.Array:
        # where, not a product alone: a padded element may be infinite, and 0 x inf is not 0
        return jnp.sum(jnp.where(weights > 0, element_values.astype(dtype), 0) * weights)

    if taken := losses.metrics.keys() & RESERVED:
        raise ValueError(f"a metric cannot be called {', '.join(sorted(taken))}: the step's own are")
    metrics = {name: total(value) for name, value in losses.metrics.items()}
    return {"count": jnp.sum(weights), "loss": total(values), **metrics}


def cross_entropy(model: Callable[[jax.Array], jax.Array], batch: Batch) -> Losses:
    """-log softmax(model(x))_y for each label y, and whether the largest logit is right.

    Labels of -100 are ignored, as by `torch.nn.functional.cross_entropy`.

    Args:
        model: maps x to logits of shape (B, C) or (B, T, C); of 16 bits, the loss is taken in float32.
        batch: "x", and "y" of shape (B,) or (B, T), integer.

    >>> logits = lambda x: jnp.log(x)
    >>> batch = {"x": jnp.array([[0.5, 0.5], [0.1, 0.9]]), "y": jnp.array([0, -100])}
    >>> losses = cross_entropy(logits, batch)
    >>> print(losses.values.round(4)[0], losses.weights)
    0.6931 [1. 0.]
    """
    logits, labels = model(batch["x"]), batch["y"]
    counts = labels != IGNORE_INDEX
    labels = jnp.where(counts, labels, 0)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    values = optax.softmax_cross_entropy_with_integer_labels(wide, labels)
    right = jnp.argmax(logits, axis=-1) == labels
    return Losses(values, counts.astype(values.dtype), {"accuracy": right.astype(values.dtype)})
