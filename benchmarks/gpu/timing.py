"""Timing of work on a device, and the largest batch that fits into its memory; needs neither jax nor torch."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Work = Callable[[int], object]  # makes so many steps, and waits for the device
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OutOfMemory")  # jax's and torch's words


def best_seconds(work: Work, calls: int, repeats: int = 5) -> float:
    """Return the shortest time of one call, over several repeats of `calls` calls each, after a warm-up."""
    work(1)
    return min(_seconds(work, calls) for _ in range(repeats))


def median_seconds(work: Work, seconds: float, rounds: int = 5) -> float:
    """Return the median time of a step over rounds of about `seconds` each, after a warm-up."""
    work(2)
    steps = max(1, round(seconds / _seconds(work, 2)))
    return statistics.median(_seconds(work, steps) for _ in range(rounds))


def _seconds(work: Work, steps: int) -> float:
    started = time.perf_counter()
    work(steps)
    return (time.perf_counter() - started) / steps


def largest_that_fits(
    batches: Sequence[int], measure: Callable[[int], dict[str, Any]], free: Callable[[], object]
) -> dict[str, Any]:
    """Measure batch sizes in order until one fits; return its measures, its size, and the sizes that did not fit.

    Args:
        batches: sizes, the largest first.
        measure: measures one size.
        free: frees what a size that did not fit has left.

    Raises:
        MemoryError: none fits.
    """
    too_large: list[int] = []
    for size in batches:
        try:
            return {"batch_per_gpu": size, "too_large": too_large, **measure(size)}
        except Exception as error:
            if not any(sign in f"{type(error).__name__}: {error}" for sign in _OUT_OF_MEMORY):
                raise
            print(f"batch of {size}: out of memory", flush=True)
        too_large.append(size)  # out of the handler, whose error keeps the arrays alive
        gc.collect()
        free()
    raise MemoryError(f"out of memory with {', '.join(map(str, too_large))} examples per GPU")
