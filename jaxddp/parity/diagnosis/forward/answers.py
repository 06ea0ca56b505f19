"""Answers to a call, which an edit gives in its place, made of functions of its arguments or of its result."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed, Site


def with_argument(key: int | str, function: Callable[[Any], Any]) -> Answer:
    """Return the answer that makes the call with a function of an argument in place of the argument.

    Args:
        key: place of the argument, or its parameter's name.
        function: argument -> what the call is given.
    """
    return lambda call, proceed, value: proceed(call.put(key, function(call.get(key))))


def with_value(key: int | str, operation: Callable[[Any, float], Any] = lambda argument, value: value) -> Answer:
    """Return the answer that makes the call with an operation on an argument and the edit's value, or with the value.

    >>> import operator, torch
    >>> with_value(0, operator.mul)(Call(("neg", 0), torch.neg, (torch.ones(2),), {}), Call.run, 2.0)
    tensor([-2., -2.])
    """
    return lambda call, proceed, value: proceed(call.put(key, operation(call.get(key), value)))


def with_options(**options: Any) -> Answer:
    """Return the answer that makes the call with other arguments, by the names of their parameters."""
    return lambda call, proceed, value: proceed(call.but(**options))


def with_result(function: Callable[[Any], Any]) -> Answer:
    """Return the answer that makes the call, and returns a function of its result."""
    return lambda call, proceed, value: function(proceed(call))


def argument(position: int) -> Answer:
    """Return the answer that returns an argument, and leaves the call out."""
    return lambda call, proceed, value: call.args[position]


def earlier(site: Site, function: Callable[[Any], Any] = lambda result: result) -> Answer:
    """Return the answer that returns an earlier call's result, or a function of it, and leaves the call out."""
    return lambda call, proceed, value: function(call.earlier(site))


def instead(function: Callable[..., Any], given: Callable[[Call], tuple[Any, Any]]) -> Answer:
    """Return the answer that calls another function.

    Args:
        function: the function.
        given: call -> the arguments of the function, by place and by name.
    """

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        args, kwargs = given(call)
        return proceed(replace(call, function=function, args=tuple(args), kwargs=kwargs))

    return answer


def multiplied(fault: str, what: Statement, key: int | str, tier: int = 0) -> Change:
    """Return the change that multiplies an argument by a number, of any sign."""
    times = with_value(key, operator.mul)
    return Change(fault, what, times, 1.0, 2.0, least=-float("inf"), tier=tier, values=(Value(is_factor=True),))
