"""What SimpleDDP is in any framework: replicas that are checked, gradients that are averaged or kept apart."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxddp.errors import TrainingError


@dataclass(frozen=True)
class Place:
    """Which replica this is: the number in the whole run, the number on its machine, and how many there are."""

    rank: int
    local_rank: int
    world_size: int


class Skeleton(ABC):
    """A data-parallel model without its framework.

    It starts, as every subclass has to, with `check_replicas`. A training step is then

        backward        each replica: gradients of its own batch, added to what it has gathered
        sync_gradients  all of them: g = (g_0 + ... + g_{W-1}) / W in place of each one's own
        step            each replica: one optimizer step with what it has gathered, which is then forgotten
    """

    _sends = True

    @abstractmethod
    def gaps(self) -> dict[str, list[float]]:
        """By torch's name of a parameter: how far each replica's copy is from replica 0's, at most."""

    @abstractmethod
    def backward(self, batch: Any, scale: float = 1.0) -> None:
        """Add the gradients of `scale` times the mean loss over the replica's batch; nothing is sent."""

    @abstractmethod
    def average_gradients(self) -> None:
        """Give every replica the mean of all replicas' gradients."""

    @abstractmethod
    def step(self) -> None:
        """Make an optimizer step, and start to gather anew."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Replica 0's parameters by torch's names, in torch's layout."""

    @abstractmethod
    def wait(self) -> Self:
        """Return when everything that was asked for is done."""

    @property
    def distance(self) -> float:
        """The largest difference between a parameter of any replica and replica 0's; infinite for a NaN."""
        return self._furthest()[0]

    def check_replicas(self) -> None:
        """Raise `TrainingError`, with parameter, rank and difference, unless all replicas are equal."""
        distance, rank, name = self._furthest()
        if distance:
            raise TrainingError(
                f"{name} on rank {rank} is up to {distance:.3g} away from rank 0's; seed all ranks alike"
            )

    def sync_gradients(self) -> None:
        """Average the gradients, but not in `no_sync`."""
        if self._sends:
            self.average_gradients()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context every replica keeps its gradients to itself."""
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
