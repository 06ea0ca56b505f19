"""Edits of how calls are connected: left out, moved, added, given another tensor, their gradient stopped or scaled."""

import itertools
import math
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.forward.answers import (
    argument,
    instead,
    multiplied,
    with_argument,
    with_result,
    with_value,
)
from jaxddp.parity.diagnosis.forward.calls import (
    Answer,
    Call,
    Change,
    Name,
    Names,
    Proceed,
    Site,
    parameters_of,
    tensors_in,
)
from jaxddp.parity.diagnosis.forward.composites import CELLS, GATES
from jaxddp.parity.diagnosis.forward.edits import MOVERS, OPERANDS, orders_of
from jaxddp.parity.diagnosis.forward.function_edits import is_number


def _sorted(x: Tensor, axis: int) -> Tensor:
    return torch.sort(x, axis)[0]


NEARBY = 8  # calls between the two places of a call that is moved, or between a tensor and its new use
# Functions that a port may add -> primitives of jax that they are made of.
ADDED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "softmax": (partial(torch.softmax, dim=-1), ("exp", "reduce_max")),
    "log_softmax": (partial(torch.log_softmax, dim=-1), ("log", "reduce_max")),
    "sigmoid": (torch.sigmoid, ("logistic",)),
    "tanh": (torch.tanh, ("tanh",)),
    "relu": (torch.relu, ("max",)),
    "exp": (torch.exp, ("exp",)),
    "log": (torch.log, ("log",)),
    "abs": (torch.abs, ("abs",)),
    "square": (torch.square, ("square",)),
    "sqrt": (torch.sqrt, ("sqrt",)),
    "normalize over the last axis": (partial(F.normalize, dim=-1), ("sqrt",)),
    "neg": (torch.neg, ("neg",)),
    **{f"flip of axis {axis}": (partial(torch.flip, dims=(axis,)), ("rev",)) for axis in range(3)},
    **{f"sort along axis {axis}": (partial(_sorted, axis=axis), ("sort",)) for axis in range(3)},
}
ORDERED = [name for name, (_, parts) in ADDED.items() if parts in (("rev",), ("sort",))]  # of any dtype
NO_NAMES: Mapping[int, str] = {}
Operands = Sequence[tuple[int, Name]]  # position and name of each operand of a call
CONDITION = "the condition"  # of torch.where, that has no name
JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")
SHAPES = ("squeeze", "unsqueeze", "flatten", "unflatten", "reshape", "view")  # calls that change nothing but a shape
ITSELF = ("__get__", "detach", "contiguous", "clone", "size", "dim", "to", "float", "double")


def edits_of_connections(
    calls: Sequence[Call],
    here: Collection[int],
    primitives: Collection[str],
    names: Names,
    variables: Mapping[int, str] = NO_NAMES,
) -> Iterator[tuple[Call, Change]]:
    """Yield every edit of the connections of some calls that changes the loss.

    Args:
        calls: all calls of the loss, in order.
        here: indices of the calls that are edited.
        primitives: what the port computes where it parts from the reference.
        names: id of a tensor -> what it is.
        variables: id of a tensor -> the user's variable that holds it.
    """
    for index in here:
        call = calls[index]
        operands = _operands(call, names)
        own = (
            left_out(call, variables),
            operands_left_out(call, names),
            reordered(call, names),
            _scaled(call, operands),
            _transposed(call, operands),
            _from_zeros(call),
        )
        yield from ((call, change) for changes in own for change in changes)
        if not {"add", "sub"}.isdisjoint(primitives):
            yield from ((call, change) for change in _plus(call, operands))
        yield from ((call, change) for change in _added(call, operands, primitives))
        yield from ((calls[index], change) for change in moved(calls, index))
        yield from _elsewhere(calls, index, operands, names)
        yield from exchanged(calls, index, names)


def edits_of_gradients(call: Call, names: Names) -> Iterator[Change]:
    """Yield every edit of the gradient that reaches an operand of a call: stopped, let through, or scaled.

    Args:
        call: a recorded call.
        names: see `edits_of_connections`.
    """
    passes = Statement("gradient_passes", at="")
    if call.name == "detach":
        what = passes.but(at=names.get(id(call.args[0]), ""))
        yield Change("gradient_not_stopped", what, argument(0), group=passes, tier=3)
    elif call.name == "_set_grad_enabled" and call.args == (False,):
        yield Change("gradient_not_stopped", passes, with_argument(0, operator.not_), tier=3)
    for position, x in enumerate(call.args):
        if _is_float(x) and x.requires_grad:
            name = names.get(id(x)) or Statement("operand_number", number=position + 1)
            stopped, what = with_argument(position, Tensor.detach), Statement("no_gradient", of=name, call=call.words)
            yield Change("gradient_stopped", what, stopped, tier=3)
            times = with_value(position, _ScaledGradient.apply)
            what = Statement("gradient_factor", of=name, call=call.words)
            scaled = partial(Change, "factor", what, times, 1.0, 2.0, tier=5)
            yield scaled(least=-math.inf, values=(Value(is_factor=True),))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _keeps_shape(call: Call) -> bool:
    first: Any = call.args[0] if call.args else None
    return _is_float(first) and _is_float(call.result) and first.shape == call.result.shape and call.name not in ITSELF


def _operands(call: Call, names: Names) -> Operands:
    """Return the operands that are tensors; those with the same name have their numbers, too."""
    given = [(k, names.get(id(x), "")) for k, x in enumerate(call.args) if _is_float(x)]
    every = [name for _, name in given]
    return [
        (k, name if every.count(name) == 1 and name else Statement("numbered_operand", of=name, number=k + 1))
        for k, name in given
    ]


def left_out(call: Call, variables: Mapping[int, str] = NO_NAMES) -> Iterator[Change]:
    """Yield no call: its first argument instead of its result; `variables`: see `edits_of_connections`."""
    of, by = (variables.get(id(call.args[0]), "") if call.args else ""), ""
    if call.name in SHAPES and _is_float(call.args[0]) and _is_float(call.result):
        shapes = {"jax": tuple(call.args[0].shape), "torch": tuple(call.result.shape)}
        what = Statement("shape_left_out", call=call.words, of=of, **shapes)
        yield Change("call_left_out", what, argument(0), tier=3)
    elif _keeps_shape(call):
        for x in call.args[1:2] if call.name in OPERANDS else ():
            by = f"{x:.4g}" if isinstance(x, int | float) else variables.get(id(x), "")
        what = Statement("call_left_out", call=call.words, by=by, of=of)
        yield Change("call_left_out", what, argument(0), tier=3)
        if call.name == "flip" and call.within:  # that of the inputs and that of the outputs
            yield Change("call_left_out", Statement("flip_left_out"), argument(0), setting=True, tier=3)


def operands_left_out(call: Call, names: Names) -> Iterator[Change]:
    """Yield one of several operands instead of the result; a layer without its weights is no layer."""
    operands = _operands(call, names)
    if call.name == "mul" and len(operands) == 1 and is_number(call.args[1]):
        by = f"{call.args[1]:.4g}"
        what = Statement("operand_left_out", operands=(operands[0][1],), call=call.words, by=by)
        yield Change("operand_left_out", what, with_argument(0, torch.ones_like), tier=3)
    if len(operands) > 1 and _is_float(call.result) and "weight" not in parameters_of(call.function):
        for position, _ in operands:
            if call.args[position].shape == call.result.shape:
                others = tuple(name for other, name in operands if other != position)
                if call.name == "where":
                    others = (names.get(id(call.args[0]), CONDITION), *others)
                what = Statement("operand_left_out", operands=others, call=call.words, by="")
                yield Change("operand_left_out", what, argument(position), tier=3)


class _ScaledGradient(Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _scaled(call: Call, operands: Operands) -> Iterator[Change]:
    """Yield an operand times a number."""
    for position, name in operands:
        yield multiplied("factor", Statement("factor", of=name, call=call.words), position, 5)


def _transposed(call: Call, operands: Operands) -> Iterator[Change]:
    """Yield an operand with two of its axes of the same length exchanged, as scores of keys by queries."""
    for position, name in operands:
        shape = call.args[position].shape
        for one, other in itertools.combinations(range(len(shape)), 2):
            if shape[one] == shape[other] > 1:
                answer = with_argument(position, partial(_swapped, one, other))
                what = Statement("operand_transposed", of=name, axes=(one, other), call=call.words)
                yield Change("other_order", what, answer, tier=3)


def _swapped(one: int, other: int, x: Tensor) -> Tensor:
    return x.transpose(one, other)


def _plus(call: Call, operands: Operands) -> Iterator[Change]:
    """Yield an operand plus a number; where the call itself adds or moves values, an edit of the next call does it."""
    if call.name in (*MOVERS, "add", "add_", "sub", "rsub"):
        return
    for position, name in operands:
        plus, what = with_value(position, operator.add), Statement("addend", of=name, call=call.words)
        yield Change("addend", what, plus, 0.0, 1.0, least=-math.inf, tier=5)


def _from_zeros(call: Call) -> Iterator[Change]:
    """Yield a recurrent layer or cell that starts from zeros."""
    if call.name.removesuffix("_cell") in CELLS and len(call.args) > 1:
        states = [*tensors_in(call.args[1])]
        if all(map(_is_float, states)) and any(bool(x.any()) for x in states):
            what = Statement("state_of_zeros", call=call.words)
            yield Change("other_operand", what, with_argument(1, _zeros), tier=3)


def _zeros(state: Any) -> Any:
    return torch.zeros_like(state) if isinstance(state, Tensor) else tuple(map(torch.zeros_like, state))


def reordered(call: Call, names: Names) -> Iterator[Change]:
    """Yield the parts of a split in another order; those that are joined; the gates of a recurrent layer."""
    parts = call.result
    if isinstance(parts, tuple | list) and len({getattr(x, "shape", None) for x in parts}) == 1 and len(parts) <= 4:
        for order in orders_of(len(parts)):
            what = Statement("parts_reordered", call=call.words, order=order)
            yield Change("other_order", what, with_result(partial(_in_order, order)), tier=3)
    if call.name in JOINS and len(call.args[0]) <= 4:
        for order in orders_of(len(call.args[0])):
            parts = [names.get(id(x), "") for x in call.args[0]]
            listed = tuple(parts[k] for k in order) if len({*parts}) == len(parts) else ()
            what = Statement("joined_in_order", call=call.words, names=listed, order=order)
            yield Change("other_order", what, with_argument(0, partial(_in_order, order)), tier=3)
    if call.name == "repeat_interleave" and isinstance(_copies(call)["repeats"], int):
        yield Change(
            "other_order",
            Statement("copies_by_block"),
            instead(_tiled, lambda call: (call.args[:1], _copies(call))),
            tier=3,
        )
    if call.name in GATES:
        for order in orders_of(GATES[call.name]):
            what = Statement("gates_reordered", call=call.name, order=order)
            yield Change("other_order", what, with_argument(2, partial(_with_gates, order)), tier=3)


def _copies(call: Call) -> dict[str, Any]:
    given = dict(zip(("repeats", "dim"), call.args[1:], strict=False))
    return {name: given.get(name, call.kwargs.get(name)) for name in ("repeats", "dim")}


def _tiled(x: Tensor, repeats: int, dim: int | None) -> Tensor:
    return x.flatten().tile(repeats) if dim is None else torch.cat([x] * repeats, dim)


def _in_order(order: tuple[int, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(parts[k] for k in order)


def _with_gates(order: tuple[int, ...], weights: Sequence[Tensor]) -> list[Tensor]:
    count = len(order)
    return [torch.cat(_in_order(order, x.chunk(count))) if len(x) % count == 0 else x for x in weights]


def _added(call: Call, operands: Operands, primitives: Collection[str]) -> Iterator[Change]:
    """Yield a function that only the port computes, applied to an operand or to the result."""
    for added, (function, parts) in ADDED.items():
        if not set(parts) <= set(primitives):
            continue
        for position, name in operands:
            if call.args[position].ndim:
                what = Statement("call_added_before", added=added, of=name, call=call.words)
                yield Change("call_added", what, with_argument(position, function), tier=4)
        is_index = isinstance(call.result, Tensor) and not _is_float(call.result)  # or labels
        if _is_float(call.result) or (added in ORDERED and is_index and call.result.ndim):
            fault, tier = ("other_order", 3) if is_index else ("call_added", 4)
            what = Statement("call_added_after", added=added, call=call.words)
            yield Change(fault, what, with_result(function), tier=tier)


def moved(calls: Sequence[Call], index: int) -> Iterator[Change]:
    """Yield a call that keeps the shape, made later: at the result of another call.

    Args:
        calls: all calls of the loss, in order.
        index: the call.
    """
    call = calls[index]
    if not _keeps_shape(call):
        return
    near, far = calls[index + 1 : index + 1 + NEARBY], calls[index + 1 + NEARBY :]
    joined = [later for later in far if any(x is call.args[0] for x in later.args)]  # a residual connection
    for later in (*near, *joined):
        if _is_float(later.result) and later.result.shape == call.result.shape and later.name not in ITSELF:
            what = Statement("call_moved", call=call.words, after=later.words)
            yield Change("call_moved", what, _made_later(call.site), tier=4, also=(later.site,))


def _made_later(site: Site) -> Answer:
    """Return an answer that leaves out the call at a site, and makes it at the result of another, later one."""
    skipped = threading.local()  # each replica runs in its own thread

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        if call.site == site:
            skipped.call = call
            return call.args[0]
        made: Call = skipped.call
        return made.function(proceed(call), *made.args[1:], **made.kwargs)

    return answer


def _elsewhere(calls: Sequence[Call], index: int, operands: Operands, names: Names) -> Iterator[tuple[Call, Change]]:
    """Yield an earlier result of the same shape in place of an operand."""
    call = calls[index]
    for position, name in operands:
        x = call.args[position]
        if isinstance(x, torch.nn.Parameter):
            continue
        for before in calls[max(0, index - NEARBY) : index]:
            other = before.result
            if _is_float(other) and other is not x and other.shape == x.shape and before.name not in ITSELF:
                what = Statement("other_operand", jax=names[id(other)], torch=name, call=call.words)
                answer = _with_earlier(position, before.site)
                yield call, Change("other_operand", what, answer, tier=4, needs=(before.site,))


def _with_earlier(position: int, site: Site) -> Answer:
    return lambda call, proceed, value: proceed(call.put(position, call.earlier(site)))


SUMS = ("add", "sub")


def exchanged(calls: Sequence[Call], index: int, names: Names) -> Iterator[tuple[Call, Change]]:
    """Yield a sum of two products in which two factors have changed places, as in z * n + (1 - z) * h.

    Args:
        calls: all calls, in order.
        index: the call that adds.
        names: id of a tensor -> what it is.
    """
    call = calls[index]
    if call.name not in SUMS or len(call.args) < 2:
        return
    products = [_maker(calls[:index], x) for x in call.args[:2]]
    if any(one is None or one.name != "mul" or not _are_tensors(one.args) for one in products):
        return
    first, second = (one for one in products if one is not None)
    x = first.args[1]  # to exchange the others is the same
    for position in (0, 1):
        y = second.args[position]
        if y is not x and y.shape == x.shape:
            sites = first.site, second.site
            both = tuple(names.get(id(one), "") for one in (x, y))
            what = Statement("operands_exchanged", operands=both, calls=(first.words, second.words))
            yield call, Change("other_operand", what, _with_exchanged(*sites, position), tier=3, also=sites)


def _with_exchanged(first: Site, second: Site, position: int) -> Answer:
    """Return an answer that notes two products, and makes them with exchanged factors where they are added."""
    noted = threading.local()  # each replica runs in its own thread

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        if call.site == first:
            noted.first = call
            return proceed(call)
        if call.site == second:
            noted.second = call
            return proceed(call)
        one, other = noted.first, noted.second
        products = one.put(1, other.args[position]), other.put(position, one.args[1])
        return proceed(call.put(0, products[0].run()).put(1, products[1].run()))

    return answer


def _maker(calls: Sequence[Call], x: Any) -> Call | None:
    """Return the last call that returned a tensor."""
    return next((call for call in reversed(calls) if call.result is x), None)


def _are_tensors(values: Sequence[Any]) -> bool:
    return len(values) == 2 and all(isinstance(x, Tensor) for x in values)
