"""Describe segments for a report: their operations as text, their lines, and what each side computes there."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.parity.diagnosis.forced.expressions import MOVES
from jaxddp.parity.diagnosis.forced.lines import lines_of
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forced.segments import Segment
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import SegmentText


def text_of(location: Location, place: Sequence[Segment]) -> SegmentText:
    """Return the operations of a fault at a place, with their lines and the value that differs most.

    Args:
        location: the programs.
        place: the segments before one call.
    """
    of_jax, of_torch = ([k for one in place for k in getattr(one, side)] for side in ("jax", "torch"))
    element, values = _largest_difference(location, place[-1])
    jax, torch = tuple(_operations(location.jax, of_jax)), tuple(_operations(location.torch, of_torch))
    return SegmentText(jax, torch, lines_of(location, place), element, values)


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
    index = np.unravel_index(int(np.argmax(np.nan_to_num(np.abs(torch - other), nan=np.inf))), torch.shape)
    return tuple(map(int, index)), (float(other[index]), float(torch[index]))
