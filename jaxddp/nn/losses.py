"""Per-example losses and their sums and counts.

A loss function returns one value per element of a replica's batch and averages nothing. The step sums
values and weights and divides once, at the end, by the denominator that `loss_normalization` selects, so that
padding, masked tokens and uneven batches do not distort the mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.errors import InputError, check_weights

__all__ = [
    "RESERVED",
    "Batch",
    "LossFunction",
    "Losses",
    "Sums",
    "as_losses",
    "cross_entropy",
    "num_examples",
    "summed",
]

Batch = Mapping[str, Any]  # arrays by name: NumPy's on the host, jax's in a step
Sums = dict[str, jax.Array]

RESERVED = {"loss", "count", "grad_norm", "scale", "skipped"}  # metrics that the step computes


@dataclass(frozen=True)
class Losses:
    """Losses of one batch, element by element.

    Attributes:
        values: loss of each element, (B,) or (B, T).
        weights: 1 for elements to include, 0 for elements to leave out; None: include all.
        metrics: further per-element values (such as 1.0 for a correct prediction), averaged like the loss.
    """

    values: jax.Array
    weights: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)


LossFunction = Callable[[Any, Batch], Losses | jax.Array]


def as_losses(loss: Any, name: str = "loss") -> Losses:
    """Return what a loss function returns as `Losses`; a scalar, already a mean, gets an axis of length 1.

    Args:
        loss: the loss, one per element, a pair of these and their weights, or `Losses`; or a pair of the mean loss
            and anything else, which is left out.
        name: name of the function, for the message.

    Raises:
        InputError: it is none of these.

    >>> as_losses((jnp.array([1.0, 2.0]), jnp.array([1, 0]))).weights.tolist()
    [1, 0]
    """
    if isinstance(loss, Losses):
        return loss
    values, weights = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not hasattr(values, "dtype"):
        raise InputError(f"{name}: must return the loss, or one per element, or a pair of these and their weights")
    check_weights(name, values.shape, weights)
    return Losses(jnp.atleast_1d(values), weights if values.ndim else None)


def num_examples(batch: Batch) -> int:
    """Return the number of examples B in a batch of leaves (B, ...)."""
    return int(jax.tree.leaves(batch)[0].shape[0])


def summed(losses: Losses | jax.Array, valid: jax.Array | None = None) -> Sums:
    """Sum over a batch: `loss` = sum_i w_i l_i, `count` = sum_i w_i, and each metric's sum.

    Args:
        losses: per-element losses; a plain array includes every element.
        valid: (B,), 0 for examples to leave out (the padding of the last evaluation batch, for instance).

    Raises:
        ValueError: the losses are averaged already, or a metric has a reserved name.

    >>> {name: float(x) for name, x in summed(jnp.array([1.0, 5.0]), jnp.array([1.0, 0.0])).items()}
    {'count': 1.0, 'loss': 1.0}
    """
    if not isinstance(losses, Losses):
        losses = Losses(losses)
    values = losses.values
    if jnp.ndim(values) == 0:
        raise ValueError("the loss function must return one loss per example, shape (B, ...), not their mean")
    dtype = jnp.promote_types(values.dtype, jnp.float32)  # bfloat16 cannot count beyond 256
    weights = jnp.ones(values.shape, dtype) if losses.weights is None else losses.weights.astype(dtype)
    if valid is not None:
        weights *= valid.astype(dtype).reshape(valid.shape + (1,) * (values.ndim - valid.ndim))

    def total(element_values: jax.Array) -> jax.Array:
        # where, not only a product: a padded element may be infinite, and 0 x inf is not 0
        return jnp.sum(jnp.where(weights > 0, element_values.astype(dtype), 0) * weights)

    if taken := losses.metrics.keys() & RESERVED:
        raise ValueError(f"metrics {', '.join(sorted(taken))}: must have other names than the metrics of the step")
    metrics = {name: total(value) for name, value in losses.metrics.items()}
    return {"count": jnp.sum(weights), "loss": total(values), **metrics}


def cross_entropy(model: Callable[[jax.Array], jax.Array], batch: Batch) -> Losses:
    """Compute the cross entropy -log softmax(model(x))_y for each label y, and the accuracy of the largest logit.

    Labels of -100 are ignored, as by `torch.nn.functional.cross_entropy`.

    Args:
        model: maps x to logits (B, C) or (B, T, C); for 16-bit logits the loss is computed in float32.
        batch: "x", and integer labels "y" (B,) or (B, T).

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
