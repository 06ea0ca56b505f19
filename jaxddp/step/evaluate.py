"""Evaluation on all replicas, in which every example counts exactly once."""

from collections.abc import Mapping

import jax
import numpy as np

from jaxddp.distributed.collectives import all_reduce
from jaxddp.errors import InputError
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch, Sums
from jaxddp.state import TrainState
from jaxddp.step.loops import scan


def padded_batches(arrays: Mapping[str, np.ndarray], world_size: int, batch_size: int) -> dict[str, np.ndarray]:
    """Arrange all examples as leaves (world_size, K, batch_size, ...), padded at the end and marked by "valid" = 0.

    Padding repeats the first example, whose loss is finite wherever that of the evaluation is.

    Raises:
        InputError: there are no examples, or the arrays differ in length.

    >>> padded_batches({"x": np.arange(3)}, world_size=2, batch_size=2)["valid"].tolist()
    [[[1.0, 1.0]], [[1.0, 0.0]]]
    """
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise InputError(f"evaluation arrays of lengths {sizes}: must be equal, and at least 1")
    size = next(iter(sizes.values()))
    steps = max(1, -(-size // (world_size * batch_size)))
    places = np.arange(world_size * steps * batch_size)
    shape = (world_size, steps, batch_size)
    indices = np.where(places < size, places, 0).reshape(shape)
    batches = {name: array[indices] for name, array in arrays.items()}
    return {**batches, "valid": (places < size).astype(np.float32).reshape(shape)}


def evaluate_replica(loss: LocalLoss, state: TrainState, batches: Batch) -> Sums:
    """Compute the sums of losses, metrics and counts over the examples of all replicas.

    Args:
        loss: (params, buffers, batch) -> (sums, buffers), in evaluation mode.
        state: the same on all replicas.
        batches: of this replica, leaves (K, B, ...).
    """

    def body(carry: None, batch: Batch) -> tuple[None, Sums]:
        return carry, loss(state.params, state.buffers, batch)[0]

    _, sums = scan(body, None, batches)
    return all_reduce(jax.tree.map(lambda x: x.sum(axis=0), sums))
