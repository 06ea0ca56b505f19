"""Framework-free part of SimpleDDP: the check of the replicas, and when gradients are averaged."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxddp.errors import TrainingError


@dataclass(frozen=True)
class Place:
    """A replica's place in the run.

    Attributes:
        rank: number among all replicas of the run.
        local_rank: number on its machine.
        world_size: number of replicas.
    """

    rank: int
    local_rank: int
    world_size: int


class Skeleton(ABC):
    """A data-parallel model without its framework.

    Every subclass calls `check_replicas` when it is built. A training step is then

        backward        each replica adds the gradients of its batch to those accumulated so far
        sync_gradients  all replicas replace their gradients by the mean, g = (g_0 + ... + g_{W-1}) / W
        step            each replica takes an optimizer step and clears its gradients
    """

    _sends = True

    @abstractmethod
    def gaps(self) -> dict[str, list[float]]:
        """Return each replica's largest difference from replica 0, for each parameter by torch's name."""

    @abstractmethod
    def backward(self, batch: Any, scale: float = 1.0) -> None:
        """Add the gradients of `scale` times the mean loss over each replica's batch; send nothing."""

    @abstractmethod
    def average_gradients(self) -> None:
        """Replace every replica's gradients by the mean over the replicas."""

    @abstractmethod
    def step(self) -> None:
        """Take an optimizer step and clear the gradients."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return replica 0's parameters by torch's names, in torch's layout."""

    @abstractmethod
    def wait(self) -> Self:
        """Wait until all dispatched work is done."""

    @property
    def distance(self) -> float:
        """Largest difference between a parameter of any replica and replica 0's; infinity for a NaN."""
        return self._furthest()[0]

    def check_replicas(self) -> None:
        """Raise `TrainingError`, naming parameter, rank and difference, unless all replicas are equal."""
        distance, rank, name = self._furthest()
        if distance:
            raise TrainingError(
                f"{name} on rank {rank} differs from rank 0's by up to {distance:.3g}; use the same seed on all ranks"
            )

    def sync_gradients(self) -> None:
        """Average the gradients, except within `no_sync`."""
        if self._sends:
            self.average_gradients()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable `sync_gradients` in this context, so that every replica keeps its local gradients."""
        before, self._sends = self._sends, False
        try:
            yield
        finally:
            self._sends = before

    def _furthest(self) -> tuple[float, int, str]:
        gaps = self.gaps()
        table = np.nan_to_num(np.array(list(gaps.values())), nan=np.inf)  # (parameters, ranks)
        parameter, rank = np.unravel_index(table.argmax(), table.shape)
        return float(table[parameter, rank]), int(rank), list(gaps)[parameter]
