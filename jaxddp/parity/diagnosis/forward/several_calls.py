"""Edits of several calls: a chain left out, an input moved, a constant of two calls, gradients let through."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from jaxddp.parity.deviation import Statement, Value, as_code, rounded
from jaxddp.parity.diagnosis.forward.answers import argument, earlier, with_argument
from jaxddp.parity.diagnosis.forward.calls import Answer, Call, CallEdit, Change, Name, Names, Proceed, Site, tensors_in
from jaxddp.parity.diagnosis.forward.edits import arguments_of
from jaxddp.parity.diagnosis.forward.function_edits import is_number

LONGEST = 4  # calls of a chain that is left out
BLOCK = "_set_grad_enabled"
Chain = tuple[Statement, ...]  # calls, the first one first


def chains_left_out(calls: Sequence[Call], inside: Collection[int], names: Names) -> Iterator[tuple[Call, Change]]:
    """Yield chains of two calls or more left out, from a value that both sides compute to a call.

    Args:
        calls: all calls of the loss, in order.
        inside: indices of the calls whose results the port does not compute.
        names: id of a tensor -> what it is.
    """
    makers = {id(x): index for index, call in enumerate(calls) for x in tensors_in(call.result)}

    def walk(index: int, later: Chain, sites: frozenset[Site]) -> Iterator[tuple[int, Chain]]:
        call = calls[index]
        sites |= {call.site}
        for kept, x in enumerate(call.args):
            maker = makers.get(id(x))
            if maker is None or maker >= index or not isinstance(call.result, Tensor) or x.shape != call.result.shape:
                continue
            chain = (Statement("call_by", call=call.words, by=_others(call, kept, names)), *later)
            if maker in inside and len(chain) < LONGEST:
                yield from walk(maker, chain, sites)
            elif maker not in inside and len(chain) > 1 and _is_value(calls[maker], sites):
                yield maker, chain

    for index in inside:
        for maker, chain in walk(index, (), frozenset()):
            what = Statement("calls_left_out", calls=chain)
            yield (
                calls[index],
                Change("calls_left_out", what, earlier(calls[maker].site), tier=3, needs=(calls[maker].site,)),
            )


def _is_value(call: Call, sites: frozenset[Site]) -> bool:
    """Return whether a call gives a tensor, and is not one of these sites at an earlier time step."""
    return isinstance(call.result, Tensor) and call.site not in sites


def _others(call: Call, kept: int, names: Names) -> tuple[Name, ...]:
    """Return the operands of a call except one: numbers as code, and tensors that have a name."""
    others = [x for position, x in enumerate(call.args) if position != kept and isinstance(x, int | float | Tensor)]
    return tuple(filter(None, (f"{x:.4g}" if is_number(x) else names.get(id(x), "") for x in others)))


def inputs_moved(calls: Sequence[Call], inputs: Mapping[int, str]) -> Iterator[tuple[Call, Change]]:
    """Yield an entry of the batch moved by one along an axis, wherever it is used.

    Args:
        calls: all calls of the loss.
        inputs: id of a tensor of the batch -> its name.
    """
    uses: dict[int, list[tuple[Call, int]]] = {}
    for call in calls:
        for position, x in enumerate(call.args):
            if id(x) in inputs:
                uses.setdefault(id(x), []).append((call, position))
    for key, places in uses.items():
        call, first = places[0]
        for axis, by, (end, filled) in itertools.product(range(1, call.args[first].ndim), (-1, 1), ENDS.items()):
            answer = _moved({one.site: position for one, position in places}, partial(filled, axis=axis, by=by))
            what = Statement("entry_moved", entry=inputs[key], axis=axis, by=by, end=end)
            also = tuple(one.site for one, _ in places)
            yield call, Change("other_index", what, answer, tier=3, also=also, entry=inputs[key])


def _moved(positions: Mapping[Site, int], move: Callable[[Tensor], Tensor]) -> Answer:
    return lambda call, proceed, value: with_argument(positions[call.site], move)(call, proceed, value)


def _rolled(x: Tensor, axis: int, by: int) -> Tensor:
    return torch.roll(x, by, axis)


def _with_zeros(x: Tensor, axis: int, by: int) -> Tensor:
    moved = torch.roll(x, by, axis)
    moved.select(axis, 0 if by > 0 else -1).zero_()
    return moved


ENDS: dict[str, Callable[..., Tensor]] = {"rolled": _rolled, "zero": _with_zeros}


def numbers_together(call: Call, numbers: Sequence[float]) -> Iterator[Change]:
    """Yield two numbers of a call replaced by two of the port's."""
    given = [(name, x, key) for name, x, key in arguments_of(call) if isinstance(x, float)]
    for (first, x, one), (second, y, other) in itertools.combinations(given, 2):
        for pair in itertools.permutations(numbers, 2):
            of_torch, of_jax = (tuple(map(rounded, of)) for of in ((x, y), pair))
            what = Statement("two_arguments", call=call.name, names=(first, second), jax=of_jax, torch=of_torch)
            of_each = ((first, x, pair[0]), (second, y, pair[1]))
            values = tuple(Value(as_code(jax), as_code(torch), call.name, name) for name, torch, jax in of_each)
            yield Change("number", what, _with_both(one, other, pair), tier=2, values=values)


def of_step_before(calls: Sequence[Call], loop: Sequence[int], names: Names) -> Iterator[CallEdit]:
    """Yield calls of a loop that are given what the loop has carried on from the step before.

    Args:
        calls: all calls of the loss, in order.
        loop: indices of the calls, one for each step.
        names: id of a tensor -> what it is.
    """
    makers = {id(x): index for index, call in enumerate(calls) for x in tensors_in(call.result)}
    of_modules: dict[str | None, list[int]] = {}
    for k in loop:
        of_modules.setdefault(calls[k].module, []).append(k)
    call = calls[loop[0]]
    for position, x in enumerate(call.args):
        what = Statement("of_step_before", of=names.get(id(x), ""), call=call.words)
        changes: dict[Site, Change] = {}
        for numbers in of_modules.values():
            for k, site in zip(numbers, _carried(calls, numbers, position, makers), strict=False):
                answer = _of_site(position, site)
                changes[calls[k].site] = Change("other_operand", what, answer, tier=3, needs=(site,))
        if changes.keys() >= {calls[k].site for k in loop}:
            yield CallEdit(changes[call.site], frozenset(changes), changes=changes)


def _carried(calls: Sequence[Call], loop: Sequence[int], position: int, makers: Mapping[int, int]) -> list[Site]:
    """Return for each step of a loop the call that makes what it carries on to there; []: it carries nothing on."""
    values = [calls[k].args[position] for k in loop]
    made = [makers[id(x)] for x in values if id(x) in makers]
    if len({*made}) < len(loop) or len(loop) < 2:
        return []
    before = _first_carried(calls, made, values[0])
    return [] if id(before) not in makers else [calls[makers[id(x)]].site for x in (before, *values[:-1])]


def _first_carried(calls: Sequence[Call], made: Sequence[int], value: Tensor) -> Tensor | None:
    """Return what a loop's first step is given where its second is given a value of the first; None: nowhere."""
    for k in range(made[0] + 1, made[1] + 1):
        user = calls[k]
        for position, x in enumerate(user.args):
            first = next((one for one in calls[: made[0] + 1] if is_same_place(one, user)), None)
            if x is value and first is not None and isinstance(first.args[position], Tensor):
                return first.args[position]
    return None


def is_same_place(call: Call, other: Call) -> bool:
    """Return whether two calls are made by one expression of a module."""
    keys = ((one.module, one.words, one.line, one.place) for one in (call, other))
    return next(keys) == next(keys)


def _of_site(position: int, site: Site) -> Answer:
    return lambda call, proceed, value: proceed(call.put(position, call.earlier(site)))


def _with_both(one: int | str, other: int | str, pair: tuple[float, float]) -> Answer:
    return lambda call, proceed, value: proceed(call.put(one, pair[0]).put(other, pair[1]))


def blocks_without_gradients(calls: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """Yield where each `no_grad` block begins and ends."""
    switches = [index for index, call in enumerate(calls) if call.name == BLOCK]
    for begin, end in itertools.pairwise(switches):
        if calls[begin].args == (False,):
            yield begin + 1, end


def with_gradient(call: Call, proceed: Proceed, value: float) -> object:
    """Answer a call with its result, through which gradients pass though the call is in a `no_grad` block."""
    with torch.enable_grad():
        return proceed(call)


def updates_too_late(calls: Sequence[Call]) -> Iterator[tuple[Call, Change]]:
    """Yield optimizers whose update comes only after what a step computes from the new weights.

    A replay copies the new weights to where the optimizer would have made them.
    """
    for call in calls:
        if is_update(call) and call.line is not None:
            what = Statement("earlier_weights", before=call.line.text)
            yield call, Change("call_moved", what, argument(0), tier=3)


def is_update(call: Call) -> bool:
    """Return whether a call represents an optimizer, whose new weights it copies."""
    return call.name == "copy_" and isinstance(call.args[0], torch.nn.Parameter)
