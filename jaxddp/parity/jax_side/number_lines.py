"""Lines of a port's step that state a number."""

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.jax_side.equations import body_of, lines_of
from jaxddp.parity.jax_side.port_lines import program_of_step
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.processes import Tell

NEAR = 1e-6  # relative; a number may be a float32


@dataclass(frozen=True)
class NumberLines:
    """A job that returns the user's first line that multiplies or divides by each of some numbers.

    Attributes:
        case: the port.
        start: initial weights of the reference.
        numbers: the numbers; their inverses count too.
    """

    case: AnyCase
    start: Arrays
    numbers: tuple[float, ...]

    def run(self, tell: Tell) -> dict[float, SourceLine]:
        """Return the lines of those numbers that the step states."""
        tell("jax_step or jax_loss")
        stated = [*_stated(program_of_step(self.case, self.start))]
        lines = {n: next((line for x, line in stated if _is_near(x, n)), None) for n in self.numbers}
        return {number: line for number, line in lines.items() if line is not None}


def _is_near(x: float, number: float) -> bool:
    return any(abs(x - y) <= NEAR * abs(y) for y in (number, 1 / number))


def _stated(program: Jaxpr, outer: tuple[SourceLine, ...] = ()) -> Iterator[tuple[float, SourceLine]]:
    """Yield each number by which a program multiplies or divides, with its line."""
    for equation in program.eqns:
        lines = lines_of(equation) or outer
        if lines and equation.primitive.name in ("mul", "div"):
            yield from ((x, lines[0]) for x in _numbers(equation))
        if (body := body_of(equation.params)) is not None:
            yield from _stated(body.jaxpr, lines)


def _numbers(equation: JaxprEqn) -> Iterator[float]:
    for x in equation.invars:
        if isinstance(x, Literal) and not getattr(x.aval, "shape", ()):
            yield float(x.val)
