"""Types of numbers that a port's jax half holds when it trains as written."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any
from unittest import mock

import jax
from flax import linen, nnx

from jaxddp.nn.any_model import AnyFunctional, transformation_of
from jaxddp.nn.model_tree import seeing
from jaxddp.optim.groups import Grouped
from jaxddp.parity.convert import Converter
from jaxddp.parity.held_types import HeldType, HeldTypes, version_of
from jaxddp.parity.jax_side.multi_loss_step import multi_loss_step
from jaxddp.parity.jax_side.optimizer_line import line_of_making
from jaxddp.parity.jax_side.side import states_of_parameters
from jaxddp.parity.operations import SourceLine, calling_lines, line_of_user
from jaxddp.parity.port import Port
from jaxddp.parity.user_code.homes import line_of_function
from jaxddp.parity.user_code.stated import named_at

Lines = dict[str, SourceLine]

# jax_default_matmul_precision -> products of float32 matrices on hardware with a choice
PRODUCTS = {
    **{"high": "TensorFloat32", "tensorfloat32": "TensorFloat32", "default": "TensorFloat32"},
    **{"highest": "float32", "float32": "float32"},
}
_wide: dict[tuple[str, int], bool] = {}  # see `version_of`


@contextmanager
def own_settings(port: str) -> Iterator[None]:
    """Keep what a port sets for all of jax from this process's other ports; each finds its own again.

    A port's code runs without 64 bits until it sets them itself, whatever the environment says.
    """
    before, version = _settings(), version_of(port)
    jax.config.update("jax_enable_x64", _wide.get(version, False))
    try:
        yield
    finally:
        _wide[version], _ = _settings()
        for name, value in zip(("jax_enable_x64", "jax_default_matmul_precision"), before, strict=True):
            jax.config.update(name, value)


def _settings() -> tuple[bool, str | None]:
    """Return the settings of jax outside of this thread's contexts: 64 bits, and the precision of products."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(
            lambda: (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
        ).result()


def held_types(
    port: Port, model: Any, functional: AnyFunctional, converter: Converter, lines: Lines, types: HeldTypes
) -> HeldTypes:
    """Add the types of a port's arrays, and of its optimizer's state after an update, to those of its losses.

    Args:
        port: the port.
        model: its model as made.
        functional: the model's pure side.
        converter: knows which arrays have a twin.
        lines: lines at which arrays are made, see `noted_arrays`.
        types: those of its losses, see `draws_of`.
    """
    home = line_of_function(port.jax_model)

    def of(arrays: Mapping[str, Any]) -> dict[str, HeldType]:
        return {name: HeldType(name_of(x.dtype), lines.get(name) or named_at(home, name)) for name, x in arrays.items()}

    types.of |= {"parameters": of(functional.params), "buffers": of(functional.buffers)}
    types.twins = tuple((piece.torch, piece.jax) for piece in converter.pieces)
    types.products = PRODUCTS.get(precision := _settings()[1] or "", precision)
    with types.collecting("inputs"):
        if port.jax_batch is not None:
            batch = port.first_batch("jax")
            types.of["inputs"] = {name: HeldType(name_of(x.dtype)) for name, x in batch.items()}
    with types.collecting("moments"):
        states = [] if port.optimizer_config is not None else _states(port, model, functional)
        types.of["moments"] = {
            f"{kind}:{name}": HeldType(name_of(x.dtype), line)
            for state, line in states
            for kind, arrays in states_of_parameters(state, functional.params).items()
            for name, x in arrays.items()
        }
    return types


def _states(port: Port, model: Any, functional: AnyFunctional) -> list[tuple[Any, SourceLine | None]]:
    """Return the shapes and types of each optimizer's state after an update, and the line that makes the optimizer."""
    if port.torch_step is not None and port.jax_step is not None:
        step = multi_loss_step(functional, port.jax_step, port.jax_optimizer)
        shapes = jax.eval_shape(step.init_optimizers, functional.params, functional.buffers)
        states = [tree.flat_within(watched.inner) for tree, watched in step.each(shapes)]
        return [(state, line_of_making(made)) for state, (_, made) in zip(states, step.optimizers, strict=True)]
    made = transformation_of(port.jax_optimizer, model)
    optimizer = seeing(functional.param_tree, made.of_learning if isinstance(made, Grouped) else made)

    def updated(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)[1]

    with suppress(Exception):  # an update may need more than gradients and parameters, a loss for instance
        return [(jax.eval_shape(updated, functional.params), line_of_making(made))]
    return [(jax.eval_shape(optimizer.init, functional.params), line_of_making(made))]


@contextmanager
def noted_arrays() -> Iterator[list[tuple[Any, SourceLine]]]:
    """Note each nnx variable, and the path of each linen one, with the user's line that makes it."""
    made: list[tuple[Any, SourceLine]] = []
    make: Any = nnx.Variable.__init__

    @wraps(make)
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if (line := line_of_user(calling_lines())) is not None:
            made.append((self, line))

    def noting(function: Any, name_at: int) -> Any:
        @wraps(function)
        def note_path(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (line := line_of_user(calling_lines())) is not None and len(args) > name_at:
                made.append((".".join((*self.path, args[name_at])), line))
            return function(self, *args, **kwargs)

        return note_path

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nnx.Variable, "__init__", note))
        for name, place in (("param", 0), ("variable", 1)):
            stack.enter_context(mock.patch.object(linen.Module, name, noting(getattr(linen.Module, name), place)))
        yield made


def lines_of_arrays(model: Any, made: list[tuple[Any, SourceLine]]) -> Lines:
    """Return the line that makes each array by its name, of those that are known."""
    lines = {name: line for name, line in made if isinstance(name, str)}
    of_variables = {id(variable): line for variable, line in made}
    with suppress(Exception):  # a tree of arrays has no nodes
        named = ((".".join(map(str, path)), id(node)) for path, node in nnx.iter_graph(model))
        lines |= {name: of_variables[node] for name, node in named if node in of_variables}
    return lines


def name_of(dtype: Any) -> str:
    """Return the name of the type in which jax holds an array: NumPy's float64 is float32 without 64 bits.

    >>> name_of("float64"), name_of("bfloat16")
    ('float32', 'bfloat16')
    """
    return str(jax.dtypes.canonicalize_dtype(dtype))
