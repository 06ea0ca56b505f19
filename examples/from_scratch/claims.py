"""What the course claims, from what was measured on both sides."""

from collections.abc import Callable, Sequence

from examples.arrays import furthest
from examples.claims import Claim
from examples.from_scratch import in_jax, in_torch
from examples.from_scratch.course import Measured
from examples.from_scratch.problem import ACCUMULATION, PLAIN, ROUNDING, contiguous_steps

SIZES = range(1, 1001)  # of data sets
WORLD_SIZE, BATCH_SIZE = 2, 8

StepsOf = Callable[[int, int, int], Sequence[int]]


def claims(jax: Measured, torch: Measured) -> list[Claim]:
    """All claims, in the order of the course."""
    apart = furthest(jax.parameters, torch.parameters)
    dealt = [out_of_step(deal.sampler_steps) for deal in (in_jax, in_torch)]
    pieces = out_of_step(contiguous_steps)
    return [
        _claim("replicas of one seed are equal", "alike", jax, torch, lambda found: found == 0),
        Claim(
            "replicas of two seeds are refused, for the same reason",
            jax.refusal == torch.refusal != "",
            *(_shown_refusal(side.refusal) for side in (jax, torch)),
        ),
        _claim("without synchronisation replicas drift apart", "apart", jax, torch, lambda found: found > PLAIN),
        _claim("with it they stay equal, to the last bit", "together", jax, torch, lambda found: found == 0),
        _rounding("SimpleDDP is DataParallel, and DistributedDataParallel", "real", jax, torch),
        Claim("JAX's parameters are torch's", apart < ROUNDING, jax=apart),
        _rounding("accumulated right, a step is one on the whole batch", "accumulated", jax, torch),
        _wrong("never divided by the micro-batches, it is not", "undivided", jax, torch),
        _rounding(f"but one at {ACCUMULATION} times the rate", "higher_rate", jax, torch),
        _wrong("on the first micro-batch of each group, it is not", "on_first", jax, torch),
        _wrong("with both, as in the document, it is not", "both", jax, torch),
        Claim(f"contiguous shards put ranks out of step ({len(SIZES)} sizes)", pieces > 0, *2 * (f"{pieces}",)),
        Claim("DistributedSampler never does", dealt == [0, 0], *map(float, dealt)),
    ]


def out_of_step(steps_of: StepsOf) -> int:
    """For how many of `SIZES` ranks would make unequal numbers of steps: then the one with more waits for ever."""
    return sum(len(set(steps_of(size, WORLD_SIZE, BATCH_SIZE))) > 1 for size in SIZES)


def _rounding(says: str, name: str, jax: Measured, torch: Measured) -> Claim:
    return _claim(says, name, jax, torch, lambda found: found < ROUNDING)


def _wrong(says: str, name: str, jax: Measured, torch: Measured) -> Claim:
    return _claim(says, name, jax, torch, lambda found: found > PLAIN)


def _claim(says: str, name: str, jax: Measured, torch: Measured, holds: Callable[[float], bool]) -> Claim:
    found = getattr(jax, name), getattr(torch, name)
    return Claim(says, all(map(holds, found)), *found)


def _shown_refusal(refusal: str) -> str:
    return "refused" if refusal else "let pass"
