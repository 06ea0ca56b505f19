"""Largest batch that fits into a GPU's memory, from two or more compiled sizes."""

from collections.abc import Callable
from dataclasses import dataclass

MOST_TIMES = 64  # the batch that is asked for; a larger estimate is not confirmed
CHEAP_SECONDS = 120.0  # up to which a compilation is repeated to confirm an estimate
TRIES = 3


@dataclass(frozen=True)
class Largest:
    """Largest batch per GPU.

    Attributes:
        size: examples; 0 if not even one step of them fits.
        memory: bytes of the program with it, as compiled, or as estimated.
        confirmed: whether it was compiled.
    """

    size: int
    memory: float
    confirmed: bool


def largest_batch(
    compiled: dict[int, int], limit: float, multiple: int, memory_of: Callable[[int], int], confirm: bool = True
) -> Largest:
    """Extrapolate the memory of two compiled sizes to the limit, and confirm the result by compiling it.

    Args:
        compiled: batch size -> bytes; at least two sizes.
        limit: bytes of a GPU.
        multiple: the batch size must be divisible by this.
        memory_of: batch size -> bytes, by compiling.
        confirm: whether to compile the estimate; if it does not fit, a new one is made from it.

    >>> largest_batch({8: 1080, 16: 1160}, 2000, 4, lambda size: 1000 + 10 * size)
    Largest(size=100, memory=2000, confirmed=True)
    """
    known = dict(compiled)
    asked = max(compiled)
    size = 0
    for _ in range(TRIES):
        size = _estimate(known, limit, multiple)
        if size in known or not confirm or size > MOST_TIMES * asked:
            break
        known[size] = memory_of(size)
        if known[size] <= limit:
            break
    if size in known and known[size] <= limit:
        return Largest(size, known[size], True)
    return Largest(size, _line(known)(size), False)


def _estimate(known: dict[int, int], limit: float, multiple: int) -> int:
    """Return the largest multiple at which the line through the two largest known sizes stays below the limit."""
    line = _line(known)
    slope = line(1) - line(0)
    if slope <= 0:  # temporaries of the parameters hide those of the batch
        return max(known)
    return max(0, int((limit - line(0)) / slope) // multiple * multiple)


def _line(known: dict[int, int]) -> Callable[[float], float]:
    (low, low_bytes), (high, high_bytes) = sorted(known.items())[-2:]
    slope = (high_bytes - low_bytes) / (high - low)
    return lambda size: high_bytes + slope * (size - high)
