"""Check of a user's port."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.errors import InputError
from jaxddp.parity.case_interface import UnequalBatches
from jaxddp.parity.jax_side.draws import serving
from jaxddp.parity.jax_side.side import JaxSide, side_of_port
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.port.draws import DrawnPort
from jaxddp.parity.port.variants import Variant, with_variants
from jaxddp.parity.records import Tensors
from jaxddp.parity.torch_side.widened import WideSource


@dataclass(frozen=True)
class PortCase:
    """A user's port, as a `jaxddp.parity.case_interface.AnyCase`.

    Attributes:
        source: makes the port; `PortFile(path)` for a file.
        world_size: number of replicas.
        steps: number of optimizer steps.
        dtype: "float64" or "float32".
        seed: seed of torch's generator, from which the weights are drawn.
        casts: dtypes to which torch's loss casts; a run in float64 lifts such casts on both sides.
        wide: constants and optimizers' arrays that are declared in float32 are float64 in a run in float64.
        variants: changes of the steps, in place of these; the programs are the same.
    """

    source: PortSource
    world_size: int
    steps: int = 10
    dtype: str = "float64"
    seed: int = 0
    casts: tuple[str, ...] = ()
    wide: bool = False
    variants: tuple[Variant, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Name of the port."""
        return self.source.name

    @cached_property
    def port_as_made(self) -> Port:
        """Port, made once; its losses draw their random numbers themselves."""
        return self._varied.port()

    @cached_property
    def port(self) -> Port:
        """Port whose losses take their random numbers from the batch."""
        port = self.port_as_made
        return serving(port) if isinstance(port, DrawnPort) else port

    @property
    def torch_source(self) -> PortSource:
        """Source from which each torch rank builds the port."""
        return WideSource(self._varied) if self.wide else self._varied

    @property
    def _varied(self) -> PortSource:
        return with_variants(self.source, self.variants, self.world_size) if self.variants else self.source

    def jax_side(self) -> JaxSide:
        """Build the jax side: the port's jax functions."""
        return side_of_port(self.port, self.steps, self.dtype, self.casts, self.wide and self.dtype == "float64")

    def with_dtype(self, dtype: str) -> "PortCase":
        """Return the same case in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def batches(self) -> Iterator[MicroBatches]:
        """Yield every step's micro-batches, leaves (world_size, ...), or for ranks of unequal shapes `UnequalBatches`.

        Raises:
            InputError: the batches of two ranks have other entries.
        """
        for step in range(len(self.variants) or self.steps):
            of_ranks = [self.port.micro_batches(step, rank, "jax") for rank in range(self.world_size)]
            shapes = [{name: x.shape for name, x in pieces[0].items()} for pieces in of_ranks]
            for rank, of_rank in enumerate(shapes):
                if of_rank.keys() != shapes[0].keys():
                    names, given = (", ".join(sorted(x)) for x in (shapes[0], of_rank))
                    raise InputError(f"batch({step}, {rank}): must have the entries of rank 0, {names}; has {given}")
            yield _joined(of_ranks, [shapes.index(of_rank) for of_rank in shapes], self.dtype)


def _joined(of_ranks: list[list[Tensors]], firsts: list[int], dtype: str) -> MicroBatches:
    """Stack the micro-batches of all ranks, those of several shapes as `UnequalBatches`.

    Args:
        of_ranks: each rank's micro-batches.
        firsts: for each rank, the first rank whose batch has its shape.
        dtype: dtype of floating-point arrays.
    """
    distinct = sorted({*firsts})
    # In the arrays of one shape, a rank of another has the rows of the first rank of this one.
    ranks = [[rank if of_rank == first else first for rank, of_rank in enumerate(firsts)] for first in distinct]
    heads, lasts, _ = zip(*(_stacked([of_ranks[rank] for rank in row], dtype) for row in ranks), strict=True)
    if len(distinct) == 1:
        return MicroBatches(heads[0], lasts[0])
    which = tuple(map(distinct.index, firsts))
    return MicroBatches(UnequalBatches(heads, which) if heads[0] else None, UnequalBatches(lasts, which))


def _stacked(of_ranks: list[list[Tensors]], dtype: str) -> MicroBatches:
    """Stack the micro-batches of all ranks, leaves (world_size, A - 1, B, ...) and (world_size, B, ...)."""

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
