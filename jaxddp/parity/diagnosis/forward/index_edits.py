"""Edits of an index: another element, the neighbours of elements, a slice moved by one, elements that count as 0."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed


def indices(call: Call) -> Iterator[Change]:
    """Yield another index in place of an integer, and a slice moved by one."""
    if call.name != "__getitem__":
        return
    source, index = call.args
    whole = index if isinstance(index, tuple) else (index,)
    for position, (part, size) in enumerate(zip(whole, source.shape, strict=False)):
        if isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool:
            for by, ends in itertools.product((-1, 1), NEIGHBOURS):
                what = f"the index {'before' if by < 0 else 'after'}, {ends}, instead of the index"
                yield Change("other_index", what, _with_index(position, by, ends), tier=3)
            continue
        if isinstance(part, int) and not isinstance(part, bool):
            last = ", the last," if part % size == size - 1 else ""
            what = f"values at index {part}{last} of axis {position} count as 0: they are left out"
            yield Change("other_index", what, _zeros, tier=2)
        others: list[Any] = []
        if isinstance(part, int) and not isinstance(part, bool):
            others = [i for i in dict.fromkeys((0, size - 1, part % size + 1, part % size - 1)) if i != part % size]
        elif isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = part.indices(size)
            others = [slice(start + by, stop + by) for by in (-1, 1) if start + by >= 0 and stop + by <= size]
        for other in others:
            changed = (*whole[:position], other, *whole[position + 1 :])
            what = f"index {_in_words(other)} instead of {_in_words(part)}"
            yield Change("other_index", what, _at(changed), tier=3)


NEIGHBOURS = ("at the ends the end itself", "at an end the other end")


def _with_index(position: int, by: int, ends: str) -> Answer:
    """Return an answer that takes neighbours of the elements at a tensor of indices."""

    def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
        index = call.args[1]
        whole = index if isinstance(index, tuple) else (index,)
        size = call.args[0].shape[position]
        other = whole[position] + by
        other = other.clamp(0, size - 1) if ends == NEIGHBOURS[0] else other % size
        return proceed(call.but_at(1, (*whole[:position], other, *whole[position + 1 :])))

    return answer


def _zeros(call: Call, proceed: Proceed, value: float, /) -> Any:
    return torch.zeros_like(proceed(call))


def _in_words(index: Any) -> str:
    """Write an index as Python does.

    >>> _in_words(slice(1, None)), _in_words(-1)
    ('1:', '-1')
    """
    if not isinstance(index, slice):
        return f"{index}"
    return ":".join("" if end is None else f"{end}" for end in (index.start, index.stop))


def _at(index: Any) -> Answer:
    return lambda call, proceed, value, /: proceed(call.but_at(1, index))
