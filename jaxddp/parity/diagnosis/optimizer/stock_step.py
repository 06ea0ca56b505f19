"""Steps of a stock torch optimizer, run again with other numbers: traces as Python functions."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial, reduce
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.optimizer.named import Expression, Guard, less_one
from jaxddp.parity.diagnosis.optimizer.trace import (
    GRAD,
    PARAM,
    Names,
    Number,
    Op,
    Read,
    Ref,
    State,
    Trace,
    TraceEdit,
    trace_step,
)

Values = dict[int | str, Any]  # tensors by their numbers, and numbers by their names
CHANGE = -1  # the change of the parameter
ADDITIVE = ("add_", "sub_", "addcmul_", "addcdiv_")  # x.add_(y) moves x by y, whatever x is


class Branches(Exception):
    """Raised where torch would take another branch than it did when the step was traced."""


def compiled(trace: Trace) -> Callable[..., tuple[Tensor, State]]:
    """Return the trace as a function of other tensors and numbers.

    The parameter is kept as its value before the step and its change, so that the change, which may be many times
    smaller, is not rounded: p (1 - x) changes p by -x p.

    Returns:
        (parameters, gradient, state before the step, numbers by name) -> (change of the parameters, state after the
        step), which raises `Branches` where torch would branch differently.

    >>> numbers = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.5}
    >>> step = compiled(StockStep("SGD", numbers, {"nesterov": False}).first(numbers))
    >>> step(torch.ones(1), torch.ones(1), {}, numbers)
    (tensor([-0.1500]), {})
    """
    steps = [_bound(op) for op in trace.ops]
    after = {key: _getter(x) for key, x in trace.outputs.items()}

    def step(params: Tensor, gradient: Tensor, state: State, numbers: Names) -> tuple[Tensor, State]:
        values: Values = {PARAM: params, CHANGE: torch.zeros_like(params), GRAD: gradient}
        values.update(numbers.items())
        for key, number in trace.inputs.items():
            values[number] = state[key].clone()
        for take in steps:
            take(values)
        return values[CHANGE], {key: of(values) for key, of in after.items()}

    return step


def _bound(op: Op | Read | Guard) -> Callable[[Values], None]:
    """Return a call, a read or a guard as a function that changes the values."""
    if isinstance(op, Read):
        tensor, name = op.tensor, op.name

        def read(values: Values) -> None:
            values[name] = float(values[tensor])

        return read
    if isinstance(op, Guard):
        compare, one, other, result = getattr(operator, op.name), _term(op.one), _term(op.other), op.result

        def check(values: Values) -> None:
            if compare(one(values), other(values)) != result:
                raise Branches

        return check
    return _change(op) if op.result == PARAM else _call(op)


def _call(op: Op) -> Callable[[Values], None]:
    result, gives = op.result, op.name != "__setitem__"
    constants = {name: x for name, x in op.kwargs.items() if not isinstance(x, Ref | Number | list | tuple)}
    kwargs = {name: _getter(x) for name, x in op.kwargs.items() if name not in constants}
    args, function = [_getter(x) for x in op.args], partial(op.function, **constants)

    def call(values: Values) -> None:
        given = {name: of(values) for name, of in kwargs.items()} if kwargs else {}
        made = function(*[of(values) for of in args], **given)
        if gives:
            values[result] = made

    return call


def _change(op: Op) -> Callable[[Values], None]:
    """Return a call that changes the parameter in place as a function of its change."""
    if op.name == "mul_" and isinstance(op.args[1], Number):
        factor, less = _term(op.args[1].term), _term(less_one(op.args[1].term))

        def shrink(values: Values) -> None:
            values[CHANGE] = values[CHANGE] * factor(values) + less(values) * values[PARAM]

        return shrink
    if op.name in ADDITIVE:
        return _call(replace(op, args=(Ref(CHANGE), *op.args[1:]), result=CHANGE))
    call = _call(replace(op, result=CHANGE))

    def move(values: Values) -> None:
        call(values)  # on the sum of the parameter and its change
        values[CHANGE] = values[CHANGE] - values[PARAM]

    return move


def _getter(argument: Any) -> Callable[[Values], Any]:
    """Return an argument as a function of the values."""
    if isinstance(argument, Ref):
        return _moved if argument.number == PARAM else itemgetter(argument.number)
    if isinstance(argument, Number):
        return _term(argument.term)
    if isinstance(argument, list | tuple) and any(isinstance(x, Ref | Number) for x in argument):
        each, kind = [_getter(x) for x in argument], type(argument)
        return lambda values: kind(of(values) for of in each)
    return lambda values: argument


def _moved(values: Values) -> Tensor:
    return values[PARAM] + values[CHANGE]


def _term(term: Any) -> Callable[[Values], Any]:
    """Return a term as a function of the values."""
    if isinstance(term, Expression):
        function, operands = term.function, [_term(operand) for operand in term.operands]
        if len(operands) == 1:
            return lambda values: function(operands[0](values))
        one, other = operands
        return lambda values: function(one(values), other(values))
    return itemgetter(term) if isinstance(term, str) else lambda values: term


class StockStep:
    """A stock optimizer's step, traced when it is needed.

    Args:
        kind: name of the class in `torch.optim`.
        options, flags: see `trace_step`.
    """

    def __init__(self, kind: str, options: Names, flags: Mapping[str, Any]):
        self._kind, self._flags = kind, flags
        self._traces: dict[Any, list[Trace]] = {}
        self._firsts: dict[tuple[tuple[str, float], ...], Trace] = {}
        self._functions: dict[Any, Any] = {}
        self._options = options

    @cached_property
    def elementwise(self) -> bool:
        """Whether the update of an element depends only on this element."""
        one = torch.linspace(0.1, 0.4, 4, dtype=torch.float64).reshape(2, 2)
        other = one.clone()
        other[0, 0] = 2.0
        updates = []
        for x in (one, other):
            function = compiled(trace_step(self._kind, self._options, self._flags, x, x, {}))
            updates.append(function(x, x, {}, dict(self._options))[0].ravel()[1:])
        return torch.equal(*updates)

    def first(self, options: Names) -> Trace:
        """Return the calls of the first step on a small matrix."""
        if (key := tuple(options.items())) not in self._firsts:
            small = torch.full((2, 2), 0.5, dtype=torch.float64)
            self._firsts[key] = trace_step(self._kind, options, self._flags, small, small, {})
        return self._firsts[key]

    def step(
        self,
        params: Tensor,
        gradient: Tensor,
        state: State,
        options: Names,
        edits: tuple[TraceEdit, ...] = (),
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[Tensor, State]:
        """Take one step.

        Args:
            edits: changes of the trace.
            more: numbers that the changes need, by name.

        Returns:
            The update, to be added to the parameters, and the state after the step.
        """
        there = tuple(key for key, value in state.items() if value is not None)
        known = self._traces.setdefault((there, None if self.elementwise else tuple(params.shape)), [])
        for place, trace in enumerate(known):
            try:
                result = self._function(trace, edits)(params, gradient, state, {**options, **more})
            except Branches:
                continue
            if place:
                known.insert(0, known.pop(place))  # the next step takes the same branches, most often
            return result
        few = self._few(params), self._few(gradient), {key: self._few(x) for key, x in state.items()}
        known.insert(0, trace_step(self._kind, options, self._flags, *few))
        return self._function(known[0], edits)(params, gradient, state, {**options, **more})

    def _function(self, trace: Trace, edits: tuple[TraceEdit, ...]) -> Any:
        if (key := (id(trace), edits)) not in self._functions:
            self._functions[key] = compiled(reduce(lambda one, edit: edit(one), edits, trace))
        return self._functions[key]

    def initial(self, params: Tensor, options: Names) -> State:
        """Return the state before the first step, of those parts that do not depend on the first gradient."""
        few = self._few(params)
        trace = trace_step(self._kind, options, self._flags, few, few, {})
        makers = {op.result: (place, op) for place, op in reversed([*enumerate(trace.ops)]) if isinstance(op, Op)}
        state: State = {}
        for key, x in trace.outputs.items():
            place, op = makers.get(x.number, (0, None)) if isinstance(x, Ref) else (0, None)
            # Of zeros_like(gradient), only the shape is the gradient's.
            if op is not None and (op.name.endswith("_like") or not op.uses(GRAD)):
                part = Trace(trace.ops[: place + 1], {}, {key: x})
                state |= compiled(part)(params, params, {}, dict(options))[1]
        return state

    def _few(self, tensor: Any) -> Any:
        """Return one element of a tensor where that decides on branches as well as all of them."""
        return tensor.ravel()[:1] if self.elementwise and isinstance(tensor, Tensor) and tensor.ndim else tensor
