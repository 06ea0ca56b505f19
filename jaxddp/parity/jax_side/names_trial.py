"""Choose, of several tables `names` that the shapes allow, the one under which both models compute the same."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import cast
from jaxddp.nn.losses import Batch
from jaxddp.nn.plain import PlainFunctional
from jaxddp.parity.compare.layers import layer_residuals
from jaxddp.parity.convert import Converter, find_entry, under_all_names
from jaxddp.parity.convert.entries import numbered
from jaxddp.parity.convert.layouts import Shape
from jaxddp.parity.convert.lines import Table, exchanged, exchanges, lines_of, widest, within
from jaxddp.parity.jax_side.draws import constant_draws
from jaxddp.parity.jax_side.layers import images_of, record_calls, twins
from jaxddp.parity.jax_side.multi_loss_step import losses_alone, multi_loss_step
from jaxddp.parity.jax_side.widened import in_float64
from jaxddp.parity.port import Names, Port, Rule, flattened, transposed
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Tensors, relative
from jaxddp.parity.torch_side.layers import LayerCalls
from jaxddp.parity.torch_side.probe import Probe
from jaxddp.state import Buffers, Params

# From lines to those that may be right in their place, and layers whose twins two right tables may exchange.
Doubt = tuple[Callable[[Table], Iterable[Table]], set[str]]
MOST_TABLES = 64  # each is a forward pass
MOST_LAYOUTS = 3  # each may have one order or the other
# A wrong table's residual over the right one's, in the first layer where they differ; measured: 1e14 in right ports,
# 900 in one with GELU by the other formula in front of that layer.
CLEARLY = 10.0
EQUAL = 1e-9  # residuals that differ by less are equal; measured: up to 3e-15


class NamesTrial:
    """Compare a forward pass, or a step, of torch with one of jax for each table, with the same weights in float64.

    Random draws of the losses are constants. Steps, and plain trees of arrays, show no layers, so their losses are
    compared.

    Args:
        port: the port.
        model: its jax model.
        functional: the model's pure side.
        module: its torch model.
        of_torch: torch's pass; if it is empty, nothing is decided.
        tell: reports what the process is doing.
    """

    def __init__(self, port: Port, model: Any, functional: AnyFunctional, module: Any, of_torch: Probe, tell: Tell):
        self._port, self._model, self._functional, self._module = port, model, functional, module
        self._tell = tell
        self._of_torch = of_torch
        self._shapes = functional.shapes
        self._by_losses = port.torch_step is not None or isinstance(functional, PlainFunctional)
        self._passes: dict[str, dict[str, float]] = {}  # text of a table -> residuals

    def lines(self, table: Names) -> Table:
        """Return the same table with a line for each layer of jax, from one that maps all arrays."""
        return lines_of(self._converter(table).pieces, table)

    def settle(
        self,
        lines: Table,
        orders: Sequence[Table] = ({},),
        by_order: Iterable[Sequence[str]] = (),
        used: Collection[str] = (),
    ) -> tuple[Table, set[str]]:
        """Try the other lines that shapes, names and layouts allow, and keep those that bring the models nearest.

        A line is doubtful if another is no worse, unless a loss uses all layers of both and is the same with either.

        Args:
            lines: a line for each layer.
            orders: lines of the parts of fused layers, in several orders.
            by_order: groups of jax's layers that only their order pairs off.
            used: jax's layers or arrays that its loss uses.

        Returns:
            The lines, and the names of the doubtful ones.
        """
        free = {*used} if self._port.torch_step is None else set()
        doubts: list[Doubt] = [(partial(self._arranged, orders), set())]
        doubts += [(partial(exchanges, group, self._shapes), free) for group in by_order]
        undecided: list[tuple[Doubt, set[str]]] = []
        beaten: list[Table] = []
        now: dict[str, float] | None = None
        while doubts:
            doubt = others, interchangeable = doubts.pop(0)
            if not (tables := [other for other in others(lines) if other not in beaten]):
                continue
            now = self._residuals(lines) if now is None else now
            nearest, doubtful = self._nearest(lines, now, tables, interchangeable)
            if nearest is not None:  # with it, undecided lines may be decided
                beaten += [lines, *tables]
                lines, now = nearest
                doubts, undecided = [doubt, *(one for one, _ in undecided), *doubts], []
            elif doubtful:
                undecided.append((doubt, doubtful))
        return lines, {name for _, names in undecided for name in names}

    def _nearest(
        self, lines: Table, now: dict[str, float], tables: Sequence[Table], interchangeable: set[str]
    ) -> tuple[tuple[Table, dict[str, float]] | None, set[str]]:
        """Return the table that is clearly the nearest, or None and the lines that are then doubtful."""
        free = [_changed(lines, other) <= interchangeable for other in tables]
        if _are_equal(now) and all(free):
            return None, set()
        tried = [*zip(tables, map(self._residuals, tables), free, strict=True)]

        def is_as_good(one: dict[str, float], other: dict[str, float], is_free: bool) -> bool:
            """Return whether the first is nearer, or both are right, since the layers are interchangeable."""
            return self._is_nearer(one, other) or (is_free and _are_equal(one) and _are_equal(other))

        for other, then, _ in tried:
            if self._is_nearer(then, now) and all(then is one or is_as_good(then, one, also) for _, one, also in tried):
                return (other, then), set()
        rivals = [other for other, then, is_free in tried if not is_as_good(now, then, is_free)]
        return None, {name for other in rivals for name in _changed(lines, other)}

    def _arranged(self, orders: Sequence[Table], lines: Table) -> Iterator[Table]:
        """Yield the lines with other orders of fused layers, of the axes of jax's arrays or of flattened images."""
        for order in orders:
            yield from (other for other in self._with_layouts(lines | order) if other != lines)

    def _with_layouts(self, lines: Table) -> list[Table]:
        pieces = [
            piece for piece in self._converter(lines).pieces if isinstance(find_entry(piece.jax, lines).value, str)
        ]
        layers = {_layer(piece.torch): _layer(piece.jax) for piece in pieces if piece.is_entire}
        others: list[Table] = [
            {layers[name]: flattened(name, image) for name in names}
            for image, names in self._of_torch.images
            if names and layers.keys() >= {*names}
        ]
        turned: dict[tuple[str, Shape], Table] = {}
        for piece in (piece for piece in pieces if piece.other_axes):
            of_name = turned.setdefault((piece.jax.rpartition(".")[2], piece.other_axes), {})
            name = _layer(find_entry(piece.jax, lines).paths()[0])
            of_name[_layer(piece.jax) or piece.jax] = transposed(name or piece.torch, piece.other_axes)
        others += turned.values()
        subsets = itertools.product((False, True), repeat=min(len(others), MOST_LAYOUTS))
        return [
            lines | {name: rule for line in itertools.compress(others, chosen) for name, rule in line.items()}
            for chosen in subsets
        ]

    def crossed(self, table: Names) -> tuple[Table, str] | None:
        """Return the table with the two lines exchanged that make the first differing layer or loss equal, and why."""
        now, lines = self._residuals(table), self.lines(table)
        first = next((name for name, residual in now.items() if residual > EQUAL), None)
        if first is None:
            return None
        place = {name: number for number, name in enumerate(self._of_torch.calls.used)}
        last = place.get(first.partition(" ")[0], math.inf)
        places = {name: _place(twin, place) for name, twin in lines.items()}
        nearest_first = sorted(lines, key=lambda name: -places[name])
        before = [name for name in nearest_first if places[name] <= last]
        shapes = {name: within(name, self._shapes) for name in before}
        alike = (sorted(pair) for pair in combinations(before, 2) if shapes[pair[0]] == shapes[pair[1]])
        pairs = dict.fromkeys(widest(one, other, self._shapes, lines) for one, other in alike)
        for one, other in itertools.islice(pairs, MOST_TABLES):
            swapped = exchanged(one, other, self._shapes, lines)
            then = self._residuals(swapped)
            if then.get(first, math.inf) <= EQUAL and self._is_nearer(then, now):
                what = "the losses agree" if self._by_losses else f"{first} agrees"
                changed = {name: swapped[name] for name in _changed(lines, swapped)}
                return {**table, **changed}, f"perhaps `names` crosses {one} and {other}: with the two swapped {what}"
        return None

    def _is_nearer(self, one: Mapping[str, float], other: Mapping[str, float]) -> bool:
        return is_nearer(one, other, EQUAL if self._by_losses else math.inf)

    def _converter(self, table: Names) -> Converter:
        return Converter(self._module, self._shapes, table, self._port.transpose_kernel, self._port.no_twin)

    def _residuals(self, table: Names) -> dict[str, float]:
        """Return the residual of each layer's output, or of each loss, under a table; {} if none can be computed."""
        if (text := str(table)) not in self._passes and self._of_torch.tensors and len(self._passes) < MOST_TABLES:
            self._tell(f"jax_loss, to try names, pass {len(self._passes) + 1}")
            self._passes[text] = self._pass(table)
        return self._passes.get(text, {})

    def _pass(self, table: Names) -> dict[str, float]:
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
            sums, _ = self._functional.local_loss(self._port.jax_loss)(params, buffers, floats)
            return {"loss": np.asarray(sums["loss"] / sums["count"])}
        assert self._port.jax_step is not None, "checked by Port"
        step = multi_loss_step(self._functional, self._port.jax_step, self._port.jax_optimizer)
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


def _changed(lines: Table, other: Table) -> set[str]:
    return {name for name in lines if lines[name] != other[name]}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _place(twin: str | Rule, places: Mapping[str, int]) -> int:
    """Return the place of a layer, or of the one that holds it; 0 if neither was called."""
    name = numbered(twin if isinstance(twin, str) else twin.layers[0], (0, 0))
    return next((places[layer] for layer in (name, _layer(name)) if layer in places), 0)


def _widened(x: np.ndarray) -> np.ndarray:
    return x.astype("float64") if x.dtype.kind == "f" else x


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
