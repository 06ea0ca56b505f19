"""Normalisation with statistics computed in float32."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Call, Change, Proceed

WHAT = "variance as E[x^2] - E[x]^2, of means in float32"


def fast_variance(call: Call) -> Iterator[Change]:
    """Yield BatchNorm and LayerNorm as flax's use_fast_variance computes them, with means kept in float32."""
    if call.name == "batch_norm" and call.get("training"):
        yield Change("fast_variance", f"BatchNorm's {WHAT}", _batch_norm, setting=True)
    elif call.name == "layer_norm":
        yield Change("fast_variance", f"LayerNorm's {WHAT}", _layer_norm, setting=True)


def _batch_norm(call: Call, proceed: Proceed, value: float, /) -> Any:
    x: Tensor = call.get("input")
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean, variance = _statistics(x, axes)
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    # The output is computed here; the reference's call only updates the running statistics.
    proceed(call.but(input=x.detach()))
    return _scaled((x - mean) * (variance + call.get("eps", 1e-5)).rsqrt(), call, shape)


def _layer_norm(call: Call, proceed: Proceed, value: float, /) -> Any:
    x: Tensor = call.get("input")
    axes = list(range(x.ndim - len(call.get("normalized_shape")), x.ndim))
    mean, variance = _statistics(x, axes)
    return _scaled((x - mean) * (variance + call.get("eps", 1e-5)).rsqrt(), call, [x.shape[axis] for axis in axes])


def _statistics(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    mean, of_squares = (value.mean(axes, keepdim=True).float().to(x.dtype) for value in (x, x * x))
    return mean, of_squares - mean * mean


def _scaled(x: Tensor, call: Call, shape: list[int]) -> Tensor:
    weight, bias = call.get("weight"), call.get("bias")
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)
