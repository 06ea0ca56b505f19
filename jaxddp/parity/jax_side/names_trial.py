"""Trial of tables `names`: of several that the shapes allow, the one under which both models compute the same."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import cast
from jaxddp.nn.losses import Batch
from jaxddp.nn.plain import PlainFunctional
from jaxddp.parity.compare.layers import layer_residuals
from jaxddp.parity.convert import Converter, find_entry, under_all_names
from jaxddp.parity.convert.layouts import Shape
from jaxddp.parity.convert.swaps import is_within, moves, swap, units_of, widest
from jaxddp.parity.jax_side.draws import constant_draws
from jaxddp.parity.jax_side.layers import images_of, record_calls, twins
from jaxddp.parity.jax_side.multi_loss_step import losses_alone, multi_loss_step
from jaxddp.parity.jax_side.widened import in_float64
from jaxddp.parity.port import Port, Rule, flattened, transposed
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Tensors, relative
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


class Settled(NamedTuple):
    """A table whose doubtful lines were tried.

    Attributes:
        table: the table, with the lines that no run decides left out.
        ambiguous: pairs of jax's layers or branches that no run tells apart.
    """

    table: Table
    ambiguous: list[tuple[str, str]]


class NamesTrial:
    """One forward pass of torch, and one of jax for each table, with the same weights in float64; or one step of each.

    Random draws of the losses are constants. Steps, and plain trees of arrays, show no layers: of these the losses are
    compared.

    Args:
        port: the port.
        model: its jax model.
        functional: the model's pure side.
        module: its torch model.
        of_torch: torch's pass; empty if there was none: nothing is decided then.
        tell: reports what the process is doing.
    """

    def __init__(self, port: Port, model: Any, functional: AnyFunctional, module: Any, of_torch: Probe, tell: Tell):
        self._port, self._model, self._functional, self._module = port, model, functional, module
        self._tell = tell
        self._of_torch = of_torch
        self._shapes = functional.shapes
        self._by_losses = port.torch_step is not None or isinstance(functional, PlainFunctional)
        self._passes = 0

    def with_layouts(self, table: Table) -> list[Table]:
        """Return the table, and those in which jax has other orders of axes or of flattened images than torch."""
        pieces = [
            piece for piece in self._converter(table).pieces if isinstance(find_entry(piece.jax, table).value, str)
        ]
        layers = {_layer(piece.torch): _layer(piece.jax) for piece in pieces if piece.is_entire}
        lines: list[Table] = [
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

        Where losses are compared, a table is the right one if it alone makes a loss equal.

        Args:
            tables: each maps all arrays.
        """
        if len(tables) < 2:
            return next(iter(tables), None)
        if len(tables) > MOST_TABLES or not self._of_torch.tensors:
            return None
        residuals = [self._residuals(table) for table in tables]
        for one, table in zip(residuals, tables, strict=True):
            if all(other is one or self._is_nearer(one, other) for other in residuals):
                return table
        return None

    def settle(self, table: Table, by_order: Iterable[Sequence[str]], used: Collection[str]) -> Settled:
        """Try the lines that the order of use alone decides: exchange twins, and keep what brings the models nearer.

        Two layers are ambiguous if their exchange is no worse, unless a loss uses both and is the same with either.

        Args:
            table: maps all arrays.
            by_order: groups of jax's layers of one kind.
            used: jax's layers or arrays that its loss uses.
        """
        units = units_of(self._converter(table).pieces, table)
        left = [*dict.fromkeys(move for group in by_order for move in moves(group, units))]
        now, ambiguous = self._residuals(table) if left else {}, list[tuple[str, str]]()
        while left:
            move = left.pop(0)
            units = units_of(self._converter(table).pieces, table)
            inside = {name for name in units for pair in move for one in pair if is_within(name, one)}
            free = self._port.torch_step is None and inside <= {*used}  # layers that may be interchangeable
            if free and _are_equal(now):
                continue
            other: Table | None = table
            for pair in move:
                other = other and swap(other, units_of(self._converter(other).pieces, other), *pair)
            then = self._residuals(other) if other and self._passes < MOST_TABLES else {}
            if other and self._is_nearer(then, now):
                table, now = other, then
                again = [pair for pair in ambiguous if any({*pair} & {*moved} for moved in move)]
                ambiguous = [pair for pair in ambiguous if pair not in again]
                left += [(pair,) for pair in again]
            elif len(move) == 1 and not self._is_nearer(now, then) and not (free and _are_equal(then)):
                ambiguous.append(move[0])
        if _are_equal(now):
            ambiguous = [pair for pair in ambiguous if self._port.torch_step is not None or not {*pair} <= {*used}]
        doubtful = [name for pair in ambiguous for name in pair]
        if not doubtful:
            return Settled(table, [])
        lines = {
            name: unit.value
            for name, unit in units_of(self._converter(table).pieces, table).items()
            if name != unit.value
        }
        return Settled({n: x for n, x in lines.items() if not any(is_within(n, one) for one in doubtful)}, ambiguous)

    def crossed(self, table: Table) -> tuple[Table, str] | None:
        """Return the table with two lines swapped whose first layer or loss that differs is then equal, in words."""
        now, units = self._residuals(table), units_of(self._converter(table).pieces, table)
        first = next((name for name, residual in now.items() if residual > EQUAL), None)
        if first is None:
            return None
        place = {name: number for number, name in enumerate(self._of_torch.calls.used)}
        before = [
            unit for unit in units.values() if place.get(unit.layer, 0) <= place.get(first.partition(" ")[0], math.inf)
        ]
        before.sort(key=lambda unit: -place.get(unit.layer, 0))  # the nearest first
        alike = (pair for pair in combinations(before, 2) if pair[0].shapes == pair[1].shapes)
        pairs = dict.fromkeys(widest(units, *sorted((one.name, other.name))) for one, other in alike)
        for one, other in itertools.islice(pairs, MOST_TABLES):
            swapped = swap(table, units, one, other)
            then = self._residuals(swapped) if swapped else {}
            if swapped and then.get(first, math.inf) <= EQUAL and self._is_nearer(then, now):
                what = "the losses agree" if self._by_losses else f"{first} agrees"
                return swapped, f"perhaps `names` crosses {one} and {other}: with the two swapped {what}"
        return None

    def _is_nearer(self, one: Mapping[str, float], other: Mapping[str, float]) -> bool:
        return is_nearer(one, other, EQUAL if self._by_losses else math.inf)

    def _converter(self, table: Table) -> Converter:
        return Converter(self._module, self._shapes, table, self._port.transpose_kernel, self._port.no_twin)

    def _residuals(self, table: Table) -> dict[str, float]:
        """Return the residual of each layer's output, or of each loss, under a table; {} if none can be computed."""
        self._passes += 1
        self._tell(f"flax_loss, to try names, pass {self._passes}")
        if not self._of_torch.tensors:
            return {}
        converter = self._converter(table)
        arrays = converter.to_jax(under_all_names(self._of_torch.tensors, converter.tied))
        calls, losses = self._of_torch.calls, self._of_torch.losses
        for lifting in (in_float64, nullcontext):  # with casts lifted, jax may refuse two dtypes in one
            of_jax = None
            exact = jax.enable_x64(True), jax.default_matmul_precision("highest"), lifting(), constant_draws()
            with suppress(Exception), ExitStack() as stack:
                for context in exact:
                    stack.enter_context(context)
                of_jax = self._losses(arrays) if self._by_losses else self._outputs(arrays)
            if of_jax is not None and self._by_losses:
                both = ((name, float(of_jax.get(name, np.inf)), loss) for name, loss in losses.items())
                return {name: relative(abs(one - other), abs(other)) for name, one, other in both}
            if of_jax is not None:
                return layer_residuals(calls.order, calls.outputs, of_jax, twins(converter), images_of(table))
        return {}

    def _outputs(self, arrays: Tensors) -> Tensors:
        """Return the outputs of the jax layers at these parameters and buffers; constants keep their values."""
        calls = LayerCalls()
        values, floats = self._inputs(arrays)
        record_calls(self._port, self._model, self._functional, values, floats, calls)
        return calls.outputs

    def _losses(self, arrays: Tensors) -> Tensors:
        """Return the losses of one step, taken on one replica, or the loss of a plain tree."""
        (params, buffers), floats = self._inputs(arrays)
        if isinstance(self._functional, PlainFunctional) and self._port.torch_step is None:
            sums, _ = self._functional.local_loss(self._port.flax_loss)(params, buffers, floats)
            return {"loss": np.asarray(sums["loss"] / sums["count"])}
        assert self._port.flax_step is not None, "checked by Port"
        step = multi_loss_step(self._functional, self._port.flax_step, self._port.flax_optimizer)
        losses = jax.jit(partial(losses_alone, step))(params, buffers, floats)
        return {name: np.asarray(loss) for name, loss in losses.items()}

    def _inputs(self, arrays: Tensors) -> tuple[tuple[Params, Buffers], Batch]:
        params, buffers = (
            cast({name: jnp.asarray(arrays.get(name, x)) for name, x in of.items()}, "float64")
            for of in (self._functional.params, self._functional.buffers)
        )
        return (params, buffers), jax.tree.map(_widened, self._port.first_batch("jax"))


def _are_equal(residuals: Mapping[str, float]) -> bool:
    return bool(residuals) and max(residuals.values()) <= EQUAL


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
