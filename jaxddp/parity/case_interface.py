"""Interface of everything that can be checked: its size, batches and sources, and the run that results.

This module imports neither framework and knows neither side.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.errors import InputError
from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.port import Port
from jaxddp.parity.records import Record, Tensors, full

# Stages that are recorded after every step: per replica (leading axis world_size) ...
LOCAL_STAGES = ("local_loss", "local_gradients")
# ... and equal on all replicas, in the order in which a step computes them.
SHARED_STAGES = ("gradients", "clipped_gradients", "params", "buffers")


@dataclass(frozen=True)
class UnequalBatches(Mapping[str, Any]):
    """Batches of ranks that differ in shape, in place of a batch that a step only passes on to the loss.

    Attributes:
        of_shapes: arrays by name, (world_size, ...), in each shape that a rank has.
        which: place of each rank's shape; its own rows in the arrays of other shapes do not count.
    """

    of_shapes: Sequence[Mapping[str, Any]]
    which: tuple[int, ...]

    def __getitem__(self, name: str) -> Any:
        """Raise `InputError`: replicas have no array in common."""
        raise InputError(
            "jax_step: reads the batch, whose shapes differ between ranks, and replicas are one program; "
            "must only pass it on to loss, or get equal shapes from batch"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self[""])

    def __len__(self) -> int:
        return len(self[""])

    def __contains__(self, name: object) -> bool:
        return False

    def of_rank(self, rank: int) -> Mapping[str, Any]:
        """Return the arrays, (world_size, ...), in which a rank has its rows."""
        return self.of_shapes[self.which[rank]]


class AnyCase(Hashable, Protocol):
    """A run that both sides take: its size, its batches, and the source of each side."""

    @property
    def name(self) -> str:
        """Name in reports and error messages."""

    @property
    def world_size(self) -> int:
        """Number of replicas."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""

    @property
    def dtype(self) -> str:
        """Dtype of parameters, buffers and inputs: "float64" or "float32"."""

    @property
    def torch_source(self) -> Any:
        """`torch_side.side.Source`, which is pickled to the torch ranks and becomes a `TorchSide` there."""

    def jax_side(self) -> Any:
        """Build the `jax_side.side.JaxSide`."""

    def batches(self) -> Iterator[MicroBatches]:
        """Yield every step's micro-batches, leaves (world_size, ...)."""

    def with_dtype(self, dtype: str) -> "AnyCase":
        """Return the same case in another dtype."""


class AnyPortCase(AnyCase, Protocol):
    """A run of a user's port."""

    @property
    def port(self) -> Port:
        """Port whose code runs, with losses that take their random numbers from the batch."""

    @property
    def port_as_made(self) -> Port:
        """The same port with losses that draw random numbers themselves."""


@dataclass(frozen=True)
class Trajectory:
    """A run, step by step.

    Attributes:
        start: parameters and buffers before the first step.
        records: one per step, stage -> name -> array.
    """

    start: Arrays
    records: Sequence[Record]

    def before(self, step: int) -> Arrays:
        """Return the parameters and buffers before a step, counted from 0."""
        if step == 0:
            return self.start
        return Joined(*(full(self.records[step - 1], stage) for stage in ("params", "buffers")))

    def last(self) -> Arrays:
        """Return the parameters and buffers after the last step, or before it: large ones are not kept in full then."""
        after = self.before(len(self.records))
        is_full = all(x.shape == self.start[name].shape for name, x in after.items() if name in self.start)
        return after if is_full else self.before(len(self.records) - 1)


def micro_batches_of(batch: MicroBatches, rank: int) -> list[Tensors]:
    """Return one replica's micro-batches as a list, as a torch training loop iterates over them."""
    head = batch.head.of_rank(rank) if isinstance(batch.head, UnequalBatches) else batch.head
    last = batch.last.of_rank(rank) if isinstance(batch.last, UnequalBatches) else batch.last
    pieces = [{name: array[rank] for name, array in last.items()}]
    if head is None:
        return pieces
    count = next(iter(head.values())).shape[1]
    return [{name: array[rank, i] for name, array in head.items()} for i in range(count)] + pieces
