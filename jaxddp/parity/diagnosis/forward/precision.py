"""Matrix products and convolutions with inputs rounded to fewer bits."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forward.calls import Call, Change, Proceed

FORMATS = {"TF32": 10, "bfloat16": 7}  # bits of the mantissa that are stored
PRODUCTS = ("linear", "matmul", "bmm", "einsum", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d")


def reduced_precision(calls: Sequence[Call]) -> Iterator[tuple[Call, Change]]:
    """Yield products of rounded inputs: all products, only the convolutions, or only the others.

    Each has three backward passes. A GPU also rounds the inputs of products in the backward pass. A
    program that casts the inputs down and up again rounds their gradients. A rounding that is left out
    of the derivative changes no gradient.
    """
    products = [call for call in calls if call.name in PRODUCTS and not _drops(call)]
    convolutions = [call for call in products if call.name.startswith("conv")]
    others = [call for call in products if call not in convolutions]
    kinds = {"products": products}
    if convolutions and others:
        kinds |= {"convolutions": convolutions, "others": others}
    for kind, some in kinds.items():
        for name, bits in FORMATS.items():
            what = Statement("inputs_rounded", of=kind, dtype=name, by="hardware")
            changes = (
                _change(what, _Rounding(bits, outputs=True)),
                _change(what.but(by="cast"), _Rounding(bits, inputs=True)),
                _change(what.but(by="forward"), _Rounding(bits)),
            )
            yield from ((call, change) for change in changes for call in some)


def _drops(call: Call) -> bool:
    return call.name == "scaled_dot_product_attention" and bool(call.get("dropout_p"))


class _Rounding:
    """Rounding of a product's inputs, and of the gradients of its inputs or of its output if asked for."""

    def __init__(self, bits: int, inputs: bool = False, outputs: bool = False):
        self._bits, self._inputs, self._outputs = bits, inputs, outputs

    def input(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self._bits, self._bits if self._inputs else None)

    def output(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, None, self._bits) if self._outputs else x


class _Rounded(Function):
    """Rounding in the forward pass, the backward pass, or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int | None, backward: int | None) -> Tensor:
        ctx.bits = backward
        return x.clone() if forward is None else round_mantissa(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient if ctx.bits is None else round_mantissa(gradient, ctx.bits)), None, None


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """Round to the nearest number with so many stored mantissa bits, ties to even.

    >>> round_mantissa(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8], dtype=torch.float64), bits=7).tolist()
    [1.0, 1.015625]
    """
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)), exponent - (bits + 1))


def _change(what: Statement, rounding: _Rounding) -> Change:
    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        if call.name == "scaled_dot_product_attention":
            return _attention(call, rounding)
        if call.name == "einsum":
            operands = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
            return rounding.output(torch.einsum(call.args[0], *map(rounding.input, operands)))
        if call.name in ("matmul", "bmm"):
            for position in range(2):
                call = call.put(position, rounding.input(call.args[position]))
            return rounding.output(proceed(call))
        bias = call.get("bias")
        rounded = {name: rounding.input(call.get(name)) for name in ("input", "weight")}
        product = rounding.output(proceed(call.but(**rounded, bias=None)))
        axes = 0 if call.name == "linear" else int(call.name[-2])
        return product if bias is None else product + bias.view(-1, *(1,) * axes)

    return Change("reduced_precision_matmul", what, answer, setting=True)


def _attention(call: Call, rounding: _Rounding) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + mask) v with both products rounded."""
    query, key, value = (rounding.input(call.get(name)) for name in ("query", "key", "value"))
    scale = call.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = rounding.output(query @ key.mT) * scale
    mask = call.get("attn_mask")
    if call.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return rounding.output(rounding.input(scores.softmax(-1)) @ value)
