"""Values of torch's program when segments are forced, also on other inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxddp.parity.diagnosis.forced.align import Alignment, PortValues, Twin, given_at
from jaxddp.parity.diagnosis.forced.layouts import equal
from jaxddp.parity.diagnosis.forced.torch_graph import DRAWS
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import ARGUMENT, Graph

LOSS_NEAR = 1e-9  # relative, of losses on other inputs

if TYPE_CHECKING:
    from jaxddp.parity.diagnosis.forced.locate import Location
    from jaxddp.parity.diagnosis.forced.segments import Segment


@dataclass(frozen=True)
class ForcedValues:
    """Values of torch's program when every segment is forced: those of the port, in torch's layout.

    Attributes:
        arrays: index of a value of torch -> the array.
        edges: (index of a value of torch, number of a call) -> what this call gets in its place.
    """

    arrays: Mapping[int, Any]
    edges: Mapping[tuple[int, int], np.ndarray]


@dataclass(frozen=True)
class OtherInputs:
    """Other inputs of both programs.

    Attributes:
        jax: the port's values.
        arguments: name of a parameter or of an entry of the batch -> torch's array.
        same_batch: only the parameters are others.
    """

    jax: Graph
    arguments: Mapping[str, np.ndarray]
    same_batch: bool = False


def forced_values(location: "Location") -> ForcedValues:
    """Return the values of torch's program when every segment is forced."""
    alignment = location.alignment
    return ForcedValues(alignment.arrays, _edges(location, alignment, location.aligner.port))


def forced_values_on(location: "Location", alignment: Alignment, other: OtherInputs) -> ForcedValues:
    """Return the values of torch's program on other inputs.

    Args:
        location: both programs.
        alignment: what is forced.
        other: the inputs.

    Raises:
        ValueError: the port's program on other inputs is another one, or a call cannot be made again.
        One of `fit.IMPOSSIBLE`: a call cannot be made with its values.
    """
    torch = location.torch
    if [node.name for node in other.jax] != [node.name for node in location.jax] or location.aligner.opaque:
        raise ValueError("the programs cannot be run on other inputs")
    port = PortValues(other.jax, location.aligner.layouts)
    edges, arrays = _edges(location, alignment, port), dict[int, Any]()
    for number, outputs in sorted(torch.outputs.items()):
        if number == ARGUMENT or location.loss.calls[number].name in DRAWS:
            made: Sequence[Any] = [_argument(location, k, other, port) for k in outputs]
        else:
            given = [edges.get((k, number), arrays[k]) for k in torch[outputs[0]].inputs]
            edits = alignment.edits.get(number, ())
            made = location.loss.called(number, given, edits, location.loss.earlier(arrays, number))
        for k, array in zip(outputs, made, strict=True):
            twin = alignment.forced.get(k)
            arrays[k] = port.or_made(array) if twin is None else port.array(twin, torch[k].array)
    return ForcedValues(arrays, edges)


def _argument(location: "Location", index: int, other: OtherInputs, port: PortValues) -> Any:
    """Return an argument on other inputs; what torch draws, and keeps as a constant, is the port's."""
    node, twin = location.torch[index], location.alignment.twins.get(index)
    if node.name in other.arguments:
        return other.arguments[node.name]
    if node.moments is None or node.moments.least == node.moments.largest:
        return node.array
    return node.array if twin is None else port.array(twin, node.array)


def collapses(location: "Location", alignment: Alignment) -> bool:
    """Return whether a value is one number with some faults, and several without: so do many other faults."""
    changed = location.aligner.follow(alignment.copy(), set(alignment.edits))
    for k, node in enumerate(location.torch):
        x, y = node.array, changed.arrays.get(k)
        if x is None or y is None or not x.dtype.kind == y.dtype.kind == "f" or x.size < 2:
            continue
        if np.ptp(x) > 0 and y.size and not np.ptp(y) > 0:
            return True
    return False


def _edges(location: "Location", alignment: Alignment, port: PortValues) -> dict[tuple[int, int], np.ndarray]:
    return {(k, n): given_at(location.torch, port, k, twin) for (k, n), twin in alignment.edges.items()}


def unedited(location: "Location") -> Alignment:
    """Return what is forced, with the port's values in place of faults of calls, as far as they are known."""
    changed = location.alignment.copy()
    for one in location.segments:
        if one.edits and one.order is not None:
            changed.edits.pop(one.call, None)
            changed.forced[one.ends[0]] = Twin(one.ends[1], one.order)
    return changed


def made_by(location: "Location", segment: "Segment") -> int:
    """Return the call at which a segment is forced: the one that makes what it ends with, or the next one."""
    return location.torch[segment.ends[0]].call if segment.inside else segment.call


def with_names(location: "Location", place: "Sequence[Segment]", names: Sequence[CallEdit]) -> Alignment:
    """Return what is forced, with faults in place of what is forced at a place."""
    changed = unedited(location)
    sites = {site for name in names for site in name.sites}
    # A recurrent layer has the sites of a time step again in the next one.
    numbers = {number for number, call in enumerate(location.loss.calls) if call.site in sites}
    again = [one for one in location.segments if made_by(location, one) in numbers]
    for one in (*place, *again):
        changed.forced.pop(one.ends[0], None)
        changed.edges.pop((one.ends[0], one.call), None)
        changed.edits.pop(one.call, None)
    for name in names:
        for number in (n for n in numbers if location.loss.calls[n].site in name.sites):
            others = [edit for edit in changed.edits.get(number, ()) if edit.change.what != name.change.what]
            changed.edits[number] = (*others, name)
    return changed


def holds(location: "Location", alignment: Alignment, other: OtherInputs) -> bool:
    """Return whether the losses are equal on other inputs, too, with what is forced."""
    try:
        there = forced_values_on(location, alignment, other).arrays[location.torch.end]
    except IMPOSSIBLE:
        return False
    end = other.jax[other.jax.end].array
    return bool(np.isfinite(end).all()) and equal(there, end.reshape(there.shape), near=LOSS_NEAR)
