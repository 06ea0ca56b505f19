"""Edits that put another expression of earlier results in place of a call's result, or of its operands.

There are many of them, so only those are replayed that give what the port computes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forward.answers import earlier, with_argument
from jaxddp.parity.diagnosis.forward.calls import Call, Change, Name, Names
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
    "amax": torch.amax,
    "amin": torch.amin,
}


def substitutes(calls: Sequence[Call], index: int, names: Names) -> Iterator[Change]:
    """Yield expressions in place of a call or an operand: a function, a reduction or a quotient of earlier results.

    Args:
        calls: all calls of the loss, in order.
        index: the call.
        names: id of a tensor -> what it is.
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


def _functions(call: Call, one: Call, name: Name) -> Iterator[Change]:
    """Yield other functions of the same family, applied to an earlier result."""
    if one.result.shape == call.result.shape and all(x is not one.result for x in call.args):
        for family in families_of(call):
            for title, function in family:
                if title != call.name:
                    what = Statement("function_instead", function=title, of=name, call=call.name)
                    yield _change(what, one, function)


def _reductions(call: Call, one: Call, name: Name) -> Iterator[Change]:
    """Yield reductions of an earlier result along one axis or all, such as a mean that ignores the mask."""
    shape = tuple(one.result.shape)
    for axes in [(axis,) for axis in range(len(shape))] + [tuple(range(len(shape)))] * (len(shape) > 1):
        kept = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        count = math.prod(shape) // max(1, math.prod(kept))
        if kept != tuple(call.result.shape) or count < 2:
            continue
        along = axes if len(axes) < len(shape) else ()
        what = Statement("reduction_instead", of=name, axes=along, elements=count, call=call.name)
        for title, function in REDUCTIONS.items():
            yield _change(what.but(reduction=title), one, partial(_along, function, axes), tier=4)


def _along(function: Callable[..., Tensor], axes: tuple[int, ...], x: Tensor) -> Tensor:
    return function(x, axes)


def _change(what: Statement, one: Call, function: Callable[[Tensor], Tensor], tier: int = 3) -> Change:
    return Change(FAULT, what, earlier(one.site, function), tier=tier, needs=(one.site,))


def _divisors(call: Call, before: Sequence[Call], names: Names) -> Iterator[Change]:
    """Yield divisions by the size of an axis in place of a tensor, such as the number of valid elements."""
    if call.name in ("div", "div_", "true_divide") and isinstance(divisor := call.args[1], Tensor):
        sizes = {size for one in (*before, call) for size in one.result.shape if size > 1}
        for size in sorted(sizes):
            of, by = names.get(id(call.args[0]), ""), names.get(id(divisor), "")
            what = Statement("other_divisor_of", of=of, jax=size, torch=by)
            yield Change(FAULT, what, with_argument(1, partial(_size, size)), tier=3)


def _operands(call: Call, names: Names) -> Iterator[Change]:
    """Yield powers of any operand but the first."""
    given: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, x in given:
        if not _is_float(x):
            continue
        name = key if isinstance(key, str) else names.get(id(x), "")
        for title, function in POWERS.items() if x is not call.args[0] else ():
            what = Statement("power_before", power=title, of=name, call=call.name)
            yield Change("call_added", what, with_argument(key, function), tier=3)


def _size(size: int, divisor: Tensor) -> int:
    return size
