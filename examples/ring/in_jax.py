"""Ring of `jaxddp.distributed.ring_all_reduce`, recorded after each step, and jaxddp's collectives."""

import jax
import numpy as np
from jax import numpy as jnp
from numpy.typing import NDArray

from examples.ring.inputs import COLLECTIVES, Arrays, buffers, given
from jaxddp import collectives
from jaxddp.distributed.collectives import all_reduce, world_size
from jaxddp.distributed.replicas import Replicas
from jaxddp.distributed.ring_all_reduce import all_gather_step, in_chunks, reduce_scatter_step, ring_all_reduce
from jaxddp.plan.messages import permutes


def walk(buffer: jax.Array) -> jax.Array:
    """Return this replica's chunks at the start and after each of 2 (N-1) steps, (2N - 1, N chunks, chunk)."""
    held = [in_chunks(buffer)]
    for make_step in (reduce_scatter_step, all_gather_step):
        for step in range(world_size() - 1):
            held.append(make_step(held[-1], step))
    return jnp.stack(held)


def ring(replicas: Replicas) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Run the ring on each buffer: every replica's "steps", "ring", "all_reduce" and "bytes" sent, (N, ...)."""
    of_replica = replicas.map(
        lambda x: {"steps": walk(x), "ring": ring_all_reduce(x), "all_reduce": all_reduce(x)}, (0,), 0
    )
    alone = replicas.map(ring_all_reduce, (0,), 0)
    results = {}
    with jax.enable_x64(True):
        for name, buffer in buffers(replicas.world_size).items():
            placed = replicas.shard(buffer)
            sent = permutes(alone.lower(placed).compile().as_text()).bytes
            results[name] = jax.device_get(of_replica(placed)) | {"bytes": np.full(replicas.world_size, sent)}
    return results


def talk(replicas: Replicas) -> Arrays:
    """Return every replica's result of each collective, (N, ...)."""

    def calls(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: getattr(collectives, name)(x[name], **options) for name, options in COLLECTIVES.items()}

    with jax.enable_x64(True):
        return jax.device_get(replicas.map(calls, (0,), 0)(replicas.shard(given(replicas.world_size))))
