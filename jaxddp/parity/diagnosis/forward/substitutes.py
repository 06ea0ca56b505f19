"""Edits that put another expression of earlier results in place of a call's result, or of its operands.

There are many of them, so only those are replayed that give what the port computes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.answers import earlier, with_argument
from jaxddp.parity.diagnosis.forward.calls import Call, Change
from jaxddp.parity.diagnosis.forward.function_edits import families_of

FAULT = "other_expression"
BEFORE = 8  # earlier calls whose results an expression may take
POWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": torch.square,
    "root": torch.sqrt,
    "inverse": torch.reciprocal,
}
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "largest value": torch.amax,
    "smallest value": torch.amin,
}


def substitutes(calls: Sequence[Call], index: int, names: Mapping[int, str]) -> Iterator[Change]:
    """Yield expressions in place of a call or an operand: a function, a reduction or a quotient of earlier results.

    Args:
        calls: all calls of the loss, in order.
        index: the call.
        names: id of a tensor -> what it is, in words.
    """
    call = calls[index]
    if not _is_float(call.result):
        return
    before = [one for one in calls[max(0, index - BEFORE) : index] if _is_float(one.result)]
    for one in before:
        name = names[id(one.result)]
        yield from _functions(call, one, name)
        yield from _reductions(call, one, name)
    yield from _divisors(call, before, names)
    yield from _operands(call, names)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _functions(call: Call, one: Call, name: str) -> Iterator[Change]:
    """Yield other functions of the same family, applied to an earlier result."""
    if one.result.shape == call.result.shape and all(x is not one.result for x in call.args):
        for family in families_of(call):
            for title, function in family:
                if title != call.name:
                    yield _change(f"{title} of {name}", call, one, function)


def _reductions(call: Call, one: Call, name: str) -> Iterator[Change]:
    """Yield reductions of an earlier result along one axis or all, such as a mean that ignores the mask."""
    shape = tuple(one.result.shape)
    for axes in [(axis,) for axis in range(len(shape))] + [tuple(range(len(shape)))] * (len(shape) > 1):
        kept = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        count = math.prod(shape) // max(1, math.prod(kept))
        if kept != tuple(call.result.shape) or count < 2:
            continue
        over = f"all elements ({count} in number)"
        over = f"axis {axes[0]}, {over}," if len(axes) < len(shape) else over
        for title, function in REDUCTIONS.items():
            what = f"the {title} of {name} over {over}"
            yield _change(what, call, one, partial(_along, function, axes), tier=4)


def _along(function: Callable[..., Tensor], axes: tuple[int, ...], x: Tensor) -> Tensor:
    return function(x, axes)


def _change(what: str, call: Call, one: Call, function: Callable[[Tensor], Tensor], tier: int = 3) -> Change:
    instead = f"{what} in place of the result of {call.name}"
    return Change(FAULT, instead, earlier(one.site, function), tier=tier, needs=(one.site,))


def _divisors(call: Call, before: Sequence[Call], names: Mapping[int, str]) -> Iterator[Change]:
    """Yield divisions by the size of an axis in place of a tensor, such as the number of valid elements."""
    if call.name in ("div", "div_", "true_divide") and isinstance(divisor := call.args[1], Tensor):
        sizes = {size for one in (*before, call) for size in one.result.shape if size > 1}
        for size in sorted(sizes):
            by = names.get(id(divisor), "a tensor")
            what = f"{names.get(id(call.args[0]), 'a tensor')} divided by {size} instead of by {by}"
            yield Change(FAULT, what, with_argument(1, partial(_size, size)), tier=3)


def _operands(call: Call, names: Mapping[int, str]) -> Iterator[Change]:
    """Yield powers of any operand but the first."""
    given: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, x in given:
        if not _is_float(x):
            continue
        name = names.get(id(x), "a tensor")
        for title, function in POWERS.items() if x is not call.args[0] else ():
            what = f"the {title} of {key if isinstance(key, str) else name} before {call.name}"
            yield Change("call_added", what, with_argument(key, function), tier=3)


def _size(size: int, divisor: Tensor) -> int:
    return size
