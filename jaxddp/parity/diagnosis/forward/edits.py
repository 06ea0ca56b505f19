"""Edits of a call's own arguments: another number, axis, option or function of the same kind. Any call has them.

Each function yields the changes that an edit may make to a call; an edit that does not fit raises when it is replayed.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.forward.answers import with_argument, with_result, with_value
from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Name, Names, Proceed, parameters_of, tensors_in
from jaxddp.parity.diagnosis.forward.function_edits import is_number, other_functions
from jaxddp.parity.diagnosis.forward.index_edits import edits_of_indices
from jaxddp.parity.diagnosis.forward.statistics import normalized_axes

ORDERS = {"p": (1.0, 2.0, math.inf), "ord": (1.0, 2.0, math.inf)}  # of a norm
AXES = ("dim", "dims", "axis", "dim0", "dim1")
NOT_TRIED = (*AXES, "normalized_shape", "chunks", "num_layers", "groups", "dtype", "_stacklevel", "inplace", "keepdim")
MOVERS = (
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "movedim", "swapaxes", "t", "flip", "roll"),
    *("__getitem__", "chunk", "split", "unbind", "cat", "stack", "squeeze", "unsqueeze", "expand", "repeat", "gather"),
    *("__get__", "contiguous", "sort", "arange", "index_select", "unfold", "narrow", "select", "repeat_interleave"),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "reduction": ("mean", "sum"),
    "approximate": ("none", "tanh"),
    "mode": ("nearest", "nearest-exact", "bilinear", "bicubic", "area", "constant", "reflect", "replicate", "circular"),
}
PRODUCTS = ("mul", "mul_")
# Function of an operator with a number -> the operator.
OPERANDS = {
    **{name: name.strip("_") for name in (*PRODUCTS, "div", "div_", "add", "add_", "sub", "sub_", "pow", "pow_")},
    **{name: name.strip("_") for name in ("rsub", "__rsub__", "__rdiv__", "__rpow__")},
    **{"true_divide": "div", **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), "compare")},
}


def edits_of_arguments(call: Call, names: Names) -> Iterator[Change]:
    """Yield every edit of a call's own arguments and of its function.

    Args:
        call: a recorded call.
        names: id of a tensor -> what it is.
    """
    of = next((names[id(x)] for x in tensors_in((call.args, call.kwargs)) if id(x) in names), "")
    yield from numbers(call, of)
    yield from other_functions(call, of)
    for edits in (axes, options, normalized_axes, masked_scores, edits_of_indices, not_rescaled):
        yield from edits(call)


def arguments_of(call: Call) -> Iterator[tuple[str, Any, int | str]]:
    """Yield parameter, value, and the key by which a call replaces the value; parameters by default too."""
    parameters = parameters_of(call.function)
    names = [*parameters, *(f"argument {k + 1}" for k in range(len(parameters), len(call.args)))]
    yield from ((names[position], value, position) for position, value in enumerate(call.args))
    for name, default in parameters.items():
        if name in call.kwargs or (name not in names[: len(call.args)] and isinstance(default, int | float | str)):
            yield name, call.kwargs.get(name, default), name
    yield from ((name, value, name) for name, value in call.kwargs.items() if name not in parameters)


def numbers_of(call: Call) -> Iterator[float]:
    """Yield the numbers that a call is given."""
    for name, value, _ in arguments_of(call):
        if is_number(value) and name not in NOT_TRIED:
            yield float(value)


def numbers(call: Call, of: Name) -> Iterator[Change]:
    """Yield another number in place of each number: any for a float, a neighbour for an integer that counts."""
    for name, value, key in arguments_of(call):
        if not is_number(value) or name in NOT_TRIED:
            continue
        is_operand = call.name in OPERANDS and name != "alpha"
        option = "" if is_operand or " " in name else name
        what = group = _argument(call, name)
        if is_operand:
            later = next((one.name for one in call.into if not one.name.startswith("__")), "")
            within = call.caller if call.caller != call.name else ""
            group = Statement("operand", operator=OPERANDS[call.name], of="", within=within, before="")
            what = group.but(of=of, before=later)
        if name in ORDERS and "dropout" not in call.name:
            for other in ORDERS[name]:
                if other != value:
                    values = (Value(f"{other:g}", f"{value:g}", call.name, name),)
                    yield Change("number", _instead(call, name, values[0]), _with(key, other), tier=2, values=values)
        elif isinstance(value, float) or call.name in OPERANDS or name == "value":
            start = 2.0 * value if value and math.isfinite(value) else 1.0
            values = (Value(call=call.name, key=option, is_factor=is_operand and call.name in PRODUCTS),)
            fitted = partial(Change, "number", what, with_value(key), float(value), start, group=group, tier=2)
            yield fitted(least=-float("inf"), values=values)
        else:
            for other in dict.fromkeys((value + 1, value - 1, 2 * value, value // 2, 1)):
                if other == value:
                    continue
                values = (Value(f"{other}", f"{value}", call.name, option),)
                instead = Statement("instead", of=what, jax=f"{other}", torch=f"{value}")
                yield Change("number", instead, _with(key, other), tier=2, values=values)


def _argument(call: Call, name: str) -> Statement:
    within = call.caller if call.caller != call.name else ""
    return Statement("argument", call=call.words, name=name, inner=call.within is not None, within=within)


def _instead(call: Call, name: str, value: Value) -> Statement:
    of = Statement("argument", call=call.words, name=name, inner=False, within="")
    return Statement("instead", of=of, jax=value.jax, torch=value.torch)


def _with(key: int | str, other: Any) -> Answer:
    return with_argument(key, lambda value: other)


def axes(call: Call) -> Iterator[Change]:
    """Yield another axis."""
    shape = next((x.shape for x in call.args if isinstance(x, Tensor)), ())
    for name, value, key in arguments_of(call):
        if name in AXES and isinstance(value, int) and not isinstance(value, bool):
            for axis in range(len(shape)):
                if axis != value % len(shape):
                    values = (Value(f"{axis}", f"{value % len(shape)}", call.name, name),)
                    what = Statement("other_axis", call=call.words, jax=axis, torch=value % len(shape))
                    yield Change("other_axis", what, _with(key, axis), tier=3, values=values)
        elif name in AXES and isinstance(value, tuple | list) and all(isinstance(axis, int) for axis in value):
            here = tuple(sorted(axis % len(shape) for axis in value))
            for axes in itertools.combinations(range(len(shape)), len(here)):
                if axes != here:
                    what = Statement("other_axes", call=call.words, jax=axes, torch=here)
                    values = (Value(f"{axes}", f"{here}", call.name, name),)
                    yield Change("other_axis", what, _with(key, axes), tier=3, values=values)


def masked_scores(call: Call) -> Iterator[Change]:
    """Yield another score of what an attention mask hides than minus infinity."""

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        query, key, values, mask = call.args[:3] + (call.get("attn_mask"),)
        scores = query @ key.transpose(-2, -1) * (call.get("scale") or query.shape[-1] ** -0.5)
        return scores.masked_fill(~mask, value).softmax(-1) @ values

    if call.name == "scaled_dot_product_attention" and not call.get("dropout_p"):
        mask = call.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            what, values = Statement("masked_scores"), (Value(call=call.name),)
            yield Change("number", what, answer, -float("inf"), 0.0, least=-float("inf"), tier=2, values=values)


def options(call: Call) -> Iterator[Change]:
    """Yield the other value of a bool, another one of a mode, and no tensor where none is the default."""
    defaults = parameters_of(call.function)
    for name, value, key in arguments_of(call):
        if name in NOT_TRIED:
            continue
        others: Sequence[Any] = ()
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, str):
            others = [other for other in OPTIONS.get(name, ()) if other != value]
        elif isinstance(value, Tensor) and defaults.get(name, value) is None:
            others = (None,)
        for other in others:
            value_of = Value(f"{other!r}", f"{value!r}", call.name, name)
            without = Statement("without_argument", call=call.words, name=name)
            what, values = (without, ()) if other is None else (_instead(call, name, value_of), (value_of,))
            yield Change("other_option", what, _with(key, other), tier=3, values=values)


def not_rescaled(call: Call) -> Iterator[Change]:
    """Yield dropout whose kept values stay as they are."""
    if call.name.startswith("dropout") and call.get("training", True) and 0 < (p := call.get("p", 0.5)) < 1:
        what = Statement("not_rescaled", call=call.words, kept=1 - p)
        yield Change("other_option", what, with_result(lambda x: x * (1 - p)), tier=3)


def orders_of(count: int, most: int = 24) -> Iterator[tuple[int, ...]]:
    """Yield every other order of a few things."""
    return itertools.islice(itertools.permutations(range(count)), 1, most)
