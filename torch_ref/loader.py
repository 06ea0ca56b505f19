"""Batches of a training set from torch's DataLoader and DistributedSampler, grouped by optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from jaxddp.config import TrainConfig
from jaxddp.data.sampler import PADDING
from jaxddp.errors import InputError
from torch_ref.distributed import CPU, World
from torch_ref.losses import Batch

Arrays = Mapping[str, np.ndarray[Any, Any]]


class ArrayDataset(Dataset[dict[str, Tensor]]):
    """Dataset of examples {"x": ..., "y": ...}; floating-point numbers in the run's dtype, integers as int64.

    >>> ArrayDataset({"x": np.ones((3, 2)), "y": np.arange(3)}, torch.float32)[2]
    {'x': tensor([1., 1.]), 'y': tensor(2)}
    """

    def __init__(self, arrays: Arrays, dtype: torch.dtype):
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.tensors = {name: x.to(dtype if x.is_floating_point() else torch.int64) for name, x in tensors.items()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


class Loader:
    """Loader of a training set, distributed over the replicas; seen from one process.

    Args:
        arrays: training set, leaves of shape (N, ...).
        config: configuration of batch size, accumulation and sampling.
        num_replicas: W, number of replicas that share each global batch.
        ranks: ranks whose examples this process takes: its rank, or all ranks in a single process.
        device: device of the batches.

    Raises:
        InputError: a global batch size that is not divisible, or larger than the training set.

    >>> arrays = {"x": np.arange(9), "y": np.arange(9)}
    >>> loader = Loader(arrays, TrainConfig(global_batch_size=6, shuffle=False), num_replicas=2, ranks=[1])
    >>> [[micro_batch["x"].tolist() for micro_batch in step] for step in loader.epoch(0)]
    [[[1, 3, 5]], [[7, 0]]]
    """

    def __init__(
        self,
        arrays: Arrays,
        config: TrainConfig,
        num_replicas: int,
        ranks: Sequence[int],
        device: torch.device = CPU,
    ):
        self._dataset = dataset = ArrayDataset(arrays, getattr(torch, config.dtype))
        samplers = _samplers(dataset, config, num_replicas)
        self._sampler = SharedSampler([samplers[rank] for rank in ranks])
        self._shares = [len(sampler) for sampler in samplers]
        self._together = len(ranks) == num_replicas
        self._per_replica_batch_size = config.per_replica_batch_size(num_replicas)
        self._accumulation_steps = config.accumulation_steps
        self._drop_last_batch = config.drop_last_batch
        self._device = device
        self._micro_batches = DataLoader(
            dataset,
            batch_size=len(ranks) * self._per_replica_batch_size // config.accumulation_steps,
            sampler=self._sampler,
            pin_memory=self._device.type == "cuda",
        )
        if self.steps_per_epoch == 0:
            raise InputError(f"--global-batch-size {config.global_batch_size}: larger than the {len(dataset)} examples")

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
        return {name: x[:size].to(self._device) for name, x in self._dataset.tensors.items()}

    def examples_in(self, step: int) -> int:
        """Return the examples of an optimizer step over all replicas; steps count from 0 over all epochs."""
        start = step % self.steps_per_epoch * self._per_replica_batch_size
        return sum(min(max(share - start, 0), self._per_replica_batch_size) for share in self._shares)

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
            epoch: number of the epoch, which determines the order, as torch's `set_epoch` does.
            start_step: number of optimizer steps to skip, to resume within an epoch.
        """
        self._sampler.set_epoch(epoch)
        micro_batches = iter(self._micro_batches)
        for step in range(self.steps_per_epoch):
            batches = list(islice(micro_batches, self._accumulation_steps))
            if step >= start_step and batches:
                batches += [self._empty] * (self._micro_batches_in(step) - len(batches))
                yield [{name: x.to(self._device, non_blocking=True) for name, x in batch.items()} for batch in batches]

    @property
    def _empty(self) -> Batch:
        return {name: x[:0] for name, x in self._dataset.tensors.items()}

    def _micro_batches_in(self, step: int) -> int:
        """Return the number of micro-batches of the rank with the most examples in a step."""
        examples = min(max(self._shares) - step * self._per_replica_batch_size, self._per_replica_batch_size)
        return -(-examples * self._accumulation_steps // self._per_replica_batch_size)


class UnevenSampler(Sampler[int]):
    """Sampler of one rank's examples like DistributedSampler, without repetitions: dataset[rank::num_replicas].

    >>> [list(UnevenSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    def __init__(self, dataset: Any, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0):
        self._order: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle, seed)
        self._num_replicas, self._rank = num_replicas, rank
        self.set_epoch = self._order.set_epoch

    def __iter__(self) -> Iterator[int]:
        return islice(self._order, self._rank, None, self._num_replicas)

    def __len__(self) -> int:
        return len(range(self._rank, len(self._order), self._num_replicas))


RankSampler = DistributedSampler[Any] | UnevenSampler


class SharedSampler(Sampler[int]):
    """Sampler of several ranks' examples in turn: each batch is the union of their batches.

    >>> samplers = [DistributedSampler(range(5), 2, rank, shuffle=False) for rank in range(2)]
    >>> list(SharedSampler(samplers))
    [0, 1, 2, 3, 4, 0]
    """

    def __init__(self, samplers: Sequence[RankSampler]):
        self.samplers = samplers

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all samplers, which determines the order of the next pass."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return (example for turn in zip_longest(*self.samplers) for example in turn if example is not None)

    def __len__(self) -> int:
        return sum(map(len, self.samplers))


def evaluation_batches(arrays: Arrays, config: TrainConfig, world: World, batch_size: int = 256) -> list[Batch]:
    """Return this rank's batches of the test set, on its device; every example is on exactly one rank.

    >>> arrays = {"x": np.arange(3)}
    >>> evaluation_batches(arrays, TrainConfig(), World(rank=1, world_size=2))
    [{'x': tensor([1])}]
    """
    share = {name: array[world.rank :: world.world_size] for name, array in arrays.items()}
    tensors = ArrayDataset(share, getattr(torch, config.dtype)).tensors
    pieces = {name: tensor.to(world.device).split(batch_size) for name, tensor in tensors.items()}
    return [dict(zip(pieces, batch, strict=True)) for batch in zip(*pieces.values(), strict=True)]


def epoch_indices(dataset_size: int, config: TrainConfig, num_replicas: int) -> np.ndarray[Any, Any]:
    """Return the example indices of each replica in the first epoch, int64 (num_replicas, examples per replica).

    With `--join`, positions beyond the last example hold `PADDING`.

    >>> epoch_indices(5, TrainConfig(shuffle=False), num_replicas=2)
    array([[0, 2, 4],
           [1, 3, 0]])
    """
    samplers = _samplers(range(dataset_size), config, num_replicas)
    return np.array(list(zip_longest(*samplers, fillvalue=PADDING)), dtype=np.int64).T


def _samplers(dataset: Any, config: TrainConfig, num_replicas: int) -> Sequence[RankSampler]:
    """Return the sampler of every rank."""
    ranks = range(num_replicas)
    if config.join:
        return [UnevenSampler(dataset, num_replicas, rank, config.shuffle, config.seed) for rank in ranks]
    return [
        DistributedSampler(dataset, num_replicas, rank, config.shuffle, config.seed, config.drop_last) for rank in ranks
    ]
