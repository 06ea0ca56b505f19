"""The steps of the course on one side: what each framework brings to it, and what is measured."""

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
    """What a framework brings.

    Attributes:
        simple: (seeds of the replicas, rate) -> a SimpleDDP before its first step.
        real: (placed batches) -> the parameters after a step on each, by the framework's own data parallelism.
        place: a batch of the problem, for `backward`.
    """

    simple: Callable[[Sequence[int], float], Skeleton]
    real: Callable[[Sequence[Any]], dict[str, Any]]
    place: Callable[[Any], Any]


@dataclass(frozen=True)
class Measured:
    """What came out. Differences are relative to the largest parameter, distances between replicas absolute.

    Attributes:
        alike: distance between replicas of one seed.
        refusal: what the check says of replicas of two seeds; "" if it lets them pass.
        apart, together: distance after training without and with synchronisation.
        real: difference from the framework's own data parallelism.
        accumulated, undivided, on_first, both: difference from steps on whole batches, of accumulation done right,
            with either mistake, and with both.
        higher_rate: difference of undivided accumulation from steps on whole batches at `ACCUMULATION` times the rate.
        taken, taken_on_first: of how many micro-batches the steps were; last those of which none was.
        parameters: after training with synchronisation, by torch's names.
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
    """Go through all steps. In torch, every rank goes at once, and measures the same."""
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
