"""Describe segments for a report: their operations as text, their lines, and what each side computes there."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.parity.diagnosis.forced.expressions import MOVES
from jaxddp.parity.diagnosis.forced.hits import Segment, moves
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit
from jaxddp.parity.diagnosis.forward.reading import NO_TRACE
from jaxddp.parity.graph import ARGUMENT, Graph, Node
from jaxddp.parity.operations import Lines, SegmentText, SourceLine, are_near, readings

LEFT_OUT = ("operand_left_out", "call_left_out", "calls_left_out")  # those that say most first
OF_ARGUMENTS = ("number", "other_index", "other_axis", "other_option")
NEARBY = 40  # values before one, among which an equal one is looked for


def text_of(location: Location, place: Sequence[Segment]) -> SegmentText:
    """Return the operations of a fault at a place, with their lines and the value that differs most.

    Args:
        location: the programs.
        place: the segments before one call.
    """
    torch, jax = location.torch, location.jax
    next_of_torch, next_of_jax = place[-1].joined or place[-1].ends
    of_jax, of_torch = ([k for one in place for k in getattr(one, side)] for side in ("jax", "torch"))
    lines = Lines(_last_line(jax, of_jax, next_of_jax), _last_line(torch, of_torch, next_of_torch))
    if of_torch and not of_jax:
        lines = _of_call_left_out(location, place, torch[of_torch[-1]].call) or lines
    element, values = _largest_difference(location, place[-1])
    return SegmentText(tuple(_operations(jax, of_jax)), tuple(_operations(torch, of_torch)), lines, element, values)


def lines_of(location: Location, place: Sequence[Segment], lines: Lines, call: Call, name: CallEdit) -> Lines:
    """Return the lines of a fault that has a name: torch's call, and the port's operation that has the number."""
    if name.change.fault in LEFT_OUT:
        number = next(n for n, one in enumerate(location.loss.calls) if one is call)
        lines = _of_call_left_out(location, place, number) or lines
    indices = [k for one in place for k in (*one.jax, *(one.joined or one.ends)[1:])]
    jax, value = [location.jax[k] for k in indices], name.value
    if name.change.fault in OF_ARGUMENTS and value is None:  # the port's first operation has it
        shown = (location.jax[k].line for k in indices if not moves(location.jax, k))
        lines = Lines(next((line for line in shown if line is not None), lines.jax), lines.torch)
    alike = (node.line for node in jax if value is not None and value not in NO_TRACE and _has(node, value))
    return Lines(next((line for line in alike if line is not None), lines.jax), call.line or lines.torch)


def _has(node: Node, number: float) -> bool:
    """Return whether an operation computes with a number; one that only compares with it does something else."""
    is_compared = node.array is not None and node.array.dtype.kind == "b"
    return not is_compared and any(math.isclose(x, y, rel_tol=1e-9) for x in node.numbers for y in readings(number))


def _of_call_left_out(location: Location, place: Sequence[Segment], number: int) -> Lines | None:
    """Return the lines where the port would make a call, if the reference uses its result in another statement."""
    torch, twins = location.torch, location.alignment.twins
    node, later = torch[torch.outputs[number][0]], torch.users[torch.outputs[number][0]]
    kept = [k for k in node.inputs if k in twins and torch[k].size == node.size]
    if not kept or not later or torch[later[0]].line == node.line:
        return None
    kept.sort(key=lambda k: twins[k].jax != place[-1].ends[1])
    after = max((one.joined or one.ends)[1] for one in place)
    return Lines(_no_deeper(location, _used(location.jax, twins[kept[0]].jax, after), node), node.line)


def _used(graph: Graph, index: int, after: int) -> Node:
    """Return a value as another one uses it: of several that are equal, the one from which that is computed."""
    waiting = [after]
    for k in itertools.islice(waiting, NEARBY):
        node = graph[k]
        is_value = k != after and node.name not in MOVES and node.moments is not None
        if is_value and are_near(node.moments, graph[index].moments):
            return node
        waiting += graph[k].inputs
    return graph[index]


def _no_deeper(location: Location, node: Node, call: Node) -> SourceLine | None:
    """Return the line of a value of the port, or of a function's call if it is deeper in these than torch's call.

    Depths count from the functions that end the losses.
    """
    ends = len(location.jax[location.jax.end].callers) - len(location.torch[location.torch.end].callers)
    return (node.line, *node.callers)[max(0, len(node.callers) - len(call.callers) - ends)]


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
