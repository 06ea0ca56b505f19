"""Edits of statistics: deviations with another divisor, normalisation over other axes or in float32."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.forward.calls import Call, Change, Proceed

NAMES = {name: name.removesuffix("_mean") for name in ("std", "var", "std_mean", "var_mean")}
CORRECTIONS = (0, 1)
Statistics = Callable[[Tensor, tuple[int, ...]], tuple[Tensor, Tensor]]  # mean and variance along some axes


def deviation(call: Call) -> Iterator[Change]:
    """Yield a standard deviation or a variance that divides by n instead of n - 1, or by n - 1 instead of n.

    With s the result, c the call's correction and d the other one, the change is

        variance: s (n - c) / (n - d);  standard deviation: s sqrt((n - c) / (n - d))

    Source: torch.std, correction 1 by default; jnp.std, ddof 0 by default.
    """
    if call.name not in NAMES or (used := _correction(call)) not in CORRECTIONS or _size(call, call.result) < 2:
        return
    kind, other = NAMES[call.name], 1 - used

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        result = proceed(call)
        n = _size(call, result)
        ratio = (n - used) / (n - other)
        factor = ratio**0.5 if NAMES[call.name] == "std" else ratio  # the call may be another one of the group
        return (factor * result[0], result[1]) if call.name.endswith("_mean") else factor * result

    group = Statement("other_divisor", of="", jax=other, torch=used)
    values = (Value(f"{other:g}", f"{used:g}", kind, "correction"),)
    yield Change("std_correction", group.but(of=kind), answer, group=group, values=values)


def _correction(call: Call) -> float:
    """Return what the call subtracts from n: `correction`, or 1 or 0 for `unbiased`; 1 by default."""
    flags = [argument for argument in call.args[1:3] if isinstance(argument, bool)]
    unbiased = flags[0] if flags else call.kwargs.get("unbiased", True)
    correction = call.kwargs.get("correction")
    return float(unbiased) if correction is None else correction


def _size(call: Call, result: Any) -> int:
    """Return the number of values from which each element of the result is computed."""
    values = call.args[0] if call.args else call.kwargs["input"]
    spread: Tensor = result[0] if isinstance(result, tuple) else result
    return values.numel() // max(spread.numel(), 1) if torch.is_floating_point(spread) else 0


def fast_variance(call: Call) -> Iterator[Change]:
    """Yield BatchNorm and LayerNorm as flax's use_fast_variance computes them, with means kept in float32."""
    if call.name == "batch_norm" and call.get("training"):
        yield Change("fast_variance", Statement("fast_variance", norm="BatchNorm"), _batch_norm, setting=True)
    elif call.name == "layer_norm":
        answer = partial(_layer_norm, _given_axes(call), _fast)
        yield Change("fast_variance", Statement("fast_variance", norm="LayerNorm"), answer, setting=True)


def normalized_axes(call: Call) -> Iterator[Change]:
    """Yield a layer norm over other axes, with the weights of the last ones."""
    if call.name != "layer_norm":
        return
    x, given = call.get("input"), _given_axes(call)
    for axes in [*((axis,) for axis in range(x.ndim)), *(tuple(range(first, x.ndim)) for first in range(x.ndim))]:
        if axes != given:
            what = Statement("normalized_axes", jax=axes, torch=given)
            values = (Value(_as_code(axes), _as_code(given), call.name),)
            yield Change("other_axis", what, partial(_layer_norm, axes, _exact), tier=3, values=values)


def _given_axes(call: Call) -> tuple[int, ...]:
    x = call.get("input")
    return tuple(range(x.ndim - len(call.get("normalized_shape")), x.ndim))


def _as_code(axes: tuple[int, ...]) -> str:
    return f"{axes[0] if len(axes) == 1 else axes}"


def _batch_norm(call: Call, proceed: Proceed, value: float) -> Any:
    x: Tensor = call.get("input")
    # The output is computed here; the reference's call only updates the running statistics.
    proceed(call.but(input=x.detach()))
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    return _normalised(call, tuple(axis for axis in range(x.ndim) if axis != 1), _fast, shape)


def _layer_norm(
    axes: tuple[int, ...], statistics: Callable[..., Any], call: Call, proceed: Proceed, value: float
) -> Any:
    return _normalised(call, axes, statistics)


def _normalised(call: Call, axes: tuple[int, ...], statistics: Statistics, shape: Sequence[int] = ()) -> Tensor:
    x: Tensor = call.get("input")
    mean, variance = statistics(x, axes)
    return affine((x - mean) * (variance + call.get("eps", 1e-5)).rsqrt(), call, shape)


def _exact(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return mean, variance


def _fast(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mean, of_squares = (value.mean(axes, keepdim=True).float().to(x.dtype) for value in (x, x * x))
    return mean, of_squares - mean * mean


def affine(x: Tensor, call: Call, shape: Sequence[int] = ()) -> Tensor:
    """Return normalised values times the weight of a normalisation plus its bias.

    Args:
        x: the values.
        call: the normalisation, without weight and bias or with them.
        shape: shape to which weight and bias are brought; (): as they are.
    """
    weight, bias = (
        None if one is None else one.view(*shape) if shape else one for one in map(call.get, ("weight", "bias"))
    )
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
