"""Return values that Lightning allows of `configure_optimizers`, and when it advances their schedulers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from jaxddp.errors import InputError, check_name

NAME = "configure_optimizers"
INTERVALS = ("epoch", "step")


class Cadence(NamedTuple):
    """Numbers that decide when a scheduler advances.

    Attributes:
        steps_per_epoch: optimizer steps per epoch; None: unknown.
        accumulation_steps: batches per optimizer step, which Lightning counts.
    """

    steps_per_epoch: int | None = None
    accumulation_steps: int = 1


UNKNOWN = Cadence()


class LightningScheduler:
    """A scheduler that is called after each optimizer step, and advances when Lightning would.

    With interval "epoch", it advances at the end of each `frequency`-th epoch; with "step", after each batch of an
    epoch whose number, from 1, `frequency` divides.

    Source: `_update_learning_rates` of lightning.pytorch.loops.training_epoch_loop

    >>> from types import SimpleNamespace
    >>> counts = []
    >>> scheduler = LightningScheduler(SimpleNamespace(step=lambda: counts.append(1)), "step", 2, Cadence(3))
    >>> for _ in range(7):
    ...     scheduler.step()
    >>> len(counts)  # after batches 2 and 5; batch 7 is the first of its epoch
    2
    """

    def __init__(self, scheduler: Any, interval: str, frequency: int, cadence: Cadence):
        self.scheduler = scheduler
        self._interval, self._frequency, self._cadence, self._steps = interval, frequency, cadence, 0

    def step(self) -> None:
        """Count an optimizer step, and advance the scheduler if it is due."""
        self._steps += 1
        per_epoch = self._cadence.steps_per_epoch or self._steps + 1  # unknown only if every step is due
        epochs, of_epoch = divmod(self._steps - 1, per_epoch)
        batches = (of_epoch + 1) * self._cadence.accumulation_steps
        at_end = of_epoch + 1 == per_epoch
        number = batches if self._interval == "step" else epochs + 1
        if (at_end or self._interval == "step") and number % self._frequency == 0:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the number of steps so far."""
        return {"steps": self._steps, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._steps = state["steps"]
        self.scheduler.load_state_dict(state["scheduler"])


def unpacked(returned: Any, cadence: Cadence) -> tuple[Optimizer, Any]:
    """Return the optimizer, and its scheduler or None, from what `configure_optimizers` returned.

    Args:
        returned: an optimizer; or (optimizer, scheduler), each alone or in a list; or Lightning's dictionary
            {"optimizer": ..., "lr_scheduler": ...}, whose scheduler may be in a dictionary, too. A scheduler outside of
            dictionaries advances after each optimizer step.
        cadence: see `LightningScheduler`.

    Raises:
        InputError: there are several optimizers or schedulers, or a dictionary says what a check cannot follow.
    """
    parts = returned if isinstance(returned, tuple) else (returned, None)
    if len(parts) != 2:
        raise InputError(f"{NAME}: must return (optimizer, scheduler), and returns {len(parts)} values")
    optimizer, scheduler = (_only(part, kind) for part, kind in zip(parts, ("optimizer", "scheduler"), strict=True))
    if isinstance(optimizer, Mapping):
        _refuse_monitor(optimizer)
        if "optimizer" not in optimizer:
            raise InputError(f'{NAME}: must return a dictionary with "optimizer", and returns {[*optimizer]}')
        if (scheduler := optimizer.get("lr_scheduler")) is not None and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler}
        optimizer = optimizer["optimizer"]
    return optimizer, _scheduler(scheduler, cadence) if isinstance(scheduler, Mapping) else scheduler


def _scheduler(given: Mapping[str, Any], cadence: Cadence) -> LightningScheduler:
    """Return the scheduler of a dictionary {"scheduler": ..., "interval": ..., "frequency": ...}."""
    _refuse_monitor(given)
    interval, frequency = given.get("interval", "epoch"), given.get("frequency", 1)
    check_name(f'{NAME}: "interval"', str(interval), INTERVALS)
    if not isinstance(frequency, int) or frequency < 1:
        raise InputError(f'{NAME}: "frequency" {frequency!r}: must be an integer of at least 1')
    scheduler = given.get("scheduler")
    if not hasattr(scheduler, "step"):
        raise InputError(f'{NAME}: "scheduler": must have a method step, and is {type(scheduler).__name__}')
    if cadence.steps_per_epoch is None and (interval, frequency) != ("step", 1):
        default = "" if "interval" in given else ", Lightning's default,"
        what = f'"interval": "{interval}"{default}' if interval == "epoch" else f'"frequency": {frequency}'
        raise InputError(
            f"{NAME}: {what} needs the number of optimizer steps per epoch; set steps_per_epoch in the file, or give "
            '"interval": "step" with "frequency": 1'
        )
    return LightningScheduler(scheduler, interval, frequency, cadence)


def _refuse_monitor(given: Mapping[str, Any]) -> None:
    if (metric := given.get("monitor")) is not None:
        raise InputError(
            f'{NAME}: "monitor": {metric!r}: a scheduler that waits for a metric is not followed; leave it out'
        )


def _only(part: Any, kind: str) -> Any:
    if not isinstance(part, list):
        return part
    if len(part) > 1 or (kind == "optimizer" and not part):
        raise InputError(f"{NAME}: returns {len(part)} {kind}s; must be one")
    return part[0] if part else None
