"""Segments as data for a report: their operations as text, their lines, and what each side computes there."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxddp.parity.diagnosis.forced.align import Aligner
from jaxddp.parity.diagnosis.forced.locate import Location, Segment
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import Lines, SegmentText, SourceLine

MOVES = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "expand_dims")  # that show nothing


def described(location: Location) -> tuple[SegmentText, ...]:
    """Return the segments that were found; those of equal operations at the same lines are one."""
    found: dict[tuple[object, ...], SegmentText] = {}
    for segment in location.segments:
        text = _text(location, segment)
        key = text.jax, text.torch, text.lines
        found[key] = replace(found[key], places=found[key].places + 1) if key in found else text
    return tuple(found.values())


def _text(location: Location, segment: Segment) -> SegmentText:
    torch, jax = location.torch, location.jax
    next_of_torch, next_of_jax = segment.joined or segment.ends
    lines = Lines(_last_line(jax, segment.jax, next_of_jax), _last_line(torch, segment.torch, next_of_torch))
    element, values = _largest_difference(location.aligner, segment)
    return SegmentText(
        tuple(_operations(jax, segment.jax)), tuple(_operations(torch, segment.torch)), lines, element, values
    )


def _last_line(graph: Graph, indices: Sequence[int], after: int) -> SourceLine | None:
    """Return the line of the last of some values; of none, or without a line, that of the value after them."""
    lines = [graph[k].line for k in indices if graph[k].line is not None]
    return lines[-1] if lines else graph[after].line


def _operations(graph: Graph, indices: Sequence[int]) -> Iterator[str]:
    seen: set[int] = set()
    for k in indices:
        node = graph[k]
        if node.call != ARGUMENT and node.call not in seen and node.name not in MOVES:
            seen.add(node.call)
            yield " ".join([node.name, *(f"{number:.6g}" for number in node.numbers)])


def _largest_difference(aligner: Aligner, segment: Segment) -> tuple[tuple[int, ...], tuple[float, float]]:
    t, j = segment.ends
    torch, jax = aligner.torch[t].array, aligner.jax[j].array
    if torch is None or jax is None or torch.dtype.kind != "f" or torch.size != jax.size:
        return (), (0.0, 0.0)
    flat = jax.ravel() if segment.order is None else jax.ravel()[segment.order]
    other = flat.reshape(torch.shape)
    index = np.unravel_index(int(np.nanargmax(np.abs(torch - other))), torch.shape)
    return tuple(map(int, index)), (float(other[index]), float(torch[index]))
