"""Edits of the elements that a call takes: another index or its neighbours, a slice moved, other rows, no elements."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.forward.answers import with_argument, with_result
from jaxddp.parity.diagnosis.forward.calls import Answer, Call, CallEdit, Change, Names, Proceed

# Function -> place of the indices among its arguments.
TABLES = {"embedding": 0, "index_select": 2, "gather": 2}
PLAIN = (int, slice, type(None), type(...))  # indices that are no tensors of indices
NEIGHBOURS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "end": lambda index, size: index.clamp(0, size - 1),
    "other_end": lambda index, size: index % size,
}
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": torch.zeros_like,
    "next": lambda index: index + 1,
    "previous": lambda index: index - 1,
}


def edits_of_indices(call: Call) -> Iterator[Change]:
    """Yield every edit of the elements that a call takes."""
    for edits in (_indices, _ranges, _rows):
        yield from edits(call)


def _indices(call: Call) -> Iterator[Change]:
    """Yield other indices: another integer, values of 0 at it, a slice moved by one, or neighbouring elements."""
    if call.name != "__getitem__":
        return
    source = call.args[0]
    for position, (part, size) in enumerate(zip(_parts(call), source.shape, strict=False)):
        if isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool:
            for by, (ends, within) in itertools.product((-1, 1), NEIGHBOURS.items()):
                what = Statement("neighbour", by=by, ends=ends)
                yield Change("other_index", what, _at(position, partial(_neighbour, by, within)), tier=3)
            continue
        if isinstance(part, int) and not isinstance(part, bool):
            what = Statement("index_left_out", index=part, is_last=part % size == size - 1, axis=position)
            yield Change("other_index", what, with_result(torch.zeros_like), tier=2)
        others: list[Any] = []
        if isinstance(part, int) and not isinstance(part, bool):
            others = [i for i in dict.fromkeys((0, size - 1, part % size + 1, part % size - 1)) if i != part % size]
        elif isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = part.indices(size)
            others = [slice(start + by, stop + by) for by in (-1, 1) if start + by >= 0 and stop + by <= size]
        for other in others:
            index, change = Value(_as_code(other), _as_code(part)), _at(position, partial(_other, other))
            what = Statement("other_index", jax=index.jax, torch=index.torch)
            yield Change("other_index", what, change, tier=3, values=(index,))


def _parts(call: Call) -> tuple[Any, ...]:
    """Return the index of each axis that a call of __getitem__ has."""
    index = call.args[1]
    return index if isinstance(index, tuple) else (index,)


def _at(position: int, other: Callable[[Any, int], Any]) -> Answer:
    """Return an answer that replaces the index of an axis by `other(index, size of the axis)`."""

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        source, indices = call.args[0], [*_parts(call)]
        indices[position] = other(indices[position], source.shape[position])
        return proceed(call.put(1, tuple(indices)))

    return answer


def _neighbour(by: int, within: Callable[[Tensor, int], Tensor], index: Tensor, size: int) -> Tensor:
    return within(index + by, size)


def _other(other: Any, index: Any, size: int) -> Any:
    return other


def _ranges(call: Call) -> Iterator[Change]:
    """Yield an `arange` that starts at another number, such as positions from 1."""
    if call.name == "arange" and all(isinstance(x, int) for x in call.args):
        first = call.args[0] if len(call.args) > 1 else 0
        for by in (1, -1):
            what = Statement("arange_start", jax=first + by, torch=first)
            yield Change("number", what, with_result(partial(torch.add, by)), tier=2)


def _rows(call: Call) -> Iterator[Change]:
    """Yield lookups in a table, such as an embedding, that take other rows than those of the indices."""
    if (place := TABLES.get(call.name)) is not None and len(call.args) > place:
        for which, other in ROWS.items():
            what = Statement("other_rows", call=call.name, rows=which)
            yield Change("other_index", what, with_argument(place, other), tier=3)


def shifts(calls: Sequence[Call], here: Iterable[int], names: Names) -> Iterator[CallEdit]:
    """Yield another offset between two slices of a tensor, such as inputs and targets one step ahead.

    Args:
        calls: all calls of the loss, in order.
        here: indices of the calls that are edited.
        names: id of a tensor -> what it is.
    """
    taken = [calls[index] for index in here if calls[index].name == "__getitem__"]
    taken = [call for call in taken if all(isinstance(part, PLAIN) for part in _parts(call))]
    for first, second in itertools.permutations(taken, 2):
        one, other = _parts(first), _parts(second)
        differing = [k for k, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
        if first.args[0] is not second.args[0] or len(one) != len(other) or len(differing) != 1:
            continue
        place, by = differing[0], other[differing[0]].start if isinstance(other[differing[0]], slice) else None
        if not by or (one[place], other[place]) != (slice(None, -by), slice(by, None)):
            continue
        for distance in (by + 1, by - 1, 2 * by + 1):
            if distance > 0:
                ends = {first.site: slice(None, -distance), second.site: slice(distance, None)}
                what = Statement("slices_shifted", of=names.get(id(first.args[0]), ""), jax=distance, torch=by)
                change = partial(Change, "other_index", what, tier=3, values=(Value(f"{distance}", f"{by}"),))
                changes = {site: change(_at(place, partial(_other, end))) for site, end in ends.items()}
                yield CallEdit(changes[first.site], frozenset(changes), changes=changes)


def _as_code(index: Any) -> str:
    """Write an index in Python's notation.

    >>> _as_code(slice(1, None)), _as_code(-1)
    ('1:', '-1')
    """
    if not isinstance(index, slice):
        return f"{index}"
    return ":".join("" if end is None else f"{end}" for end in (index.start, index.stop))
