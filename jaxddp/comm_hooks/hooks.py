"""Communication hooks: how replicas average their gradients, under the names of torch's DDP hooks.

With g_r the local gradient of replica r and N the world size:

    allreduce         g = (g_0 + ... + g_{N-1}) / N
    bf16_compress     the same, with each g_r rounded to bfloat16, and divided by N and summed in bfloat16
    fp16_compress     the same in float16
    powerSGD          each tensor as a product of two thin matrices, see `jaxddp.comm_hooks.power_sgd`
    batched_powerSGD  all tensors as one square matrix, and that as a product of two thin ones

A hook is a pair of pure functions, like an optax transformation. Its state differs between replicas: each keeps
the part of its gradient that it has not sent (error feedback).

`allreduce` is the default without a hook; as a function, it is `jaxddp.distributed.collectives.all_reduce_mean`.

Source: pytorch.org/docs/stable/ddp_comm_hooks.html

>>> def with_momentum(beta):  # a user-defined hook with a state
...     def reduce(gradients, state):
...         mean = all_reduce(gradients, op="mean")
...         momentum = jax.tree.map(lambda old, new: beta * old + new, state, mean)
...         return momentum, momentum
...     return CommHook(lambda params: jax.tree.map(jnp.zeros_like, params), reduce)
>>> print(with_momentum(0.9).init({"w": jnp.ones(2)})["w"])
[0. 0.]
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from jaxddp.comm_hooks.power_sgd import BatchedPowerSGD, LowRank, PowerSGD
from jaxddp.config import TrainerConfig
from jaxddp.distributed.collectives import all_reduce, world_size
from jaxddp.state import Params


class CommHook(NamedTuple):
    """A reduction of local gradients to the gradients that the optimizer sees.

    Attributes:
        init: parameters -> initial state of a replica, any tree.
        reduce: (local gradients, state) -> (gradients, state); called once per optimizer step on each
            replica. The returned gradients must be the same on all replicas.
    """

    init: Callable[[Params], Any]
    reduce: Callable[[Params, Any], tuple[Params, Any]]


def stateless(reduce: Callable[[Params], Params]) -> CommHook:
    """Make a hook without state from a function of the local gradients."""
    return CommHook(lambda params: (), lambda gradients, state: (reduce(gradients), state))


def bf16_compress() -> CommHook:
    """Average over the replicas, sent and summed in bfloat16: half of float32's bytes, 8 significant bits."""
    return stateless(lambda gradients: _compressed(gradients, jnp.bfloat16))


def fp16_compress() -> CommHook:
    """Average over the replicas, sent and summed in float16: half of float32's bytes, 11 bits, largest value 65504."""
    return stateless(lambda gradients: _compressed(gradients, jnp.float16))


def powerSGD(**options: Any) -> CommHook:
    """Approximate each tensor by a matrix of low rank; see `jaxddp.comm_hooks.power_sgd.PowerSGD` for the options."""
    return _as_hook(PowerSGD(**options))


def batched_powerSGD(**options: Any) -> CommHook:
    """Approximate all tensors by one matrix of low rank.

    See `jaxddp.comm_hooks.power_sgd.BatchedPowerSGD` for the options.
    """
    return _as_hook(BatchedPowerSGD(**options))


def from_config(config: TrainerConfig, order: Callable[[], Sequence[str]]) -> CommHook | None:
    """Return the hook that `config` names; None for "allreduce", which needs no hook.

    Args:
        order: returns the names of the parameters in the order in which torch's backward pass reaches them, see
            `jaxddp.nn.functional.gradient_order`.
    """
    if config.comm_hook == "allreduce":
        return None
    if config.comm_hook == "bf16_compress":
        return bf16_compress()
    if config.comm_hook == "fp16_compress":
        return fp16_compress()
    options = config.power_sgd_options() | {"order": order()}
    return powerSGD(**options) if config.comm_hook == "powerSGD" else batched_powerSGD(**options)


def _as_hook(method: LowRank) -> CommHook:
    return CommHook(method.init, method.reduce)


def _compressed(gradients: Params, dtype: Any) -> Params:
    """Average in `dtype`; divide before the sum, like torch, so that the sum does not overflow."""
    share = jax.tree.map(lambda g: _rounded(g, dtype) / world_size(), gradients)
    return jax.tree.map(lambda total, g: total.astype(g.dtype), all_reduce(share), gradients)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round to 16 bits, from float64 by way of float32: torch rounds twice, which is not always the nearest number.

    >>> import numpy as np
    >>> x = np.float64(1 + 2**-11 + 2**-40)  # float32 makes it a tie, rounded to 1; the nearest is 1 + 2**-10
    >>> with jax.enable_x64(True):
    ...     print(_rounded(jnp.asarray(x), jnp.float16), x.astype(np.float32).astype(np.float16))
    1.0 1.0
    """
    return (lax.reduce_precision(x, 8, 23) if x.dtype == jnp.float64 else x).astype(dtype)
