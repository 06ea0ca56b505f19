"""Variants of a run's steps, under which a check compares both sides beyond the run. Imports neither framework."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np

from jaxddp.data.batches import to_arrays
from jaxddp.errors import InputError
from jaxddp.parity.coverage import Trial
from jaxddp.parity.port.draws import ENTRY, DrawnSource
from jaxddp.parity.port.loading import PortSource
from jaxddp.parity.port.port import Port

BATCHES = ("batch", "torch_batch", "jax_batch")
FACTOR = f"{ENTRY}factor"  # entry of the batch; names that begin so are no examples


@dataclass(frozen=True)
class Variant:
    """A step of a run, changed.

    Attributes:
        trial: the trial that this is; None: a step as it is, between others.
        step: number of the step in the run, from 0; from the run's length on, the step has other examples.
        weights, batch, gradients, moments: factors of the parameters, of the batch's floating-point entries, of the
            gradients that the optimizer gets, and of its first moments.
        spike: size of one element of the gradients, relative to the largest; None: no element is replaced.
        shorter: number of examples that each micro-batch lacks.
        scales_loss: the factor of the gradients is one of the loss, as a `jax_step` gets no gradients; see
            `ScaledSource`.
    """

    trial: Trial | None = None
    step: int = 0
    weights: float = 1.0
    batch: float = 1.0
    gradients: float = 1.0
    moments: float = 1.0
    spike: float | None = None
    shorter: int = 0
    scales_loss: bool = False

    def varied(self, arrays: dict[str, np.ndarray], pieces: int) -> dict[str, np.ndarray]:
        """Return a replica's examples, changed; entries that hold only 0 and 1, such as masks, are not scaled.

        Args:
            arrays: by name, (B, ...).
            pieces: number of micro-batches.

        Raises:
            InputError: no example would be left.

        >>> Variant(batch=4.0, shorter=1).varied({"x": np.array([3.0, 2.0]), "y": np.array([1, 0])}, 1)
        {'x': array([12.]), 'y': array([1])}
        """
        size = len(next(iter(arrays.values()))) - self.shorter * pieces
        if size < 1:
            raise InputError("each micro-batch has one example")
        factor = {FACTOR: np.full(size, self.gradients)} if self.scales_loss else {}
        return {name: self._scaled(x[:size]) for name, x in arrays.items()} | factor

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        is_mask = x.dtype.kind != "f" or bool(np.isin(x, (0, 1)).all())
        return x if is_mask or self.batch == 1 else x * x.dtype.type(self.batch)


@dataclass(frozen=True)
class VariedSource:
    """A source of a port whose k-th batch is that of the k-th variant.

    Attributes:
        source: makes the port.
        variants: one per step.
        world_size: number of replicas that the port's batches are for; further ones get examples of other steps.
    """

    source: PortSource
    variants: tuple[Variant, ...]
    world_size: int

    @property
    def name(self) -> str:
        """Name of the port."""
        return self.source.name

    def port(self) -> Port:
        """Make the port."""
        port = self.source.port()
        given = {name: getattr(port, name) for name in BATCHES if getattr(port, name) is not None}
        varied = partial(_varied, variants=self.variants, world_size=self.world_size, pieces=port.accumulation_steps)
        functions: dict[str, Any] = {name: partial(varied, batch) for name, batch in given.items()}
        return replace(port, **functions)


@dataclass(frozen=True)
class ScaledSource:
    """A source of a port whose losses are multiplied by an entry of the batch, which a `Variant` adds.

    Attributes:
        source: makes the port.
    """

    source: PortSource

    @property
    def name(self) -> str:
        """Name of the port."""
        return self.source.name

    def port(self) -> Port:
        """Make the port."""
        port = self.source.port()
        return replace(port, torch_loss=_scaled(port.torch_loss), jax_loss=_scaled(port.jax_loss))


def _scaled(loss: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(loss)
    def scaled(*arguments: Any, **named: Any) -> Any:
        *others, batch = arguments
        if FACTOR not in batch:
            raise InputError("jax_step: must give the loss all entries of the batch")
        rest = {name: x for name, x in batch.items() if name != FACTOR}
        return _times(loss(*others, rest, **named), batch[FACTOR][0])

    return scaled


def _times(returned: Any, factor: Any) -> Any:
    """Multiply what a loss returns: the loss, or a tuple of it and anything else.

    >>> _times((3.0, "aux"), 2.0)
    (6.0, 'aux')
    """
    return (_times(returned[0], factor), *returned[1:]) if isinstance(returned, tuple) else returned * factor


def scaled_by_batch(source: PortSource) -> PortSource:
    """Return a source of a port with scaled losses, which see no numbers for draws."""
    if isinstance(source, DrawnSource):
        return replace(source, source=scaled_by_batch(source.source))
    return ScaledSource(source)


def with_variants(source: PortSource, variants: tuple[Variant, ...], world_size: int) -> PortSource:
    """Return a source whose batches are varied; numbers for draws are not, which a `DrawnSource` adds to them."""
    if isinstance(source, DrawnSource):
        return replace(source, source=with_variants(source.source, variants, world_size))
    return VariedSource(source, variants, world_size)


def _varied(
    batch: Callable[[int, int], Any], step: int, rank: int, variants: Sequence[Variant], world_size: int, pieces: int
) -> dict[str, np.ndarray]:
    """Return a variant's examples of a replica; one beyond `world_size` gets those of a further step."""
    variant, (further, of_rank) = variants[step], divmod(rank, world_size)
    arrays = to_arrays(batch(variant.step + further, of_rank), f"batch({variant.step}, {rank})")
    return variant.varied(arrays, pieces)
