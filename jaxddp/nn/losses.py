"""Per-example losses and their sums and counts.

A loss function returns one value per element of a replica's batch and averages nothing. The step sums
values and weights and divides once, at the end, by the denominator that `loss_normalization` selects, so that
padding, masked tokens and uneven batches do not distort the mean.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.choices import COUNT_OF, IGNORE_INDEX, RESERVED
from jaxddp.errors import InputError, check_weights
from jaxddp.program.losses import shown_metrics
from jaxddp.tracking.gradient_metrics import EXAMPLE, EXAMPLES

__all__ = [
    "Batch",
    "LossFunction",
    "Losses",
    "Metrics",
    "Sums",
    "as_losses",
    "cross_entropy",
    "no_metrics",
    "num_examples",
    "returns_mean",
    "summed",
    "sums_of",
]

Batch = Mapping[str, Any]  # arrays by name: NumPy's on the host, jax's in a step
Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Losses:
    """Losses of one batch, element by element.

    Attributes:
        values: loss of each element, (B,) or (B, T).
        weights: 1 for elements to include, 0 for elements to leave out; None: include all.
        metrics: further per-element values (such as 1.0 for a correct prediction), averaged like the loss; or
            scalars, means over the batch.
        is_mean: the loss function has returned a mean, of which no element can be left out.
    """

    values: jax.Array
    weights: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    is_mean: bool = False


LossFunction = Callable[[Any, Batch], Losses | jax.Array]
Metrics = Callable[..., Mapping[str, jax.Array]]


def no_metrics(*arguments: Any) -> dict[str, jax.Array]:
    """Return no metrics in addition to those of the loss."""
    return {}


_MEANS: ContextVar[list[str] | None] = ContextVar("means", default=None)  # of functions that have returned a mean


def as_losses(loss: Any, name: str = "loss") -> Losses:
    """Return what a loss function returns as `Losses`; a scalar, already a mean, gets an axis of length 1.

    Args:
        loss: the loss, or one per element, or a pair of it and the elements' weights, of it and metrics by name, or of
            a mean and anything else, which is left out; or `Losses`.
        name: name of the function, for the message.

    Raises:
        InputError: it is none of these.

    >>> as_losses((jnp.array([1.0, 2.0]), jnp.array([1, 0]))).weights.tolist()
    [1, 0]
    >>> as_losses((jnp.array(1.5), {"accuracy": jnp.array(0.75)})).metrics
    {'accuracy': Array(0.75, dtype=float32, weak_type=True)}
    """
    if isinstance(loss, Losses):
        return loss
    values, more = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not hasattr(values, "dtype"):
        raise InputError(f"{name}: must return the loss, or one per element, or a pair of these and their weights")
    if isinstance(more, Mapping):
        metrics = {k: jnp.asarray(x) for k, x in shown_metrics(more).items() if jnp.shape(x) in ((), values.shape)}
        more = None
    else:
        metrics = {}
        check_weights(name, values.shape, more)
    if not values.ndim:
        _note_mean(name)
    return Losses(jnp.atleast_1d(values), more if values.ndim else None, metrics, is_mean=not values.ndim)


def _note_mean(name: str) -> None:
    if (means := _MEANS.get()) is not None:
        means.append(name)


def returns_mean(loss: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a function computes a mean over the batch, as its loss or as a metric; it is traced."""
    means: list[str] = []
    before = _MEANS.set(means)
    try:
        jax.eval_shape(lambda *arguments: loss(*arguments), *arguments)  # a new function: jax would know an old one
    finally:
        _MEANS.reset(before)
    return bool(means)


def num_examples(batch: Batch) -> int:
    """Return the number of examples B in a batch of leaves (B, ...)."""
    return int(jax.tree.leaves(batch)[0].shape[0])


def summed(losses: Losses | jax.Array, valid: jax.Array | None = None, examples: int | None = None) -> Sums:
    """Sum over a batch: `loss` = sum_i w_i l_i, `count` = sum_i w_i, and each metric's sum.

    Args:
        losses: per-element losses; a plain array includes every element.
        valid: (B,), 0 for examples to leave out (the padding of the last evaluation batch, for instance).
        examples: if the losses have as many rows, add `EXAMPLES` and `EXAMPLE`, the number of rows that are not finite
            and 1 + the place of the first; 0: none.

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

    def weighted(element_values: jax.Array) -> jax.Array:
        # where, not only a product: a padded element may be infinite, and 0 x inf is not 0
        return jnp.where(weights > 0, element_values.astype(dtype), 0) * weights

    if taken := losses.metrics.keys() & {*RESERVED}:
        raise ValueError(f"metrics {', '.join(sorted(taken))}: must have other names than the metrics of the step")
    sums = {"count": jnp.sum(weights), "loss": jnp.sum(weighted(values))}
    sums |= {name: jnp.sum(weighted(value)) for name, value in losses.metrics.items()}
    if examples == len(values) and not losses.is_mean:
        wrong = ~jnp.isfinite(weighted(values)).all(axis=range(1, values.ndim))
        sums |= {EXAMPLES: wrong.sum(), EXAMPLE: jnp.where(wrong.any(), wrong.argmax() + 1, 0)}
    return sums


def sums_of(
    losses: Losses, valid: jax.Array | None, train: bool | None, metrics: Mapping[str, jax.Array], batch: Batch
) -> Sums:
    """Sum losses and metrics over a batch.

    Args:
        losses: the losses; a mean counts once or, in evaluation, as often as there are examples. One element for
            several examples, as of `mean(keepdims=True)`, is a mean.
        valid: (B,), 0 for examples to leave out; None: there are none.
        train: whether the batch is one of training.
        metrics: further metrics: one value per example, (B, ...), or a mean over the batch.
        batch: the batch.

    Returns:
        "loss", "count", and the metrics; for a metric m of `metrics`, its own count as "count:m"; in training also what
        `summed` tells of losses that are not finite.

    Raises:
        InputError: a batch of training has padding, and the loss is a mean, from which it cannot be left out.
    """
    is_single = losses.values.ndim and losses.values.size == 1 and losses.weights is None and not losses.is_mean
    if is_single and jax.tree.leaves(batch) and num_examples(batch) > 1:
        losses = replace(losses, values=losses.values.reshape(1), is_mean=True)
        _note_mean("loss")
    scalars = [f"its metric {name}" for name, value in losses.metrics.items() if not jnp.ndim(value)]
    if valid is not None and train is not False and (means := ["the loss"] * losses.is_mean + scalars):
        raise InputError(
            f"{means[0]} is a mean over a batch, from which padding cannot be left out; return one per example"
        )
    for name in scalars + [name for name, value in metrics.items() if not value.ndim]:
        _note_mean(name)
    rows_differ = valid is not None and losses.values.shape[:1] != valid.shape
    if not losses.is_mean and (rows_differ or not losses.values.size):
        returned = f"returns {tuple(losses.values.shape)} for {num_examples(batch)} examples"
        raise InputError(f"jax_loss: {returned}; must be a mean, or have a row for each")
    if losses.is_mean and train is False and valid is None:
        valid = jnp.ones(num_examples(batch))
    sums = summed(losses, valid, num_examples(batch) if train else None)
    for name, value in metrics.items():
        if name in sums:
            raise InputError(f"metrics: {name}: is a metric of the step, or of the loss; choose another name")
        shares = jnp.ones(num_examples(batch)) if valid is None else valid
        weights = jnp.broadcast_to(shares.reshape(-1, *[1] * (value.ndim - 1)), value.shape or shares.shape)
        sums[name], sums[COUNT_OF + name] = jnp.sum(value * weights), jnp.sum(weights)
    return sums


def cross_entropy(model: Callable[[jax.Array], jax.Array], batch: Batch, label_smoothing: float = 0.0) -> Losses:
    """Compute the cross entropy -log softmax(model(x))_y for each label y, and the accuracy of the largest logit.

    Labels of -100 are ignored, as by `torch.nn.functional.cross_entropy`.

    Args:
        model: maps x to logits (B, C) or (B, T, C); for 16-bit logits the loss is computed in float32.
        batch: "x", and integer labels "y" (B,) or (B, T).
        label_smoothing: share of a label that is spread over all classes, as by torch's cross_entropy.

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
    if label_smoothing:
        spread = -jax.nn.log_softmax(wide).mean(axis=-1)
        values = (1 - label_smoothing) * values + label_smoothing * spread
    right = jnp.argmax(logits, axis=-1) == labels
    return Losses(values, counts.astype(values.dtype), {"accuracy": right.astype(values.dtype)})
