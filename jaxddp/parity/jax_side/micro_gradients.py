"""Gradients of each micro-batch's summed loss, computed only from the loss, without the port's step."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch
from jaxddp.parity.case_interface import AnyCase, Trajectory, UnequalBatches, micro_batches_of
from jaxddp.parity.excerpts import excerpts
from jaxddp.parity.jax_side.checked_step import replicas_of
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.records import Record, Tensors, scaled_by
from jaxddp.state import Buffers, Params


def micro_records(case: AnyCase, reference: Trajectory, steps: Sequence[int]) -> Iterator[Record]:
    """Yield the gradients of all micro-batches for each step.

    Args:
        case: model or port, and its batches.
        reference: run that the parameters come from.
        steps: steps from 0, ascending.

    Yields:
        Per step, for W replicas and A micro-batches: "counts", sums of weights, (W, A); "sums", gradients of the
        summed losses, (W, A, ...), excerpts of large ones; "stale", the same at the parameters of the step before,
        absent at step 0.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        side, replicas, of_replica = program(case)
        for number, batch in islice(enumerate(case.batches()), max(steps) + 1):
            if number not in steps:
                continue

            def gradients_at(state: Arrays, batch: MicroBatches = batch) -> tuple[np.ndarray, Tensors]:
                params, buffers = map(replicas.replicate, side.from_torch(state))
                counts, sums = replicas.gather(of_replica(params, buffers, replicas.shard(replicas.local(batch))))
                if isinstance(batch.last, UnequalBatches) and (counts == 1).all():  # the losses are means
                    of_ranks = [micro_batches_of(batch, rank) for rank in range(case.world_size)]
                    counts = np.array([[len(next(iter(x.values()))) for x in pieces] for pieces in of_ranks])
                    sums = {name: scaled_by(counts, x) for name, x in sums.items()}
                return counts, _named(sums, side.to_torch)

            counts, sums = gradients_at(reference.before(number))
            record: dict[str, Tensors] = {"counts": {"counts": counts}, "sums": sums}
            if number > 0:
                record["stale"] = gradients_at(reference.before(number - 1))[1]
            yield record


@lru_cache(maxsize=1)
def program(case: AnyCase) -> tuple[JaxSide, Replicas, Any]:
    """Build the jax side, its replicas, and (params, buffers, batch) -> counts and gradients of all replicas."""
    side, replicas = case.jax_side(), replicas_of(case)
    step: Any = side.replica_step
    return side, replicas, replicas.map(lambda p, b, batch: _micro(step.loss, p, b, batch), (None, None, 0), 0)


def _micro(loss: LocalLoss, params: Params, buffers: Buffers, batch: MicroBatches) -> tuple[jax.Array, Params]:
    """Compute counts (A,) and gradients (A, ...) of one replica's micro-batches, carrying the buffers along."""

    def one(buffers: Buffers, micro_batch: Batch) -> tuple[Buffers, tuple[jax.Array, Params]]:
        def summed(params: Params) -> tuple[jax.Array, tuple[jax.Array, Buffers]]:
            sums, new_buffers = loss(params, buffers, micro_batch)
            return sums["loss"], (sums["count"], new_buffers)

        (_, (count, buffers)), gradients = jax.value_and_grad(summed, has_aux=True)(params)
        return buffers, (count, gradients)

    if batch.head is None:
        return jax.tree.map(lambda x: x[None], one(buffers, batch.last)[1])
    buffers, head = lax.scan(one, buffers, batch.head)
    return jax.tree.map(lambda many, x: jnp.concatenate([many, x[None]]), head, one(buffers, batch.last)[1])


def _named(sums: Params, to_torch: Callable[[Params], Tensors]) -> Tensors:
    """Convert arrays (W, A, ...) to torch's names and layouts."""
    world_size, pieces = next(iter(sums.values())).shape[:2]
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in sums.items()}
    each = ({name: value[i] for name, value in flat.items()} for i in range(world_size * pieces))
    of_each = [excerpts(to_torch(arrays)) for arrays in each]
    stacked = {name: np.stack([tensors[name] for tensors in of_each]) for name in of_each[0]}
    return {name: value.reshape(world_size, pieces, *value.shape[1:]) for name, value in stacked.items()}
