"""Changes of the calls in an optimizer's step: a decay elsewhere, eps inside of the root, no bias correction.

Each function takes a trace and returns another; a trace without the calls in question is returned as it is.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.optimizer.named import Expression, replaced
from jaxddp.parity.diagnosis.optimizer.trace import GRAD, PARAM, Number, Op, Read, Ref, Trace, TraceEdit

DECAY = "weight_decay"
SCALARS = ("ones", "zeros", "tensor", "as_tensor", "full")  # functions that make a number of the state


def _calls(trace: Trace, *names: str) -> Iterable[tuple[int, Op]]:
    """Yield the calls of functions with these names, with their places."""
    return ((place, op) for place, op in trace.calls if op.name in names)


def _mentions(op: Any, name: str) -> bool:
    """Return whether a number of a call depends on a name."""
    return isinstance(op, Op) and any(name in _names(number.term) for number in op.numbers)


def _names(term: Any) -> set[str]:
    if isinstance(term, Expression):
        return set().union(*map(_names, term.operands))
    return {term.partition("#")[0]} if isinstance(term, str) else set()


def _new(trace: Trace) -> int:
    """Return a number that no tensor of the trace has."""
    return max(op.result for _, op in trace.calls) + 1 + len(trace.inputs) + GRAD


def _reading(ops: Iterable[Any], before: int, after: int) -> list[Any]:
    """Return the calls with one tensor in place of another among their arguments."""

    def taken(argument: Any) -> Any:
        return Ref(after) if argument == Ref(before) else argument

    return [
        replace(op, args=tuple(map(taken, op.args)), kwargs={n: taken(x) for n, x in op.kwargs.items()})
        if isinstance(op, Op)
        else op
        for op in ops
    ]


def with_terms(change: Callable[[Any], Any], of: Callable[[Any], bool] = lambda op: True) -> TraceEdit:
    """Return the edit that changes the terms of the calls' numbers."""

    def taken(argument: Any) -> Any:
        return Number(replaced(argument.term, change)) if isinstance(argument, Number) else argument

    def edit(trace: Trace) -> Trace:
        ops = [
            replace(op, args=tuple(map(taken, op.args)), kwargs={n: taken(x) for n, x in op.kwargs.items()})
            if isinstance(op, Op) and of(op)
            else op
            for op in trace.ops
        ]
        return replace(trace, ops=tuple(ops))

    return edit


def uncorrected(term: Any) -> Any:
    """Return 1 in place of a bias correction, 1 - beta ** step."""
    if isinstance(term, Expression) and term.function is operator.sub and term.operands[0] == 1:
        power = term.operands[1]
        if isinstance(power, Expression) and power.function is operator.pow and "step" in _names(power.operands[1]):
            return 1.0
    return term


NO_BIAS_CORRECTION = with_terms(uncorrected)


def _decays(op: Any) -> bool:
    return _mentions(op, DECAY)


def adds_decay_to_gradient(trace: Trace) -> bool:
    """Return whether decay is added to the gradient, and not to the parameter."""
    return any(_decays(op) and op.result != PARAM for _, op in trace.calls)


def coupled(trace: Trace) -> Trace:
    """Return the trace with its decay added to the gradient, as an L2 penalty, and not to the parameter."""
    shrinks = [place for place, op in trace.calls if _decays(op) and op.result == PARAM]
    ops = [op for place, op in enumerate(trace.ops) if place not in shrinks]
    if len(ops) == len(trace.ops):
        return trace
    new = _new(trace)
    penalty = Op(torch.add, (Ref(GRAD), Ref(PARAM)), {"alpha": Number(DECAY)}, new)
    return replace(trace, ops=(penalty, *_reading(ops, GRAD, new)))


def decoupled(trace: Trace) -> Trace:
    """Return the trace with its decay as a factor of the parameter, 1 - lr decay, and not in the gradient."""
    place, penalty = next(((p, op) for p, op in _calls(trace, "add", "add_") if _decays(op)), (0, None))
    if penalty is None or penalty.result == PARAM:
        return trace
    factor = Number(Expression(operator.sub, (1, Expression(operator.mul, ("lr", DECAY)))))
    shrunk = Op(Tensor.mul_, (Ref(PARAM), factor), {}, PARAM)
    others = _reading(trace.ops[place + 1 :], penalty.result, penalty.args[0].number)
    return replace(trace, ops=(shrunk, *trace.ops[:place], *others))


def decay_without_rate(rate: float) -> TraceEdit:
    """Return the edit after which decay is not multiplied by the learning rate, but by 1 or -1."""
    without = with_terms(lambda term: rate if term == "lr" else term, of=_decays)
    return lambda trace: without(decoupled(trace))


def decay_last(trace: Trace) -> Trace:
    """Return the trace with its decay as a factor of the updated parameter."""
    trace = decoupled(trace)
    shrinks = [place for place, op in trace.calls if _decays(op) and op.result == PARAM]
    others = [op for place, op in enumerate(trace.ops) if place not in shrinks]
    return replace(trace, ops=(*others, *(trace.ops[place] for place in shrinks)))


def rate_first(trace: Trace) -> Trace:
    """Return the trace with the gradient, decay included, multiplied by the rate, and not the update."""
    decays = [(place, op) for place, op in trace.calls if _decays(op) and op.result != PARAM]
    place, gradient = (decays[0][0] + 1, decays[0][1].result) if decays else (0, GRAD)
    new = _new(trace)
    scaled = Op(torch.mul, (Ref(gradient), Number("lr")), {}, new)
    ops = (*trace.ops[:place], scaled, *_reading(trace.ops[place:], gradient, new))
    without = with_terms(lambda term: 1.0 if term == "lr" else term, of=lambda op: op.result == PARAM)
    return without(replace(trace, ops=ops))


def eps_inside(also_outside: bool) -> TraceEdit:
    """Return the edit that adds eps under the root: sqrt(v) / c + eps becomes sqrt(v / c**2 + eps)."""

    def edit(trace: Trace) -> Trace:
        roots = [place for place, _ in _calls(trace, "sqrt", "sqrt_")]
        added = [place for place, op in _calls(trace, "add", "add_") if _mentions(op, "eps")]
        if not roots or not added or roots[0] > added[0]:
            return trace
        (first, last), ops = (roots[0], added[0]), [*trace.ops]
        calls = dict(trace.calls)
        ops[first] = replace(calls[first], function=torch.clone)
        ops[first + 1 : last] = [_squared(op) for op in ops[first + 1 : last]]
        added_to = Ref(calls[last].result)
        again = replace(calls[last], args=(added_to, *calls[last].args[1:]))
        root = Op(Tensor.sqrt_, (added_to,), {}, added_to.number)
        ops[last + 1 : last + 1] = [root, again] if also_outside else [root]
        return replace(trace, ops=tuple(ops))

    return edit


def _squared(op: Any) -> Any:
    """Return a division by a number as one by its square."""
    if not (isinstance(op, Op) and op.name in ("div", "div_")):
        return op
    divisor = op.args[1]
    term = divisor.term if isinstance(divisor, Number) else divisor
    return replace(op, args=(op.args[0], Number(Expression(operator.pow, (term, 2)))))


def numbers_of_state(trace: Trace) -> list[str]:
    """Return the parts of the state that a step reads as numbers, without the count of steps."""
    read = (op.name.partition("#")[0] for op in trace.ops if isinstance(op, Read))
    return [name for name in dict.fromkeys(read) if name != "step"]


def in_float64(trace: Trace) -> Trace:
    """Return the trace with float64 numbers where torch keeps a number of the state in float32."""
    ops = list(trace.ops)
    for place, op in _calls(trace, *SCALARS):
        ops[place] = replace(op, kwargs={**op.kwargs, "dtype": torch.float64})
    return replace(trace, ops=tuple(ops))


def starting(key: str, value: str) -> TraceEdit:
    """Return the edit that starts a part of the state from a number, given by name."""

    def edit(trace: Trace) -> Trace:
        if key in trace.inputs or not isinstance(number := trace.outputs.get(key), Ref):
            return trace
        place = next(p for p, op in enumerate(trace.ops) if isinstance(op, Op) and op.result == number.number)
        made = Op(torch.full_like, (Ref(PARAM), Number(value)), {}, number.number)
        return replace(trace, ops=(*trace.ops[:place], made, *trace.ops[place + 1 :]))

    return edit


def ahead_in_adam(trace: Trace) -> Trace:
    """Return Adam's step with Nesterov momentum, as optax has it: m of the next step in place of m."""
    moves = [(p, op) for p, op in _calls(trace, "addcdiv_") if op.result == PARAM]
    means = [op for _, op in _calls(trace, "lerp_")]
    if not moves or not means:
        return trace
    (place, move), new = moves[0], _new(trace)
    mean, gradient = means[0].args[0], means[0].args[1]
    correction = _correction(move.kwargs["value"].term)
    beta, step = correction.operands[1].operands
    later = Expression(operator.pow, (beta, Expression(operator.add, (step, 1))))
    share = Expression(operator.truediv, (correction, Expression(operator.sub, (1, later))))
    share = Expression(operator.mul, (beta, share))
    ahead = [
        Op(torch.mul, (mean, Number(share)), {}, new),
        Op(Tensor.add_, (Ref(new), gradient), {"alpha": Number(Expression(operator.sub, (1, beta)))}, new),
        replace(move, args=(move.args[0], Ref(new), *move.args[2:])),
    ]
    return replace(trace, ops=(*trace.ops[:place], *ahead, *trace.ops[place + 1 :]))


def _correction(term: Any) -> Any:
    """Return the bias correction in the term of Adam's rate, -(lr / (1 - beta1 ** step))."""
    return term.operands[0].operands[1]


def ahead_in_rmsprop(trace: Trace) -> Trace:
    """Return RMSprop's step with Nesterov momentum."""
    sums = [op for _, op in _calls(trace, "addcdiv_") if op.result != PARAM]
    moves = [(p, op) for p, op in _calls(trace, "add_") if op.result == PARAM and not _decays(op)]
    if not sums or not moves:
        return trace
    (place, move), new, buffer = moves[0], _new(trace), sums[0].args[0]
    ahead = [
        Op(torch.mul, (buffer, Number("momentum")), {}, new),
        replace(sums[0], args=(Ref(new), *sums[0].args[1:]), result=new),
        replace(move, args=(move.args[0], Ref(new))),
    ]
    return replace(trace, ops=(*trace.ops[:place], *ahead, *trace.ops[place + 1 :]))


def largest_corrected(trace: Trace) -> Trace:
    """Return AMSGrad's step with the largest of the corrected squares, as optax has it."""
    largest = [(p, op) for p, op in _calls(trace, "maximum")]
    roots = [(p, op) for p, op in _calls(trace, "div") if _mentions(op, "step")]
    if not largest or not roots:
        return trace
    (place, maximum), (later, divided), new, ops = largest[0], roots[0], _new(trace), list(trace.ops)
    term = divided.args[1].term  # the correction's root
    ops[later] = replace(divided, args=(divided.args[0], Number(1.0)))
    ops[place : place + 1] = [
        Op(torch.div, (maximum.args[1], Number(Expression(operator.pow, (term, 2)))), {}, new),
        replace(maximum, args=(maximum.args[0], Ref(new))),
    ]
    return replace(trace, ops=tuple(ops))
