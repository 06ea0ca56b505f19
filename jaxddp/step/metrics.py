"""Metrics on their way from the devices to the host, read late so that no step waits for them."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.config.choices import COUNT_OF
from jaxddp.nn.losses import Sums
from jaxddp.tracking.gradient_metrics import check_finite, histograms, norms, of_gradients, of_step

# Largest number of dispatches that run ahead of the host. XLA allows about 32; fewer keep memory and delay small.
RUN_AHEAD = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class StepSums(Mapping[str, jax.Array]):
    """Sums of K steps by name, in one array, since every array on its way to the host costs microseconds.

    Attributes:
        table: (K, M), one row per step.
        names: names of the M columns.

    >>> sums = StepSums.of({"loss": jnp.array([6.0, 2.0]), "count": jnp.array([4.0, 4.0])})
    >>> sums["loss"].tolist(), len(sums.table)
    ([6.0, 2.0], 2)
    """

    table: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, sums: Sums) -> Self:
        """Stack sums of equal shape along a new last axis."""
        return cls(jnp.stack(list(sums.values()), axis=-1), tuple(sums))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Append the steps of all parts, in order."""
        return parts[0] if len(parts) == 1 else cls(jnp.concatenate([part.table for part in parts]), parts[0].names)

    def __getitem__(self, name: str) -> jax.Array:
        return self.table[..., self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class InFlight:
    """Queue of the sums of dispatched steps, fetched in order and a few dispatches late.

    Args:
        first_step: number of the first step.
        explain: sums of a step -> message about gradients that are not finite; "" if all are finite, None if they
            were not checked.
        batch: describes the batch of a step whose loss is not finite, for the message.

    >>> in_flight = InFlight(first_step=1)
    >>> in_flight.add(StepSums.of({"loss": jnp.array([6.0, 2.0]), "count": jnp.array([4.0, 4.0])}))
    >>> list(in_flight.finished(wait=True))
    [(1, {'loss': 6.0, 'count': 4.0}), (2, {'loss': 2.0, 'count': 4.0})]
    """

    def __init__(
        self,
        first_step: int,
        explain: Callable[[Mapping[str, float]], str | None] = lambda sums: None,
        batch: Callable[..., str] | None = None,
    ):
        self._next, self._batch = first_step, batch
        self._explain = explain
        self._waiting: deque[StepSums] = deque()

    def add(self, sums: StepSums) -> None:
        """Append the sums of one dispatch."""
        self._waiting.append(sums)

    def finished(self, wait: bool = False, run_ahead: int = RUN_AHEAD) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, sums) for every step that is `run_ahead` dispatches old, or for all steps with `wait`.

        Raises:
            TrainingError: in a step that was not skipped, a loss or a checked gradient is not finite; or the loss
                scale has fallen to 0.
        """
        while self._waiting and (wait or len(self._waiting) > run_ahead):
            sums = self._waiting.popleft()
            for row in _to_list(sums.table):
                step_sums = dict(zip(sums.names, row, strict=True))
                check_finite(step_sums, self._next, self._explain(step_sums), self._batch)
                yield self._next, step_sums
                self._next += 1


def _to_list(table: jax.Array) -> list[list[float]]:
    if table.sharding.num_devices > 1:
        table = table.addressable_data(0)  # all copies are equal; reading one is faster than device_get
    return np.asarray(table).tolist()


class EpochSums:
    """Sums over the steps of an epoch, without steps that were skipped because their loss is not finite.

    Args:
        sums: sums over the steps before; None: there are none.

    Attributes:
        sums: the sums, by name.
    """

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(sums or {})

    def add(self, sums: dict[str, Any]) -> None:
        """Add the sums of one step."""
        if not math.isfinite(sums["loss"]):
            sums = dict.fromkeys(sums, 0.0) | {"skipped": sums["skipped"]}
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float]:
        """Return the means over the epoch (see `means`) and, with a loss scaler, the number of skipped steps."""
        return means(self.sums) | {name: value for name, value in self.sums.items() if name == "skipped"}

    def histograms(self) -> dict[str, list[int]]:
        """Return the histograms of the logged gradients over all steps."""
        return histograms(self.sums)


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Divide every sum by the count, or by its own: {"loss": sum w l / sum w, ...}, loss first.

    >>> means({"accuracy": 3.0, "count": 4.0, "loss": 2.0})
    {'loss': 0.5, 'accuracy': 0.75}
    """
    counts = {name: float(sums.get(COUNT_OF + name, sums["count"])) for name in sums}
    divided = {
        name: float(value) / counts[name] if counts[name] else math.nan  # without a valid element NaN, as in torch
        for name, value in sums.items()
        if name != "count" and not of_step(name) and not name.startswith(COUNT_OF) and not of_gradients(name)
    }
    return {"loss": divided.pop("loss"), **divided}


def step_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one step: the means, and metrics that are not means, such as the gradient norm."""
    return means(sums) | {name: float(value) for name, value in sums.items() if of_step(name)} | norms(sums)
