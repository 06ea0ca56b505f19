"""Batches of a training set on the devices: in the sampler's order, one ahead of the training step."""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxddp.config.ranges import check_range
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.order import PADDING, Order, Sampler, Shuffle, Unshuffled, batch_of, check_length, deal, epoch_order
from jaxddp.data.sampler import epoch_indices, samples_per_replica
from jaxddp.data.sources.arrays import Arrays
from jaxddp.data.sources.source import Augment, Collate, Job, Source, as_source
from jaxddp.data.sources.stream import StreamSource
from jaxddp.data.torch_rng import Permutation
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError

if TYPE_CHECKING:
    from jaxddp.data.sources.workers import DataWorkers

Item = TypeVar("Item")
Planned = tuple[int, np.ndarray]  # first step of a dispatch, indices of its examples (W, K, b)

MAX_STEPS_PER_DISPATCH = 32  # a larger number saves no time
_MAX_BYTES = 2**26  # of examples per dispatch, if the loader chooses the number of steps


class Loader:
    """Loader of a training set, distributed over the replicas.

    Replica r gets the examples of `torch.utils.data.DistributedSampler(rank=r)` in the same order,
    B = global_batch_size / world_size per optimizer step, in A micro-batches.

    Args:
        data: training set: arrays with leaves of shape (N, ...), or an object with a length and items, see
            `jaxddp.data.sources.as_source`, or a `jaxddp.data.sources.stream`, which keeps its order.
        replicas: replicas that share the training set.
        global_batch_size: examples per optimizer step; divisible by world_size x accumulation_steps.
        accumulation_steps: A, micro-batches per replica and optimizer step.
        steps_per_dispatch: K, optimizer steps per yielded batch; None: the loader chooses, up to
            `max_steps_per_dispatch`, and 1 with `collate`, whose batches may differ in shape.
        max_steps_per_dispatch: upper bound of K, if the loader chooses it.
        ends_every: optimizer steps after each of which a dispatch ends, if the loader chooses K; None: no such steps.
        shuffle, seed, drop_last: as in torch's DistributedSampler; shuffle "index": an order that takes no memory.
        drop_last_batch: skip the last step of an epoch if its batch is smaller, as DataLoader(drop_last=True) does.
        join: use every example exactly once. In the last step of an epoch some replicas may then have one example
            less than others, or none; that batch has an entry "valid", 1 for an example and 0 for padding.
        augment, collate: see `jaxddp.data.sources.Source`. `collate` gets the examples of all replicas of this process
            at once, once for each of `MicroBatches`' parts; all processes must come to the same shapes.
        sampler: replaces `shuffle`, see `jaxddp.data.order.Sampler`; each epoch must have as many indices.
        num_workers: number of processes that read the examples; 0: this one.
        timeout: seconds that a worker may take for a batch; 0: any time.

    Raises:
        InputError: arrays of different lengths, or a global batch size that is below 1, not divisible, or larger
            than the training set; or the data, an example or an order is not as it should be.

    >>> from jaxddp.distributed.devices import prepare
    >>> loader = Loader({"x": np.arange(9.0)}, Replicas(prepare(2, "cpu")), global_batch_size=6, shuffle=False)
    >>> [batch.last["x"].tolist() for batch in loader.epoch(0)]
    [[[[0.0, 2.0, 4.0]], [[1.0, 3.0, 5.0]]], [[[6.0, 8.0]], [[7.0, 0.0]]]]
    """

    def __init__(
        self,
        data: Any,
        replicas: Replicas,
        *,
        global_batch_size: int,
        accumulation_steps: int = 1,
        steps_per_dispatch: int | None = None,
        max_steps_per_dispatch: int = MAX_STEPS_PER_DISPATCH,
        ends_every: int | None = None,
        shuffle: Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        drop_last_batch: bool = False,
        join: bool = False,
        augment: Augment | None = None,
        collate: Collate | None = None,
        sampler: Sampler | None = None,
        num_workers: int = 0,
        timeout: float = 0.0,
    ):
        for name, value in (("global_batch_size", global_batch_size), ("accumulation_steps", accumulation_steps)):
            check_range(name, value)
        if global_batch_size % (replicas.world_size * accumulation_steps):
            raise InputError(
                f"global_batch_size {global_batch_size}: must be divisible by {replicas.world_size} replicas "
                f"x {accumulation_steps} accumulation steps"
            )
        in_memory = isinstance(data, Mapping)  # numbers that are not finite are the training step's to report
        self.source: Source = as_source(
            data, "training data", augment=augment, collate=collate, seed=seed, checked=not in_memory
        )
        self._replicas = replicas
        if isinstance(self.source, StreamSource):
            self.source.check_read(global_batch_size, num_workers, sampler)
            shuffle = False
        self._shuffle, self._seed, self._drop_last, self._sampler = shuffle, seed, drop_last, sampler
        self._drop_last_batch, self._join = drop_last_batch, join
        self.dataset_size = len(self.source)
        self.per_replica_batch_size = global_batch_size // replicas.world_size
        self.micro_batch_size = self.per_replica_batch_size // accumulation_steps
        self._workers = _workers(self.source, num_workers, timeout) if num_workers else None
        self.waited = 0.0
        """Seconds for which this process has read examples, or waited for its workers to."""
        self._orders: dict[int, Future[Order]] = {}
        self._shuffle_ahead(0)
        self._size = self.dataset_size if sampler is None else len(self._orders[0].result())  # examples per epoch
        most = samples_per_replica(self._size, replicas.world_size, drop_last)  # examples per replica
        least = self._size // replicas.world_size if join else most
        self._full_steps = least // self.per_replica_batch_size
        self._rest = most - self._full_steps * self.per_replica_batch_size
        if self.steps_per_epoch == 0:
            raise InputError(f"global_batch_size {global_batch_size}: larger than the {self._size} examples")
        self._given, self._ends_every = steps_per_dispatch, ends_every
        self._most = 1 if self.source.collate or steps_per_dispatch else self._fitting(max_steps_per_dispatch)
        self.steps_per_dispatch = 1
        self.choose_steps_per_dispatch(self._most)

    def choose_steps_per_dispatch(self, most: int) -> int:
        """Choose K, at most `most`, for the dispatches that are not planned yet, unless it was given; return it.

        Dispatches of K steps begin at multiples of K; up to there they have one step.
        """
        chosen = self._even_chunk(min(most, self._most))
        if self._ends_every is not None:
            common = math.gcd(self._ends_every, self.steps_per_epoch)
            chosen = max(k for k in range(1, chosen + 1) if common % k == 0)
        self.steps_per_dispatch = self._given or chosen
        return self.steps_per_dispatch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self._full_steps + (self._rest > 0 and not self._drop_last_batch)

    @property
    def examples_per_epoch(self) -> int:
        """Examples per epoch over all replicas, including repeated ones."""
        full = self._full_steps * self.per_replica_batch_size * self._replicas.world_size
        return full + (self.examples_in(self._full_steps) if self.steps_per_epoch > self._full_steps else 0)

    def examples_in(self, step: int) -> int:
        """Return the examples of an optimizer step over all replicas; steps count from 0 over all epochs."""
        step %= self.steps_per_epoch
        if step < self._full_steps:
            return self.per_replica_batch_size * self._replicas.world_size
        if self._join:
            return self._size - step * self.per_replica_batch_size * self._replicas.world_size
        return self._rest * self._replicas.world_size

    def batch_of(self, step: int, *anomaly: int) -> str:
        """Describe the examples of an optimizer step, counted from 1 over all epochs; see `jaxddp.data.order`."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        first = place * self.per_replica_batch_size
        last = first + (self.per_replica_batch_size if place < self._full_steps else self._rest)
        return batch_of(self._order(epoch), self._replicas.world_size, first, last, self._join, *anomaly)

    def indices(self, epoch: int) -> np.ndarray:
        """Return the example indices of each replica in `epoch`, int64 (world_size, examples per replica)."""
        return epoch_indices(
            self.dataset_size,
            self._replicas.world_size,
            shuffle=self._shuffle,
            seed=self._seed,
            epoch=epoch,
            drop_last=self._drop_last,
            join=self._join,
            sampler=self._sampler,
        )

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatches]:
        """Yield the batches of an epoch on the devices, leaves (W, K, ...), for `DistributedDataParallel.steps`.

        Args:
            epoch: number of the epoch, which determines the order, like torch's `set_epoch`.
            start_step: number of optimizer steps to skip, to resume within an epoch.
        """
        yield from _one_ahead(map(self._replicas.shard, self.host_batches(epoch, start_step)))

    def host_batches(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatches]:
        """Yield the batches of `epoch` as NumPy arrays, for the ranks of this process."""
        self._shuffle_ahead(epoch)
        order = self._orders[epoch].result()
        check_length(order, epoch, self._size)
        planned: deque[Planned] = deque()  # given to the workers, and not yet read
        jobs = self._jobs(order, epoch, start_step, planned)
        read, started = (self._workers or self.source).read(jobs), time.perf_counter()
        for parts in read:
            self.waited += time.perf_counter() - started
            yield self._batch(*planned.popleft(), parts)
            started = time.perf_counter()

    def smallest_batch(self) -> MicroBatches:
        """Return a batch like the last one of an epoch, which may be the smallest, to check shapes with.

        Its examples are the first ones, so that nothing waits for the shuffle.
        """
        order = Unshuffled(self._size) if self._sampler is None else self._orders[0].result()
        planned: deque[Planned] = deque()
        (parts,) = self.source.read(self._jobs(order, 0, self.steps_per_epoch - 1, planned, of_start=True))
        return self._batch(*planned.popleft(), parts)

    def _jobs(
        self, order: Order, epoch: int, start_step: int, planned: "deque[Planned]", of_start: bool = False
    ) -> Iterator[Job]:
        """Yield what is to be read for each dispatch from `start_step` on, and note it in `planned`.

        Args:
            of_start: read an epoch's first examples in place of those.
        """
        size, world_size, ranks = self.per_replica_batch_size, self._replicas.world_size, self._replicas.local_ranks
        for first, last, examples in self._dispatches(start_step):
            start, count = first * size, (last - first) * examples
            shift = start if of_start and not self._join else 0
            chunk = deal(order, world_size, ranks, start - shift, start - shift + count, self._join)
            indices = chunk.reshape(len(ranks), last - first, examples)
            planned.append((first, indices))
            yield Job(epoch, tuple(np.where(part == PADDING, 0, part) for part in self._cut(indices)))

    def _dispatches(self, first: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first and last + 1 step of each dispatch from step `first` on, and examples per replica and step.

        A resumed epoch soon continues with the dispatches of an uninterrupted one, so that it runs the same programs.
        """
        while first < self._full_steps:
            steps = 1 if first % self.steps_per_dispatch else self.steps_per_dispatch
            last = min(first + steps, self._full_steps)
            yield first, last, self.per_replica_batch_size
            first = last
        if self._rest and not self._drop_last_batch:
            yield self._full_steps, self._full_steps + 1, self._rest

    def _cut(self, array: np.ndarray) -> list[np.ndarray]:
        """Cut indices (W, K, b) into micro-batches: all but the last, if there are several, and the last."""
        head = (array.shape[2] - 1) // self.micro_batch_size * self.micro_batch_size
        equal_parts = array[:, :, :head].reshape(*array.shape[:2], -1, self.micro_batch_size)
        return [*([equal_parts] if head else []), array[:, :, head:]]

    def _batch(self, first_step: int, indices: np.ndarray, parts: list[Arrays]) -> MicroBatches:
        """Put together what was read of the indices (W, K, b): in an uneven last step with what is padding."""
        if first_step == self._full_steps and self._join and self._size % self._replicas.world_size:
            valid = [(part != PADDING).astype(np.float32) for part in self._cut(indices)]
            parts = [{**part, "valid": of_part} for part, of_part in zip(parts, valid, strict=True)]
        buffers_of = self._buffers_of(indices, first_step) if self._join else None
        return MicroBatches(parts[0] if len(parts) > 1 else None, parts[-1], buffers_of)

    def _shuffle_ahead(self, epoch: int) -> None:
        """Begin the orders of an epoch and the next in a thread, unless that is done: 78 million take 7 seconds."""
        missing: dict[int, Future[Order]] = {e: Future() for e in (epoch, epoch + 1) if e not in self._orders}
        self._orders = {e: missing.get(e) or self._orders[e] for e in (epoch, epoch + 1)}
        if missing:  # a daemon, so that the end of the process does not wait for it
            threading.Thread(target=self._shuffled, args=(missing,), name="shuffle", daemon=True).start()

    def _shuffled(self, orders: "Mapping[int, Future[Order]]") -> None:
        """Make orders, and then compute those to the end that are computed as they are used."""
        for epoch, future in orders.items():
            try:
                future.set_result(self._order(epoch))
            except BaseException as error:
                future.set_exception(error)
        for future in orders.values():
            if future.exception() is None and isinstance(order := future.result(), Permutation):
                order.complete(len(order))

    def _order(self, epoch: int) -> Order:
        return epoch_order(self.dataset_size, self._shuffle, self._seed, epoch, self._sampler)

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

    def _buffers_of(self, indices: np.ndarray, first_step: int) -> np.ndarray:
        """Return the rank whose buffers are kept after each of K steps, (W, K), as torch's `join` chooses it.

        It is the highest rank with examples in the next step; after the last step of an epoch, in that step.
        """
        following = np.minimum(np.arange(first_step, first_step + indices.shape[1]) + 1, self.steps_per_epoch - 1)
        ranks = [min(self.examples_in(step), self._replicas.world_size) - 1 for step in following.tolist()]
        return np.tile(np.array(ranks, np.int32), (len(indices), 1))

    def _fitting(self, most: int) -> int:
        """Return the largest number of steps, at most `most`, whose examples take `_MAX_BYTES`."""
        example_bytes = sum(array.nbytes for array in self.source.take(np.zeros(1, np.int64), 0).values())
        per_step = max(1, example_bytes * self.per_replica_batch_size * self._replicas.world_size)
        return max(1, min(most, _MAX_BYTES // per_step))

    def _even_chunk(self, most: int) -> int:
        """Return the steps per dispatch, at most `most`, that split an epoch evenly.

        An even split saves compiling a program for a shorter last dispatch.
        """
        chunks = -(-self._full_steps // most)
        return -(-self._full_steps // chunks) if chunks else 1


def _workers(source: Source, count: int, timeout: float) -> "DataWorkers":
    from jaxddp.data.sources.workers import DataWorkers  # takes 20 ms, which a run without workers need not wait for

    return DataWorkers(source, count, timeout)


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
