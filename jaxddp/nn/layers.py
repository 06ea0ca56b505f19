"""The layers that torch defines otherwise than flax: initial weights, BatchNorm and Dropout.

Each is a flax layer (or looks like one) whose numbers are torch's. Initial weights are
drawn from a `torch_random.Generator`, in the order in which torch would draw them, so a
model built layer by layer as its torch twin starts from the same weights.
"""

from collections.abc import Callable
from typing import Any

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


class Linear(nnx.Linear):
    """y = x W + b with torch's initial W and b; kernel (in, out).

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
        padding: zeros on each side of each spatial axis, as torch's integer `padding`.
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
    """A row of a table per integer, drawn from N(0, 1) as torch does; embedding (num, features)."""

    def __init__(self, num_embeddings: int, features: int, *, generator: Generator):
        table = torch_rng.embedding_init(generator, num_embeddings, features)
        super().__init__(num_embeddings, features, embedding_init=_value(table), rngs=_no_rngs())
        self.dtype = None  # flax would look rows up in float32 for ever, also once the table is float64


class BatchNorm(nnx.Module):
    """y = (x - mean) / sqrt(var + eps) * scale + bias, per channel (the last axis), as torch.nn.BatchNorm.

    In training, mean and (biased) variance are the batch's, and the running statistics move by
    `momentum` towards the mean and the unbiased variance. `model.eval()` normalises with the
    running statistics instead. With `sync` the batch is that of all replicas together, forward
    and backward, as torch.nn.SyncBatchNorm; otherwise each replica's own.

    While `valid` is set, (B,), only examples that have 1 there count (`Functional.local_loss` sets it):
    replicas may have unequal numbers of them, and where there are none the running statistics stay.
    What comes out for the others is of no use.

    Args:
        num_features: channels C; x is (..., C), and (B, ..., C) if `valid` is set. Of 16 bits, it is normalised
            in float32 and returned as it came.
        momentum: torch's: running = (1 - momentum) * running + momentum * batch.

    Raises:
        InputError: one value per channel in training, which has no variance (torch refuses too), or
            another number of examples than `valid` has.

    >>> bn, x = BatchNorm(1), jnp.array([[1.0], [3.0], [99.0]])
    >>> bn.valid = nnx.data(jnp.array([1, 1, 0]))
    >>> print(bn(x)[:2, 0].round(3), bn.mean[...], bn.var[...])
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
        given, x = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            mean, var = self._batch_statistics(x)
        scale = lax.rsqrt(var + self.eps) * self.scale[...]
        y = (x - _per_channel(mean, x)) * _per_channel(scale, x) + _per_channel(self.bias[...], x)
        return y.astype(given)

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        reduce = all_reduce if self.sync else (lambda sums: sums)
        seen = reduce(self._count(x))
        count = seen if self.valid is None else jnp.maximum(seen, 1)  # of nothing, mean and variance are 0
        if x.size * (world_size() if self.sync else 1) == x.shape[-1]:
            raise InputError(f"BatchNorm needs more than one value per channel in training, got input {x.shape}")
        mean = reduce(jnp.sum(self._counted(x), axes)) / count
        # Two passes: E[x^2] - E[x]^2 would lose the digits that a large mean takes.
        var = reduce(jnp.sum(self._counted(jnp.square(x - _per_channel(mean, x))), axes)) / count
        self._track(lax.stop_gradient(mean), lax.stop_gradient(var * count / (count - 1)), seen)
        return mean, var

    def _count(self, x: jax.Array) -> jax.Array:
        """How many values of a channel count."""
        if self.valid is None:
            return jnp.asarray(x.size // x.shape[-1], x.dtype)
        if self.valid.shape != x.shape[:1]:
            raise InputError(f"BatchNorm: valid is of {len(self.valid)} examples, the input of shape {x.shape}")
        return jnp.sum(self.valid, dtype=x.dtype) * (x.size // x.shape[-1] // len(x))

    def _counted(self, values: jax.Array) -> jax.Array:
        """Values (B, ..., C), with 0 for those that do not count."""
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
    """y = x / (1 - p) where a word drawn for the element is at least p 2**32, else 0; in training only.

    As `torch.nn.Dropout` and `nnx.Dropout`, but its masks do not depend on dtypes, and each example can draw its
    own (see `jaxddp.nn.dropout_rng`). The calls in a forward pass are counted, and each draws anew.

    Args:
        p: the share that is dropped.
        rngs: its key is the next of their stream "dropout".

    Raises:
        InputError: p outside of 0 to 1; or masks for each example, and x has no axis of examples in front.

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
        if self.deterministic:
            return x
        kept = self._words(x.shape) >= jnp.uint32(int(self.p * 2**32))
        return jnp.where(kept, x / (1 - self.p), 0)

    def _words(self, shape: tuple[int, ...]) -> jax.Array:
        keys, call = self.key[...], self.count[...]
        self.count[...] = call + 1
        if keys.ndim == 0:
            return jax.random.bits(jax.random.fold_in(keys, call), shape, jnp.uint32)
        if shape[:1] != keys.shape:
            raise InputError(f"Dropout: masks for each of {len(keys)} examples need them in front, got input {shape}")
        return jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, call), shape[1:], jnp.uint32))(keys)


def dropout(p: float, seed: int) -> Callable[[jax.Array], jax.Array]:
    """A model's only Dropout layer; nothing at all if p is 0."""
    return Dropout(p, rngs=nnx.Rngs(dropout=seed)) if p else jax.nn.identity


def _per_channel(values: jax.Array, x: jax.Array) -> jax.Array:
    """Values (C,) in a shape that broadcasts against x (..., C)."""
    return values.reshape((1,) * (x.ndim - 1) + (-1,))


def _no_rngs() -> nnx.Rngs:
    """flax asks for a random stream even where the initial values are given."""
    return nnx.Rngs(0)


def _value(array: np.ndarray | None) -> Callable[..., Any]:
    """An initializer that ignores the random key and returns `array`."""
    return lambda key, shape, dtype=jnp.float32, out_sharding=None: jnp.asarray(array, dtype).reshape(shape)
