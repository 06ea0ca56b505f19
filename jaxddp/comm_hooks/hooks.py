"""What happens to the gradients between the replicas, under the names of torch's DDP communication hooks.

With g_r replica r's local gradient and N the world size:

    allreduce       g = (g_0 + ... + g_{N-1}) / N
    bf16_compress   the same, with each g_r / N rounded to bfloat16 before it is sent, and summed so
    fp16_compress   the same in float16
    powerSGD        each g_r as a product of two thin matrices, see `jaxddp.comm_hooks.power_sgd`
    batched_powerSGD   all of them as one square matrix, and that so

A hook is a pair of pure functions, as an optax transformation is. Its state is a replica's own: what one
replica has not sent (error feedback) is no other's business.

Source: pytorch.org/docs/stable/ddp_comm_hooks.html

`allreduce` is `jaxddp.distributed.collectives.all_reduce_mean`, as it is.

>>> def with_momentum(beta):  # a hook of one's own, with a state
...     def reduce(gradients, state):
...         mean = all_reduce(gradients, op="mean")
...         kept = jax.tree.map(lambda old, new: beta * old + new, state, mean)
...         return kept, kept
...     return CommHook(lambda params: jax.tree.map(jnp.zeros_like, params), reduce)
>>> print(with_momentum(0.9).init({"w": jnp.ones(2)})["w"])
[0. 0.]
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import lax
from jax import numpy as jnp

from jaxddp.comm_hooks.power_sgd import BatchedPowerSGD, LowRank, PowerSGD
from jaxddp.config import TrainConfig
from jaxddp.distributed.collectives import all_reduce, all_reduce_mean, world_size
from jaxddp.nn.functional import gradient_order
from jaxddp.state import Params


class CommHook(NamedTuple):
    """How local gradients become those that the optimizer is given.

    Attributes:
        init: parameters -> the state that a replica starts with, any tree.
        reduce: (local gradients, state) -> (gradients, state); called once per optimizer step, on each
            replica. The gradients that it returns must be the same on all of them.
    """

    init: Callable[[Params], Any]
    reduce: Callable[[Params, Any], tuple[Params, Any]]


def stateless(reduce: Callable[[Params], Params]) -> CommHook:
    """A function of the local gradients alone as a hook."""
    return CommHook(lambda params: (), lambda gradients, state: (reduce(gradients), state))


def bf16_compress() -> CommHook:
    """The mean over the replicas, sent and summed in bfloat16: half the bytes, 8 bits of each number."""
    return stateless(lambda gradients: _compressed(gradients, jnp.bfloat16))


def fp16_compress() -> CommHook:
    """The mean over the replicas, sent and summed in float16: half the bytes, 11 bits, and nothing beyond 65504."""
    return stateless(lambda gradients: _compressed(gradients, jnp.float16))


def powerSGD(**options: Any) -> CommHook:
    """Matrices of low rank, one per tensor; the options are those of `jaxddp.comm_hooks.power_sgd.PowerSGD`."""
    return _of(PowerSGD(**options))


def batched_powerSGD(**options: Any) -> CommHook:
    """A matrix of low rank for all tensors; the options are those of `jaxddp.comm_hooks.power_sgd.BatchedPowerSGD`."""
    return _of(BatchedPowerSGD(**options))


def from_config(config: TrainConfig, model: nnx.Module) -> CommHook | Callable[[Params], Params]:
    """The hook that `config` names, for this model."""
    if config.comm_hook == "allreduce":
        return all_reduce_mean
    if config.comm_hook == "bf16_compress":
        return bf16_compress()
    if config.comm_hook == "fp16_compress":
        return fp16_compress()
    options = config.power_sgd_options() | {"order": gradient_order(model)}
    return powerSGD(**options) if config.comm_hook == "powerSGD" else batched_powerSGD(**options)


def _of(method: LowRank) -> CommHook:
    return CommHook(method.init, method.reduce)


def _compressed(gradients: Params, dtype: Any) -> Params:
    """Divided before it is sent, as torch does, so that a sum is no larger than the largest."""
    share = jax.tree.map(lambda g: _rounded(g, dtype) / world_size(), gradients)
    return jax.tree.map(lambda total, g: total.astype(g.dtype), all_reduce(share), gradients)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """In 16 bits; from float64 by way of float32, which torch takes, and which ends at another number now and then.

    >>> with jax.enable_x64(True):
    ...     x = jnp.float64(1 + 2**-11 + 2**-40)  # nearer to 1 + 2**-10
    ...     print(_rounded(x, jnp.float16), jnp.float32(x.astype(jnp.float16)))
    1.0 1.0009766
    """
    return (lax.reduce_precision(x, 8, 23) if x.dtype == jnp.float64 else x).astype(dtype)
