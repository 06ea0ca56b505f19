"""Clamped values, and the larger or smaller of two, as in a clipped loss."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.answers import argument, instead
from jaxddp.parity.diagnosis.forward.calls import Call, Change

LARGER, SMALLER = ("max", "maximum"), ("min", "minimum")
CLAMPS = ("clamp", "clip", "clamp_", "clip_")


def chosen_term(call: Call) -> Iterator[Change]:
    """Yield the maximum of two tensors replaced by the minimum, the first or the second tensor; or vice versa."""
    if call.name not in (*LARGER, *SMALLER) or len(_pair(call)) != 2:
        return
    right, wrong = ("larger", "smaller") if call.name in LARGER else ("smaller", "larger")
    other = torch.minimum if call.name in LARGER else torch.maximum
    functions: dict[str, Callable[..., Tensor]]
    functions = {wrong: other, "first": partial(_one_of, 0), "second": partial(_one_of, 1)}
    for which, function in functions.items():
        answer = instead(function, lambda call: (_pair(call), {}))
        yield Change("clipped_term", f"the {which} of two values instead of the {right}", answer)


def _pair(call: Call) -> list[Tensor]:
    """Return the two tensors of floating-point numbers; nothing for a call with an axis, or with one tensor."""
    pair = (*call.args, *(call.kwargs[name] for name in ("input", "other") if name in call.kwargs))
    return [one for one in pair if isinstance(one, Tensor) and one.is_floating_point()] if len(pair) == 2 else []


def _one_of(place: int, *pair: Tensor) -> Tensor:
    return torch.broadcast_tensors(*pair)[place]


def clamps(call: Call) -> Iterator[Change]:
    """Yield values that are not clamped, or whose lower or upper bound is left out."""
    if call.name not in CLAMPS or not call.args or not call.args[0].is_floating_point():
        return
    yield Change("clamp_missing", "values not clamped", argument(0))
    if None not in _bounds(call).values():
        for bound, end in (("max", "below"), ("min", "above")):
            answer = instead(torch.clamp, partial(_with_one_bound, bound))
            yield Change("clamp_missing", f"values not clamped from {end}", answer)


def _bounds(call: Call) -> dict[str, Any]:
    low, high = (*call.args[1:], None, None)[:2]
    return {"min": call.kwargs.get("min", low), "max": call.kwargs.get("max", high)}


def _with_one_bound(bound: str, call: Call) -> tuple[Any, Any]:
    return call.args[:1], {bound: _bounds(call)[bound]}
