"""Find the numbers in a port's jax loss whose change by 1 % changes the loss of no batch."""

import ast
import linecache
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxddp.parity.idle_operations import NUMBER, Called, numbers_of
from jaxddp.parity.jax_side.equations import Reader, Value, evaluated
from jaxddp.parity.jax_side.excerpt_program import QUICKLY
from jaxddp.parity.operations import LARGE, SourceLine

MOST = 64  # numbers that are changed
SMALL = 1e-5  # up to which a number is an epsilon, as torch's functions have them inside
CHANGES = (1.01, 0.99)
ROUNDING = 1e-14  # relative change of a loss that is none; measured: a softmax of shifted scores changes by 2e-16
# Equations whose literals can be arguments of the program instead.
TAKING = ("add", "sub", "mul", "div", "max", "min", "gt", "ge", "lt", "le", "pow", "clamp", "select_n", "jit")


class NumbersOfLoss:
    """Numbers that a user's lines give a loss, to be changed.

    Args:
        closed: program of the loss.
        known: numbers that the other side has too, which are not changed.

    Attributes:
        idle: numbers whose change has changed no loss so far, each at its line, by their places.
    """

    def __init__(self, closed: ClosedJaxpr, known: Collection[float]):
        self._closed, self._known = closed, known
        self._literals: dict[int, tuple[int, Literal]] = {}  # id -> place, and the literal, which keeps its id
        self.idle: dict[int, Called] = {}
        self._changed = jax.jit(self._loss, compiler_options=QUICKLY)
        jax.eval_shape(self._loss, jnp.ones(MOST), *closed.in_avals)

    def change(self, flat: Sequence[Any]) -> None:
        """Compute a loss with each number changed, and drop the numbers that change it."""
        ones = jnp.ones(MOST)
        before = float(self._changed(ones, *flat)) if self.idle else 0.0
        for place in [*self.idle]:
            losses = [float(self._changed(ones.at[place].set(factor), *flat)) for factor in CHANGES]
            if not all(math.isclose(loss, before, rel_tol=ROUNDING) for loss in losses):
                del self.idle[place]

    def _loss(self, factors: jax.Array, *flat: Any) -> jax.Array:
        (result,) = _Changing(self, factors).read(self._closed, [Value(x) for x in flat])
        loss: jax.Array = jnp.sum(result.array)
        return loss

    def place(self, x: Literal, lines: Sequence[SourceLine]) -> int | None:
        """Return the place of a literal among the numbers; None: it is not to be changed."""
        if id(x) not in self._literals and len(self._literals) < MOST and self._is_wanted(x, lines):
            self.idle[len(self._literals)] = Called(NUMBER, numbers_of(NUMBER, [float(x.val)]), lines[0])
            self._literals[id(x)] = len(self._literals), x
        return self._literals[id(x)][0] if id(x) in self._literals else None

    def _is_wanted(self, x: Literal, lines: Sequence[SourceLine]) -> bool:
        if not lines or jnp.ndim(x.val) or not jnp.issubdtype(jnp.result_type(x.val), jnp.floating):
            return False
        (number,) = numbers_of(NUMBER, [float(x.val)])
        return SMALL < abs(number) < LARGE and number not in self._known and number in written(lines[0])


class _Changing(Reader):
    """Reader of a program whose numbers are multiplied by factors."""

    def __init__(self, numbers: NumbersOfLoss, factors: jax.Array):
        super().__init__([], evaluated_with_arrays)
        self._numbers, self._factors = numbers, factors

    def literal(self, equation: JaxprEqn, x: Literal, lines: tuple[SourceLine, ...]) -> Value:
        """Return a literal's value times its factor."""
        place = self._numbers.place(x, lines) if equation.primitive.name in TAKING else None
        if place is None:
            return super().literal(equation, x, lines)
        return Value((x.val * self._factors[place]).astype(_dtype_of(x)))

    def scan(self, params: dict[str, Any], given: list[Value], lines: tuple[SourceLine, ...]) -> list[Value]:
        """Evaluate a scan as one; its numbers stay."""
        constants, carries = params["num_consts"], params["num_carry"]

        def body(carry: list[Any], of_step: list[Any]) -> Any:
            values = [*given[:constants], *map(Value, [*carry, *of_step])]
            results = [x.array for x in Reader([]).read(params["jaxpr"], values)]
            return results[:carries], results[carries:]

        arrays = [x.array for x in given[constants:]]
        options = {"length": params["length"], "reverse": params["reverse"]}
        carry, stacked = jax.lax.scan(body, arrays[:carries], arrays[carries:], **options)
        return [*map(Value, [*carry, *stacked])]


def evaluated_with_arrays(
    program: Jaxpr, equation: JaxprEqn, arrays: Sequence[Any], line: SourceLine | None = None
) -> list[Any]:
    """Compute an equation of a program, with arrays in place of its literals where these are traced."""
    pairs = zip(equation.invars, arrays, strict=True)
    if not any(isinstance(x, Literal) and isinstance(array, jax.core.Tracer) for x, array in pairs):
        return evaluated(program, equation, arrays, line)
    given = [jnp.asarray(array, _dtype_of(x)) for x, array in zip(equation.invars, arrays, strict=True)]
    return [equation.primitive.bind(*given, **equation.params)]


def _dtype_of(x: Any) -> Any:
    return x.aval.dtype


def written(line: SourceLine) -> frozenset[float]:
    """Return the numbers that are written as constants in a line of a file, without their signs and with them."""
    return frozenset(y for x in _written(line.path) if x[0] == line.number for y in (x[1], -x[1]))


@cache
def _written(path: str) -> tuple[tuple[int, float], ...]:
    """Return the lines and values of the numbers in a file."""

    def numbers() -> Iterator[tuple[int, float]]:
        for node in ast.walk(ast.parse("".join(linecache.getlines(path)))):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                yield node.lineno, numbers_of(NUMBER, [node.value])[0]

    try:
        return tuple(numbers())
    except SyntaxError:
        return ()
