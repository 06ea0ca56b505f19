"""Lines of a port where no call of the loss is at fault: those of its functions, and of its mean over the replicas."""

import contextlib
import inspect
import linecache
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.equations import body_of, line_of
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import SourceLine, is_of_user
from jaxddp.parity.processes import Tell

COLLECTIVES = ("psum", "all_gather", "reduce_scatter", "psum_scatter", "ppermute", "all_to_all")
MEAN = "mean over the replicas"


@dataclass(frozen=True)
class PortLines:
    """A job that returns the lines of a port's functions by their names.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        names: the functions; `MEAN` for the line of `flax_step` that averages over the replicas.
    """

    case: AnyCase
    start: Arrays
    names: tuple[str, ...]

    def run(self, tell: Tell) -> dict[str, SourceLine]:
        """Return the lines, of those that the port has; {} for a built-in model."""
        tell("the port's functions")
        port = getattr(self.case, "port", None)
        found = {name: line_of_function(getattr(port, name, None)) for name in self.names}
        if MEAN in self.names and getattr(port, "flax_step", None) is not None:
            with contextlib.suppress(Exception):  # it is told where the port runs
                found[MEAN] = self._mean()
        return {name: line for name, line in found.items() if line is not None}

    def _mean(self) -> SourceLine | None:
        """Return the user's line of the collective that takes the most elements; None: the step has none."""
        with jax.enable_x64(True):
            side = side_of(self.case)
            step: Any = side.replica_step
            batch = jax.tree.map(lambda x: jnp.asarray(x[0]), next(iter(self.case.batches())))
            state = step.init(*side.from_torch(self.start))
            with side.lifting():
                program = jax.make_jaxpr(step, axis_env=[(AXIS_NAME, self.case.world_size)])(state, batch)
        found = [(size_of(one), line) for one in collectives(program.jaxpr) if (line := line_of(one)) is not None]
        return max(found)[1] if found else None


def line_of_function(function: Any) -> SourceLine | None:
    """Return the line that begins a function of the user's; None: it is a library's, or no function.

    >>> line_of_function(print) is line_of_function(None) is line_of_function(jnp.mean) is None
    True
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not is_of_user(code.co_filename):
        return None
    linecache.checkcache(code.co_filename)
    number = code.co_firstlineno
    while linecache.getline(code.co_filename, number).lstrip().startswith("@"):
        number += 1
    return SourceLine(code.co_filename, number)


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
