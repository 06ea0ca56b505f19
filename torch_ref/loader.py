"""Batches of a training set from torch's DataLoader and DistributedSampler, grouped by optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from jaxddp.config import TrainerConfig
from jaxddp.data.order import PADDING, Sampler, batch_of, epoch_order
from jaxddp.data.sources.source import Augment, Collate, Source, as_source
from jaxddp.data.sources.stream import StreamSource
from jaxddp.errors import InputError, TrainingError, reason
from torch_ref.distributed import CPU, World
from torch_ref.losses import Batch
from torch_ref.samplers import SharedSampler, samplers

KEPT_BYTES = 2**30  # of a rank's test set that stays on its device between tests

Arrays = Mapping[str, np.ndarray[Any, Any]]


def to_tensors(arrays: Arrays, dtype: torch.dtype) -> Batch:
    """Return arrays as tensors: floating-point numbers in the run's dtype, integers but images' as int64.

    >>> to_tensors({"x": np.ones(2), "y": np.arange(2, dtype=np.uint16)}, torch.float32)
    {'x': tensor([1., 1.]), 'y': tensor([0, 1])}
    """

    def tensor(array: np.ndarray[Any, Any]) -> Tensor:
        if array.dtype.kind in "iu" and not (array.dtype == np.uint8 and array.ndim > 2):
            return torch.from_numpy(array.astype(np.int64, copy=False))
        converted = torch.from_numpy(array)
        return converted.to(dtype) if converted.is_floating_point() else converted

    return {name: tensor(array) for name, array in arrays.items()}


class SourceDataset(Dataset[Any]):
    """Dataset of a source's examples, which DataLoader reads a batch at a time, here or in its workers.

    Args:
        source: the source.
        dtype: dtype of floating-point numbers.
        num_workers: number of DataLoader's workers.

    Attributes:
        epoch: number of the epoch, for the augmentation; set before DataLoader starts its workers.
        reading: index of the example that each worker reads.
    """

    def __init__(self, source: Source, dtype: torch.dtype, num_workers: int = 0):
        self.source, self.dtype, self.epoch = source, dtype, 0
        self.reading = torch.zeros(max(1, num_workers), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: list[int]) -> Batch | InputError:
        """Return a batch, or the error in its way: raised in a worker, it would come with pages of text."""
        worker = get_worker_info()
        tell = partial(self.reading.__setitem__, 0 if worker is None else worker.id)
        try:
            return to_tensors(self.source.take(np.array(indices, np.int64), self.epoch, tell), self.dtype)
        except InputError as error:
            return error

    def batch(self, indices: list[int]) -> Batch:
        """Return a batch.

        Raises:
            InputError: an example is not as it should be.
        """
        if isinstance(batch := self.__getitems__(indices), InputError):
            raise batch
        return batch


class Loader:
    """Loader of a training set, distributed over the replicas; seen from one process.

    Args:
        data: training set: arrays with leaves of shape (N, ...), or an object with a length and items, see
            `jaxddp.data.sources.as_source`.
        config: configuration of batch size, accumulation and sampling.
        num_replicas: W, number of replicas that share each global batch.
        ranks: ranks whose examples this process takes: its rank, or all ranks in a single process.
        device: device of the batches.
        augment, collate, sampler, num_workers, timeout: see `jaxddp.loader.Loader`; the workers are DataLoader's.

    Raises:
        InputError: a global batch size that is not divisible, or larger than the training set; or the data, an
            example or an order is not as it should be.

    >>> arrays = {"x": np.arange(9), "y": np.arange(9)}
    >>> loader = Loader(arrays, TrainerConfig(global_batch_size=6, shuffle=False), num_replicas=2, ranks=[1])
    >>> [[micro_batch["x"].tolist() for micro_batch in step] for step in loader.epoch(0)]
    [[[1, 3, 5]], [[7, 0]]]
    """

    def __init__(
        self,
        data: Any,
        config: TrainerConfig,
        num_replicas: int,
        ranks: Sequence[int],
        device: torch.device = CPU,
        *,
        augment: Augment | None = None,
        collate: Collate | None = None,
        sampler: Sampler | None = None,
        num_workers: int = 0,
        timeout: float = 0.0,
    ):
        in_memory = isinstance(data, Mapping)  # numbers that are not finite are the training step's to report
        source = as_source(
            data, "training data", augment=augment, collate=collate, seed=config.seed, checked=not in_memory
        )
        self._dataset = SourceDataset(source, getattr(torch, config.dtype), num_workers)
        streamed = isinstance(source, StreamSource)
        if isinstance(source, StreamSource):
            source.check_read(config.global_batch_size, num_workers, sampler)
        of_ranks = samplers(range(len(source)), config, num_replicas, sampler, streamed)
        self._sampler = SharedSampler([of_ranks[rank] for rank in ranks])
        self._shares = [len(of_rank) for of_rank in of_ranks]
        shuffle = False if streamed else config.shuffle
        self._order_of = lambda epoch: epoch_order(len(source), shuffle, config.seed, epoch, sampler)
        self._join = config.join
        self._ranks = ranks
        self._together = len(ranks) == num_replicas
        self._per_replica_batch_size = config.per_replica_batch_size(num_replicas)
        self._accumulation_steps = config.accumulation_steps
        self._drop_last_batch = config.drop_last_batch
        self._device = device
        self._micro_batches = DataLoader(
            self._dataset,
            batch_size=len(ranks) * self._per_replica_batch_size // config.accumulation_steps,
            sampler=self._sampler,
            collate_fn=_unchanged,
            pin_memory=self._device.type == "cuda",
            num_workers=num_workers,
            # torch's default on Linux; with a fork server, each worker of a rank would import everything again.
            multiprocessing_context="fork" if num_workers else None,
            timeout=timeout if num_workers else 0,
        )
        if self.steps_per_epoch == 0:
            raise InputError(f"--global-batch-size {config.global_batch_size}: larger than the {len(source)} examples")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        full, rest = divmod(max(self._shares), self._per_replica_batch_size)
        return full + (rest > 0 and not self._drop_last_batch)

    def smallest_micro_batch(self) -> Batch:
        """Return a micro-batch of the smallest size that the model will see, to check shapes with."""
        full = self._micro_batches.batch_size or 1
        totals = [sum(self._shares)] if self._together else self._shares
        size = full if self._drop_last_batch else min(total % full or full for total in totals if total)
        return {name: x.to(self._device) for name, x in self._dataset.batch(list(range(size))).items()}

    def examples_in(self, step: int) -> int:
        """Return the examples of an optimizer step over all replicas; steps count from 0 over all epochs."""
        start = step % self.steps_per_epoch * self._per_replica_batch_size
        return sum(min(max(share - start, 0), self._per_replica_batch_size) for share in self._shares)

    def batch_of(self, step: int, *anomaly: int) -> str:
        """Describe the examples of an optimizer step, counted from 1 over all epochs; see `jaxddp.data.order`."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        first = place * self._per_replica_batch_size
        last = min(first + self._per_replica_batch_size, max(self._shares))
        return batch_of(self._order_of(epoch), len(self._shares), first, last, self._join, *anomaly)

    @property
    def examples_per_epoch(self) -> int:
        """Examples per epoch over all replicas, including repeated ones."""
        return sum(map(self.examples_in, range(self.steps_per_epoch)))

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each optimizer step; the last step of an epoch may have fewer and smaller ones.

        With `--join`, the epoch ends early for a rank without further examples. In a step in which a rank has
        examples, it has as many micro-batches as the others, some of them empty, since DDP's `join` counts forward
        passes.

        Args:
            epoch: number of the epoch, which determines the order, like torch's `set_epoch`.
            start_step: number of optimizer steps to skip, to resume within an epoch.
        """
        self._sampler.set_epoch(epoch)
        self._dataset.epoch = epoch
        skipped = start_step * self._per_replica_batch_size
        self._sampler.start = sum(min(skipped, self._shares[rank]) for rank in self._ranks)
        micro_batches = self._read()
        for step in range(start_step, self.steps_per_epoch):
            batches = list(islice(micro_batches, self._accumulation_steps))
            if batches:
                batches += [self._empty for _ in range(len(batches), self._micro_batches_in(step))]
                yield [{name: x.to(self._device, non_blocking=True) for name, x in batch.items()} for batch in batches]

    def _read(self) -> Iterator[Batch]:
        """Yield what DataLoader reads; errors of its workers become one line."""
        try:
            for batch in self._micro_batches:
                if isinstance(batch, InputError):
                    raise batch
                yield batch
        except (RuntimeError, InputError) as error:
            if (told := self.of_workers(error)) is error:
                raise
            raise told from error

    def of_workers(self, error: Exception) -> Exception:
        """Return the error of a DataLoader's worker as one line; torch raises it wherever the process is.

        That may be code of the user's, whose errors are raised again as input errors.
        """
        raised = (error.__cause__ or error) if isinstance(error, InputError) else error
        if not str(raised).startswith("DataLoader "):
            return error
        examples = ", ".join(map(str, self._dataset.reading.tolist()))
        what = reason(raised).rstrip(". ")
        where = self._dataset.source.where
        return TrainingError(f"{where}: {what}; the workers were reading the examples {examples}")

    @cached_property
    def _empty(self) -> Batch:
        """Micro-batch without examples; read where it is needed, since a user's code may take long to read one."""
        return {name: x[:0] for name, x in self._dataset.batch([0]).items()}

    def _micro_batches_in(self, step: int) -> int:
        """Return the number of micro-batches of the rank with the most examples in a step."""
        examples = min(max(self._shares) - step * self._per_replica_batch_size, self._per_replica_batch_size)
        return -(-examples * self._accumulation_steps // self._per_replica_batch_size)


class EvaluationBatches:
    """A rank's batches of a test set, on its device or, if they are too many, read again in each pass.

    Every example is on exactly one rank.

    Args:
        data: see `Loader`.
        config: dtype of floating-point numbers.
        world: the ranks.
        batch_size: examples per batch.

    >>> list(EvaluationBatches({"x": np.arange(3)}, TrainerConfig(), World(rank=1, world_size=2)))
    [{'x': tensor([1])}]
    """

    def __init__(self, data: Any, config: TrainerConfig, world: World, batch_size: int = 256):
        source = as_source(data, "test data", checked=False)
        self._dataset, self._device = SourceDataset(source, getattr(torch, config.dtype)), world.device
        share = list(range(world.rank, len(source), world.world_size))
        self._parts = [share[first : first + batch_size] for first in range(0, len(share), batch_size)] or [[]]
        example = sum(tensor.nbytes for tensor in self._dataset.batch([0]).values())
        self._kept = list(map(self._read, self._parts)) if len(share) * example <= KEPT_BYTES else None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        return map(self._read, self._parts) if self._kept is None else iter(self._kept)

    def _read(self, indices: list[int]) -> Batch:
        batch = self._dataset.batch(indices or [0])
        return {name: (x if indices else x[:0]).to(self._device) for name, x in batch.items()}


def epoch_indices(
    dataset_size: int, config: TrainerConfig, num_replicas: int, sampler: Sampler | None = None
) -> np.ndarray[Any, Any]:
    """Return the example indices of each replica in the first epoch, int64 (num_replicas, examples per replica).

    With `--join`, positions beyond the last example hold `PADDING`.

    >>> epoch_indices(5, TrainerConfig(shuffle=False), num_replicas=2)
    array([[0, 2, 4],
           [1, 3, 0]])
    """
    order = samplers(range(dataset_size), config, num_replicas, sampler)
    return np.array(list(zip_longest(*order, fillvalue=PADDING)), dtype=np.int64).T


def _unchanged(batch: Any) -> Any:
    return batch
