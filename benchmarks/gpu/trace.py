"""Busy share of the compute streams, longest kernels and largest gaps, read from a trace."""

from collections.abc import Sequence
from typing import Any

from benchmarks.trace import Kernel, Trace, kernels

COMMUNICATION = "nccl"  # in the names of the kernels that send, which are no computation
LONGEST, GAPS = 10, 3


def analysis(trace: Trace) -> dict[str, Any]:
    """Return the busy share of each device, and of the first device the longest kernels and the largest gaps.

    Raises:
        ValueError: the trace has no kernels.
    """
    devices = {name: sorted(of, key=lambda one: one.begin) for name, of in sorted(kernels(trace).items())}
    computing = {name: [one for one in of if COMMUNICATION not in one.name.lower()] for name, of in devices.items()}
    computing = {name: of for name, of in computing.items() if of}
    if not computing:
        raise ValueError("the trace has no kernels")
    first = next(iter(computing))
    return {
        "device": first,
        "busy_share": {name: round(busy_share(of), 4) for name, of in computing.items()},
        "communication_share": round(_communication(devices[first], computing[first]), 4),
        "window_ms": round(_window(computing[first]) / 1e3, 3),
        "kernels": longest(computing[first]),
        "gaps": gaps(computing[first]),
    }


def busy_share(kernels: Sequence[Kernel]) -> float:
    """Return the share of the time from the first kernel's begin to the last one's end in which any runs.

    >>> busy_share([Kernel("a", 0, 4), Kernel("b", 2, 5), Kernel("c", 8, 10)])
    0.7
    """
    return sum(end - begin for begin, end in _merged(kernels)) / _window(kernels)


def longest(kernels: Sequence[Kernel], count: int = LONGEST) -> list[dict[str, Any]]:
    """Return the kernels with the longest total time, with calls, time, and share of all kernels' time."""
    totals: dict[str, list[float]] = {}
    for one in kernels:
        totals.setdefault(one.name, []).append(one.end - one.begin)
    every = sum(map(sum, totals.values()))
    largest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"name": name, "calls": len(times), "ms": round(sum(times) / 1e3, 3), "share": round(sum(times) / every, 4)}
        for name, times in largest
    ]


def gaps(kernels: Sequence[Kernel], count: int = GAPS) -> list[dict[str, Any]]:
    """Return the longest times in which nothing runs, each with the kernel that ended last before it and the next one.

    >>> gaps([Kernel("a", 0, 4000), Kernel("b", 2000, 3000), Kernel("c", 6000, 7000)])
    [{'ms': 2.0, 'at_ms': 4.0, 'before': 'a', 'after': 'c'}]
    """
    found: list[dict[str, Any]] = []
    ordered = sorted(kernels, key=lambda one: one.begin)
    last = ordered[0]
    for one in ordered[1:]:
        if one.begin > last.end:
            times = {
                "ms": round((one.begin - last.end) / 1e3, 4),
                "at_ms": round((last.end - ordered[0].begin) / 1e3, 3),
            }
            found.append({**times, "before": last.name, "after": one.name})
        if one.end > last.end:
            last = one
    return sorted(found, key=lambda gap: -gap["ms"])[:count]


def _communication(every: Sequence[Kernel], computing: Sequence[Kernel]) -> float:
    """Return the share of the window in which a message is under way."""
    messages = [one for one in every if COMMUNICATION in one.name.lower()]
    return sum(end - begin for begin, end in _merged(messages)) / _window(computing)


def _window(kernels: Sequence[Kernel]) -> float:
    return max(one.end for one in kernels) - min(one.begin for one in kernels)


def _merged(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """Return the times in which at least one kernel runs."""
    merged: list[tuple[float, float]] = []
    for one in sorted(kernels, key=lambda one: one.begin):
        if merged and one.begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], one.end)
        else:
            merged.append((one.begin, one.end))
    return merged
