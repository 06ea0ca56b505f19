"""Losses of ranks whose batches differ in shape, in the one program that replicas are."""

from functools import partial, wraps

import jax
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed.collectives import rank
from jaxddp.errors import InputError
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch, Sums
from jaxddp.parity.case_interface import UnequalBatches
from jaxddp.state import Buffers, Params
from jaxddp.step.loops import primitives

COLLECTIVES = ("psum", "all_gather", "reduce_scatter", "psum_scatter", "ppermute", "all_to_all")

jax.tree_util.register_dataclass(UnequalBatches, data_fields=["of_shapes"], meta_fields=["which"])


def of_own_batch(loss: LocalLoss) -> LocalLoss:
    """Return a loss with which each replica computes the loss of its batch, even if batches differ in shape.

    Args:
        loss: (params, buffers, batch) -> (sums, new buffers).

    Raises:
        InputError: the loss communicates, which replicas in different branches of a program cannot do.

    >>> from jaxddp.distributed.collectives import AXIS_NAME
    >>> mean = of_own_batch(lambda params, buffers, batch: ({"loss": batch["x"].mean()}, buffers))
    >>> batches = UnequalBatches([{"x": jnp.ones(4)}, {"x": jnp.full(3, 5.0)}], which=(0, 1, 0))
    >>> of_replica = lambda _: mean({}, {}, batches)[0]["loss"]
    >>> jax.vmap(of_replica, axis_name=AXIS_NAME)(jnp.zeros(3)).tolist()
    [1.0, 5.0, 1.0]
    """

    @wraps(loss)
    def own_loss(params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
        if not isinstance(batch, UnequalBatches):
            return loss(params, buffers, batch)
        branches = [partial(loss, params, buffers, of_shape) for of_shape in batch.of_shapes]
        names = [name for branch in branches for name, _ in primitives(jax.make_jaxpr(branch)().jaxpr)]
        if any(name.startswith((*COLLECTIVES, "pmax", "pmin")) for name in names):
            raise InputError(
                "jax_loss: communicates between replicas whose batches differ in shape, and each runs its own branch "
                "of the program; must not, or get equal shapes from batch"
            )
        result: tuple[Sums, Buffers] = lax.switch(jnp.array(batch.which)[rank()], branches)
        return result

    return own_loss
