"""Timelines from timestamps: which replica did what and when, and how long it waited; needs neither jax nor torch.

A replica records a mark (phase, nanoseconds) whenever it finishes something; the first mark is "start". The time
between two marks belongs to the phase that the second one names. In an all-reduce a replica waits until the last
replica arrives; only then do numbers travel. All replicas read one clock (CLOCK_MONOTONIC), so the last arrival is the
latest of the marks before the all-reduce.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

FORWARD, BACKWARD, WAITING, ALL_REDUCE = PHASES = ("forward", "backward", "waiting", "all-reduce")
START = "start"

Marks = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Span:
    """A stretch of time that one replica spent in one phase.

    Attributes:
        phase: one of `PHASES`.
        begin, end: nanoseconds since the first replica's start.
    """

    phase: str
    begin: int
    end: int


Timeline = list[list[Span]]  # each replica's spans, in order


def timeline(marks: Sequence[Marks]) -> Timeline:
    """Return each replica's spans in a step.

    Args:
        marks: each replica's marks, with equally many all-reduces.

    Raises:
        ValueError: the replicas do not have equally many all-reduces, or a replica left one before all had arrived.

    >>> for spans in timeline([[("start", 0), ("forward", 3), ("all-reduce", 9)],
    ...                        [("start", 1), ("forward", 8), ("all-reduce", 9)]]):
    ...     print(" ".join(f"{span.phase} {span.begin}-{span.end}" for span in spans))
    forward 0-3 waiting 3-8 all-reduce 8-9
    forward 1-8 waiting 8-8 all-reduce 8-9
    """
    origin = min(times[0][1] for times in marks)
    arrivals = [[before for (_, before), (phase, _) in pairwise(m) if phase == ALL_REDUCE] for m in marks]
    last_arrivals = [max(times) for times in zip(*arrivals, strict=True)]
    return [_spans(of_replica, last_arrivals, origin) for of_replica in marks]


def _spans(marks: Marks, last_arrivals: Sequence[int], origin: int) -> list[Span]:
    spans, remaining = [], iter(last_arrivals)
    for (_, begin), (phase, end) in pairwise(marks):
        if phase == ALL_REDUCE:
            last = next(remaining)
            if last > end:
                raise ValueError(f"a replica left an all-reduce {last - end} ns before the last one arrived")
            spans.append(Span(WAITING, begin - origin, last - origin))
            begin = last
        spans.append(Span(phase, begin - origin, end - origin))
    return spans


def time_in(spans: Sequence[Span], phase: str) -> int:
    """Return the nanoseconds that a replica spent in a phase."""
    return sum(span.end - span.begin for span in spans if span.phase == phase)


def duration(step: Timeline) -> int:
    """Return the nanoseconds from the first replica's start to the last replica's end."""
    return max(spans[-1].end for spans in step)


def waiting(step: Timeline) -> list[float]:
    """Return the share of the step's duration that each replica waits."""
    return [time_in(spans, WAITING) / duration(step) for spans in step]


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Write timelines as the JSON that chrome://tracing and ui.perfetto.dev open, one process per timeline.

    Source: the "Trace Event Format" document of the Chromium project.
    """
    events: list[dict[str, Any]] = []
    for process, (name, step) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for replica, spans in enumerate(step):
            place = {"pid": process, "tid": replica}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"replica {replica}"}})
            for span in spans:
                microseconds = {"ts": span.begin / 1e3, "dur": (span.end - span.begin) / 1e3}
                events.append({"ph": "X", "name": span.phase, **place, **microseconds})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
