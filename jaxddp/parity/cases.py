"""What both frameworks are asked to do: the same steps, from the same weights, on the same batches."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

import jax
import numpy as np

from jaxddp import models
from jaxddp.config import TrainConfig
from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.data.datasets import Dataset
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.errors import InputError
from jaxddp.loader import Loader
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import to_torch
from jaxddp.parity.flax_side.side import FlaxSide, side_of_config, side_of_port
from jaxddp.parity.port import Port
from jaxddp.parity.records import Record, Tensors
from jaxddp.parity.torch_side.side import BuiltIn, OfPort, PortSource, TorchSource

# After every step: per replica (leading axis world_size) ...
LOCAL_STAGES = ("local_loss", "local_gradients")
# ... and the same on all replicas, in the order in which a step makes them.
SHARED_STAGES = ("gradients", "clipped_gradients", "params", "buffers")


@dataclass(frozen=True)
class Trajectory:
    """What a runner saw.

    Attributes:
        start: parameters and buffers before the first step.
        records: one per step, stage -> name -> array.
    """

    start: Tensors
    records: Sequence[Record]

    def before(self, step: int) -> Tensors:
        """Parameters and buffers before a step, from 0."""
        if step == 0:
            return self.start
        return {**self.records[step - 1]["params"], **self.records[step - 1]["buffers"]}


class Question(Hashable, Protocol):
    """What both runners ask of whatever they are to run."""

    @property
    def name(self) -> str:
        """What a reader knows it by."""

    @property
    def world_size(self) -> int:
        """The number of replicas."""

    @property
    def steps(self) -> int:
        """Optimizer steps to take."""

    @property
    def dtype(self) -> str:
        """Of parameters, buffers and inputs."""

    @property
    def torch_source(self) -> TorchSource:
        """The torch half, as it crosses to the ranks."""

    def flax_side(self) -> FlaxSide:
        """The flax half."""

    def batches(self) -> Iterator[MicroBatches]:
        """Every step's micro-batches, leaves (world_size, ...)."""

    def with_dtype(self, dtype: str) -> "Question":
        """The same in another precision."""


@dataclass(frozen=True)
class Case:
    """A question for both frameworks about one of the built-in models.

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

    @property
    def dtype(self) -> str:
        """Of parameters, buffers and inputs."""
        return self.config.dtype

    @property
    def torch_source(self) -> BuiltIn:
        """The torch half: torch_ref's model and optimizer."""
        return BuiltIn(self.config, self.dataset())

    def flax_side(self) -> FlaxSide:
        """The flax half: jaxddp's model and optimizer."""
        return side_of_config(self.config, self.dataset(), self.steps)

    def initial_weights(self) -> Tensors:
        """The model's own, under torch's names; the same in both frameworks."""
        with jax.enable_x64(self.dtype == "float64"):
            functional = Functional(models.build(self.config, self.dataset()))
            tensors = to_torch(jax.device_get({**functional.params, **functional.buffers}))
            return {n: x.astype(self.dtype) if x.dtype.kind == "f" else x for n, x in tensors.items()}

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
            drop_last_batch=config.drop_last_batch,
            join=config.join,
        )
        epochs = -(-self.steps // loader.steps_per_epoch)
        every = (batch for epoch in range(epochs) for batch in loader.host_batches(epoch))
        return (without_dispatch_axis(batch) for batch in islice(every, self.steps))


@dataclass(frozen=True)
class PortCase:
    """A question for both frameworks about a user's port.

    Attributes:
        source: where the port comes from; `PortFile(path)` for a file.
        world_size: number of replicas.
        steps: optimizer steps to take.
        dtype: "float64" or "float32".
        seed: of torch's generator, from which the weights are drawn.
    """

    source: PortSource
    world_size: int
    steps: int = 10
    dtype: str = "float64"
    seed: int = 0

    @property
    def name(self) -> str:
        """The port's."""
        return self.source.name

    @cached_property
    def port(self) -> Port:
        """Its fields."""
        return self.source.port()

    @property
    def torch_source(self) -> OfPort:
        """The torch half, which each rank makes."""
        return OfPort(self.source)

    def flax_side(self) -> FlaxSide:
        """The flax half."""
        return side_of_port(self.port, self.steps, self.dtype)

    def with_dtype(self, dtype: str) -> "PortCase":
        """The same question in another precision."""
        return dataclasses.replace(self, dtype=dtype)

    def batches(self) -> Iterator[MicroBatches]:
        """Every step's micro-batches, leaves (world_size, ...)."""
        for step in range(self.steps):
            of_ranks = [self.port.micro_batches(step, rank, "flax") for rank in range(self.world_size)]
            _check_alike(of_ranks, step)
            yield _stacked(of_ranks, self.dtype)


def _check_alike(of_ranks: list[list[Tensors]], step: int) -> None:
    """Replicas run one program, and so take batches of one shape."""
    first, *others = ({name: x.shape for name, x in pieces[0].items()} for pieces in of_ranks)
    for rank, shapes in enumerate(others, start=1):
        if shapes != first:
            raise InputError(f"batch({step}, {rank}): must have the shapes of rank 0, {first}, and has {shapes}")


def _stacked(of_ranks: list[list[Tensors]], dtype: str) -> MicroBatches:
    """The micro-batches of all ranks as leaves (world_size, A - 1, B, ...) and (world_size, B, ...)."""

    def stack(arrays: list[np.ndarray]) -> np.ndarray:
        stacked = np.stack(arrays)
        return stacked.astype(dtype) if stacked.dtype.kind == "f" else stacked

    *head, last = ([pieces[i] for pieces in of_ranks] for i in range(len(of_ranks[0])))
    lasts = {name: stack([piece[name] for piece in last]) for name in last[0]}
    if not head:
        return MicroBatches(None, lasts)
    heads = {
        name: np.stack([stack([piece[name] for piece in pieces]) for pieces in head], axis=1) for name in head[0][0]
    }
    return MicroBatches(heads, lasts)


def without_dispatch_axis(batch: MicroBatches) -> MicroBatches:
    """A batch of one step per dispatch, leaves (W, 1, ...), as leaves (W, ...)."""
    return jax.tree.map(lambda array: array[:, 0], batch)


def micro_batches_of(batch: MicroBatches, rank: int) -> list[Tensors]:
    """One replica's micro-batches as a list, the way a torch loop meets them."""
    last = {name: array[rank] for name, array in batch.last.items()}
    if batch.head is None:
        return [last]
    count = next(iter(batch.head.values())).shape[1]
    return [{name: array[rank, i] for name, array in batch.head.items()} for i in range(count)] + [last]
