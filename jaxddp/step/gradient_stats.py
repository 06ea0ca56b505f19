"""Metrics of gradients, computed on the devices: norms and histograms of the mean, and non-finite local gradients; and
learning rates.

`jaxddp.tracking.gradient_metrics` defines the names of these metrics, and reads them.
"""

from collections.abc import Iterable
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.name_patterns import matching
from jaxddp.distributed.collectives import rank, world_size
from jaxddp.nn.losses import Sums
from jaxddp.optim import plateaus
from jaxddp.state import Params
from jaxddp.tracking.gradient_metrics import ANOMALY, BASE, CHUNK, EXAMPLE, LOG2, LOG2_BINS, NORM, by_group


def norms_and_histograms(gradients: Params, patterns: Iterable[str]) -> Sums:
    """Compute the norm and the histogram of each gradient whose name matches a pattern.

    Raises:
        InputError: a pattern matches no name.

    >>> columns = norms_and_histograms({"w": jnp.array([3.0, -4.0, 0.0])}, ["*"])
    >>> {name: float(x) for name, x in columns.items() if x}
    {'grad_norm/w': 5.0, 'grad_log2/w/-32': 1.0, 'grad_log2/w/1': 1.0, 'grad_log2/w/2': 1.0}
    """
    columns: Sums = {}
    for name in matching("log_gradients", patterns, gradients):
        columns[f"{NORM}{name}"] = optax.tree.norm(gradients[name])
        counts = _log2_counts(gradients[name])
        columns |= {f"{LOG2}{name}/{k}": count for k, count in zip(LOG2_BINS, counts, strict=True)}
    return columns


def anomalies(gradients: Params, params: Iterable[str]) -> Sums:
    """Encode which of this replica's gradients are not finite, as metrics to be summed over the replicas.

    Args:
        gradients: local gradients, scaled; a loss that is NaN makes them NaN too.
        params: names of all parameters that learn.
    """
    names = sorted(params)
    digits = jnp.stack([_digit(gradients[name]) if name in gradients else jnp.zeros(()) for name in names])
    chunks = jnp.pad(digits, (0, -len(names) % CHUNK)).reshape(-1, CHUNK) @ (float(BASE) ** jnp.arange(CHUNK))
    mine = [jnp.where(rank() == r, chunks, 0) for r in range(world_size())]
    return {f"{ANOMALY}{r}/{chunk}": value for r, values in enumerate(mine) for chunk, value in enumerate(values)}


def of_replicas(sums: Sums) -> Sums:
    """Give the replica's first example whose loss is not finite, if that is known, a column for each replica."""
    first = {f"{EXAMPLE}/{r}": jnp.where(rank() == r, sums[EXAMPLE], 0) for r in range(world_size()) if EXAMPLE in sums}
    return {name: value for name, value in sums.items() if name != EXAMPLE} | first


def learning_rates(before: Any, after: Any, lr: optax.ScalarOrSchedule | None) -> Sums:
    """Return the learning rates of an update that are known, see `by_group`.

    Args:
        before, after: state of the optimizer before and after it, which tells the rates of plateaus and of
            `optax.inject_hyperparams`.
        lr: the rate otherwise, as a function of the number of updates before; None: unknown.
    """
    rates = [rate for plateau in plateaus(after) for rate in plateau.rates]
    rates = rates or _scalars([x for _, x in optax.tree.get_all_with_path(after, "learning_rate")], jnp.inexact)
    if not rates and lr is not None:
        counts = _scalars(before, jnp.integer)
        rates = [lr(jnp.stack(counts).max() if counts else 0) if callable(lr) else lr]
    return {name: jnp.asarray(rate) for name, rate in by_group(rates).items()}


def _scalars(tree: Any, kind: Any) -> list[jax.Array]:
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [x for x in leaves if not x.ndim and jnp.issubdtype(x.dtype, kind)]


def _log2_counts(gradient: jax.Array) -> jax.Array:
    """Count the elements by floor(log2 |g|), clipped to the range of `LOG2_BINS`."""
    _, exponents = jnp.frexp(gradient)  # |g| = mantissa 2^exponent with 1/2 <= mantissa < 1
    lowest, highest = LOG2_BINS[0], LOG2_BINS[-1]
    bins = jnp.clip(jnp.where(gradient == 0, lowest, exponents - 1), lowest, highest) - lowest
    return jnp.bincount(bins.ravel(), length=len(LOG2_BINS)).astype(jnp.float32)


def _digit(gradient: jax.Array) -> jax.Array:
    """Return 2 if an element is NaN, else 1 if one is infinite, else 0."""
    return jnp.where(jnp.isnan(gradient).any(), 2.0, jnp.where(jnp.isfinite(gradient).all(), 0.0, 1.0))
