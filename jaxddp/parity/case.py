"""What both frameworks are asked to do: the same steps, from the same weights, on the same batches."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from jaxddp.config import IGNORE_INDEX, TrainConfig
from jaxddp.datasets import Dataset
from jaxddp.loader import Loader
from jaxddp.replicas import VirtualReplicas
from jaxddp.step import MicroBatches

Tensors = dict[str, np.ndarray]  # torch's names, torch's layout

# After every step: per replica (leading axis world_size) ...
LOCAL_STAGES = ("local_loss", "local_gradients")
# ... and the same on all replicas, in the order in which a step makes them.
SHARED_STAGES = ("gradients", "clipped_gradients", "params", "buffers")
STAGES = LOCAL_STAGES + SHARED_STAGES

Record = dict[str, Tensors]  # stage -> tensors, after one step


@dataclass(frozen=True)
class Trajectory:
    """What a runner saw.

    Attributes:
        start: parameters and buffers before the first step.
        records: one per step, stage -> name -> array.
    """

    start: Tensors
    records: list[Record]


@dataclass(frozen=True)
class Case:
    """A question for both frameworks.

    Attributes:
        config: model, optimizer, schedule, batch size, normalisation, dtype, seed.
        world_size: number of replicas.
        steps: optimizer steps to take.
        ignored_labels: the share of labels that do not count, so that replicas hold unequal
            numbers of valid ones.
    """

    config: TrainConfig
    world_size: int
    steps: int = 20
    ignored_labels: float = 0.0

    @property
    def name(self) -> str:
        """Model, optimizer, world size and dtype in a word each."""
        config = self.config
        return f"{config.model} {config.optimizer} x{self.world_size} {config.dtype}"

    def with_dtype(self, dtype: str) -> "Case":
        """The same case in another precision."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, dtype=dtype))

    def dataset(self) -> Dataset:
        """A small probe of the model's kind of data, built to break symmetries.

        Inputs have a mean far from 0, images are not square, replicas differ, and the last
        batch of an epoch is smaller than the others.
        """
        config = self.config
        rng = np.random.default_rng(config.seed)
        # Per replica two whole steps and three quarters of one; one example short of all replicas' share,
        # so that the sampler has to repeat some.
        per_replica = config.per_replica_batch_size(self.world_size) * 11 // 4
        size = self.world_size * per_replica - (self.world_size - 1)
        if config.model == "char_mlp":
            shape: tuple[int, ...] = (config.context_length,)
            num_classes = 7
            x = rng.integers(0, num_classes, (size, *shape)).astype(np.int32)
        else:
            shape, num_classes = ((6, 4), 5) if config.model == "convnet" else ((12,), 5)
            x = (rng.standard_normal((size, *shape)) + 1.5).astype(np.float32)
        y = rng.integers(0, num_classes, size).astype(np.int32)
        y[rng.random(size) < self.ignored_labels] = IGNORE_INDEX
        arrays = {"x": x.astype(config.dtype) if x.dtype.kind == "f" else x, "y": y}
        return Dataset("probe", arrays, arrays, num_classes, shape)

    def batches(self) -> Iterator[MicroBatches]:
        """One step's micro-batches for all replicas after the other, leaves (world_size, ...)."""
        config = self.config
        loader = Loader(
            self.dataset().train,
            VirtualReplicas(self.world_size),
            global_batch_size=config.global_batch_size,
            accumulation_steps=config.accumulation_steps,
            steps_per_dispatch=1,
            seed=config.seed,
            drop_last=config.drop_last,
        )
        epochs = -(-self.steps // loader.steps_per_epoch)
        every = (batch for epoch in range(epochs) for batch in loader.host_batches(epoch))
        return (without_dispatch_axis(batch) for batch in islice(every, self.steps))


def without_dispatch_axis(batch: MicroBatches) -> MicroBatches:
    """A batch of one step per dispatch, leaves (W, 1, ...), as leaves (W, ...)."""

    head, last = batch
    return MicroBatches(
        None if head is None else {name: array[:, 0] for name, array in head.items()},
        {name: array[:, 0] for name, array in last.items()},
    )


def micro_batches_of(batch: MicroBatches, rank: int) -> list[Tensors]:
    """One replica's micro-batches as a list, the way a torch loop meets them."""
    last = {name: array[rank] for name, array in batch.last.items()}
    if batch.head is None:
        return [last]
    count = len(batch.head["y"][rank])
    return [{name: array[rank, i] for name, array in batch.head.items()} for i in range(count)] + [last]


def on_one_replica(case: Case) -> Case:
    """The same steps for one replica, which will take the whole batch (see `whole_batch`).

    BatchNorm is then over the whole batch by itself, as torch's SyncBatchNorm, which needs GPUs.
    """
    return dataclasses.replace(case, world_size=1, config=dataclasses.replace(case.config, sync_batch_norm=False))


def whole_batch(batch: MicroBatches) -> MicroBatches:
    """All replicas' examples as one replica's; for a batch that is not split into micro-batches."""
    if batch.head is not None:
        raise ValueError("a batch in micro-batches cannot become one replica's batch")
    return MicroBatches(None, {name: array.reshape(1, -1, *array.shape[2:]) for name, array in batch.last.items()})
