"""Trial of tables `names`: of several that the shapes allow, the one under which both models compute the same."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import cast
from jaxddp.nn.losses import Batch
from jaxddp.parity.compare.layers import layer_residuals
from jaxddp.parity.compare.residuals import relative
from jaxddp.parity.convert import Converter, find_entry, under_all_names
from jaxddp.parity.convert.layouts import Shape
from jaxddp.parity.jax_side.layers import images_of, record_calls, twins
from jaxddp.parity.jax_side.multi_loss_step import losses_alone, multi_loss_step
from jaxddp.parity.jax_side.widened import in_float64
from jaxddp.parity.port import Port, Rule, flattened, transposed
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Tensors
from jaxddp.parity.torch_side.layers import LayerCalls
from jaxddp.parity.torch_side.probe import Probe
from jaxddp.state import Buffers, Params

Table = dict[str, str | Rule]
MOST_TABLES = 64  # each is a forward pass
MOST_LAYOUTS = 3  # each may be in one order or in the other
# A wrong table's residual over the right one's, in the first layer where they differ; measured: 1e14 in right ports,
# 900 in one with GELU by the other formula in front of that layer.
CLEARLY = 10.0
EQUAL = 1e-9  # residuals that differ by less are equal; measured: up to 3e-15


class NamesTrial:
    """One forward pass of torch, and one of jax for each table, with the same weights in float64; or one step of each.

    Args:
        port: the port.
        model: its jax model.
        functional: the model's pure side.
        module: its torch model.
        of_torch: torch's pass; empty if there was none: nothing is decided then.
        tell: reports what the process is doing.
    """

    def __init__(
        self,
        port: Port,
        model: Any,
        functional: AnyFunctional,
        module: Any,
        of_torch: Probe,
        tell: Tell,
    ):
        self._port, self._model, self._functional, self._module = port, model, functional, module
        self._tell = tell
        self._of_torch = of_torch
        self._shapes = functional.shapes

    def with_layouts(self, table: Table) -> list[Table]:
        """Return the table, and those in which jax has other orders of axes or of flattened images than torch."""
        pieces = [
            piece for piece in self._converter(table).pieces if isinstance(find_entry(piece.jax, table).value, str)
        ]
        layers = {_layer(piece.torch): _layer(piece.jax) for piece in pieces if piece.is_entire}
        lines = [
            {layers[name]: flattened(name, image) for name in names}
            for image, names in self._of_torch.images
            if names and layers.keys() >= {*names}
        ]
        turned: dict[tuple[str, Shape], Table] = {}
        for piece in (piece for piece in pieces if piece.other_axes):
            of_name = turned.setdefault((piece.jax.rpartition(".")[2], piece.other_axes), {})
            name = _layer(find_entry(piece.jax, table).paths(())[0])
            of_name[_layer(piece.jax) or piece.jax] = transposed(name or piece.torch, piece.other_axes)
        lines += turned.values()
        subsets = itertools.product((False, True), repeat=min(len(lines), MOST_LAYOUTS))
        return [
            table | {name: rule for line in itertools.compress(lines, chosen) for name, rule in line.items()}
            for chosen in subsets
        ]

    def decide(self, tables: Sequence[Table]) -> Table | None:
        """Return the table under which the layers are clearly nearest to torch's, or the only one; None: none is.

        Steps of a port with a `torch_step` show no layers: a table is the right one if it alone makes a loss equal.

        Args:
            tables: each maps all arrays.
        """
        if len(tables) < 2:
            return next(iter(tables), None)
        if len(tables) > MOST_TABLES or not self._of_torch.tensors:
            return None
        residuals = []
        for number, table in enumerate(tables, start=1):
            self._tell(f"flax_loss, to try names {number} of {len(tables)}")
            residuals.append(self._residuals(table))
        nearest = EQUAL if self._of_torch.losses else math.inf
        for one, table in zip(residuals, tables, strict=True):
            if all(other is one or is_nearer(one, other, nearest) for other in residuals):
                return table
        return None

    def _converter(self, table: Table) -> Converter:
        return Converter(self._module, self._shapes, table, self._port.transpose_kernel, self._port.no_twin)

    def _residuals(self, table: Table) -> dict[str, float]:
        """Return the residual of each layer's output, or of each loss, under a table; {} if none can be computed."""
        converter = self._converter(table)
        arrays = converter.to_jax(under_all_names(self._of_torch.tensors, converter.tied))
        of_torch = self._of_torch.calls
        for lifting in (in_float64, nullcontext):  # with casts lifted, jax may refuse two dtypes in one
            of_jax = None
            with suppress(Exception), jax.enable_x64(True), jax.default_matmul_precision("highest"), lifting():
                of_jax = self._losses(arrays) if self._of_torch.losses else self._outputs(arrays)
            if of_jax is not None and self._of_torch.losses:
                ours = {name: float(of_jax[name]) for name in self._of_torch.losses if name in of_jax}
                of_both = ((name, ours.get(name, np.inf), theirs) for name, theirs in self._of_torch.losses.items())
                return {name: relative(abs(loss - theirs), abs(theirs)) for name, loss, theirs in of_both}
            if of_jax is not None:
                images = images_of(table)
                return layer_residuals(of_torch.order, of_torch.outputs, of_jax, twins(converter), images)
        return {}

    def _outputs(self, arrays: Tensors) -> Tensors:
        """Return the outputs of the jax layers at these parameters and buffers; constants keep their values."""
        calls = LayerCalls()
        values, floats = self._inputs(arrays)
        record_calls(self._port, self._model, self._functional, values, floats, calls)
        return calls.outputs

    def _losses(self, arrays: Tensors) -> Tensors:
        """Return the losses of one step, taken on one replica."""
        assert self._port.flax_step is not None, "checked by Port"
        step = multi_loss_step(self._functional, self._port.flax_step, self._port.flax_optimizer)
        (params, buffers), floats = self._inputs(arrays)
        losses = jax.jit(partial(losses_alone, step))(params, buffers, floats)
        return {name: np.asarray(loss) for name, loss in losses.items()}

    def _inputs(self, arrays: Tensors) -> tuple[tuple[Params, Buffers], Batch]:
        params, buffers = (
            cast({name: jnp.asarray(arrays.get(name, x)) for name, x in of.items()}, "float64")
            for of in (self._functional.params, self._functional.buffers)
        )
        return (params, buffers), jax.tree.map(_widened, self._port.first_batch("jax"))


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _widened(x: np.ndarray) -> np.ndarray:
    return x.astype("float64") if x.dtype.kind == "f" else x


def common(tables: Sequence[Table]) -> Table:
    """Return the lines that all tables have.

    >>> common([{"a": "b", "q": "k"}, {"a": "b", "q": "v"}])
    {'a': 'b'}
    """
    first, *others = tables
    return {name: twin for name, twin in first.items() if all(other.get(name) == twin for other in others)}


def is_nearer(one: Mapping[str, float], other: Mapping[str, float], nearest: float = math.inf) -> bool:
    """Return whether the first layer that differs between two tables is clearly nearer to torch's under the first.

    Args:
        one, other: residuals of the layers under each table.
        nearest: the largest residual under the first table.

    >>> is_nearer({"a": 1e-16, "b": 1e-5, "c": 1.0}, {"a": 1e-16, "b": 0.5, "c": 0.5})
    True
    """
    for layer in one:
        if layer in other and abs(one[layer] - other[layer]) > EQUAL:
            return one[layer] <= nearest and other[layer] > CLEARLY * one[layer]
    return False
