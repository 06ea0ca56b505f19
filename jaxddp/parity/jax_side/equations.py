"""Equations of a port's jax loss, with the moments of their results and their lines in the port's files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.operations import LARGE, Moments, SourceLine, lines_of_user, moments

MOST_SHOWN = 2**14  # values of a result whose moments the program computes itself, instead of returning the result
MOST = 5000  # equations of a program; a scan that has more when it is unrolled stays one equation


def program_of(loss: Callable[..., Any], arguments: Sequence[Any]) -> ClosedJaxpr:
    """Return the program of a loss on one replica, whose first argument is an axis of 1.

    What does not make the loss is left out, so that the last equation makes it.
    """
    alone = jax.vmap(lambda _, values: loss(*values), (0, None), axis_name=AXIS_NAME)
    closed = jax.make_jaxpr(alone)(jnp.zeros(1), tuple(arguments))
    return closed.replace(jaxpr=dce_jaxpr(closed.jaxpr, True, instantiate=True)[0])


@dataclass(frozen=True)
class Value:
    """A value of a program.

    Attributes:
        array: the traced array.
        maker: index of the equation that computes it; None: it is an argument or a constant.
        number: its value, if the program states it.
        output: which of the equation's results it is.
    """

    array: Any
    maker: int | None = None
    number: float | None = None
    output: int = 0


@dataclass(frozen=True)
class Made:
    """An equation that has been traced."""

    name: str
    inputs: tuple[Value, ...]
    lines: tuple[SourceLine, ...]
    results: tuple[Any, ...]


class Reader:
    """Evaluate jaxprs equation by equation, and keep every equation.

    Args:
        made: list to which the equations are appended.
        evaluate: computes an equation; None: `evaluated`.
    """

    def __init__(self, made: list[Made], evaluate: "Evaluate | None" = None):
        self.made, self._compute = made, evaluate or evaluated

    def read(self, closed: ClosedJaxpr, inputs: Sequence[Value], outer: tuple[SourceLine, ...] = ()) -> list[Value]:
        """Evaluate a jaxpr; `outer`: the user's lines of the call that it is the body of, the innermost first."""
        constants = [self.constant(x) for x in closed.consts]
        values: dict[Any, Value] = dict(zip(closed.jaxpr.constvars, constants, strict=True))
        values |= zip(closed.jaxpr.invars, inputs, strict=True)

        for equation in closed.jaxpr.eqns:
            lines = lines_of(equation)
            given = [self.literal(equation, x, lines) if isinstance(x, Literal) else values[x] for x in equation.invars]
            lines += outer if outer[-1:] != lines[-1:] else ()  # those of a scan's body end at its function
            values |= zip(equation.outvars, self.evaluate(closed.jaxpr, equation, given, lines), strict=True)
        return [_stated(x) if isinstance(x, Literal) else values[x] for x in closed.jaxpr.outvars]

    def constant(self, x: Any) -> Value:
        """Return the value of a constant of a program."""
        return Value(x, number=_number(x))

    def sliced(self, x: Value, step: int, lines: tuple[SourceLine, ...]) -> Value:
        """Return what a scan is given of a value at a step."""
        return Value(x.array[step], x.maker)

    def literal(self, equation: JaxprEqn, x: Literal, lines: tuple[SourceLine, ...]) -> Value:
        """Return the value of a literal that an equation is given; `lines`: the user's lines that made the equation."""
        return _stated(x)

    def evaluate(
        self, program: Jaxpr, equation: JaxprEqn, given: list[Value], lines: tuple[SourceLine, ...]
    ) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "scan" and params["length"] * len(params["jaxpr"].jaxpr.eqns) + len(self.made) <= MOST:
            return self.scan(params, given, lines)
        if name not in OPAQUE and (body := body_of(params)) is not None:
            return self.read(body, given[len(given) - len(body.jaxpr.invars) :], lines)
        line = next(iter(lines), None)
        results = tuple(self._compute(program, equation, [x.array for x in given], line))
        if name in PLUMBING and given[0].number is not None:  # it stays a number
            return [Value(x, given[0].maker, given[0].number) for x in results]
        if (number := _folded(program, equation, given)) is not None:
            return [Value(results[0], number=number)]
        stated = [Value(None, number=float(params[key])) for key in STATED.get(name, ())]
        return self.keep(name, [*given, *stated], lines, results)

    def keep(
        self, name: str, inputs: Sequence[Value], lines: tuple[SourceLine, ...], results: Sequence[Any]
    ) -> list[Value]:
        """Keep an equation, and return its results."""
        self.made.append(Made(name, tuple(inputs), lines, tuple(results)))
        return [Value(x, len(self.made) - 1, output=output) for output, x in enumerate(results)]

    def scan(self, params: dict[str, Any], given: list[Value], lines: tuple[SourceLine, ...]) -> list[Value]:
        """Unroll a scan."""
        constants, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
        carry, of_steps = given[constants:carried], given[carried:]
        out: list[list[Value]] = []
        steps = range(params["length"])
        for step in reversed(steps) if params["reverse"] else steps:
            slices = [self.sliced(x, step, lines) for x in of_steps]
            results = self.read(params["jaxpr"], [*given[:constants], *carry, *slices], lines)
            carry = results[: params["num_carry"]]
            out.append(results[params["num_carry"] :])
        stacked = []
        for of_all in zip(*(reversed(out) if params["reverse"] else out), strict=True):
            array = jnp.stack([x.array for x in of_all])
            stacked += self.keep("stack", of_all, lines, [array])
        return [*carry, *stacked]


def _stated(x: Literal) -> Value:
    return Value(x.val, number=_number(x.val))


def _folded(program: Jaxpr, equation: JaxprEqn, given: Sequence[Value]) -> float | None:
    """Return the scalar that an equation computes from only stated numbers; None: it computes something else."""
    numbers, avals = [x.number for x in given], [x.aval for x in (*equation.invars, *equation.outvars)]
    dtypes: Any = [of.dtype for of in avals if isinstance(of, ShapedArray) and not of.shape]
    if not numbers or None in numbers or len(dtypes) != len(numbers) + 1:
        return None
    with jax.ensure_compile_time_eval():
        arrays = [jnp.asarray(x, dtype) for x, dtype in zip(numbers, dtypes, strict=False)]
        return _number(evaluated(program, equation, arrays)[0])


# Their programs are steps of a loop, branches, or how two elements are combined, and no part of the loss.
OPAQUE = ("scan", "while", "cond", "reduce", "reduce_window", "sort", "custom_linear_solve")
STATED = {"integer_pow": ("y",)}  # primitive -> parameters that are numbers of its equation
PLUMBING = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy", "pvary")


Evaluate = Callable[[Jaxpr, JaxprEqn, Sequence[Any], SourceLine | None], list[Any]]


def evaluated(program: Jaxpr, equation: JaxprEqn, arrays: Sequence[Any], line: SourceLine | None = None) -> list[Any]:
    """Compute an equation of a program; its line does not matter."""
    given = {x: array for x, array in zip(equation.invars, arrays, strict=True) if not isinstance(x, Literal)}
    alone = program.replace(
        constvars=(),
        invars=[*given],
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
        debug_info=program.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


def body_of(params: dict[str, Any]) -> ClosedJaxpr | None:
    """Return the program that an equation calls; None: it calls none."""
    for key in ("call_jaxpr", "jaxpr", "fun_jaxpr"):
        body = params.get(key)
        if isinstance(body, Jaxpr):
            return ClosedJaxpr(body, ())
        if isinstance(body, ClosedJaxpr):
            return body
    return None


def lines_of(equation: JaxprEqn) -> tuple[SourceLine, ...]:
    """Return the user's lines that made an equation, the innermost first; (): only a library made it."""
    traceback = equation.source_info.traceback
    frames: Any = [] if traceback is None else traceback.frames
    return lines_of_user((frame.file_name, frame.line_num) for frame in frames)


def _number(x: Any) -> float | None:
    """Return the value of a scalar constant; None for an array, a bool, a random key or a traced value."""
    if isinstance(x, jax.core.Tracer) or np.ndim(x):
        return None
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return float(x) if jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer) else None


def shown(x: Any) -> Any:
    """Return what the program returns of a result: the result, or the moments of a large one."""
    if not isinstance(x, jax.Array) or not _is_real(x):
        return jnp.zeros(0)
    if x.size <= MOST_SHOWN:
        return x
    values = x.astype(jnp.float64).ravel()
    finite = jnp.abs(values) < LARGE
    kept = jnp.where(finite, values, 0.0)
    sums = finite.astype(jnp.float64), kept, jnp.abs(kept), jnp.square(kept)
    bounds = jnp.where(finite, values, jnp.inf), jnp.where(finite, values, -jnp.inf)

    def joined(one: Any, other: Any) -> Any:
        added = (x + y for x, y in zip(one[:4], other[:4], strict=True))
        return *added, lax.min(one[4], other[4]), lax.max(one[5], other[5])

    # One reduction of all makes no copies of a large array, unlike one for each.
    starts = 0.0, 0.0, 0.0, 0.0, jnp.inf, -jnp.inf
    return Moments(x.size, *lax.reduce((*sums, *bounds), starts, joined, (0,)))


def _is_real(x: Any) -> bool:
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def moments_of(shown: Any) -> Moments:
    if isinstance(shown, Moments):
        size, finite, *rest = shown
        return Moments(int(size), int(finite), *(float(x) if finite else 0.0 for x in rest))
    return moments(shown)
