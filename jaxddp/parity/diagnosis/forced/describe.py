"""Describe segments for a report: their operations as text, their lines, and what each side computes there."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.parity.diagnosis.forced.expressions import MOVES
from jaxddp.parity.diagnosis.forced.hits import Segment
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forward.calls import Call
from jaxddp.parity.diagnosis.forward.reading import NO_TRACE
from jaxddp.parity.graph import ARGUMENT, Graph, Node
from jaxddp.parity.operations import Lines, SegmentText, SourceLine, readings


def text_of(location: Location, place: Sequence[Segment]) -> SegmentText:
    """Return the operations of a fault at a place, with their lines and the value that differs most.

    Args:
        location: the programs.
        place: the segments before one call.
    """
    torch, jax = location.torch, location.jax
    next_of_torch, next_of_jax = place[-1].joined or place[-1].ends
    of_jax, of_torch = ([k for one in place for k in getattr(one, side)] for side in ("jax", "torch"))
    line = _last_line(torch, of_torch, next_of_torch)
    source = torch[_source(location, place[0])]
    is_opened = source.call != ARGUMENT and location.loss.calls[source.call].within is not None
    if not of_jax and line is not None and line == source.line and not is_opened:
        next_of_jax = place[0].ends[1]  # torch makes the call on the line of its input
    lines = Lines(_last_line(jax, of_jax, next_of_jax), line)
    element, values = _largest_difference(location, place[-1])
    return SegmentText(tuple(_operations(jax, of_jax)), tuple(_operations(torch, of_torch)), lines, element, values)


def lines_of(location: Location, place: Sequence[Segment], lines: Lines, call: Call, number: float | None) -> Lines:
    """Return the lines of a fault that has a name: torch's call, and the port's operation that has the number."""
    jax = [location.jax[k] for one in place for k in (*one.jax, *(one.joined or one.ends)[1:])]
    alike = (node.line for node in jax if number is not None and number not in NO_TRACE and _has(node, number))
    return Lines(next((line for line in alike if line is not None), lines.jax), call.line or lines.torch)


def _has(node: Node, number: float) -> bool:
    """Return whether an operation computes with a number; one that only compares with it does something else."""
    is_compared = node.array is not None and node.array.dtype.kind == "b"
    return not is_compared and any(math.isclose(x, y, rel_tol=1e-9) for x in node.numbers for y in readings(number))


def _source(location: Location, segment: Segment) -> int:
    """Return torch's value that the port uses at the end of a segment in which it computes nothing."""
    twins = location.alignment.twins
    return next((k for k, twin in twins.items() if twin.jax == segment.ends[1]), segment.ends[0])


def _last_line(graph: Graph, indices: Sequence[int], after: int) -> SourceLine | None:
    """Return the line of the last of some values; of none, or without a line, that of a value after them."""
    lines = [graph[k].line for k in indices if graph[k].line is not None] or [graph[after].line]
    users = (graph[k].line for k in graph.users[after])
    return lines[-1] or next((line for line in users if line is not None), None)


def _operations(graph: Graph, indices: Sequence[int]) -> Iterator[str]:
    seen: set[int] = set()
    for k in indices:
        node = graph[k]
        if node.call != ARGUMENT and node.call not in seen and node.name not in MOVES:
            seen.add(node.call)
            yield " ".join([node.name, *(f"{number:.6g}" for number in node.numbers)])


def _largest_difference(location: Location, segment: Segment) -> tuple[tuple[int, ...], tuple[float, float]]:
    t, j = segment.ends
    torch, jax = location.torch[t].array, location.jax[j].array
    if torch is None or jax is None or torch.dtype.kind != "f" or torch.size != jax.size:
        return (), (0.0, 0.0)
    flat = jax.ravel() if segment.order is None else jax.ravel()[segment.order]
    other = flat.reshape(torch.shape)
    index = np.unravel_index(int(np.nanargmax(np.abs(torch - other))), torch.shape)
    return tuple(map(int, index)), (float(other[index]), float(torch[index]))
