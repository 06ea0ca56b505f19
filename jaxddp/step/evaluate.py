"""Evaluation on all replicas, in which every example counts exactly once."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxddp.data.sources import Source, as_source
from jaxddp.distributed.collectives import all_reduce, all_reduce_mean, broadcast
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch, Sums, returns_mean
from jaxddp.state import TrainState
from jaxddp.step.dispatch import Dispatch, RunAhead
from jaxddp.step.loops import scan

Places = tuple[np.ndarray, np.ndarray]  # indices of examples (W, K, B), and their weights, the entry "valid"
KEPT_BYTES = 2**30  # of an evaluation set that stays on the devices between evaluations
PART_BYTES = 2**28  # of a part of a larger one, which is read again each time


def padded_places(size: int, world_size: int, batch_size: int) -> list[Places]:
    """Arrange all examples as (world_size, K, batch_size), padded at the end and marked by "valid" = 0.

    Padding repeats the first example, whose loss is finite wherever that of the evaluation is.

    >>> ((indices, valid),) = padded_places(3, world_size=2, batch_size=2)
    >>> indices.tolist(), valid.tolist()
    ([[[0, 1]], [[2, 0]]], [[[1.0, 1.0]], [[1.0, 0.0]]])
    """
    steps = max(1, -(-size // (world_size * batch_size)))
    places = np.arange(world_size * steps * batch_size)
    shape = (world_size, steps, batch_size)
    valid = (places < size).astype(np.float32)
    return [(np.where(places < size, places, 0).reshape(shape), valid.reshape(shape))]


def equal_places(size: int, world_size: int, batch_size: int) -> list[Places]:
    """Arrange all examples without padding, for a loss that is a mean over its batch.

    First as many full batches as there are, then a smaller one per replica, then the examples that the replicas cannot
    share, which each of them evaluates and which count 1 / world_size there.

    >>> [indices.tolist() for indices, _ in equal_places(7, world_size=2, batch_size=2)]
    [[[[0, 1]], [[2, 3]]], [[[4]], [[5]]], [[[6]], [[6]]]]
    """
    full = size // (world_size * batch_size) * world_size * batch_size
    rest = (size - full) // world_size * world_size
    shared = size - full - rest

    def places(indices: np.ndarray, share: float) -> Places:
        return indices, np.full(indices.shape, share, np.float32)

    parts = [places(np.arange(full).reshape(world_size, -1, batch_size), 1.0)] if full else []
    parts += [places(np.arange(full, full + rest).reshape(world_size, 1, -1), 1.0)] if rest else []
    last = np.broadcast_to(np.arange(full + rest, size), (world_size, 1, shared))
    return [*parts, places(last, 1 / world_size)] if shared else parts


class EvaluationSet:
    """Examples of an evaluation, on the devices or, if they are too many, read again at each evaluation.

    Args:
        source: the examples.
        parts: their places, all of them.
        replicas: the replicas.
    """

    def __init__(self, source: Source, parts: Sequence[Places], replicas: Replicas):
        self._source, self._replicas = source, replicas
        example = sum(array.nbytes for array in source.take(np.zeros(1, np.int64), 0).values())
        self._parts = [part for places in parts for part in _split(places, PART_BYTES if source.collate else example)]
        small = len(source) * example <= KEPT_BYTES and not source.collate
        if small:
            self._parts = list(parts)
        self._kept = list(map(self._read, self._parts)) if small else None

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches on the devices, leaves (local replicas, K, B, ...)."""
        return map(self._read, self._parts) if self._kept is None else iter(self._kept)

    def _read(self, places: Places) -> Batch:
        indices, valid = map(self._replicas.local, places)
        return self._replicas.shard({**self._source.take(indices, 0), "valid": valid})


def _split(places: Places, example_bytes: int) -> Iterator[Places]:
    """Cut places (W, K, B) into parts of at most `PART_BYTES`, or of one batch per replica."""
    world_size, steps, size = places[0].shape
    most = max(1, PART_BYTES // max(1, world_size * size * example_bytes))
    for first in range(0, steps, most):
        indices, valid = (array[:, first : first + most] for array in places)
        yield indices, valid


class Evaluation:
    """Evaluation of a model with one loss on all replicas.

    Args:
        loss: (params, buffers, batch) -> (sums, buffers), in evaluation mode.
        functional: pure side of the model.
        replicas: the replicas.
        axes: of the state, see `jaxddp.state.shortest`. If parameters differ between replicas, their mean is
            evaluated; if buffers differ, those of replica 0.
        run_ahead: bounds the number of dispatches in flight.
    """

    def __init__(
        self,
        loss: LocalLoss,
        functional: AnyFunctional,
        replicas: Replicas,
        axes: TrainState | None,
        run_ahead: RunAhead,
    ):
        self._loss, self._functional, self._replicas, self._axes = loss, functional, replicas, axes
        self._run_ahead = run_ahead
        self.dispatch = Dispatch(replicas, self._of_replica, axes, None)

    def is_mean(self, source: Source) -> bool:
        """Trace the loss on an example; return whether it is a mean over its batch."""
        example = source.take(np.zeros(1, np.int64), 0)
        return returns_mean(self._loss, self._functional.params, self._functional.buffers, example)

    def place(self, data: Any, batch_size: int) -> EvaluationSet:
        """Place an evaluation set on the devices; arguments and errors as in `DistributedDataParallel.place`."""
        source, world_size = as_source(data, "evaluation data", checked=False), self._replicas.world_size
        per_replica = max(1, min(batch_size, -(-len(source) // world_size)))
        arrange = equal_places if self.is_mean(source) else padded_places
        return EvaluationSet(source, arrange(len(source), world_size, per_replica), self._replicas)

    def sums(self, state: TrainState, placed: Iterable[Batch]) -> Sums:
        """Compute sums over a placed evaluation set; the result stays on the devices."""
        parts = []
        for batches in placed:
            for call in self.dispatch.calls(state, batches):
                parts.append(call(state))
                self._run_ahead.add(parts[-1]["loss"])
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *sums: sum(sums), *parts)

    def _of_replica(self, state: TrainState, batches: Batch) -> Sums:
        if self._axes is not None and self._axes.params == 0:
            state = dataclasses.replace(state, params=all_reduce_mean(state.params))
        if self._axes is not None and self._axes.buffers == 0:
            state = dataclasses.replace(state, buffers=broadcast(state.buffers))
        return evaluate_replica(self._loss, state, batches)


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
