"""Steps of the course in one framework: the parts that differ between frameworks, and the measurements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from examples.arrays import furthest
from examples.from_scratch.loops import accumulate, train
from examples.from_scratch.problem import ACCUMULATION, CONFIG, batches, joined
from examples.from_scratch.skeleton import Skeleton
from jaxddp.errors import TrainingError


@dataclass(frozen=True)
class Side:
    """A framework's parts of the course.

    Attributes:
        simple: (seeds of the replicas, learning rate) -> a SimpleDDP before its first step.
        real: (placed batches) -> parameters after a step on each, by the `DistributedDataParallel` of its framework.
        place: (batch of the problem) -> batch for `backward`.
    """

    simple: Callable[[Sequence[int], float], Skeleton]
    real: Callable[[Sequence[Any]], dict[str, Any]]
    place: Callable[[Any], Any]


@dataclass(frozen=True)
class Measured:
    """Measurements; differences are relative to the largest parameter, distances between replicas absolute.

    Attributes:
        alike: distance between replicas with the same seed.
        refusal: error of the check for replicas with two seeds; "" if there is none.
        apart, together: distance after training without and with synchronisation.
        real: difference from the `DistributedDataParallel` of its framework.
        accumulated, undivided, on_first, both: difference from steps on whole batches, of correct accumulation,
            with either mistake, and with both.
        higher_rate: difference of undivided accumulation from steps on whole batches at `ACCUMULATION` times the rate.
        taken, taken_on_first: number of micro-batches in each step, followed by the number left over.
        parameters: parameters after training with synchronisation, by torch's names.
    """

    alike: float
    refusal: str
    apart: float
    together: float
    real: float
    accumulated: float
    undivided: float
    on_first: float
    both: float
    higher_rate: float
    taken: list[int]
    taken_on_first: list[int]
    parameters: dict[str, Any]


def measure(side: Side) -> Measured:
    """Run all steps. In torch, all ranks run them together and measure the same."""
    micro = [side.place(batch) for batch in batches()]
    whole = [side.place(batch) for batch in joined(batches())]
    rate = CONFIG.base_lr

    def fresh(seeds: Sequence[int] = (0, 0), lr: float = rate) -> Skeleton:
        return side.simple(seeds, lr)

    apart = fresh()
    with apart.no_sync():
        train(apart, micro)
    together = train(fresh(), micro)
    expected = train(fresh(), whole).parameters()

    def accumulated(**mistakes: bool) -> tuple[dict[str, Any], list[int]]:
        ddp = fresh()
        taken = accumulate(ddp, micro, **mistakes)
        return ddp.parameters(), taken

    right, taken = accumulated()
    undivided, _ = accumulated(divided=False)
    on_first, _ = accumulated(on_first=True)
    both, taken_on_first = accumulated(divided=False, on_first=True)
    return Measured(
        alike=fresh().distance,
        refusal=_refusal(fresh),
        apart=apart.distance,
        together=together.distance,
        real=furthest(together.parameters(), side.real(micro)),
        accumulated=furthest(right, expected),
        undivided=furthest(undivided, expected),
        on_first=furthest(on_first, expected),
        both=furthest(both, expected),
        higher_rate=furthest(undivided, train(fresh(lr=ACCUMULATION * rate), whole).parameters()),
        taken=taken,
        taken_on_first=taken_on_first,
        parameters=together.parameters(),
    )


def _refusal(fresh: Callable[..., Skeleton]) -> str:
    try:
        fresh(seeds=(0, 1))
    except TrainingError as error:
        return str(error)
    return ""
