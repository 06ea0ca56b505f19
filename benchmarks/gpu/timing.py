"""Timing of work on a device, whose calls return before the work is done; needs neither jax nor torch."""

import statistics
import time
from collections.abc import Callable

Work = Callable[[int], object]  # makes so many steps, and waits for the device


def best_seconds(work: Work, calls: int, repeats: int = 5) -> float:
    """Return the shortest time of one call, over several repeats of `calls` calls each, after a warm-up."""
    work(1)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work(calls)
        seconds.append((time.perf_counter() - started) / calls)
    return min(seconds)


def median_seconds(work: Work, seconds: float, rounds: int = 5) -> float:
    """Return the median time of a step over rounds of about `seconds` each, after a warm-up."""
    work(2)
    started = time.perf_counter()
    work(2)
    steps = max(1, round(2 * seconds / (time.perf_counter() - started)))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work(steps)
        times.append((time.perf_counter() - started) / steps)
    return statistics.median(times)
