"""Edits of a call's own arguments: another number, axis, option or function of the same kind. Any call has them.

Each function yields the changes that an edit may make to a call; an edit that does not fit raises when it is replayed.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed, tensors_in
from jaxddp.parity.diagnosis.forward.index_edits import edits_of_indices
from jaxddp.parity.diagnosis.forward.signatures import parameters_of

ORDERS = {"p": (1.0, 2.0, math.inf), "ord": (1.0, 2.0, math.inf)}  # of a norm
Replace = Callable[[Call, Any], Call]  # returns the call with another value
Family = Sequence[tuple[str, Callable[..., Any]]]  # functions that take the same arguments, with their names
AXES = ("dim", "dims", "axis", "dim0", "dim1")
NOT_TRIED = (*AXES, "normalized_shape", "chunks", "num_layers", "groups", "dtype", "_stacklevel", "inplace", "keepdim")
MOVERS = (
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "movedim", "swapaxes", "t", "flip", "roll"),
    *("__getitem__", "chunk", "split", "unbind", "cat", "stack", "squeeze", "unsqueeze", "expand", "repeat", "gather"),
    *("__get__", "contiguous", "sort", "arange", "index_select", "unfold", "narrow", "select"),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "reduction": ("mean", "sum"),
    "approximate": ("none", "tanh"),
    "mode": ("nearest", "nearest-exact", "bilinear", "bicubic", "area", "constant", "reflect", "replicate", "circular"),
}
# Function of an operator -> what it does to a tensor, before its number is said.
OPERANDS = {
    **dict.fromkeys(("mul", "mul_"), "{} times"),
    **dict.fromkeys(("div", "div_", "true_divide"), "{} divided by"),
    **dict.fromkeys(("add", "add_"), "{} plus"),
    **dict.fromkeys(("sub", "sub_"), "{} minus"),
    **dict.fromkeys(("rsub", "__rsub__"), "{} subtracted from"),
    **dict.fromkeys(("pow", "pow_"), "{} to the power"),
    **{"__rdiv__": "{} as the divisor of", "__rpow__": "{} as the exponent of"},
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), "{} compared with"),
}


def _gate(x: Tensor) -> Tensor:
    """Compute hardsigmoid; the gradient of torch's is computed with 1/6 in float32, whatever the dtype."""
    return F.relu6(x + 3) / 6


# Functions that take the same arguments, where those after the first are left out.
FAMILIES: tuple[Family, ...] = (
    (
        *(("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid)),
        *(("elu", F.elu), ("leaky_relu", F.leaky_relu), ("softplus", F.softplus), ("mish", F.mish), ("selu", F.selu)),
        *(("relu6", F.relu6), ("hardswish", lambda x: x * _gate(x)), ("hardtanh", F.hardtanh), ("hardsigmoid", _gate)),
        *(("celu", F.celu), ("softsign", F.softsign), ("logsigmoid", F.logsigmoid), ("square", torch.square)),
        ("GELU by tanh", lambda x: F.gelu(x, approximate="tanh")),
    ),
    (
        *(("exp", torch.exp), ("expm1", torch.expm1), ("softplus", F.softplus), ("square", torch.square)),
        ("abs", torch.abs),
    ),
    (("sqrt", torch.sqrt), ("rsqrt", torch.rsqrt), ("square", torch.square)),
    (("log", torch.log), ("log1p", torch.log1p), ("log2", torch.log2)),
    (("sin", torch.sin), ("cos", torch.cos)),
)
REDUCTIONS: Family = (
    *(("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin), ("prod", torch.prod)),
    *(("logsumexp", torch.logsumexp), ("std", torch.std), ("var", torch.var), ("norm", torch.linalg.vector_norm)),
)
ALONG: Family = (
    *(("softmax", torch.softmax), ("log_softmax", torch.log_softmax), ("cumsum", torch.cumsum)),
    ("sigmoid", lambda x, dim: torch.sigmoid(x)),
)
LOSSES: Family = (
    *(("mse_loss", F.mse_loss), ("l1_loss", F.l1_loss), ("smooth_l1_loss", F.smooth_l1_loss)),
    ("huber_loss", F.huber_loss),
)
PAIRS: Family = (
    *(("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div)),
    *(("maximum", torch.maximum), ("minimum", torch.minimum)),
    ("sub with its operands swapped", lambda x, y: y - x),
)
# A number in place of the second operand, and the other way to use it.
BY_NUMBER: dict[str, tuple[str, Callable[..., Any]]] = {
    **{"mul": ("div", torch.div), "div": ("mul", torch.mul), "true_divide": ("mul", torch.mul)},
    **{"add": ("sub", torch.sub), "sub": ("add", torch.add)},
}


def _of_roots(start: float, end: float, steps: int, **options: Any) -> Tensor:
    return torch.linspace(start**0.5, end**0.5, steps, **options) ** 2


def _of_logarithms(start: float, end: float, steps: int, **options: Any) -> Tensor:
    return torch.exp(torch.linspace(math.log(start), math.log(end), steps, **options))


SPACES: Family = (
    *(("linspace", torch.linspace), ("squares of equally spaced roots", _of_roots)),
    ("exponentials of equally spaced logarithms", _of_logarithms),
)
COMPARISONS: Family = (
    *(("gt", torch.gt), ("ge", torch.ge), ("lt", torch.lt), ("le", torch.le), ("eq", torch.eq), ("ne", torch.ne)),
)
SHARED = ("kernel_size", "stride", "padding")  # options of all poolings
POOLS: Family = tuple(
    (f"{kind}_pool{dims}d", getattr(F, f"{kind}_pool{dims}d")) for kind in ("max", "avg") for dims in (1, 2, 3)
)


def edits_of_arguments(call: Call, names: Mapping[int, str]) -> Iterator[Change]:
    """Yield every edit of a call's own arguments and of its function.

    Args:
        call: a recorded call.
        names: id of a tensor -> what it is, in words.
    """
    of = next((names[id(x)] for x in tensors_in((call.args, call.kwargs)) if id(x) in names), "")
    yield from numbers(call, of)
    yield from other_functions(call, of)
    for edits in (axes, options, normalized_axes, masked_scores, edits_of_indices, not_rescaled):
        yield from edits(call)


def arguments_of(call: Call) -> Iterator[tuple[str, Any, Replace]]:
    """Yield parameter, value, and a function that replaces the value in a call; parameters by default too."""
    parameters = parameters_of(call.function)
    names = [*parameters, *(f"argument {k + 1}" for k in range(len(parameters), len(call.args)))]
    for position, value in enumerate(call.args):
        yield names[position], value, partial(_at_position, position)
    for name, default in parameters.items():
        if name in call.kwargs or (name not in names[: len(call.args)] and isinstance(default, int | float | str)):
            yield name, call.kwargs.get(name, default), partial(_by_name, name)
    for name, value in call.kwargs.items():
        if name not in parameters:
            yield name, value, partial(_by_name, name)


def _at_position(position: int, call: Call, value: Any) -> Call:
    return call.but_at(position, value)


def _by_name(name: str, call: Call, value: Any) -> Call:
    return replace(call, kwargs={**call.kwargs, name: value})


def numbers_of(call: Call) -> Iterator[float]:
    """Yield the numbers that a call is given."""
    for name, value, _ in arguments_of(call):
        if is_number(value) and name not in NOT_TRIED:
            yield float(value)


def numbers(call: Call, of: str) -> Iterator[Change]:
    """Yield another number in place of each number: any for a float, a neighbour for an integer that counts."""
    for name, value, but in arguments_of(call):
        if not is_number(value) or name in NOT_TRIED:
            continue
        template = OPERANDS.get(call.name, f"{call.words}'s {name}")
        template += f" within {call.caller}" if call.caller not in ("", call.name) else ""
        what, group = template.format(of or "a tensor"), template.format("a tensor")
        later = next((one.name for one in call.into if not one.name.startswith("__")), "")
        if call.name in OPERANDS and later:
            what = f"before {later}, {what}"
        if name in ORDERS and "dropout" not in call.name:
            for other in ORDERS[name]:
                if other != value:
                    says = f"{call.words}'s {name} {other:g} instead of {value:g}"
                    yield Change("number", says, _with(but, other), tier=2)
        elif isinstance(value, float) or call.name in OPERANDS or name == "value":
            start = 2.0 * value if value and math.isfinite(value) else 1.0
            fitted = _with(but)
            yield Change("number", what, fitted, float(value), start, least=-float("inf"), group=group, tier=2)
        else:
            for other in dict.fromkeys((value + 1, value - 1, 2 * value, value // 2, 1)):
                if other == value:
                    continue
                says = f"{what} {other} instead of {value}"
                yield Change("number", says, _with(but, other), tier=2)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with(but: Replace, *fixed: Any) -> Answer:
    def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
        return proceed(but(call, fixed[0] if fixed else value))

    return answer


def axes(call: Call) -> Iterator[Change]:
    """Yield another axis."""
    shape = next((x.shape for x in call.args if isinstance(x, Tensor)), ())
    for name, value, but in arguments_of(call):
        if name in AXES and isinstance(value, int) and not isinstance(value, bool):
            for axis in range(len(shape)):
                if axis != value % len(shape):
                    what = f"{call.words} over axis {axis} instead of {value % len(shape)}"
                    yield Change("other_axis", what, _with(but, axis), tier=3)


def normalized_axes(call: Call) -> Iterator[Change]:
    """Yield a layer norm over other axes, with the weights of the last ones."""
    if call.name != "layer_norm":
        return
    x, count = call.get("input"), len(call.get("normalized_shape"))
    given = tuple(range(x.ndim - count, x.ndim))
    for axes in [*((axis,) for axis in range(x.ndim)), *(tuple(range(first, x.ndim)) for first in range(x.ndim))]:
        if axes != given:

            def answer(call: Call, proceed: Proceed, value: float, /, axes: tuple[int, ...] = axes) -> Any:
                x, weight, bias = (call.get(name) for name in ("input", "weight", "bias"))
                variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
                normalised = (x - mean) * torch.rsqrt(variance + call.get("eps", 1e-5))
                normalised = normalised if weight is None else normalised * weight
                return normalised if bias is None else normalised + bias

            what = f"layer_norm over the axes {_listed(axes)} instead of {_listed(given)}"
            yield Change("other_axis", what, answer, tier=3)


def masked_scores(call: Call) -> Iterator[Change]:
    """Yield another score of what an attention mask hides than minus infinity."""

    def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
        query, key, values, mask = call.args[:3] + (call.get("attn_mask"),)
        scores = query @ key.transpose(-2, -1) * (call.get("scale") or query.shape[-1] ** -0.5)
        return scores.masked_fill(~mask, value).softmax(-1) @ values

    if call.name == "scaled_dot_product_attention" and not call.get("dropout_p"):
        mask = call.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            what = "the scores that attn_mask hides are"
            yield Change("number", what, answer, -float("inf"), 0.0, least=-float("inf"), tier=2)


def _listed(axes: Sequence[int]) -> str:
    return " and ".join(map(str, axes))


def options(call: Call) -> Iterator[Change]:
    """Yield the other value of a bool, another one of a mode, and no tensor where none is the default."""
    defaults = parameters_of(call.function)
    for name, value, but in arguments_of(call):
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
            without = f"{call.words} without {name}"
            zeros = " (zeros)" if other == "constant" else ""
            what = without if other is None else f"{call.words}'s {name} {other!r}{zeros} instead of {value!r}"
            yield Change("other_option", what, _with(but, other), tier=3)


def other_functions(call: Call, of: str) -> Iterator[Change]:
    """Yield another function of the same kind: an activation, a reduction, a loss, an operator."""
    for family in families_of(call):
        yield from _others(call, family, lambda call: ((_tensors(call)[0],), {}))
    if call.name in [name for name, _ in POOLS]:
        dims = [(name, function) for name, function in POOLS if name[-2:] == call.name[-2:]]
        options = {name: call.get(name) for name in SHARED if call.get(name) is not None}
        yield from _others(call, dims, lambda call: ((call.args[0],), options))
    for family in (REDUCTIONS, ALONG, LOSSES, COMPARISONS, SPACES):
        if call.name in [name for name, _ in family] and call.args:
            yield from _others(call, family, lambda call: (call.args, call.kwargs), f" of {of}" if of else "")
    if call.name.rstrip("_") in [name for name, _ in PAIRS] and len(_tensors(call)) == 2:
        yield from _others(call, PAIRS, lambda call: (tuple(_tensors(call)), {}))
    if call.name in BY_NUMBER and len(call.args) == 2 and is_number(call.args[1]) and not call.kwargs:
        other, function = BY_NUMBER[call.name]
        what = f"{other} by {call.args[1]:.10g} instead of {call.name}"
        # Both sides have this number, which says more than a number that one of them would have made of it.
        yield Change("other_function", what, lambda call, proceed, value, /: function(*call.args), tier=1)


def families_of(call: Call) -> Iterator[Family]:
    """Yield the families of functions of one tensor that a call's belongs to."""
    name = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(call.get("exponent"), "") if call.name == "pow" else call.name
    if len(_tensors(call)) == 1:
        yield from (family for family in FAMILIES if name in [one for one, _ in family])


def _others(call: Call, family: Family, given: Callable[[Call], tuple[Any, Any]], of: str = "") -> Iterator[Change]:
    for name, function in family:
        if name != call.name.rstrip("_"):

            def answer(call: Call, proceed: Proceed, value: float, /, function: Any = function) -> Any:
                args, kwargs = given(call)
                return function(*args, **kwargs)

            what = f"{name} instead of {call.words.rstrip('_')}"
            yield Change("other_function", f"{what}{of}", answer, group=what, tier=3)


def _tensors(call: Call) -> list[Tensor]:
    return [*tensors_in((call.args, call.kwargs))]


def not_rescaled(call: Call) -> Iterator[Change]:
    """Yield dropout whose kept values stay as they are."""
    if call.name.startswith("dropout") and call.get("training", True) and 0 < (p := call.get("p", 0.5)) < 1:

        def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
            return proceed(call) * (1 - p)

        yield Change("other_option", f"{call.words} without the division by 1 - p = {1 - p:.4g}", answer, tier=3)


def orders_of(count: int, most: int = 24) -> Iterator[tuple[int, ...]]:
    """Yield every other order of a few things."""
    return itertools.islice(itertools.permutations(range(count)), 1, most)
