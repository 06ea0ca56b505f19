"""Batches of a training set on the devices: in the sampler's order, one ahead of the training step."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np

from jaxddp.config.ranges import check_range
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.sampler import PADDING, epoch_indices
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError

Arrays = Mapping[str, np.ndarray]
Item = TypeVar("Item")

MAX_STEPS_PER_DISPATCH = 32  # a larger number saves no time
_MAX_BYTES = 2**26  # of examples per dispatch, if the loader chooses the number of steps


class Loader:
    """Loader of a training set, distributed over the replicas.

    Replica r gets the examples of `torch.utils.data.DistributedSampler(rank=r)` in the same order,
    B = global_batch_size / world_size per optimizer step, in A micro-batches.

    Args:
        arrays: training set, leaves of shape (N, ...).
        replicas: replicas that share the training set.
        global_batch_size: examples per optimizer step; divisible by world_size x accumulation_steps.
        accumulation_steps: A, micro-batches per replica and optimizer step.
        steps_per_dispatch: K, optimizer steps per yielded batch; None: the loader chooses, up to
            `max_steps_per_dispatch`.
        max_steps_per_dispatch: upper bound of K, if the loader chooses it.
        shuffle, seed, drop_last: as in torch's DistributedSampler.
        drop_last_batch: skip the last step of an epoch if its batch is smaller, as DataLoader(drop_last=True) does.
        join: use every example exactly once. In the last step of an epoch some replicas may then have one example
            less than others, or none; that batch has an entry "valid", 1 for an example and 0 for padding.

    Raises:
        InputError: arrays of different lengths, or a global batch size that is below 1, not divisible, or larger
            than the training set.

    >>> from jaxddp.distributed.devices import prepare
    >>> loader = Loader({"x": np.arange(9.0)}, Replicas(prepare(2, "cpu")), global_batch_size=6, shuffle=False)
    >>> [batch.last["x"].tolist() for batch in loader.epoch(0)]
    [[[[0.0, 2.0, 4.0]], [[1.0, 3.0, 5.0]]], [[[6.0, 8.0]], [[7.0, 0.0]]]]
    """

    def __init__(
        self,
        arrays: Arrays,
        replicas: Replicas,
        *,
        global_batch_size: int,
        accumulation_steps: int = 1,
        steps_per_dispatch: int | None = None,
        max_steps_per_dispatch: int = MAX_STEPS_PER_DISPATCH,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        drop_last_batch: bool = False,
        join: bool = False,
    ):
        for name, value in (("global_batch_size", global_batch_size), ("accumulation_steps", accumulation_steps)):
            check_range(name, value)
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            raise InputError(f"training arrays of different lengths: {sizes}")
        if global_batch_size % (replicas.world_size * accumulation_steps):
            raise InputError(
                f"global_batch_size {global_batch_size}: must be divisible by {replicas.world_size} replicas "
                f"x {accumulation_steps} accumulation steps"
            )
        self._arrays = arrays
        self._replicas = replicas
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._drop_last_batch, self._join = drop_last_batch, join
        self.dataset_size = next(iter(sizes.values()))
        self.per_replica_batch_size = global_batch_size // replicas.world_size
        self.micro_batch_size = self.per_replica_batch_size // accumulation_steps
        self._shuffler = ThreadPoolExecutor(1, "shuffle")
        self._orders: dict[int, Future[np.ndarray]] = {}
        self._shuffle_ahead(0)
        most = self._indices(0, shuffle=False).shape[1]  # examples per replica
        least = self.dataset_size // replicas.world_size if join else most
        self._full_steps = least // self.per_replica_batch_size
        self._rest = most - self._full_steps * self.per_replica_batch_size
        if self.steps_per_epoch == 0:
            raise InputError(f"global_batch_size {global_batch_size}: larger than the {self.dataset_size} examples")
        self.steps_per_dispatch = steps_per_dispatch or self._even_chunk(max_steps_per_dispatch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self._full_steps + (self._rest > 0 and not self._drop_last_batch)

    @property
    def examples_per_epoch(self) -> int:
        """Examples per epoch over all replicas, including repeated ones."""
        return sum(self.examples_in(step) for step in range(self.steps_per_epoch))

    def examples_in(self, step: int) -> int:
        """Return the examples of an optimizer step over all replicas; steps count from 0 over all epochs."""
        step %= self.steps_per_epoch
        if step < self._full_steps:
            return self.per_replica_batch_size * self._replicas.world_size
        if self._join:
            return self.dataset_size - step * self.per_replica_batch_size * self._replicas.world_size
        return self._rest * self._replicas.world_size

    def indices(self, epoch: int) -> np.ndarray:
        """Return the example indices of each replica in `epoch`, int64 (world_size, examples per replica)."""
        return self._indices(epoch, self._shuffle)

    def _indices(self, epoch: int, shuffle: bool) -> np.ndarray:
        return epoch_indices(
            self.dataset_size,
            self._replicas.world_size,
            shuffle=shuffle,
            seed=self._seed,
            epoch=epoch,
            drop_last=self._drop_last,
            join=self._join,
        )

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatches]:
        """Yield the batches of an epoch on the devices, leaves (W, K, ...), for `DataParallel.steps`.

        Args:
            epoch: number of the epoch, which determines the order, as torch's `set_epoch` does.
            start_step: number of optimizer steps to skip, to resume within an epoch.
        """
        yield from _one_ahead(map(self._replicas.shard, self.host_batches(epoch, start_step)))

    def host_batches(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatches]:
        """Yield the batches of `epoch` as NumPy arrays, for the ranks of this process."""
        self._shuffle_ahead(epoch)
        indices = self._orders[epoch].result()[self._replicas.local_ranks]
        size = self.per_replica_batch_size
        # A resumed epoch goes on with the dispatches of an uninterrupted one, so that it runs the same programs.
        following = range(0, self._full_steps, self.steps_per_dispatch)
        starts = [start_step, *(first for first in following if first > start_step)]
        for first, last in pairwise([*starts, self._full_steps] if start_step < self._full_steps else []):
            chunk = indices[:, first * size : last * size]
            yield self._gather(chunk.reshape(len(indices), last - first, size), first)
        if self._rest and not self._drop_last_batch:
            yield self._gather(indices[:, None, self._full_steps * size :], self._full_steps)

    def _shuffle_ahead(self, epoch: int) -> None:
        """Shuffle an epoch and the next in a thread, unless that is done: 10 million examples take a second."""
        wanted = (epoch, epoch + 1)
        self._orders = {e: self._orders.get(e) or self._shuffler.submit(self.indices, e) for e in wanted}

    def without_padding(self, batch: MicroBatches) -> MicroBatches:
        """Cut a padded batch to the fewest examples that any replica has, but at least one; return others unchanged.

        Shape checks need it, because the shape of a padded batch hides the number of examples.
        """
        if "valid" not in batch.last:
            return batch
        arrays = {name: array for name, array in batch.last.items() if name != "valid"}
        held = batch.last["valid"].sum(axis=-1)
        fewest = int(held[held > 0].min())
        return MicroBatches(None, {name: array[:, :, :fewest] for name, array in arrays.items()}, batch.buffers_of)

    def _gather(self, indices: np.ndarray, first_step: int) -> MicroBatches:
        """Gather the examples of indices (W, K, b) in micro-batches; the last one may be smaller."""
        uneven = first_step == self._full_steps and self._join and self.dataset_size % self._replicas.world_size > 0
        take = self._take_valid if uneven else self._take
        buffers_of = self._buffers_of(indices, first_step) if self._join else None
        head = (indices.shape[2] - 1) // self.micro_batch_size * self.micro_batch_size
        last = take(indices[:, :, head:])
        if not head:
            return MicroBatches(None, last, buffers_of)
        equal_parts = indices[:, :, :head].reshape(*indices.shape[:2], -1, self.micro_batch_size)
        return MicroBatches(take(equal_parts), last, buffers_of)

    def _take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[indices] for name, array in self._arrays.items()}

    def _take_valid(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Gather examples, with padding where an index is `PADDING`: the first example, so that values are finite."""
        valid = indices != PADDING
        return {**self._take(np.where(valid, indices, 0)), "valid": valid.astype(np.float32)}

    def _buffers_of(self, indices: np.ndarray, first_step: int) -> np.ndarray:
        """Return the rank whose buffers are kept after each of K steps, (W, K), as torch's `join` chooses it.

        It is the highest rank with examples in the next step; after the last step of an epoch, in that step.
        """
        following = np.minimum(np.arange(first_step, first_step + indices.shape[1]) + 1, self.steps_per_epoch - 1)
        ranks = [min(self.examples_in(step), self._replicas.world_size) - 1 for step in following.tolist()]
        return np.tile(np.array(ranks, np.int32), (len(indices), 1))

    def _even_chunk(self, most: int) -> int:
        """Return the steps per dispatch that split an epoch evenly, bounded in steps and bytes.

        An even split saves compiling a program for a shorter last dispatch.
        """
        example_bytes = sum(array[:1].nbytes for array in self._arrays.values())
        per_step = max(1, example_bytes * self.per_replica_batch_size * self._replicas.world_size)
        most = max(1, min(most, _MAX_BYTES // per_step))
        chunks = -(-self._full_steps // most)
        return -(-self._full_steps // chunks) if chunks else 1


def _one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over `items`, fetching each one item early; raise an error only after the items before it.

    Dispatches are asynchronous, so the devices stay busy without a thread.
    """
    waiting: list[Item] = []
    try:
        for item in items:
            yield from waiting
            waiting = [item]
    except Exception:
        yield from waiting
        raise
    yield from waiting
