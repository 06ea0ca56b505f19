"""Numbers that remember how they were computed, so that a traced program can be run again with other numbers.

A `NamedFloat` is a float for the code that computes with it. Its arithmetic gives further `NamedFloat`s with the same
computation as an `Expression`, and each comparison, on which the code may branch, is appended to `guards`.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

ARITHMETIC = ("add", "sub", "mul", "truediv", "pow")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Guard(NamedTuple):
    """A comparison: its name in `operator`, both terms, and its result."""

    name: str
    one: Any
    other: Any
    result: bool


@dataclass(frozen=True)
class Expression:
    """A function of numbers and names."""

    function: Callable[..., float]
    operands: tuple[Any, ...]


def less_one(term: Any) -> Any:
    """Return a term minus 1; of 1 - x, -x, which is not rounded."""
    if isinstance(term, Expression) and term.function is operator.sub and term.operands[0] == 1:
        return Expression(operator.neg, (term.operands[1],))
    return Expression(operator.sub, (term, 1))


def replaced(term: Any, change: Callable[[Any], Any]) -> Any:
    """Return a term with `change` applied to it and to all of its parts, the inner ones first."""
    if isinstance(term, Expression):
        term = Expression(term.function, tuple(replaced(operand, change) for operand in term.operands))
    return change(term)


class NamedFloat(float):
    """A float with the term that it is the value of.

    Args:
        value: the number.
        term: a name, or an expression of names.
        guards: list to which each comparison is appended.

    >>> guards = []
    >>> decay = NamedFloat(0.1, "decay", guards)
    >>> (1 - decay).term.operands, decay != 0, guards
    ((1, 'decay'), True, [Guard(name='ne', one='decay', other=0, result=True)])
    """

    term: Any
    guards: list[Any]

    def __new__(cls, value: float, term: Any, guards: list[Any]) -> "NamedFloat":
        self = super().__new__(cls, value)
        self.term, self.guards = term, guards
        return self

    def __neg__(self) -> "NamedFloat":
        return NamedFloat(-float(self), Expression(operator.neg, (self.term,)), self.guards)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        return int(self)

    def __deepcopy__(self, memo: Any) -> "NamedFloat":
        return self

    __hash__ = float.__hash__


def term_of(number: Any) -> Any:
    """Return the term of a `NamedFloat`; any other object is its own."""
    return number.term if isinstance(number, NamedFloat) else number


def _arithmetic(function: Callable[..., float], reverse: bool) -> Callable[[NamedFloat, Any], Any]:
    def method(self: NamedFloat, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        pair = (other, self) if reverse else (self, other)
        return NamedFloat(function(*map(float, pair)), Expression(function, tuple(map(term_of, pair))), self.guards)

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[NamedFloat, Any], Any]:
    def method(self: NamedFloat, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        result = function(float(self), float(other))
        self.guards.append(Guard(function.__name__, self.term, term_of(other), result))
        return result

    return method


for _name in ARITHMETIC:
    setattr(NamedFloat, f"__{_name}__", _arithmetic(getattr(operator, _name), reverse=False))
    setattr(NamedFloat, f"__r{_name}__", _arithmetic(getattr(operator, _name), reverse=True))
for _name in COMPARISONS:
    setattr(NamedFloat, f"__{_name}__", _comparison(getattr(operator, _name)))
