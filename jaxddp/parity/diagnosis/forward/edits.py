"""Edits of a call's own arguments: another number, axis, option or function of the same kind. Any call has them.

Each function yields the changes that an edit may make to a call; an edit that does not fit raises when it is replayed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed, tensors_in
from jaxddp.parity.diagnosis.forward.signatures import parameters_of

Replace = Callable[[Call, Any], Call]  # returns the call with another value
AXES = ("dim", "dims", "axis", "dim0", "dim1")
NOT_TRIED = (*AXES, "normalized_shape", "chunks", "num_layers", "groups", "dtype", "_stacklevel", "inplace", "keepdim")
MOVERS = (
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "movedim", "swapaxes", "t", "flip", "roll"),
    *("__getitem__", "chunk", "split", "unbind", "cat", "stack", "squeeze", "unsqueeze", "expand", "repeat", "gather"),
    *("__get__", "contiguous", "sort", "index_select", "unfold", "narrow", "select"),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "reduction": ("mean", "sum"),
    "approximate": ("none", "tanh"),
    "mode": ("nearest", "nearest-exact", "bilinear", "bicubic", "area", "constant", "reflect", "replicate", "circular"),
}
# Function -> what a number is to it. The functions of operators.
OPERANDS = {
    **{"mul": "a factor", "mul_": "a factor", "div": "a divisor", "div_": "a divisor", "true_divide": "a divisor"},
    **{"add": "an addend", "add_": "an addend", "sub": "a subtrahend", "rsub": "a minuend", "__rsub__": "a minuend"},
    **{"__rdiv__": "a dividend", "pow": "an exponent", "__rpow__": "a base", "pow_": "an exponent"},
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), "the number that it compares with,"),
}


def _gate(x: Tensor) -> Tensor:
    """Compute hardsigmoid; the gradient of torch's is computed with 1/6 in float32, whatever the dtype."""
    return F.relu6(x + 3) / 6


# Functions that take the same arguments, where those after the first are left out.
FAMILIES: tuple[Sequence[tuple[str, Callable[..., Any]]], ...] = (
    (
        *(("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid)),
        *(("elu", F.elu), ("leaky_relu", F.leaky_relu), ("softplus", F.softplus), ("mish", F.mish), ("selu", F.selu)),
        *(("relu6", F.relu6), ("hardswish", lambda x: x * _gate(x)), ("hardtanh", F.hardtanh), ("hardsigmoid", _gate)),
        *(("celu", F.celu), ("softsign", F.softsign), ("logsigmoid", F.logsigmoid), ("square", torch.square)),
        ("GELU by tanh", lambda x: F.gelu(x, approximate="tanh")),
    ),
    (
        ("exp", torch.exp),
        ("expm1", torch.expm1),
        ("softplus", F.softplus),
        ("square", torch.square),
        ("abs", torch.abs),
    ),
    (("sqrt", torch.sqrt), ("rsqrt", torch.rsqrt), ("square", torch.square)),
    (("log", torch.log), ("log1p", torch.log1p), ("log2", torch.log2)),
    (("sin", torch.sin), ("cos", torch.cos)),
)
REDUCTIONS: Sequence[tuple[str, Callable[..., Any]]] = (
    *(("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin), ("prod", torch.prod)),
    *(("logsumexp", torch.logsumexp), ("std", torch.std), ("var", torch.var), ("norm", torch.linalg.vector_norm)),
)
ALONG: Sequence[tuple[str, Callable[..., Any]]] = (
    *(("softmax", torch.softmax), ("log_softmax", torch.log_softmax), ("cumsum", torch.cumsum)),
    ("sigmoid", lambda x, dim: torch.sigmoid(x)),
)
LOSSES: Sequence[tuple[str, Callable[..., Any]]] = (
    *(("mse_loss", F.mse_loss), ("l1_loss", F.l1_loss), ("smooth_l1_loss", F.smooth_l1_loss)),
    ("huber_loss", F.huber_loss),
)
PAIRS: Sequence[tuple[str, Callable[..., Any]]] = (
    *(("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div)),
    *(("maximum", torch.maximum), ("minimum", torch.minimum)),
    ("sub with its operands swapped", lambda x, y: y - x),
)
COMPARISONS: Sequence[tuple[str, Callable[..., Any]]] = (
    *(("gt", torch.gt), ("ge", torch.ge), ("lt", torch.lt), ("le", torch.le), ("eq", torch.eq), ("ne", torch.ne)),
)
SHARED = ("kernel_size", "stride", "padding")  # options of all poolings
POOLS: Sequence[tuple[str, Callable[..., Any]]] = tuple(
    (f"{kind}_pool{dims}d", getattr(F, f"{kind}_pool{dims}d")) for kind in ("max", "avg") for dims in (1, 2, 3)
)


def edits_of_arguments(call: Call) -> Iterator[Change]:
    """Yield every edit of a call's own arguments and of its function."""
    for edits in (numbers, axes, options, other_functions, indices, not_rescaled):
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


def _at_position(position: int, call: Call, value: Any) -> Call:
    return call.but_at(position, value)


def _by_name(name: str, call: Call, value: Any) -> Call:
    return replace(call, kwargs={**call.kwargs, name: value})


def numbers_of(call: Call) -> Iterator[float]:
    """Yield the numbers that a call is given."""
    for name, value, _ in arguments_of(call):
        if _is_number(value) and name not in NOT_TRIED:
            yield float(value)


def numbers(call: Call) -> Iterator[Change]:
    """Yield another number in place of each number: any for a float, a neighbour for an integer that counts."""
    for name, value, but in arguments_of(call):
        if not _is_number(value) or name in NOT_TRIED:
            continue
        what = OPERANDS.get(call.name, f"{call.words}'s {name}")
        if isinstance(value, float) or call.name in OPERANDS or name == "value":
            start = 2.0 * value if value else 1.0
            fitted = _with(but)
            yield Change("number", what, fitted, float(value), start, least=-float("inf"), tier=2)
        else:
            for other in dict.fromkeys((value + 1, value - 1, 2 * value, value // 2, 1)):
                if other == value:
                    continue
                says = f"{what} {other} instead of {value}"
                yield Change("number", says, _with(but, other), tier=2)


def _is_number(value: Any) -> bool:
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


def other_functions(call: Call) -> Iterator[Change]:
    """Yield another function of the same kind: an activation, a reduction, a loss, an operator."""
    for family in FAMILIES:
        if call.name in [name for name, _ in family] and len(_tensors(call)) == 1:
            yield from _others(call, family, lambda call: ((_tensors(call)[0],), {}))
    if call.name in [name for name, _ in POOLS]:
        dims = [(name, function) for name, function in POOLS if name[-2:] == call.name[-2:]]
        options = {name: call.get(name) for name in SHARED if call.get(name) is not None}
        yield from _others(call, dims, lambda call: ((call.args[0],), options))
    for family in (REDUCTIONS, ALONG, LOSSES, COMPARISONS):
        if call.name in [name for name, _ in family] and call.args:
            yield from _others(call, family, lambda call: (call.args, call.kwargs))
    if call.name.rstrip("_") in [name for name, _ in PAIRS] and len(_tensors(call)) == 2:
        yield from _others(call, PAIRS, lambda call: (tuple(_tensors(call)), {}))


def _others(
    call: Call, family: Sequence[tuple[str, Callable[..., Any]]], given: Callable[[Call], tuple[Any, Any]]
) -> Iterator[Change]:
    for name, function in family:
        if name != call.name.rstrip("_"):

            def answer(call: Call, proceed: Proceed, value: float, /, function: Any = function) -> Any:
                args, kwargs = given(call)
                return function(*args, **kwargs)

            yield Change("other_function", f"{name} instead of {call.words.rstrip('_')}", answer, tier=3)


def _tensors(call: Call) -> list[Tensor]:
    return [*tensors_in((call.args, call.kwargs))]


def not_rescaled(call: Call) -> Iterator[Change]:
    """Yield dropout whose kept values stay as they are."""
    if call.name.startswith("dropout") and call.get("training", True) and 0 < (p := call.get("p", 0.5)) < 1:

        def answer(call: Call, proceed: Proceed, value: float, /) -> Any:
            return proceed(call) * (1 - p)

        yield Change("other_option", f"{call.words} without the division by 1 - p = {1 - p:.4g}", answer, tier=3)


def indices(call: Call) -> Iterator[Change]:
    """Yield another index in place of an integer, and a slice moved by one."""
    if call.name != "__getitem__":
        return
    source, index = call.args
    whole = index if isinstance(index, tuple) else (index,)
    for position, (part, size) in enumerate(zip(whole, source.shape, strict=False)):
        others: list[Any] = []
        if isinstance(part, int) and not isinstance(part, bool):
            others = [i for i in dict.fromkeys((0, size - 1, part % size + 1, part % size - 1)) if i != part % size]
        elif isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = part.indices(size)
            others = [slice(start + by, stop + by) for by in (-1, 1) if start + by >= 0 and stop + by <= size]
        for other in others:
            changed = (*whole[:position], other, *whole[position + 1 :])
            what = f"index {_in_words(other)} instead of {_in_words(part)}"
            yield Change("other_index", what, _with(lambda call, index: call.but_at(1, index), changed), tier=3)


def _in_words(index: Any) -> str:
    """Write an index as Python does.

    >>> _in_words(slice(1, None)), _in_words(-1)
    ('1:', '-1')
    """
    if not isinstance(index, slice):
        return f"{index}"
    return ":".join("" if end is None else f"{end}" for end in (index.start, index.stop))


def orders_of(count: int, most: int = 24) -> Iterator[tuple[int, ...]]:
    """Yield every other order of a few things."""
    return itertools.islice(itertools.permutations(range(count)), 1, most)
