"""Correspondence of jax arrays to torch tensors, or parts of them, by the table `names`."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import nn

from jaxddp.errors import listed
from jaxddp.parity.convert.entries import Entry, NoTwinError, find_entry, numbered
from jaxddp.parity.convert.layouts import (
    NORMS,
    RECURRENT,
    Layouts,
    Shape,
    Shapes,
    after,
    channels_last,
    find_layouts,
    is_conventional,
    outputs_axis,
    squeezed,
    transposition,
)
from jaxddp.parity.convert.outputs import Index, Target, index_of, outputs_of_each, rows_of_part, text_of
from jaxddp.parity.excerpts import LARGE
from jaxddp.parity.port.rules import NUMBER, Names, Rule
from jaxddp.parity.sums import Summand

OF_HAIKU = {"w": "weight", "b": "bias", "embeddings": "weight"}
OF_OTHERS = {"kernel": "weight", "embedding": "weight", **OF_HAIKU}
OF_NORMS = {"scale": "weight", "offset": "bias", "mean": "running_mean", "var": "running_var"}
PROJECTIONS = ("query", "key", "value")  # thirds of in_proj_weight, in this order


@dataclass(frozen=True)
class Piece:
    """A jax array (or some of its layers or outputs) paired with the torch tensor that holds the same values.

    Attributes:
        jax: name of the jax array.
        torch: name of the tensor in the state_dict.
        jax_shape, torch_shape: shapes of both parts.
        place: number of the layer in jax's stack; (): the array is not a stack.
        jax_outputs: outputs of the jax array, in torch's layout, that this tensor holds; (): all.
        torch_outputs: outputs of the tensor that this array holds; (): all.
        shape: shape of the jax array, or of its layer, in torch's layout.
        layouts: maps between the layouts of the array, or of its layer.
        order: order of the jax array's axes, "(in, out)", where its shape does not show it; "": it does.
        other_axes: axes of the tensor in another order that jax's array may have: neither its shape nor the
            convention of its name nor a layer of the same class shows which; (): one does.
        summand: the tensor is added to that of an earlier piece, like this; None: it is not.
    """

    jax: str
    torch: str
    jax_shape: Shape
    torch_shape: Shape
    place: tuple[int, ...]
    jax_outputs: Index = field(compare=False)
    torch_outputs: Index = field(compare=False)
    shape: Shape
    layouts: Layouts = field(compare=False)
    order: str = ""
    other_axes: Shape = ()
    summand: Summand | None = field(default=None, compare=False)

    @property
    def torch_name(self) -> str:
        """Name of the tensor, with the outputs if the piece is a part of it."""
        return ("+ " if self.summand else "") + self.torch + text_of(self.torch_outputs)

    @property
    def jax_name(self) -> str:
        """Name of the array, with the layer or the outputs if the piece is a part of it."""
        return self.jax + "".join(f"[{number}]" for number in self.place) + text_of(self.jax_outputs)

    @property
    def is_entire(self) -> bool:
        """Return whether the piece is one array and one tensor."""
        return not (self.place or self.jax_outputs or self.torch_outputs)


class Pieces:
    """Search for the pieces of jax arrays.

    Args:
        modules: torch's modules by name.
        tensors: names and shapes of torch's state_dict.
        names: see `Converter`.
        transpose_kernel: see `Converter`.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], tensors: Shapes, names: Names, transpose_kernel: Collection[str]
    ):
        self._modules, self._tensors, self._names, self._as_gradient = modules, tensors, names, transpose_kernel
        self._known = modules.keys() | tensors.keys()
        self._orders: dict[tuple[type, str], set[str]] = {}  # class, name -> orders of axes that shapes have shown

    def of(self, jax: str, shape: Shape) -> list[Piece]:
        """Return the pieces of a jax array.

        Raises:
            NoTwinError: torch has no such tensor, or one of another shape.
            RuleError: the array falls under a rule that does not fit.
        """
        entry = find_entry(jax, self._names)
        try:
            return list(self._find(jax, shape, entry))
        except NoTwinError as error:
            if isinstance(entry.value, Rule):
                raise entry.error(str(error)) from None
            raise

    def _find(self, jax: str, shape: Shape, entry: Entry) -> Iterator[Piece]:
        depth = entry.rule.depth
        if len(shape) < depth:
            raise NoTwinError(f"jax's {jax} {shape} has no axis for {NUMBER}")
        if depth:
            self._check_count(jax, shape, entry)
        for place in np.ndindex(shape[:depth]):
            numbers = [self._numbers(layer, place) for layer in entry.rule.layers]
            targets = [self._target(path, jax, shape) for path in entry.paths(numbers)]
            of_layer = self._of_sum if entry.rule.summands else self._of_layer
            yield from of_layer(jax, shape[depth:], place, targets, entry)

    def _check_count(self, jax: str, shape: Shape, entry: Entry) -> None:
        """Raise unless torch has as many layers as jax's stack."""
        stack = entry.rule.layers[0].partition(NUMBER)[0]
        first = self._first(stack)
        count = next(number for number in itertools.count() if f"{stack}{first + number}" not in self._known)
        if count != shape[0]:
            raise entry.error(f"jax's {jax} {shape} holds {shape[0]} layers, torch has {count} {stack}{NUMBER}")

    def _numbers(self, layer: str, place: tuple[int, ...]) -> tuple[int, ...]:
        """Return torch's numbers of a layer in a stack, or in nested ones."""
        numbers: tuple[int, ...] = ()
        for number in place:
            stack = numbered(layer, numbers).partition(NUMBER)[0]
            numbers = (*numbers, self._first(stack) + number)
        return numbers

    def _first(self, stack: str) -> int:
        """Return the number of the first of torch's layers `stack`0, `stack`1, ..., which may count from 1."""
        return 1 if f"{stack}0" not in self._known and f"{stack}1" in self._known else 0

    def _target(self, path: str, jax: str, shape: Shape) -> Target:
        """Return the tensor of a jax array whose name has torch's module names; see `Entry.paths`."""
        prefix, _, leaf = path.rpartition(".")
        modules = self._modules
        rows = None
        if isinstance(modules.get(prefix.rpartition(".")[0]), nn.MultiheadAttention):
            name, rows = _of_attention(prefix, leaf, self._tensors)
        else:
            name = _tensor_name(prefix, leaf, modules.get(prefix), self._tensors)
        if name not in self._tensors:
            raise NoTwinError(f"jax's {jax} {shape} has no twin in torch, {name} is not there")
        owner, torch = modules.get(name.rpartition(".")[0]), self._tensors[name]
        target = Target(name, owner, torch, outputs_axis(owner, len(torch)))
        return target if rows is None else target.part(rows)

    def _of_layer(
        self, jax: str, shape: Shape, place: tuple[int, ...], targets: list[Target], entry: Entry
    ) -> list[Piece]:
        rule, first = entry.rule, targets[0]
        if not first.shape and (rule.part is not None or len(targets) > 1):
            raise NoTwinError(f"torch's {first.name} is a number and has no outputs")
        if rule.part is not None:
            first = first.part(rows_of_part(rule, first))
            targets = [first]
        others = {target.shape[: target.axis] + target.shape[target.axis + 1 :] for target in targets}
        joint = ", ".join(target.name for target in targets)
        if len(others) > 1:
            raise NoTwinError(f"{joint} have different inputs, {listed(sorted(map(str, others)), joint=' and ')}")
        full, sizes = first.shape, [0]
        if len(targets) > 1:
            sizes = [target.shape[target.axis] for target in targets]
            full = (*full[: first.axis], sum(sizes), *full[first.axis + 1 :])
        layouts, order, other_axes = self._layouts(jax, shape, full, first, entry)
        if layouts is None:
            raise NoTwinError(f"jax's {jax} {shape} cannot be torch's {joint} {full}")
        outputs = outputs_of_each(rule, sizes) if len(targets) > 1 else [None]
        return [
            Piece(
                jax,
                target.name,
                shape if some is None else (*full[: first.axis], *full[first.axis + 1 :], len(some)),
                target.shape,
                place,
                index_of(some, first.axis),
                index_of(target.rows, target.axis),
                full,
                layouts,
                order,
                other_axes,
            )
            for target, some in zip(targets, outputs, strict=True)
        ]

    def _of_sum(
        self, jax: str, shape: Shape, place: tuple[int, ...], targets: list[Target], entry: Entry
    ) -> Iterator[Piece]:
        """Yield the pieces of an array that is a sum of torch's vectors: the first, and those that are added to it."""
        if any(len(target.shape) != 1 or target.shape[0] > LARGE for target in targets):
            raise NoTwinError(f"all must be vectors of at most {LARGE} elements")
        pairs = zip(targets, entry.rule.summands, strict=True)
        targets = [one if rule.part is None else one.part(rows_of_part(rule, one)) for one, rule in pairs]
        (first,) = self._of_layer(jax, shape, place, targets[:1], entry)
        yield first
        rows = [np.arange(*one.shape) if one.rows is None else one.rows for one in targets]
        if max(map(len, rows)) > len(rows[0]):
            raise NoTwinError(f"the first, {first.torch_name}, must be the longest")
        for target, others in zip(targets[1:], rows[1:], strict=True):
            summand = Summand(first.torch, rows[0][: len(others)], target.name, others)
            added = replace(first, torch=target.name, torch_shape=target.shape, summand=summand)
            ends = index_of(np.arange(len(others)), 0), index_of(target.rows, 0)
            yield replace(added, jax_outputs=ends[0], torch_outputs=ends[1])

    def _layouts(
        self, jax: str, shape: Shape, torch: Shape, target: Target, entry: Entry
    ) -> tuple[Layouts | None, str, Shape]:
        """Return the maps between jax's array of a layer and torch's tensor; see `Piece` for the others."""
        rule, leaf = entry.rule, jax.rpartition(".")[2]
        if rule.axes is not None and (len(rule.axes) == len(torch) or leaf == "kernel" or not entry.rest):
            fits = len(rule.axes) == len(torch) and tuple(torch[axis] for axis in rule.axes) == shape
            return transposition(rule.axes) if fits else None, "", ()
        as_gradient = jax.rpartition(".")[0] in self._as_gradient
        recurrent = isinstance(target.module, RECURRENT) and ".weight" in f".{target.name}"  # weight_ih_l0
        module = target.module if recurrent or target.name.endswith("weight") else None
        possible = find_layouts(module, leaf, torch, shape, as_gradient)
        shown = self._orders.setdefault((type(module), leaf), set())
        if len(possible) == 1 and len(squeezed(torch)) > 1:  # a matrix of one row or column fits both orders
            shown |= {possible[0].order}
        layouts = next((one for one in possible if {one.order} == shown), possible[0] if possible else None)
        order = ""
        other_axes: Shape = ()
        if layouts is not None and len(possible) > 1:
            order = layouts.order
            if shown != {order} and not is_conventional(module, leaf):
                other_axes = next((one.axes for one in possible if one is not layouts), ())
        if layouts is None or rule.image is None:
            return layouts, order, other_axes
        axis = _image_axis(target.module, leaf, torch)
        if axis is None:
            if leaf != "bias" and torch:
                raise NoTwinError(f"torch's {target.name} {torch} has no flattened image as its input")
            return layouts, order, ()
        if torch[axis] != math.prod(rule.image):
            sizes = " x ".join(map(str, rule.image))
            raise NoTwinError(f"torch's {target.name} {torch} has {torch[axis]} inputs, {sizes} is another number")
        return after(channels_last(rule.image, axis), layouts), order, ()


def _tensor_name(prefix: str, leaf: str, module: nn.Module | None, tensors: Shapes) -> str:
    if (same := f"{prefix}.{leaf}".lstrip(".")) in tensors:
        return same
    of_norm = f"{prefix}.{OF_NORMS.get(leaf, leaf)}".lstrip(".")
    if isinstance(module, NORMS) or len(tensors.get(of_norm, ())) == 1:  # also of a norm that the model brings itself
        return of_norm
    return f"{prefix}.{OF_OTHERS.get(leaf, leaf)}".lstrip(".")


def _of_attention(prefix: str, leaf: str, tensors: Shapes) -> tuple[str, np.ndarray | None]:
    """Return the tensor of nn.MultiheadAttention, and its rows, for jax's query, key, value and out."""
    parent, _, projection = prefix.rpartition(".")
    projection = projection.removesuffix("_proj")
    kind = {"kernel": "weight", **OF_HAIKU}.get(leaf, leaf)
    if projection not in PROJECTIONS:
        return f"{parent}.out_proj.{kind}".lstrip("."), None
    separate = f"{parent}.{projection[0]}_proj_weight".lstrip(".")  # used if keys or values have another size
    if kind == "weight" and separate in tensors:
        return separate, None
    name = f"{parent}.in_proj_{kind}".lstrip(".")
    size = tensors[name][0] // 3 if name in tensors else 0
    return name, np.arange(size) + PROJECTIONS.index(projection) * size


def _image_axis(module: nn.Module | None, leaf: str, torch: Shape) -> int | None:
    """Return the axis of a flattened image in a tensor of the layer after it; None: the tensor has none."""
    if leaf in ("kernel", "w"):
        return 1 - outputs_axis(module, len(torch)) if len(torch) == 2 else None
    return 0 if isinstance(module, NORMS) and len(torch) == 1 else None
