"""Make torch's calls with the port's values: the port computes what a call returns, too, or it differs here."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxddp.parity.diagnosis.forced.layouts import Layouts, Order, equal
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import ARGUMENT, Graph, differing
from jaxddp.parity.operations import NEAR, Moments, are_near, moments

GOT = "__get__"  # call that gets an attribute; where the loss does not depend on it, a gradient
TAKEN = ("__getitem__", "masked_select")  # calls that keep what a mask shows


@dataclass(frozen=True)
class Twin:
    """A value of the port that a value of torch is.

    Attributes:
        jax: index of the port's value.
        order: see `layouts.Order`; None: the port's value is known by its moments alone.
        inverted: torch has True where the port has False.
        like: index of the value of torch that is in the place of another one; None: the port's is in its layout.
    """

    jax: int
    order: Order | None
    inverted: bool = False
    like: int | None = None


@dataclass
class Alignment:
    """What the port has in place of torch's values.

    Attributes:
        arrays: for each value of torch, the port's in torch's layout; where the port has none, what torch computes from
            the port's values; None: it is too large.
        twins: the port's values, where there are.
        forced: index of a value of torch -> the port's value that all calls get in its place.
        edges: (index of a value of torch, number of a call) -> the port's value that only this call gets.
        edits: number of a call -> the fault with which it computes what the port does.
    """

    arrays: dict[int, Any] = field(default_factory=dict)
    twins: dict[int, Twin] = field(default_factory=dict)
    forced: dict[int, Twin] = field(default_factory=dict)
    edges: dict[tuple[int, int], Twin] = field(default_factory=dict)
    edits: dict[int, tuple[CallEdit, ...]] = field(default_factory=dict)

    def copy(self) -> "Alignment":
        """Return a copy that can be changed."""
        return Alignment(dict(self.arrays), dict(self.twins), dict(self.forced), dict(self.edges), dict(self.edits))


class PortValues:
    """Values of the port's program, to look others up.

    Args:
        jax: the port's program.
        layouts: orders that were seen before.

    Attributes:
        of_size: number of elements -> the values that have so many.
    """

    def __init__(self, jax: Graph, layouts: Layouts):
        self.jax, self.layouts = jax, layouts
        known: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        self.of_size: dict[int, list[int]] = defaultdict(list)
        for k, node in enumerate(jax):
            self.of_size[node.size].append(k)
            is_vacuous = node.is_spoiled and node.call == ARGUMENT  # as a gradient that torch's NaN gave the port
            if node.moments is not None and (node.array is not None or node.is_telling) and not is_vacuous:
                known[node.moments[:2]].append((node.moments.absolute, k))
        self._known = {sizes: sorted(values) for sizes, values in known.items()}

    def twin_of(self, array: np.ndarray | None, among: Collection[int] | None = None) -> Twin | None:
        """Return the port's value that holds the same numbers; None: it has none.

        Args:
            array: a value of torch's program.
            among: indices of the port's values that are looked at; None: all.
        """
        return next(self.twins_of(array, among), None)

    def twins_of(self, array: np.ndarray | None, among: Collection[int] | None = None) -> Iterator[Twin]:
        """Yield the port's values that hold the same numbers, in the order of the program; see `twin_of`."""
        if array is None:
            return
        for inverted in (False, True) if array.dtype.kind == "b" else (False,):
            looked_for = ~array if inverted else array
            wanted = moments_of(looked_for)
            for k in self._near(wanted):
                if (among is None or k in among) and are_near(wanted, self.jax[k].moments):
                    port_array = self.jax[k].array
                    if port_array is not None and _are_apart(array, port_array, wanted):
                        continue
                    order = None if port_array is None else self.layouts.matching(looked_for, port_array)
                    if port_array is None or order is not None:
                        yield Twin(k, order, inverted)
        yield from self._padded(array, among)

    def _padded(self, array: np.ndarray, among: Collection[int] | None) -> Iterator[Twin]:
        """Yield the port's values of which an array of torch has some rows."""
        padded = [k for size in self.layouts.sizes_of_padded(array.shape) for k in self.of_size[size]]
        if not padded or array.dtype.kind != "f" or not np.ptp(array):
            return
        for k in padded:
            port_array = self.jax[k].array
            if port_array is None or port_array.dtype.kind != "f" or (among is not None and k not in among):
                continue
            if (order := self.layouts.matching(array, port_array)) is not None:
                yield Twin(k, order)

    def _near(self, wanted: Moments) -> list[int]:
        """Return the values of a size whose sum of absolute values is near, in the order of the program."""
        values, around = self._known.get(wanted[:2], []), 2 * NEAR * wanted.absolute
        first = bisect_left(values, (wanted.absolute - around, -1))
        last = bisect_right(values, (wanted.absolute + around, len(self.jax)))
        return sorted(k for _, k in values[first:last])

    def array(self, twin: Twin, like: np.ndarray) -> np.ndarray:
        """Return a value of the port in the layout of torch's; torch's own if the port's is not known."""
        if twin.order is None:
            return like
        values = self.jax[twin.jax].array.ravel()[twin.order].reshape(like.shape)
        return values == 0 if twin.inverted else values

    def or_made(self, array: np.ndarray) -> np.ndarray:
        """Return the port's value in place of an equal one of torch; if it has none, torch's."""
        twin = self.twin_of(array)
        return array if twin is None else self.array(twin, array)


class Aligner:
    """Both programs of a loss, and what is known of the port's values.

    Args:
        loss: torch's program.
        jax: the port's program.
    """

    def __init__(self, loss: TorchGraph, jax: Graph):
        self.loss, self.torch, self.jax = loss, loss.graph, jax
        self.layouts = Layouts()
        self.port = PortValues(jax, self.layouts)
        self.twin_of, self.array = self.port.twin_of, self.port.array
        for count, rows in rows_taken(self.torch):
            self.layouts.note_rows(count, rows)
        everything = range(len(self.torch))
        got = [k for k, node in enumerate(self.torch) if node.name == GOT]
        self._beside = {x for k in got for x in (k, *self.torch.after(k, everything))}
        self._beside -= self.torch.before(self.torch.end, everything)
        self.opaque = {call for call in self.torch.outputs if call != ARGUMENT and not self._repeats(call)}

    def start(self) -> Alignment:
        """Return the alignment without anything forced."""
        alignment = Alignment()
        for k, node in enumerate(self.torch):
            if node.call == ARGUMENT:
                self._set(alignment, k, node.array)
        return self.follow(alignment, set(self.torch.outputs))

    def follow(self, alignment: Alignment, calls: Collection[int] = ()) -> Alignment:
        """Make the calls that depend on what has been forced, in order, and change the alignment.

        Args:
            alignment: the alignment.
            calls: further calls that are made.
        """
        changed = {*alignment.forced}
        for number in sorted(self.torch.outputs):
            if number == ARGUMENT:
                continue
            outputs = self.torch.outputs[number]
            inputs = self.torch[outputs[0]].inputs
            edges = any((k, number) in alignment.edges for k in inputs)
            if number in calls or edges or changed.intersection(inputs):
                made = self.made(alignment, number)
                if len(made) != len(outputs):  # a fault that returns something else
                    raise ValueError(f"call {number} returns {len(made)} values instead of {len(outputs)}")
                for k, array in zip(outputs, made, strict=True):
                    if k not in alignment.forced:
                        self._set(alignment, k, array)
                        changed.add(k)
        return alignment

    def made(
        self, alignment: Alignment, number: int, replaced: Mapping[int, np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Return what a call makes of the port's values; what it has made, if it cannot be made again.

        Args:
            alignment: the alignment.
            number: number of the call.
            replaced: other values in place of the alignment's.
        """
        outputs = self.torch.outputs[number]
        inputs = self.torch[outputs[0]].inputs
        given = [(replaced or {}).get(k, self._given(alignment, k, number)) for k in inputs]
        try:
            if number not in self.opaque:
                edits = alignment.edits.get(number, ())
                return self.loss.called(number, given, edits, self.loss.earlier(alignment.arrays, number))
        except IMPOSSIBLE:
            if replaced:
                raise
        return [self.torch[k].array for k in outputs]

    def unequal(self, alignment: Alignment) -> tuple[set[int], set[int]]:
        """Return the values of torch, and of the port, on which the loss depends and which have no twin."""
        of_torch = {*alignment.twins, *alignment.forced}
        of_jax = {twin.jax for twins in (alignment.twins, alignment.forced, alignment.edges) for twin in twins.values()}
        # Places in another numbering are right if what is taken by them is equal.
        of_torch |= _used_rightly(self.torch, of_torch)
        of_jax |= _used_rightly(self.jax, of_jax)
        end, array = self.torch.end, self.jax[self.jax.end].array
        if array is not None and not equal(alignment.arrays[end].ravel(), array.ravel()):  # a twin that is no loss
            of_torch.discard(end)
            of_jax.discard(self.jax.end)
        return differing(self.torch, of_torch), differing(self.jax, of_jax)

    def _given(self, alignment: Alignment, index: int, call: int) -> np.ndarray:
        twin = alignment.edges.get((index, call))
        return alignment.arrays[index] if twin is None else given_at(self.torch, self.port, index, twin)

    def _set(self, alignment: Alignment, index: int, array: np.ndarray | None) -> None:
        twin = None if index in self._beside else self.twin_of(array)
        alignment.twins.pop(index, None)
        alignment.arrays[index] = array
        if array is not None and twin is not None:
            alignment.twins[index] = twin
            alignment.arrays[index] = self.array(twin, array)

    def _repeats(self, number: int) -> bool:
        """Return whether a call, made again, returns what it has returned."""
        outputs = self.torch.outputs[number]
        node = self.torch[outputs[0]]
        given = [self.torch[k].array for k in node.inputs]
        try:
            again = self.loss.called(number, given) if all(x is not None for x in given) else []
        except IMPOSSIBLE:
            return False
        return len(again) == len(outputs) and all(
            self.torch[k].array is not None and x.shape == self.torch[k].array.shape and equal(x, self.torch[k].array)
            for k, x in zip(outputs, again, strict=True)
        )


def _are_apart(array: np.ndarray, other: np.ndarray, known: Moments) -> bool:
    """Return whether arrays of one number are of different kinds: zeros are no mask of False, and no first index."""
    return known.least == known.largest and array.dtype.kind != other.dtype.kind


def given_at(torch: Graph, port: PortValues, index: int, twin: Twin) -> np.ndarray:
    """Return the port's value that a call of torch gets in place of another one."""
    return port.array(twin, torch[index if twin.like is None else twin.like].array)


def moments_of(array: np.ndarray) -> Moments:
    """Return the moments of an array, of a complex one those of both parts."""
    array = np.ascontiguousarray(array)
    return moments(array.view(array.real.dtype) if array.dtype.kind == "c" else array)


def rows_taken(torch: Graph) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of rows, and which of them are kept, of each call that keeps those where a mask is True."""
    for node in torch:
        kept = node.array.shape[:1] if node.array is not None and node.name in TAKEN else ()
        for mask in (torch[k].array for k in node.inputs):
            if mask is not None and mask.dtype.kind == "b" and (mask.sum(),) == kept and 0 < mask.sum() < mask.size:
                yield mask.size, np.flatnonzero(mask)


def _used_rightly(graph: Graph, equal: Collection[int]) -> set[int]:
    """Return the integers and bools that differ, such as places, with which calls compute what makes an equal value."""
    region = differing(graph, equal)
    places = [k for k in region if (array := graph[k].array) is not None and array.dtype.kind in "iub"]
    if not places:
        return set()
    leading = {*equal}
    for k in range(len(graph) - 1, -1, -1):
        leading |= {x for x in graph[k].inputs if x not in region} if k in leading else set()
    return {k for k in places if not leading.isdisjoint(graph.users[k])}
