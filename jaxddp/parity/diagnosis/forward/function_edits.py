"""Edits that call another function of the same kind."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jaxddp.parity.deviation import Statement, Value, rounded
from jaxddp.parity.diagnosis.forward.answers import instead
from jaxddp.parity.diagnosis.forward.calls import Call, Change, Name, tensors_in

Family = Sequence[tuple[str, Callable[..., Any]]]  # functions that take the same arguments, with their names


def _gate(x: Tensor) -> Tensor:
    """Compute hardsigmoid; the gradient of torch's is computed with 1/6 in float32, whatever the dtype."""
    return F.relu6(x + 3) / 6


def _norm(x: Tensor, *along: Any, **options: Any) -> Tensor:
    """Compute the Euclidean norm, with the arguments of `torch.sum`."""
    return torch.linalg.vector_norm(x, 2, *along, **options)


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
    *(("logsumexp", torch.logsumexp), ("std", torch.std), ("var", torch.var), ("norm", _norm)),
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


def other_functions(call: Call, of: Name) -> Iterator[Change]:
    """Yield another function of the same kind: an activation, a reduction, a loss, an operator."""
    for family in families_of(call):
        yield from _others(call, family, lambda call: ((_tensors(call)[0],), {}))
    if call.name in [name for name, _ in POOLS]:
        dims = [(name, function) for name, function in POOLS if name[-2:] == call.name[-2:]]
        options = {name: call.get(name) for name in SHARED if call.get(name) is not None}
        yield from _others(call, dims, lambda call: ((call.args[0],), options))
    for family in (REDUCTIONS, ALONG, LOSSES, COMPARISONS, SPACES):
        if call.name in [name for name, _ in family] and call.args:
            yield from _others(call, family, lambda call: (call.args, call.kwargs), of)
    if call.name.rstrip("_") in [name for name, _ in PAIRS] and len(_tensors(call)) == 2:
        yield from _others(call, PAIRS, lambda call: (tuple(_tensors(call)), {}))
    if call.name in BY_NUMBER and len(call.args) == 2 and is_number(call.args[1]) and not call.kwargs:
        other, function = BY_NUMBER[call.name]
        what = Statement("other_operator", jax=other, number=rounded(call.args[1]), torch=call.name)
        # Both sides have this number, which says more than a number that one of them would have made of it.
        answer = instead(function, lambda call: (call.args, {}))
        yield Change("other_function", what, answer, tier=1, values=(Value(other, call.name),))


def families_of(call: Call) -> Iterator[Family]:
    """Yield the families of functions of one tensor that a call's belongs to."""
    name = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(call.get("exponent"), "") if call.name == "pow" else call.name
    if len(_tensors(call)) == 1:
        yield from (family for family in FAMILIES if name in [one for one, _ in family])


def _others(call: Call, family: Family, given: Callable[[Call], tuple[Any, Any]], of: Name = "") -> Iterator[Change]:
    for name, function in family:
        if name != call.name.rstrip("_"):
            values = (Value(name, call.name.rstrip("_")),)
            group, answer = (
                Statement("other_function", jax=name, torch=call.words.rstrip("_"), of=""),
                instead(function, given),
            )
            yield Change("other_function", group.but(of=of), answer, group=group, tier=3, values=values)


def _tensors(call: Call) -> list[Tensor]:
    return [*tensors_in((call.args, call.kwargs))]


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
