"""Learning rates of a port's torch optimizer at every step: its scheduler, stepped alone. Imports no jax."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from jaxddp.parity.processes import Tell
from jaxddp.parity.rate_curves import BEYOND, MOST, OPEN, OTHERS, TorchRates
from jaxddp.parity.torch_side.side import BuiltIn, Source, TorchSide, make_side, side_of_port
from torch_ref.distributed import World
from torch_ref.lightning import LightningScheduler
from torch_ref.program_step import Optimizers

LONGEST = 1_000_000  # steps within which the end that a scheduler shows is looked for
TOLD = 20_000  # steps between two signs of life


@dataclass(frozen=True)
class ReadTorchRates:
    """A job that steps the scheduler of a port, or of a built-in model, without training.

    Attributes:
        source: model or port.
        steps: steps of the check's run, as its schedules are made for.
        total_steps: steps of the run that the port is for; None: as the port says, or its schedules show.
        world_size: always 1.
    """

    source: Source
    steps: int
    total_steps: int | None = None
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> TorchRates:
        """Return the rates, or why they cannot be read."""
        tell("the optimizer")
        side, horizon = self._made()
        optimizer, schedulers = optimizer_of(side, world)
        names = {id(parameter): name for name, parameter in side.model.named_parameters()}
        rates = TorchRates(tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups))
        if any(isinstance(_inner(scheduler), ReduceLROnPlateau) for scheduler in schedulers):
            return replace(rates, why_not="torch's ReduceLROnPlateau follows a metric, not the step")
        horizon.watch(schedulers)
        return self._stepped(rates, optimizer, schedulers, horizon, tell)

    def _made(self) -> "tuple[TorchSide, Horizon]":
        """Return the side, and how far its schedule is compared.

        A schedule of jaxddp's own flags is made for the length of a run, after which both trainers stop.
        """
        if isinstance(self.source, BuiltIn):
            return make_side(self.source, self.steps, "float64"), Horizon(self.steps, stops=True)
        port = self.source.port()
        side = side_of_port(port, self.steps, "float64")
        if port.optimizer_config is not None:
            return side, Horizon(port.total_steps or self.steps, stops=True)
        return side, Horizon(self.total_steps or port.total_steps)

    def _stepped(
        self, rates: TorchRates, optimizer: Any, schedulers: Sequence[Any], horizon: "Horizon", tell: Tell
    ) -> TorchRates:
        """Return the rates of all groups until the horizon, or until a scheduler raises."""
        rows: list[list[tuple[Any, ...]]] = [[] for _ in optimizer.param_groups]
        count, goes_on = 0, True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer has taken a step
            while goes_on and count < horizon.end:
                for row, group in zip(rows, optimizer.param_groups, strict=True):
                    row.append(_numbers(group))
                count += 1
                goes_on = bool(schedulers) and _advanced(schedulers)
                horizon.reach(count, goes_on or not schedulers)
                if count % TOLD == 0:
                    tell(f"the scheduler, step {count}")
        steps = min(count, horizon.end) if schedulers else horizon.end
        if steps < min(self.steps, horizon.end):
            return replace(rates, why_not=f"torch's scheduler raises after {count} steps when it is stepped alone")
        lr, others = zip(*map(_curves, rows), strict=True)
        return replace(rates, lr=lr, others=others, last=horizon.last, length=horizon.length, steps=steps)


class Horizon:
    """How far rates are compared.

    Args:
        given: number of steps of the whole training; None: as the schedulers show.
        stops: compare nothing after these.

    Attributes:
        last: the last step that counts as within the schedule; None: not known, or not yet.
        end: number of steps to compare.
    """

    def __init__(self, given: int | None, stops: bool = False):
        self._given, self._clocks = given, list[Clock]()
        self.last = None if given is None else given - 1
        self.end = given if given is not None and stops else _end(self.last, False)

    @property
    def length(self) -> int:
        """Number of steps after which rates are beyond the schedule; 0: unknown."""
        return self._given or self.last or 0

    def watch(self, schedulers: Sequence[Any]) -> None:
        """Look for the ends that schedulers show."""
        self._clocks = [Clock(scheduler) for scheduler in schedulers]
        if self._given is None and any(clock.waits for clock in self._clocks):
            self.end = LONGEST

    def reach(self, count: int, goes_on: bool) -> None:
        """Note that `count` steps are taken, and whether a further one can be."""
        ticks = [clock.ticks(count) for clock in self._clocks]
        known = [clock.last for clock in self._clocks if clock.last is not None]
        if any(ticks) and self._given is None:
            self.last = max(known)
            self.end = _end(self.last, any(clock.is_open or clock.waits for clock in self._clocks))
        if not goes_on:  # no run uses the value that follows a schedule's last
            self.end = min([self.end, *(last + 1 for last in known)])


class Clock:
    """Find the step of a run at which a scheduler reaches the end that it shows.

    Args:
        scheduler: a scheduler, or one that advances less often than every step.

    Attributes:
        is_open: whether it continues to change the rate after that, or shows no end.
        last: the step at which it ends; None: not known yet.
    """

    def __init__(self, scheduler: Any):
        self._inner = _inner(scheduler)
        self._length, self.is_open = None, True
        with contextlib.suppress(Exception):  # a port's own scheduler may have no state_dict, or another kind of one
            self._length, self.is_open = length_shown(self._inner.state_dict())
        self.last: int | None = None

    @property
    def waits(self) -> bool:
        """Return whether the end is still to come."""
        return self._length is not None and self.last is None

    def ticks(self, count: int) -> bool:
        """Return whether the end is reached now, after `count` steps."""
        if not self.waits or getattr(self._inner, "last_epoch", count) < (self._length or 0):
            return False
        self.last = count
        return True


def length_shown(state: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Return the last step that a scheduler's `state_dict` shows, None if none, and whether it continues after that.

    >>> length_shown({"T_max": 100}), length_shown({"milestones": {500: 1, 800: 1}}), length_shown({"total_steps": 10})
    ((100, False), (800, False), (9, False))
    >>> length_shown({"_milestones": [5], "_schedulers": [{"total_iters": 5}, {"T_max": 95}]})
    (100, False)
    >>> length_shown({"_schedulers": [{"total_iters": 5}, {"gamma": 0.9}]}), length_shown({"gamma": 0.9})
    ((5, True), (None, True))
    """
    if members := state.get("_schedulers"):
        lengths, are_open = zip(*map(length_shown, members), strict=True)
        starts = [0, *state.get("_milestones", [0] * (len(members) - 1))]
        ends = [start + (length or 0) for start, length in zip(starts, lengths, strict=True)]
        return max(ends) or None, are_open[-1] if "_milestones" in state else any(are_open)
    if state.get("milestones"):
        return int(max(state["milestones"])), False
    if isinstance(state.get("total_steps"), int):
        return int(state["total_steps"]) - 1, False
    known = [state[name] for name in ("T_max", "total_iters") if isinstance(state.get(name), int)]
    return max(known, default=None), not known


def _end(last: int | None, is_open: bool) -> int:
    """Return how many steps are compared, of a schedule that ends at a step, or continues after it."""
    if last is None:
        return OPEN
    return max(min(BEYOND * (last + 1), max(last + 1, MOST)), OPEN if is_open else 0)


def optimizer_of(side: TorchSide, world: World) -> tuple[Any, list[Any]]:
    """Return the optimizer of a side, or all of a `torch_step`'s with the interface of one, and the schedulers."""
    if side.torch_step is not None:
        several = Optimizers(side.torch_step.configure(side.model), side.model)
        return several, several.schedulers
    optimizer, scheduler = side.make_optimizer(side.model.parameters(), world)
    return optimizer, [] if scheduler is None else [scheduler]


def _inner(scheduler: Any) -> Any:
    return scheduler.scheduler if isinstance(scheduler, LightningScheduler) else scheduler


def _advanced(schedulers: Sequence[Any]) -> bool:
    """Advance the schedulers by a step; return False if one raises, like OneCycleLR after its last step."""
    try:
        for scheduler in schedulers:
            scheduler.step()
    except Exception:
        return False
    return True


def _numbers(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a group's rate and the values of `OTHERS`; tensors are changed in place, so as numbers."""
    lr = group["lr"]
    return float(lr) if isinstance(lr, Tensor) else lr, *(group.get(name) for name in OTHERS)


def _curves(rows: Sequence[tuple[Any, ...]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a group's rates, and its other numbers."""
    lr, *others = zip(*rows, strict=True)
    named = (pair for of_name in zip(OTHERS, others, strict=True) for pair in _named(*of_name))
    return _short(np.asarray(lr, float)), {name: _short(values) for name, values in named}


def _short(curve: np.ndarray) -> np.ndarray:
    return curve if np.ptp(curve) else curve[:1]


def _named(name: str, values: Sequence[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the curves of numbers by name, the betas one by one."""
    values = values[:1] if all(x is values[0] for x in values) else values
    if isinstance(values[0], tuple):
        for number, of_number in enumerate(zip(*values, strict=True), start=1):
            yield f"beta{number}", np.asarray([float(x) for x in of_number])
    elif values[0] is not None:
        yield name, np.asarray([float(x) for x in values])
