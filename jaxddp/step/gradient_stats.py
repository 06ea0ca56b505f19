"""Norms and histograms of mean gradients, and which local ones are not finite: metrics, computed on the devices.

`jaxddp.tracking.gradient_metrics` says what they are called and reads them.
"""

from collections.abc import Iterable

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.name_patterns import matching
from jaxddp.distributed.collectives import rank, world_size
from jaxddp.nn.losses import Sums
from jaxddp.state import Params
from jaxddp.tracking.gradient_metrics import ANOMALY, BASE, CHUNK, LOG2, LOG2_BINS, NORM


def logged(gradients: Params, patterns: Iterable[str]) -> Sums:
    """The norm and the histogram of each gradient that a pattern matches.

    Raises:
        InputError: a pattern matches none.

    >>> columns = logged({"w": jnp.array([3.0, -4.0, 0.0])}, ["*"])
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
    """This replica's part of the columns that say whose gradients are not finite, to be summed over the replicas.

    Args:
        gradients: its own, scaled; NaN of a loss is in them too.
        params: the names of all parameters that learn.
    """
    names = sorted(params)
    digits = jnp.stack([_digit(gradients[name]) if name in gradients else jnp.zeros(()) for name in names])
    chunks = jnp.pad(digits, (0, -len(names) % CHUNK)).reshape(-1, CHUNK) @ (float(BASE) ** jnp.arange(CHUNK))
    mine = [jnp.where(rank() == r, chunks, 0) for r in range(world_size())]
    return {f"{ANOMALY}{r}/{chunk}": value for r, values in enumerate(mine) for chunk, value in enumerate(values)}


def _log2_counts(gradient: jax.Array) -> jax.Array:
    """How many elements have which floor(log2 |g|)."""
    _, exponents = jnp.frexp(gradient)  # |g| = mantissa 2^exponent with 1/2 <= mantissa < 1
    lowest, highest = LOG2_BINS[0], LOG2_BINS[-1]
    bins = jnp.clip(jnp.where(gradient == 0, lowest, exponents - 1), lowest, highest) - lowest
    return jnp.bincount(bins.ravel(), length=len(LOG2_BINS)).astype(jnp.float32)


def _digit(gradient: jax.Array) -> jax.Array:
    """2: a NaN is among the elements, 1: an infinity, 0: all are finite."""
    return jnp.where(jnp.isnan(gradient).any(), 2.0, jnp.where(jnp.isfinite(gradient).all(), 0.0, 1.0))
