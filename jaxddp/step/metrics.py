"""Metrics on their way from the devices: read late, so that no step waits for them."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.nn.losses import Sums
from jaxddp.tracking.gradient_metrics import check_finite, histograms, norms, of_gradients

# Dispatches that may run ahead of the host. XLA allows some 32; fewer keep memory and delay small.
RUN_AHEAD = 8
OF_STEP = ("grad_norm", "scale", "skipped")  # numbers of the step itself, and no sums over elements


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class StepSums(Mapping[str, jax.Array]):
    """The sums of K steps by name, in one array, since each array on its way to the host costs microseconds.

    Attributes:
        table: (K, M), a row per step.
        names: of its M columns.

    >>> sums = StepSums.of({"loss": jnp.array([6.0, 2.0]), "count": jnp.array([4.0, 4.0])})
    >>> sums["loss"].tolist(), len(sums.table)
    ([6.0, 2.0], 2)
    """

    table: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, sums: Sums) -> Self:
        """Stack sums of equal shapes along a last axis."""
        return cls(jnp.stack(list(sums.values()), axis=-1), tuple(sums))

    def __getitem__(self, name: str) -> jax.Array:
        return self.table[..., self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class InFlight:
    """The sums of dispatched steps, fetched in order, at most `RUN_AHEAD` dispatches behind.

    Args:
        first_step: the number of the step that comes first.
        explain: sums of a step -> what is known of gradients that are not finite; "" if they all are, None if
            nobody has looked.

    >>> in_flight = InFlight(first_step=1)
    >>> in_flight.add(StepSums.of({"loss": jnp.array([6.0, 2.0]), "count": jnp.array([4.0, 4.0])}))
    >>> list(in_flight.finished(wait=True))
    [(1, {'loss': 6.0, 'count': 4.0}), (2, {'loss': 2.0, 'count': 4.0})]
    """

    def __init__(self, first_step: int, explain: Callable[[Mapping[str, float]], str | None] = lambda sums: None):
        self._next = first_step
        self._explain = explain
        self._waiting: deque[StepSums] = deque()

    def add(self, sums: StepSums) -> None:
        """Take over the sums of one dispatch."""
        self._waiting.append(sums)

    def finished(self, wait: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, sums) of every step that lies far enough back, or of all with `wait`.

        Raises:
            TrainingError: a loss is not a finite number, or a gradient is known not to be, in a step that was not
                skipped; or the loss scale has fallen to 0.
        """
        while self._waiting and (wait or len(self._waiting) > RUN_AHEAD):
            sums = self._waiting.popleft()
            for row in _to_list(sums.table):
                step_sums = dict(zip(sums.names, row, strict=True))
                check_finite(step_sums, self._next, self._explain(step_sums))
                yield self._next, step_sums
                self._next += 1


def _to_list(table: jax.Array) -> list[list[float]]:
    if table.sharding.num_devices > 1:
        table = table.addressable_data(0)  # the first copy says it all, and is read faster than by device_get
    return np.asarray(table).tolist()


class EpochSums:
    """What an epoch's steps add up to; a loss that is not finite is left out, of a step that was skipped for it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, sums: dict[str, Any]) -> None:
        """One step's sums more."""
        if not math.isfinite(sums["loss"]):
            sums = dict.fromkeys(sums, 0.0) | {"skipped": sums["skipped"]}
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float]:
        """Sums over counts (see `means`), and with a loss scaler how many steps were skipped."""
        return means(self._sums) | {name: value for name, value in self._sums.items() if name == "skipped"}

    def histograms(self) -> dict[str, list[int]]:
        """Those of logged gradients, over all steps."""
        return histograms(self._sums)


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Every sum divided by the count, once and last: {"loss": sum w l / sum w, ...}, loss first.

    >>> means({"accuracy": 3.0, "count": 4.0, "loss": 2.0})
    {'loss': 0.5, 'accuracy': 0.75}
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # no valid element: NaN, as torch's mean of nothing
        sums_only = {name: value for name, value in sums.items() if name not in OF_STEP and not of_gradients(name)}
        divided = {name: float(np.divide(value, sums["count"])) for name, value in sums_only.items()}
        divided.pop("count")
    return {"loss": divided.pop("loss"), **divided}


def step_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """What there is to show of one step: the means, and what is no mean, such as the norm of a clipped gradient."""
    return means(sums) | {name: float(value) for name, value in sums.items() if name in OF_STEP} | norms(sums)
