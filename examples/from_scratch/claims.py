"""Claims of the course, checked against the measurements of both frameworks."""

from collections.abc import Callable, Sequence

from examples.arrays import furthest
from examples.claims import Claim
from examples.from_scratch import in_jax, in_torch
from examples.from_scratch.course import Measured
from examples.from_scratch.problem import ACCUMULATION, PLAIN, ROUNDING, contiguous_steps

SIZES = range(1, 1001)  # data-set sizes
WORLD_SIZE, BATCH_SIZE = 2, 8

StepsOf = Callable[[int, int, int], Sequence[int]]


def claims(jax: Measured, torch: Measured) -> list[Claim]:
    """Return all claims, in the order of the course."""
    apart = furthest(jax.parameters, torch.parameters)
    dealt = [out_of_step(deal.sampler_steps) for deal in (in_jax, in_torch)]
    pieces = out_of_step(contiguous_steps)
    return [
        _claim("replicas with the same seed are equal", "alike", jax, torch, lambda value: value == 0),
        Claim(
            "replicas with two seeds are refused, with the same error",
            jax.refusal == torch.refusal != "",
            *(_shown_refusal(side.refusal) for side in (jax, torch)),
        ),
        _claim("without synchronisation replicas drift apart", "apart", jax, torch, lambda value: value > PLAIN),
        _claim("with synchronisation they stay equal, bit for bit", "together", jax, torch, lambda value: value == 0),
        _rounding("SimpleDDP equals DistributedDataParallel", "real", jax, torch),
        Claim("JAX's parameters equal torch's", apart < ROUNDING, jax=apart),
        _rounding("an accumulated step equals a step on the whole batch", "accumulated", jax, torch),
        _wrong("but not if the loss is never divided by the micro-batches", "undivided", jax, torch),
        _rounding(f"that mistake equals {ACCUMULATION} times the learning rate", "higher_rate", jax, torch),
        _wrong("nor if it steps on the first micro-batch of each group", "on_first", jax, torch),
        _wrong("nor with both mistakes", "both", jax, torch),
        Claim(f"contiguous shards put ranks out of step ({len(SIZES)} sizes)", pieces > 0, *2 * (f"{pieces}",)),
        Claim("DistributedSampler never does", dealt == [0, 0], *map(float, dealt)),
    ]


def out_of_step(steps_of: StepsOf) -> int:
    """Count the `SIZES` for which ranks take unequal numbers of steps; the rank with more would wait forever."""
    return sum(len(set(steps_of(size, WORLD_SIZE, BATCH_SIZE))) > 1 for size in SIZES)


def _rounding(says: str, name: str, jax: Measured, torch: Measured) -> Claim:
    return _claim(says, name, jax, torch, lambda value: value < ROUNDING)


def _wrong(says: str, name: str, jax: Measured, torch: Measured) -> Claim:
    return _claim(says, name, jax, torch, lambda value: value > PLAIN)


def _claim(says: str, name: str, jax: Measured, torch: Measured, holds: Callable[[float], bool]) -> Claim:
    values = getattr(jax, name), getattr(torch, name)
    return Claim(says, all(map(holds, values)), *values)


def _shown_refusal(refusal: str) -> str:
    return "refused" if refusal else "accepted"
