"""Clamped values, and the larger or smaller of two, as in a clipped loss."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed

LARGER, SMALLER = ("max", "maximum"), ("min", "minimum")
CLAMPS = ("clamp", "clip", "clamp_", "clip_")


def chosen_term(call: Call) -> Iterator[Change]:
    """Yield the maximum of two tensors replaced by the minimum, the first or the second tensor; or vice versa."""
    if call.name not in (*LARGER, *SMALLER) or _pair(call) is None:
        return
    right, wrong = ("larger", "smaller") if call.name in LARGER else ("smaller", "larger")
    other = torch.minimum if call.name in LARGER else torch.maximum
    answers: dict[str, Answer] = {wrong: _taken(other), "first": _taken(_first), "second": _taken(_second)}
    for which, answer in answers.items():
        yield Change("clipped_term", f"the {which} of two values instead of the {right}", answer)


def _pair(call: Call) -> tuple[Tensor, Tensor] | None:
    """Return the two tensors of floating-point numbers; None for a call with an axis, or with one tensor."""
    pair = (*call.args, *(call.kwargs[name] for name in ("input", "other") if name in call.kwargs))
    tensors = [one for one in pair if isinstance(one, Tensor) and one.is_floating_point()]
    return (tensors[0], tensors[1]) if len(pair) == len(tensors) == 2 else None


def _first(one: Tensor, other: Tensor) -> Tensor:
    return torch.broadcast_tensors(one, other)[0]


def _second(one: Tensor, other: Tensor) -> Tensor:
    return torch.broadcast_tensors(one, other)[1]


def _taken(function: Callable[[Tensor, Tensor], Tensor]) -> Answer:
    def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
        return proceed(replace(call, function=function, args=_pair(call) or (), kwargs={}))

    return answer


def clamps(call: Call) -> Iterator[Change]:
    """Yield values that are not clamped, or whose lower or upper bound is left out."""
    if call.name not in CLAMPS or not call.args or not call.args[0].is_floating_point():
        return
    yield Change("clamp_missing", "values not clamped", lambda call, proceed, value, /: call.args[0])
    low, high = _bounds(call)
    if low is not None and high is not None:
        yield Change("clamp_missing", "values not clamped from below", _clamped(lower=False))
        yield Change("clamp_missing", "values not clamped from above", _clamped(lower=True))


def _bounds(call: Call) -> tuple[Any, Any]:
    low, high = (*call.args[1:], None, None)[:2]
    return call.kwargs.get("min", low), call.kwargs.get("max", high)


def _clamped(lower: bool) -> Answer:
    def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
        low, high = _bounds(call)
        bounds = {"min": low} if lower else {"max": high}
        return proceed(replace(call, args=call.args[:1], kwargs=bounds))

    return answer
