"""The port's loss as a graph of values: a job of the jax process, and a function of any loss."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.nn.losses import Batch
from jaxddp.parity.case_interface import AnyCase, Trajectory, micro_batches_of
from jaxddp.parity.graph import ARGUMENT, SLICE, Graph, Node, operations_of
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.equations import Made, Reader, Value, evaluated, moments_of, program_of, shown
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.recorded_runs import given_gradients
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import Moments, Operations, SourceLine
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.varied import WAYS, varied
from jaxddp.state import Buffers, Params


@dataclass(frozen=True)
class ReadGraphs:
    """Values of a port's loss.

    Attributes:
        run: those of the run; None: they could not be read.
        varied: way of `varied.WAYS` -> those with parameters that are varied; "turned": of the next replica's
            micro-batch, too.
    """

    run: Graph | None = None
    varied: Mapping[str, Graph] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadLoss:
    """A job that reads the values of a case's loss on one micro-batch.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        reference: folder of the reference's records.
        step, rank: step (from 0) and rank whose first micro-batch is the input.
        loss: the loss that is read, or the buffer, or parameter of a `MultiLossStep`, whose next value is.
        backward: values also have their cotangents, unless the program is a large one.
        needed: of a large program, indices of the values that are read as arrays and not as moments.
    """

    case: AnyCase
    start: Arrays
    reference: Path
    step: int
    rank: int
    loss: str = "loss"
    backward: bool = False
    needed: tuple[int, ...] = ()

    def run(self, tell: Tell) -> ReadGraphs:
        """Trace the loss, run it, and return its values; none if it cannot be traced for a single replica."""
        tell("jax's program")
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        read: dict[str, Graph] = {}
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            side = side_of(self.case)
            step: Any = side.replica_step
            batches = next(islice(self.case.batches(), self.step, None))
            weights, parameters = reference.before(self.step), [*reference.records[self.step]["params"]]

            def arguments(tensors: Arrays, rank: int) -> tuple[Any, ...]:
                batch = jax.tree.map(jnp.asarray, micro_batches_of(batches, rank)[0])
                gradients = (given_gradients(reference, self.step, side),) if isinstance(step, MultiLossStep) else ()
                return *side.from_torch(tensors), batch, *gradients

            # A loss that cannot be traced for a single replica, or has no equations, is explained without them.
            with side.lifting(), contextlib.suppress(Exception):
                loss = TracedLoss(
                    lambda *values: _result(self.loss, side, step, *values),
                    arguments(weights, self.rank),
                    self.needed,
                )
                read["run"] = loss.graph(arguments(weights, self.rank), self.backward)
                ways = {} if isinstance(step, MultiLossStep) else self._ways(read["run"])
                for way, rank in ways.items():
                    read[way] = loss.graph(arguments(varied(weights, parameters, way), rank))
        return ReadGraphs(read.pop("run", None), read)

    def _ways(self, run: Graph) -> dict[str, int]:
        """Return the ways in which parameters are varied, each with the replica whose micro-batch is the input."""
        near = {} if run.is_partial else {NEAR: self.rank}
        turned = {} if run.is_partial and not self.needed else {TURNED: (self.rank + 1) % self.case.world_size}
        return near | turned


def _result(
    name: str, side: JaxSide, step: Any, params: Params, buffers: Buffers, batch: Batch, *gradients: Params
) -> jax.Array:
    """Return a step's loss, or what a buffer, or a parameter of a `MultiLossStep`, is after it, by torch's name."""
    if not isinstance(step, MultiLossStep):
        sums, after = step.loss(params, buffers, batch)
        result: jax.Array = sums[name] if name in sums else side.to_torch(after, library=jnp)[name]
        return result
    state = step.init(params, buffers)
    state = replace(state, opt_state=step.forced(state.opt_state, *gradients))
    stages = step(state, MicroBatches(None, batch))[2]
    losses: dict[str, jax.Array] = stages["local_loss"]
    return losses[name] if name in losses else side.to_torch(stages["params"], library=jnp)[name]


NEAR, TURNED = WAYS
MOST_BYTES = 2**27  # of all values; of a larger program, large values are read as moments unless they are needed


def kept(x: Any) -> Any:
    """Return a value, nothing for a random key."""
    return x if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended) else jnp.zeros(0)


def is_float(x: Any) -> bool:
    """Return whether a value is an array of real floating-point numbers."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


class TracedLoss:
    """A loss as the equations that `equations.read` reads.

    Args:
        loss: function of arrays that returns a scalar; it may use collectives.
        arguments: trees of arrays.
        needed: see `ReadLoss`.
    """

    def __init__(self, loss: Callable[..., Any], arguments: Sequence[Any], needed: Sequence[int] = ()):
        self._closed = program_of(loss, arguments)
        flat, _ = jax.tree_util.tree_flatten_with_path(tuple(arguments))
        self._names = ["the replica", *(jax.tree_util.keystr(path) for path, _ in flat)]
        self._made: list[Made] = []
        self._needed = {*needed}
        self._run = jax.jit(self._values)

    def _values(self, *arrays: jax.Array) -> list[Any]:
        self._made.clear()
        self._read(_GraphReader(self._made), arrays)
        is_small = sum(x.nbytes for one in self._made for x in one.results if isinstance(x, jax.Array)) <= MOST_BYTES
        index = count()
        return [
            [kept(x) if next(index) in self._needed or is_small else shown(x) for x in one.results]
            for one in self._made
        ]

    def _read(self, reader: Reader, arrays: Sequence[jax.Array]) -> Any:
        """Return the loss, computed by a reader."""
        given = [reader.keep(name, (), (), [x])[0] for name, x in zip(self._names, arrays, strict=True)]
        return reader.read(self._closed, given)[0].array

    def _cotangents(self, *arrays: jax.Array) -> list[list[jax.Array | None]]:
        shifts = [[jnp.zeros_like(x) if is_float(x) else None for x in one.results] for one in self._made]
        return jax.grad(lambda shifts: self._read(_ShiftedReader([], shifts), arrays).sum())(shifts)

    def graph(self, arguments: Sequence[Any], backward: bool = False) -> Graph:
        """Return the values of the loss, computed from trees of arrays of the same shapes.

        Args:
            arguments: the trees.
            backward: values also have their cotangents.
        """
        arrays = jnp.zeros(1), *jax.tree.leaves(tuple(arguments))
        values = jax.device_get(self._run(*arrays))
        is_small = not any(isinstance(x, Moments) for results in values for x in results)
        cotangents = jax.device_get(jax.jit(self._cotangents)(*arrays)) if backward and is_small else None
        firsts: list[int] = []
        nodes: list[Node] = []
        for number, (one, of_one) in enumerate(zip(self._made, values, strict=True)):
            firsts.append(len(nodes))
            is_argument = number < len(self._names) or one.name == _GraphReader.CONSTANT
            call = ARGUMENT if is_argument else number
            inputs = tuple(firsts[x.maker] + x.output for x in one.inputs if x.maker is not None)
            numbers = tuple(x.number for x in one.inputs if x.number is not None)
            leading = next((k for k, x in enumerate(one.inputs) if x.number is None), 0)
            line, callers = next(iter(one.lines), None), one.lines[1:]
            for output, x in enumerate(of_one):
                array = None if isinstance(x, Moments) or not x.size else np.asarray(x)
                reals = array.view(array.real.dtype) if array is not None and array.dtype.kind == "c" else x
                known = moments_of(reals) if array is not None or isinstance(x, Moments) else None
                cotangent = None if cotangents is None else cotangents[number][output]
                known_of = one.name, call, output, inputs, numbers, line, callers, known, array, cotangent, leading
                nodes.append(Node(*known_of))
        return Graph(nodes)


def graph_of(loss: Callable[..., Any], arguments: Sequence[Any]) -> Graph:
    """Return the values of a loss; see `TracedLoss`.

    >>> graph = graph_of(lambda x: jnp.sum(2 * jnp.sin(x)), [jnp.array([1.0, 2.0])])
    >>> [(node.name, node.inputs, node.numbers) for node in graph[1:5]]
    [('[0]', (), ()), ('sin', (1,), ()), ('mul', (2,), (2.0,)), ('reduce_sum', (3,), ())]
    """
    return TracedLoss(loss, arguments).graph(arguments)


class _GraphReader(Reader):
    """A reader that keeps constants and slices as values."""

    CONSTANT = "a constant"

    def constant(self, x: Any) -> Value:
        value = super().constant(x)
        if value.number is not None:
            return value
        return self.keep(self.CONSTANT, (), (), [jnp.asarray(x)])[0]

    def sliced(self, x: Value, step: int, lines: tuple[SourceLine, ...]) -> Value:
        return self.keep(SLICE, (x,), lines, [x.array[step]])[0]


class _ShiftedReader(_GraphReader):
    """A reader that adds a shift to every value; the gradient with respect to it is the value's cotangent.

    Args:
        made: see `Reader`.
        shifts: for each equation, those of its results; None: it is no float.
    """

    def __init__(self, made: list[Made], shifts: Sequence[Sequence[jax.Array | None]]):
        super().__init__(made)
        self._shifts = shifts

    def keep(
        self, name: str, inputs: Sequence[Value], lines: tuple[SourceLine, ...], results: Sequence[Any]
    ) -> list[Value]:
        shifts = self._shifts[len(self.made)]
        shifted = [x if shift is None else x + shift for x, shift in zip(results, shifts, strict=True)]
        return super().keep(name, inputs, lines, shifted)

    def evaluate(
        self, program: Jaxpr, equation: JaxprEqn, given: list[Value], lines: tuple[SourceLine, ...]
    ) -> list[Value]:
        if not equation.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            return super().evaluate(program, equation, given, lines)
        # Its body shows the values, and its rule makes the gradients of what it is given.
        stopped = [replace(x, array=jax.lax.stop_gradient(x.array)) for x in given]
        inside = super().evaluate(program, equation, stopped, lines)
        exact = evaluated(program, equation, [x.array for x in given])
        both = zip(inside, exact, strict=True)
        return [replace(x, array=y + x.array - jax.lax.stop_gradient(x.array)) for x, y in both]


def read(loss: Callable[..., Any], arguments: Sequence[Any]) -> Operations:
    """Return the equations of a loss; see `graph_of`.

    >>> program = read(lambda x: jnp.sum(jax.nn.leaky_relu(x, 0.2)), [jnp.array([1.0, -1.0])])
    >>> [(one.name, one.numbers) for one in program if one.numbers]
    [('ge', (0.0,)), ('mul', (0.2,))]
    """
    return operations_of(graph_of(loss, arguments))
