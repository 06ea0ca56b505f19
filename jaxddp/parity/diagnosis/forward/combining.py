"""Edits of how results of several calls are combined: factors of two products exchanged."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed, Site

SUMS = ("add", "sub")


def exchanged(calls: Sequence[Call], index: int, names: Mapping[int, str]) -> Iterator[tuple[Call, Change]]:
    """Yield a sum of two products in which two factors have changed places, as in z * n + (1 - z) * h.

    Args:
        calls: all calls, in order.
        index: the call that adds.
        names: id of a tensor -> what it is, in words.
    """
    call = calls[index]
    if call.name not in SUMS or len(call.args) < 2:
        return
    products = [_maker(calls[:index], x) for x in call.args[:2]]
    if any(one is None or one.name != "mul" or not _are_tensors(one.args) for one in products):
        return
    first, second = (one for one in products if one is not None)
    x = first.args[1]  # to exchange the others is the same
    for position in (0, 1):
        y = second.args[position]
        if y is not x and y.shape == x.shape:
            sites = first.site, second.site
            words = " and ".join(names.get(id(one), "another tensor") for one in (x, y))
            what = f"{words} exchanged between {first.words} and {second.words}"
            yield call, Change("other_operand", what, _with_exchanged(*sites, position), tier=3, also=sites)


def _with_exchanged(first: Site, second: Site, position: int) -> Answer:
    """Return an answer that notes two products, and makes them with exchanged factors where they are added."""
    noted = threading.local()  # each replica runs in its own thread

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        if call.site == first:
            noted.first = call
            return proceed(call)
        if call.site == second:
            noted.second = call
            return proceed(call)
        one, other = noted.first, noted.second
        products = one.put(1, other.args[position]), other.put(position, one.args[1])
        return proceed(call.put(0, products[0].run()).put(1, products[1].run()))

    return answer


def _maker(calls: Sequence[Call], x: Any) -> Call | None:
    """Return the last call that returned a tensor."""
    return next((call for call in reversed(calls) if call.result is x), None)


def _are_tensors(values: Sequence[Any]) -> bool:
    return len(values) == 2 and all(isinstance(x, Tensor) for x in values)
