"""Lines of a port where no call of the loss is at fault: those of its functions, and of its mean over the replicas."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.equations import body_of, lines_of
from jaxddp.parity.jax_side.unequal_batches import COLLECTIVES
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import Lines, SourceLine
from jaxddp.parity.port import PortFile
from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.processes import Tell
from jaxddp.parity.user_code.homes import home_of, line_of_function
from jaxddp.parity.user_code.line_values import LineValues, Noted, first_apart

MEAN = "mean over the replicas"


@dataclass(frozen=True)
class PortLines:
    """A job that returns the lines of a port's functions by their names.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        names: the functions; `MEAN` for the line of `jax_step` that averages over the replicas.
    """

    case: AnyCase
    start: Arrays
    names: tuple[str, ...]

    def run(self, tell: Tell) -> dict[str, SourceLine]:
        """Return the lines, of those that the port has; {} for a built-in model.

        A number, such as `clip_grad_norm`, has the line that assigns it.
        """
        tell("the port's functions")
        port = getattr(self.case, "port", None)
        found = {name: line_of_function(getattr(port, name, None)) for name in self.names}
        source = getattr(self.case, "source", None)
        source = source.source if isinstance(source, DrawnSource) else source
        if isinstance(source, PortFile):
            numbers = (name for name in self.names if isinstance(getattr(port, name, None), float))
            found |= {name: home_of(Path(source.path), name) for name in numbers}
        if MEAN in self.names and getattr(port, "jax_step", None) is not None:
            with contextlib.suppress(Exception):  # the run of the port reports it
                found[MEAN] = self._mean()
        return {name: line for name, line in found.items() if line is not None}

    def _mean(self) -> SourceLine | None:
        """Return the user's line of the collective that takes the most elements; None: the step has none."""
        program = program_of_step(self.case, self.start)
        found = [(size_of(one), lines[0]) for one in collectives(program) if (lines := lines_of(one))]
        return max(found)[1] if found else None


@dataclass(frozen=True)
class BatchLines:
    """A job that returns the lines of a port's `jax_batch` and `torch_batch` that first give other values.

    Attributes:
        case: the port.
        step: step of the batches, from 0.
    """

    case: AnyCase
    step: int

    def run(self, tell: Tell) -> Lines:
        """Return the lines, of the first replica that has them; none if both sides have one function."""
        tell("the batches")
        port = getattr(self.case, "port", None)
        functions = getattr(port, "jax_batch", None), getattr(port, "torch_batch", None)
        found = Lines()
        for rank in range(self.case.world_size if all(functions) else 0):
            jax, torch = (self._noted(function, rank) for function in functions)
            if jax and torch:
                found = Lines(first_apart(jax, torch), first_apart(torch, jax))
            if found != Lines():
                break
        return found

    def _noted(self, function: Any, rank: int) -> list[Noted]:
        """Return what a function computes; [] if it computes something else when it is called again."""
        noted: list[list[Noted]] = []
        for _ in range(2):
            with LineValues() as values:
                function(self.step, rank)
            noted.append(values.noted)
        return noted[1] if noted[0] == noted[1] else []


@dataclass(frozen=True)
class StepCollectives:
    """A job that returns the sizes of what a `jax_step` exchanges between replicas.

    Attributes:
        case: the port.
        start: initial weights of the reference.
    """

    case: AnyCase
    start: Arrays

    def run(self, tell: Tell) -> tuple[int, ...]:
        """Return the number of elements that each collective of the step is given."""
        tell("jax_step")
        return tuple(size_of(one) for one in collectives(program_of_step(self.case, self.start)))


def program_of_step(case: AnyCase, start: Arrays) -> Jaxpr:
    """Return the program of a port's step on its first batch."""
    with jax.enable_x64(True):
        side = side_of(case)
        step: Any = side.replica_step
        batch = jax.tree.map(lambda x: jnp.asarray(x[0]), next(iter(case.batches())))
        state = step.init(*side.from_torch(start))
        with side.lifting():
            return jax.make_jaxpr(step, axis_env=[(AXIS_NAME, case.world_size)])(state, batch).jaxpr


def collectives(program: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations that exchange arrays between replicas, those inside of other equations included."""
    for equation in program.eqns:
        if equation.primitive.name.startswith(COLLECTIVES):
            yield equation
        elif (body := body_of(equation.params)) is not None:
            yield from collectives(body.jaxpr)


def size_of(equation: JaxprEqn) -> int:
    """Return the number of elements that an equation is given."""
    return sum(math.prod(x.aval.shape) for x in equation.invars if isinstance(x.aval, ShapedArray))
