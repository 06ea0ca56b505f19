"""Lines of a port at which its optax optimizer and its schedule are made."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.nn.any_model import transformation_of
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.graph import Graph
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.equations import lines_of
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.value_graph import graph_of
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import OptimizerLines, SourceLine, calling_lines, is_of_user, line_of_user
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import is_large_model
from jaxddp.parity.user_code.line_values import MOST_STEPS, LineValues, Noted
from jaxddp.parity.user_code.stated import called_at

Observe = Callable[[SourceLine, str, Any, Any, Any], None]

_made: dict[int, tuple[Any, SourceLine]] = {}  # id of an `update` function -> the function, and the line that made it
_observers: list[Observe] = []


@contextlib.contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Within the `with` statement, tell of each update of a transformation that a user's line makes.

    Args:
        observe: is given the line, the function that makes the transformation ("" if one calls another for it), the
            updates before and after, and the new state.
    """
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def note_optimizers() -> None:
    """Note the user's line at which each optax transformation is made from now on, in this process."""
    make: Callable[..., Any] = optax.GradientTransformation.__new__

    @wraps(make)
    def noted(kind: type, init: Any, update: Any) -> Any:
        if (line := line_of_user(calling_lines())) is None:
            return make(kind, init, update)
        update = _observed(update, line, _maker())
        _made[id(update)] = update, line
        return make(kind, init, update)

    optax.GradientTransformation.__new__ = noted


def line_of_making(optimizer: Any) -> SourceLine | None:
    """Return the user's line that makes an optax transformation; None: unknown."""
    return _made.get(id(getattr(optimizer, "update", None)), (None, None))[1]


def _maker() -> str:
    """Return the name of the function that the user's line calls to make a transformation; "": another one makes it.

    >>> _maker()
    ''
    """
    frame = sys._getframe(2)
    if is_of_user(frame.f_code.co_filename):  # GradientTransformation(init, update)
        return optax.GradientTransformation.__name__
    above = frame.f_back
    return frame.f_code.co_name if above is not None and is_of_user(above.f_code.co_filename) else ""


def _observed(update: Callable[..., Any], line: SourceLine, maker: str) -> Callable[..., Any]:
    @wraps(update)
    def observed(updates: Any, *args: Any, **kwargs: Any) -> Any:
        returned = update(updates, *args, **kwargs)
        for observe in _observers:
            observe(line, maker, updates, *returned)
        return returned

    return observed


def line_of_schedule(optimizer: optax.GradientTransformation, params: Any) -> SourceLine | None:
    """Return the user's line that computes the last scalar of an update; None: the user's files have no schedule.

    >>> line_of_schedule(optax.sgd(optax.cosine_decay_schedule(0.1, 10)), {"w": jax.numpy.ones(2)})  # it is optax's
    """
    update = jax.make_jaxpr(lambda given: optimizer.update(given, optimizer.init(given), given))(params)
    lines = [lines_of(one) for one in update.jaxpr.eqns if all(not getattr(x.aval, "shape", ()) for x in one.outvars)]
    return next((of_one[0] for of_one in reversed(lines) if of_one), None)


def idle_lines(graph: Graph) -> set[SourceLine]:
    """Return lines all of whose values are left out: they only make branches that no `where` of numbers takes."""
    needed, waiting = {graph.end}, [graph.end]
    while waiting:
        node = graph[waiting.pop()]
        chooses = node.name == "select_n" and node.array is not None and node.array.size == 1
        inputs = [k for n, k in enumerate(node.inputs) if not (chooses and n) or node.is_near(graph[k])]
        waiting += {*inputs} - needed
        needed |= {*inputs}
    used = {line for k in needed for line in (graph[k].line, *graph[k].callers)}
    return {node.line for node in graph if node.line is not None} - used


@dataclass(frozen=True)
class JaxOptimizerLine:
    """A job that returns the lines at which a port's optimizer is made, and at which its schedule ends.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        tensor: a parameter that the optimizer updates, by torch's name, where a step has several.
        step: step, from 0, whose rate is computed line by line; None: none.
    """

    case: AnyCase
    start: Arrays
    tensor: str
    step: int | None = None

    def run(self, tell: Tell) -> OptimizerLines:
        """Return the lines; none for a built-in model, or an optimizer that is not made by optax's functions."""
        tell("jax_optimizer")
        port = getattr(self.case, "port", None)
        if port is None or port.jax_optimizer is None:
            return OptimizerLines()
        made, schedule, rates, of_group = None, None, tuple[Noted, ...](), None
        with jax.enable_x64(True), contextlib.suppress(Exception):  # the run of the port reports it
            if port.torch_step:
                made = self._one_of_several()
            else:
                made = transformation_of(port.jax_optimizer, port.jax_model())
                if not is_large_model(self.start):
                    optimizer, params = self._optimizer()
                    schedule = line_of_schedule(optimizer, params)
                    rates = self._rates(optimizer, params)
                    of_group = self._of_group(optimizer, params)
        line = of_group or line_of_making(made)
        return OptimizerLines(line, schedule or called_at(line, dir(optax.schedules)), rates)

    def _optimizer(self) -> tuple[optax.GradientTransformation, Any]:
        side = side_of(self.case)
        step = side.replica_step
        assert not isinstance(step, MultiLossStep), "a port without a torch_step"
        return step.optimizer, side.from_torch(self.start)[0]

    def _rates(self, optimizer: optax.GradientTransformation, params: Any) -> tuple[Noted, ...]:
        if self.step is None or self.step > MOST_STEPS:
            return ()
        update, gradients = jax.jit(optimizer.update), jax.tree.map(jnp.zeros_like, params)
        state = optimizer.init(params)
        for _ in range(self.step):
            _, state = update(gradients, state, params)
        with jax.disable_jit(), LineValues() as values:
            optimizer.update(gradients, state, params)

        def moved(state: Any) -> jax.Array:
            return sum(map(jnp.sum, jax.tree.leaves(optimizer.update(gradients, state, params)[0])), jnp.zeros(()))

        idle = idle_lines(graph_of(moved, [state]))
        return tuple((line, x) for line, x in values.numbers if line not in idle)

    def _of_group(self, optimizer: optax.GradientTransformation, params: Any) -> SourceLine | None:
        """Return the line that makes the transformation of the tensor's group; None: all tensors have one."""
        side, lines = side_of(self.case), list[SourceLine]()
        held = {name for name, x in params.items() if self.tensor in side.to_torch({name: x})}
        gradients = {name: jnp.full_like(x, name in held) for name, x in params.items()}

        def observe(line: SourceLine, maker: str, updates: Any, returned: Any, state: Any) -> None:
            leaves = jax.tree.leaves(updates)
            if len(leaves) < len(params) and any(map(jnp.any, leaves)):
                lines.append(line)

        with observing(observe):
            optimizer.update(gradients, optimizer.init(params), params)
        return next(iter(lines), None)

    def _one_of_several(self) -> optax.GradientTransformation:
        side = side_of(self.case)
        params, step = side.from_torch(self.start)[0], side.replica_step
        assert isinstance(step, MultiLossStep), "a port with a torch_step"
        updated = ((side.to_torch({name: params[name] for name in tree.paths}), one) for tree, one in step.optimizers)
        return next(one for tensors, one in updated if self.tensor in tensors)
