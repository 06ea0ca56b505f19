"""Choice of the buffers that a step keeps, from those of all replicas' forward passes."""

import jax

from jaxddp.distributed.collectives import all_reduce_mean, broadcast
from jaxddp.errors import InputError
from jaxddp.state import Buffers


def synchronized(buffers: Buffers, keep: str, source: jax.Array | None = None) -> Buffers:
    """Return the buffers with which the replicas continue.

    Args:
        buffers: this replica's, after its forward passes.
        keep: "rank0": the buffers of rank 0, as torch's DDP keeps them; "mean": the mean over the replicas, in
            the buffer's dtype; "local": each replica keeps its own.
        source: int32 scalar, the rank whose buffers "rank0" keeps instead, see `MicroBatches`; None: rank 0.

    Raises:
        InputError: "mean" with a `source`: replicas without examples have no new statistics to average.
    """
    if keep == "local":
        return buffers
    if keep == "mean":
        if source is not None:
            raise InputError("keep_buffers mean: some replicas have no examples; must be rank0 or local")
        return jax.tree.map(lambda mean, local: mean.astype(local.dtype), all_reduce_mean(buffers), buffers)
    return broadcast(buffers, src=0 if source is None else source)
