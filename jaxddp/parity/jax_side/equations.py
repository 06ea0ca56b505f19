"""Equations of a port's jax loss, with the moments of their results and their lines in the port's files."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.nn.losses import Batch
from jaxddp.parity.case_interface import AnyCase, Trajectory, micro_batches_of
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.recorded_runs import given_gradients
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import Moments, Operation, Operations, SourceLine, lines_of_user, moments
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.state import Buffers, Params

LARGE = 2**14  # values of a result whose moments the program computes itself, instead of returning the result
MOST = 5000  # equations of a program; a scan that has more when it is unrolled stays one equation


@dataclass(frozen=True)
class ReadEquations:
    """A job that reads the program of a case's loss on one micro-batch.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        reference: folder of the reference's records.
        step, rank: step (from 0) and rank whose first micro-batch is the input.
        loss: the loss of a `MultiLossStep` that is read, or the parameter, by torch's name, whose next value is.
    """

    case: AnyCase
    start: Arrays
    reference: Path
    step: int
    rank: int
    loss: str = "loss"

    def run(self, tell: Tell) -> Operations:
        """Trace the loss, run it, and return its equations; () if it cannot be traced for a single replica."""
        tell("jax's program")
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            side = side_of(self.case)
            batch = micro_batches_of(next(islice(self.case.batches(), self.step, None)), self.rank)[0]
            weights = side.from_torch(reference.before(self.step))
            arguments: tuple[Any, ...] = *weights, jax.tree.map(jnp.asarray, batch)
            step: Any = side.replica_step
            if isinstance(step, MultiLossStep):
                arguments = *arguments, given_gradients(reference, self.step, side)
            # A loss that cannot be traced for a single replica, or has no equations, is explained without them.
            with side.lifting(), contextlib.suppress(Exception):
                return read(lambda *values: _results(side, step, *values)[self.loss], arguments)
        return ()


def _results(
    side: JaxSide, step: Any, params: Params, buffers: Buffers, batch: Batch, *gradients: Params
) -> dict[str, jax.Array]:
    """Return a step's losses by name; also the new parameters of a `MultiLossStep`, in a first step with gradients."""
    if not isinstance(step, MultiLossStep):
        sums: dict[str, jax.Array] = step.loss(params, buffers, batch)[0]
        return sums
    state = step.init(params, buffers)
    state = replace(state, opt_state=step.forced(state.opt_state, *gradients))
    stages = step(state, MicroBatches(None, batch))[2]
    return {**stages["local_loss"], **side.to_torch(stages["params"], library=jnp)}


def read(loss: Callable[..., Any], arguments: Sequence[Any]) -> Operations:
    """Return the equations of a loss, those inside of jit, checkpoint, cond and short scans included.

    Args:
        loss: function of arrays that returns a scalar; it may use collectives.
        arguments: trees of arrays.

    >>> program = read(lambda x: jnp.sum(jax.nn.leaky_relu(x, 0.2)), [jnp.array([1.0, -1.0])])
    >>> [(one.name, one.numbers) for one in program if one.numbers]
    [('ge', (0.0,)), ('mul', (0.2,))]
    """
    alone = jax.vmap(lambda _, values: loss(*values), (0, None), axis_name=AXIS_NAME)
    closed = jax.make_jaxpr(alone)(jnp.zeros(1), tuple(arguments))
    # What does not make the loss is left out, so that the last equation makes it.
    closed = closed.replace(jaxpr=dce_jaxpr(closed.jaxpr, True, instantiate=True)[0])
    made: list[_Made] = []

    def run(*flat: jax.Array) -> list[Any]:
        made.clear()
        Reader(made).read(closed, [Value(x) for x in flat])
        return [[shown(x) for x in one.results] for one in made]

    flat = jax.tree.leaves((jnp.zeros(1), tuple(arguments)))
    results = [[moments_of(x) for x in of_one] for of_one in jax.device_get(jax.jit(run)(*flat))]
    return tuple(_operation(one, of_one, results) for one, of_one in zip(made, results, strict=True))


@dataclass(frozen=True)
class Value:
    """A value of a program.

    Attributes:
        array: the traced array.
        maker: index of the equation that computes it; None: it is an argument or a constant.
        number: its value, if the program states it.
    """

    array: Any
    maker: int | None = None
    number: float | None = None


@dataclass(frozen=True)
class _Made:
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

    def __init__(self, made: list[_Made], evaluate: "Evaluate | None" = None):
        self._made, self._compute = made, evaluate or evaluated

    def read(self, closed: ClosedJaxpr, inputs: Sequence[Value], outer: tuple[SourceLine, ...] = ()) -> list[Value]:
        """Evaluate a jaxpr; `outer`: the user's lines of the call that it is the body of, the innermost first."""
        constants = [Value(x, number=_number(x)) for x in closed.consts]
        values: dict[Any, Value] = dict(zip(closed.jaxpr.constvars, constants, strict=True))
        values |= zip(closed.jaxpr.invars, inputs, strict=True)

        for equation in closed.jaxpr.eqns:
            lines = lines_of(equation)
            given = [self.literal(equation, x, lines) if isinstance(x, Literal) else values[x] for x in equation.invars]
            lines += outer if outer[-1:] != lines[-1:] else ()  # those of a scan's body end at its function
            values |= zip(equation.outvars, self.evaluate(closed.jaxpr, equation, given, lines), strict=True)
        return [_stated(x) if isinstance(x, Literal) else values[x] for x in closed.jaxpr.outvars]

    def literal(self, equation: JaxprEqn, x: Literal, lines: tuple[SourceLine, ...]) -> Value:
        """Return the value of a literal that an equation is given; `lines`: the user's lines that made the equation."""
        return _stated(x)

    def evaluate(
        self, program: Jaxpr, equation: JaxprEqn, given: list[Value], lines: tuple[SourceLine, ...]
    ) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "scan" and params["length"] * len(params["jaxpr"].jaxpr.eqns) + len(self._made) <= MOST:
            return self.scan(params, given, lines)
        if name not in ("scan", "while", "cond") and (body := body_of(params)) is not None:
            return self.read(body, given[len(given) - len(body.jaxpr.invars) :], lines)
        line = next(iter(lines), None)
        results = tuple(self._compute(program, equation, [x.array for x in given], line))
        if name in PLUMBING and given[0].number is not None:  # it stays a number
            return [Value(x, given[0].maker, given[0].number) for x in results]
        if (number := _folded(program, equation, given)) is not None:
            return [Value(results[0], number=number)]
        self._made.append(_Made(name, tuple(given), lines, results))
        return [Value(x, len(self._made) - 1) for x in results]

    def scan(self, params: dict[str, Any], given: list[Value], lines: tuple[SourceLine, ...]) -> list[Value]:
        """Unroll a scan."""
        constants, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
        carry, of_steps = given[constants:carried], given[carried:]
        out: list[list[Value]] = []
        steps = range(params["length"])
        for step in reversed(steps) if params["reverse"] else steps:
            slices = [Value(x.array[step], x.maker) for x in of_steps]
            results = self.read(params["jaxpr"], [*given[:constants], *carry, *slices], lines)
            carry = results[: params["num_carry"]]
            out.append(results[params["num_carry"] :])
        stacked = []
        for of_all in zip(*(reversed(out) if params["reverse"] else out), strict=True):
            array = jnp.stack([x.array for x in of_all])
            self._made.append(_Made("stack", tuple(of_all), lines, (array,)))
            stacked.append(Value(array, len(self._made) - 1))
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
    if x.size <= LARGE:
        return x
    values = x.astype(jnp.float64).ravel()
    finite = jnp.isfinite(values)
    kept = jnp.where(finite, values, 0.0)
    bounds = jnp.where(finite, values, jnp.inf).min(), jnp.where(finite, values, -jnp.inf).max()
    return Moments(x.size, finite.sum(), kept.sum(), jnp.abs(kept).sum(), kept @ kept, *bounds)  # type: ignore[arg-type]


def _is_real(x: Any) -> bool:
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def moments_of(shown: Any) -> Moments:
    if isinstance(shown, Moments):
        size, finite, *rest = shown
        return Moments(int(size), int(finite), *map(float, rest))
    return moments(shown)


def _operation(made: _Made, results: list[Moments], of_all: list[list[Moments]]) -> Operation:
    inputs = [x.maker for x in made.inputs if x.maker is not None]
    numbers = [x.number for x in made.inputs if x.number is not None]
    line, callers = next(iter(made.lines), None), made.lines[1:]
    return Operation(made.name, tuple(dict.fromkeys(inputs)), tuple(numbers), line, tuple(results), callers)
