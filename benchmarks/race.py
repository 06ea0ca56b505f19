"""Interleaved rounds of contenders, and the ratios between them; needs neither jax nor torch.

In each round every contender has one turn, and each round starts with another one. Ratios are taken within a round,
whose turns meet the same load of the machine.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PATIENCE = 5  # times its share of the race that a contender may take
FEWEST = 3  # turns of each contender, however slow


@dataclass(frozen=True)
class Turn:
    """Result of a turn.

    Attributes:
        seconds: time of all steps.
        losses: loss of each step, the mean over the replicas.
    """

    seconds: float
    losses: list[float]

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step."""
        return self.seconds / len(self.losses)


class Contender(Protocol):
    """A trainer of one workload, with everything built."""

    def train(self, steps: int) -> Turn:
        """Train from the initial state for at least `steps` steps, in complete dispatches."""


class Failed(Exception):
    """A contender that cannot run here; the message says why."""


@dataclass
class Result:
    """Outcome of a contender in a race.

    Attributes:
        seconds_per_step: one number per round; empty if it failed. A slow contender is left out of the last rounds.
        turns: seconds of each turn.
        steps: optimizer steps of each turn.
        setup: seconds to build it, to compile, and to warm up.
        loss: of the last step of a turn.
        failure: why it did not take part; None: it did.
    """

    seconds_per_step: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    steps: int = 0
    setup: float = 0.0
    loss: float = math.nan
    failure: str | None = None


@dataclass(frozen=True)
class Length:
    """Length of a race.

    Attributes:
        rounds: number of turns of each contender.
        seconds: time that a turn should take; one of complete epochs may take twice as long.
        steps_per_epoch: optimizer steps of an epoch.
    """

    rounds: int
    seconds: float
    steps_per_epoch: int

    def steps(self, seconds_per_step: float) -> int:
        """Return the steps of a turn: complete epochs, if one is short enough.

        >>> Length(rounds=5, seconds=0.5, steps_per_epoch=45).steps(0.001), Length(5, 0.5, 45).steps(0.1)
        (540, 5)
        """
        steps = max(1, round(self.seconds / seconds_per_step))
        if self.steps_per_epoch * seconds_per_step > 2 * self.seconds:
            return steps
        return math.ceil(steps / self.steps_per_epoch) * self.steps_per_epoch


def run(
    contenders: Mapping[str, Callable[[], Contender]],
    length: Length,
    clock: Callable[[], float],
) -> dict[str, Result]:
    """Build all contenders, warm them up, and let them take turns.

    Args:
        contenders: functions that build a contender, by name.
        clock: time in seconds.
    """
    results = {name: Result() for name in contenders}
    ready: dict[str, Contender] = {}
    for name, build in contenders.items():
        started = clock()
        try:
            contender = build()
            results[name].steps = _warm_up(contender, length)
            ready[name] = contender
        except Failed as failure:
            results[name].failure = str(failure)
        results[name].setup = clock() - started
    names = list(ready)
    for number in range(length.rounds if names else 0):
        for name in rotated(names, number, length.rounds):
            result = results[name]
            if len(result.turns) >= FEWEST and sum(result.turns) > PATIENCE * length.seconds * length.rounds:
                continue
            turn = ready[name].train(result.steps)
            result.turns.append(turn.seconds)
            result.seconds_per_step.append(turn.seconds_per_step)
            result.loss = turn.losses[-1]
    return results


def _warm_up(contender: Contender, length: Length) -> int:
    """Compile all programs of a turn; return its number of steps."""
    steps = 1
    while True:
        contender.train(steps)  # meets every shape of a batch that so many steps meet, and compiles their programs
        enough = length.steps(contender.train(steps).seconds_per_step)
        if enough <= steps:
            return enough
        if steps > 1 and enough < 2 * steps:
            return steps
        steps = enough


def rotated(names: Sequence[str], number: int, rounds: int) -> list[str]:
    """Return the order of a round; over all rounds the starts are spread evenly over the contenders.

    >>> [rotated("abcd", number, rounds=2) for number in range(2)]
    [['a', 'b', 'c', 'd'], ['c', 'd', 'a', 'b']]
    """
    first = number * max(1, len(names) // rounds) % len(names)
    return [*names[first:], *names[:first]]


@dataclass(frozen=True)
class Spread:
    """Median and extremes over the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize the values, to four digits.

        >>> Spread.of([3.0, 1.0, 2.00004])
        Spread(median=2.0, min=1.0, max=3.0)
        """
        return cls(*(float(f"{value:.4g}") for value in (statistics.median(values), min(values), max(values))))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Divide round by round, over the rounds in which both took part.

    >>> ratio([2.0, 8.0, 9.0], [1.0, 2.0, 3.0])
    Spread(median=3.0, min=2.0, max=4.0)
    """
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=False)])
