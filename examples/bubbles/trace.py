"""From timestamps to who did what when, and who waited for whom; this knows neither jax nor torch.

A replica notes the time whenever it has finished something: a list of marks (what, nanoseconds), the first of them
"start". Between two marks it did what the second says. In an all-reduce it waits until the last replica has come,
and only then numbers travel; as all clocks are one (CLOCK_MONOTONIC), that moment is the latest of the marks before
the all-reduce.
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
    """What one replica did for a while.

    Attributes:
        phase: one of `PHASES`.
        begin, end: nanoseconds since the first replica's start.
    """

    phase: str
    begin: int
    end: int


Timeline = list[list[Span]]  # of each replica, in order


def timeline(marks: Sequence[Marks]) -> Timeline:
    """What each replica did in a step.

    Args:
        marks: of each replica, equally many all-reduces in each.

    Raises:
        ValueError: the replicas do not have equally many all-reduces, or one left before all had come: then the
            marks do not tell what happened.

    >>> for spans in timeline([[("start", 0), ("forward", 3), ("all-reduce", 9)],
    ...                        [("start", 1), ("forward", 8), ("all-reduce", 9)]]):
    ...     print(" ".join(f"{span.phase} {span.begin}-{span.end}" for span in spans))
    forward 0-3 waiting 3-8 all-reduce 8-9
    forward 1-8 waiting 8-8 all-reduce 8-9
    """
    origin = min(times[0][1] for times in marks)
    came = [[before for (_, before), (what, _) in pairwise(m) if what == ALL_REDUCE] for m in marks]
    last_came = [max(times) for times in zip(*came, strict=True)]
    return [_spans(of_replica, last_came, origin) for of_replica in marks]


def _spans(marks: Marks, last_came: Sequence[int], origin: int) -> list[Span]:
    spans, meetings = [], iter(last_came)
    for (_, begin), (what, end) in pairwise(marks):
        if what == ALL_REDUCE:
            last = next(meetings)
            if last > end:
                raise ValueError(f"a replica left an all-reduce {last - end} ns before the last one came")
            spans.append(Span(WAITING, begin - origin, last - origin))
            begin = last
        spans.append(Span(what, begin - origin, end - origin))
    return spans


def time_in(spans: Sequence[Span], phase: str) -> int:
    """Nanoseconds that a replica spent on something."""
    return sum(span.end - span.begin for span in spans if span.phase == phase)


def duration(step: Timeline) -> int:
    """Nanoseconds from the first replica's start to the last one's end."""
    return max(spans[-1].end for spans in step)


def waiting(step: Timeline) -> list[float]:
    """The share of the step's time that each replica waits."""
    return [time_in(spans, WAITING) / duration(step) for spans in step]


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Timelines by name in the JSON that chrome://tracing and ui.perfetto.dev open, one process for each.

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
