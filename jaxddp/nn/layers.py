"""Flax layers with torch's definitions of initial weights, BatchNorm and Dropout.

Initial weights are drawn from a `torch_rng.Generator` in the order in which torch draws them, so that a
model built layer by layer like its torch twin starts from the same weights.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax import numpy as jnp

from jaxddp.data import torch_rng
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.collectives import all_reduce, world_size
from jaxddp.errors import InputError
from jaxddp.nn.dropout_rng import ExampleKey

__all__ = ["BatchNorm", "Conv", "Dropout", "Embed", "Linear", "dropout"]


class Linear(nnx.Linear):
    """Linear layer y = x W + b with torch's initial W and b; kernel (in, out).

    >>> Linear(3, 2, generator=Generator(0)).kernel.shape
    (3, 2)
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, generator: Generator):
        weight, offset = torch_rng.linear_init(generator, in_features, out_features, bias)
        super().__init__(
            in_features,
            out_features,
            use_bias=bias,
            kernel_init=_value(weight.T),
            bias_init=_value(offset),
            rngs=_no_rngs(),
        )


class Conv(nnx.Conv):
    """Convolution with torch's initial weights and explicit padding; kernel (*size, in / groups, out).

    Args:
        padding: number of zeros on each side of each spatial axis, torch's integer `padding`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, ...],
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
        generator: Generator,
    ):
        weight, offset = torch_rng.conv_init(generator, in_channels, out_channels, kernel_size, groups, bias)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            strides=stride,
            padding=[(padding, padding)] * len(kernel_size),
            feature_group_count=groups,
            use_bias=bias,
            kernel_init=_value(np.moveaxis(weight, (0, 1), (-1, -2))),
            bias_init=_value(offset),
            rngs=_no_rngs(),
        )


class Embed(nnx.Embed):
    """Lookup table with rows drawn from N(0, 1) as in torch; embedding (num, features)."""

    def __init__(self, num_embeddings: int, features: int, *, generator: Generator):
        table = torch_rng.embedding_init(generator, num_embeddings, features)
        super().__init__(num_embeddings, features, embedding_init=_value(table), rngs=_no_rngs())
        self.dtype = None  # flax would return float32 rows even of a float64 table


class BatchNorm(nnx.Module):
    """Batch normalisation y = (x - mean) / sqrt(var + eps) * scale + bias over the last axis, as torch.nn.BatchNorm.

    In training, mean and (biased) variance are the batch's, and the running statistics move by
    `momentum` towards the mean and the unbiased variance. After `model.eval()`, the running
    statistics are used instead. With `sync`, statistics are taken over the batches of all replicas, forward
    and backward, as in torch.nn.SyncBatchNorm; without, over the batch of each replica.

    While `valid`, (B,), is set (by `Functional.local_loss`), statistics are taken over the examples with valid 1.
    Replicas may have different numbers of such examples; if there are none, the running statistics do not change.
    Outputs for examples with valid 0 are meaningless.

    Args:
        num_features: channels C; x is (..., C), and (B, ..., C) if `valid` is set. 16-bit inputs are normalised
            in float32 and returned in their dtype.
        momentum: torch's: running = (1 - momentum) * running + momentum * batch.

    Raises:
        InputError: one value per channel in training, which has no variance (an error in torch too), or
            an input with another number of examples than `valid`.

    >>> bn, x = BatchNorm(1), jnp.array([[1.0], [3.0], [99.0]])
    >>> bn.valid = nnx.data(jnp.array([1, 1, 0]))
    >>> print(bn(x)[:2, 0].round(3), bn.mean[...].round(3), bn.var[...].round(3))
    [-1.  1.] [0.2] [1.1]
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, momentum: float = 0.1, sync: bool = False):
        self.scale = nnx.Param(jnp.ones(num_features))
        self.bias = nnx.Param(jnp.zeros(num_features))
        self.mean = nnx.BatchStat(jnp.zeros(num_features))
        self.var = nnx.BatchStat(jnp.ones(num_features))
        self.num_batches_tracked = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.eps = eps
        self.momentum = momentum
        self.sync = sync
        self.valid: jax.Array | None = None
        self.use_running_average = False  # set by model.train() and model.eval()

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, x = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            mean, var = self._batch_statistics(x)
        scale = lax.rsqrt(var + self.eps) * self.scale[...]
        y = (x - _per_channel(mean, x)) * _per_channel(scale, x) + _per_channel(self.bias[...], x)
        return y.astype(dtype)

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        reduce = all_reduce if self.sync else (lambda sums: sums)
        seen = reduce(self._count(x))
        count = seen if self.valid is None else jnp.maximum(seen, 1)  # without examples, mean and variance are 0
        if x.size * (world_size() if self.sync else 1) == x.shape[-1]:
            raise InputError(f"BatchNorm needs more than one value per channel in training, got input {x.shape}")
        mean = reduce(jnp.sum(self._counted(x), axes)) / count
        # Two passes: E[x^2] - E[x]^2 loses digits where the mean is large.
        var = reduce(jnp.sum(self._counted(jnp.square(x - _per_channel(mean, x))), axes)) / count
        self._track(lax.stop_gradient(mean), lax.stop_gradient(var * count / (count - 1)), seen)
        return mean, var

    def _count(self, x: jax.Array) -> jax.Array:
        """Return the number of values per channel that enter the statistics."""
        if self.valid is None:
            return jnp.asarray(x.size // x.shape[-1], x.dtype)
        if self.valid.shape != x.shape[:1]:
            raise InputError(f"BatchNorm: valid has {len(self.valid)} examples, but the input has shape {x.shape}")
        return jnp.sum(self.valid, dtype=x.dtype) * (x.size // x.shape[-1] // len(x))

    def _counted(self, values: jax.Array) -> jax.Array:
        """Set values (B, ..., C) of examples with valid 0 to 0."""
        if self.valid is None:
            return values
        return jnp.where(self.valid.reshape(-1, *(1,) * (values.ndim - 1)) > 0, values, 0)

    def _track(self, mean: jax.Array, unbiased_var: jax.Array, seen: jax.Array) -> None:
        moved = [
            (self.mean, (1 - self.momentum) * self.mean[...] + self.momentum * mean),
            (self.var, (1 - self.momentum) * self.var[...] + self.momentum * unbiased_var),
            (self.num_batches_tracked, self.num_batches_tracked[...] + 1),
        ]
        for variable, value in moved:
            variable[...] = value if self.valid is None else jnp.where(seen > 0, value, variable[...])


class Dropout(nnx.Module):
    """Dropout, in training only: y = x / (1 - p) where the element's random word is at least p 2**32, else 0.

    Like `torch.nn.Dropout` and `nnx.Dropout`, but masks do not depend on the dtype, and each example can have a mask
    that does not depend on its batch (see `jaxddp.nn.dropout_rng`). Each call in a forward pass draws a new mask.

    Args:
        p: probability that an element is dropped.
        rngs: source of the layer's key, the next of the stream "dropout".

    Raises:
        InputError: p outside of [0, 1), or per-example masks for an x without a leading axis of examples.

    >>> layer = Dropout(0.5, rngs=nnx.Rngs(0))
    >>> print(layer(jnp.ones(8)))
    [0. 2. 0. 2. 0. 0. 0. 2.]
    """

    def __init__(self, p: float, *, rngs: nnx.Rngs):
        if not 0 <= p < 1:
            raise InputError(f"Dropout: p {p}: must be at least 0 and below 1")
        self.p = p
        self.key = ExampleKey(rngs.dropout(), tag="dropout")
        self.count = nnx.RngCount(jnp.zeros((), jnp.uint32), tag="dropout")
        self.deterministic = False  # set by model.train() and model.eval()

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.deterministic or not self.p:
            return x
        kept = self._words(x.shape) >= jnp.uint32(int(self.p * 2**32))
        return jnp.where(kept, x / (1 - self.p), 0)

    def _words(self, shape: tuple[int, ...]) -> jax.Array:
        keys, call = self.key[...], self.count[...]
        self.count[...] = call + 1
        if keys.ndim == 0:
            return _bits(jax.random.fold_in(keys, call), shape)
        if shape[:1] != keys.shape:
            raise InputError(f"Dropout: per-example masks need {len(keys)} examples on axis 0, got input {shape}")
        return jax.vmap(lambda key: _bits(jax.random.fold_in(key, call), shape[1:]))(keys)


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    with jax.threefry_partitionable(True):  # whatever JAX_THREEFRY_PARTITIONABLE says
        return jax.random.bits(key, shape, jnp.uint32)


def dropout(p: float, seed: int) -> Callable[[jax.Array], jax.Array]:
    """Return the Dropout layer of a model that has one; the identity, without random state, if p is 0.

    Args:
        p: probability that an element is dropped.
        seed: lower 32 bits of the seed; the masks depend only on it, and on no setting of jax.
    """
    if not p:
        return jax.nn.identity
    # jax.random.key(seed), which JAX_DEFAULT_PRNG_IMPL and JAX_RANDOM_SEED_OFFSET would change.
    key = jax.random.wrap_key_data(jnp.array([0, seed], jnp.uint32), impl="threefry2x32")
    return Dropout(p, rngs=nnx.Rngs(dropout=key))


def _per_channel(values: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape values (C,) to broadcast against x (..., C)."""
    return values.reshape((1,) * (x.ndim - 1) + (-1,))


class _NoRngs:
    """Random streams without keys."""

    def params(self) -> None:
        """Return no key."""


def _no_rngs() -> nnx.Rngs:
    """Return the key source that flax requires even with initial values; a real key would compile five programs."""
    return cast(nnx.Rngs, _NoRngs())


def _value(array: np.ndarray | None) -> Callable[..., Any]:
    """Return an initializer that ignores the random key and returns `array`."""
    return lambda key, shape, dtype=jnp.float32, out_sharding=None: jnp.asarray(array, dtype).reshape(shape)
