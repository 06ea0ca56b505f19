"""Pairs of layers for the table `names`: by their kinds, their names, and the order in which they are used."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, nn

from jaxddp.parity.convert.layouts import EMBEDDINGS, GRUS, NORMS, Shape, Shapes, squeezed
from jaxddp.parity.convert.pieces import PROJECTIONS
from jaxddp.parity.convert.similar_names import pair_off
from jaxddp.parity.port.rules import Rule
from jaxddp.parity.records import COUNTER

Kind = tuple[str, Shape]  # kind of a layer, and the sizes of its arrays; of a bare array, its shape

OF_NORMS = {"scale", "mean", "var"}
OF_TREES = {"w", "b", "offset", "embeddings", "weight"}  # of Haiku's and Equinox's layers
OF_FLAX = {*OF_NORMS, *OF_TREES, "kernel", "bias", "embedding"}  # arrays of jax's layers; others are bare
OF_TORCH = {"weight", "bias", "running_mean", "running_var"}
BIASES = {"bias", "b", "offset", "in_proj_bias"}
OPTIONAL = BIASES | {"mean", "var", "running_mean", "running_var", COUNTER}  # which only one side's layer may have


@dataclass(frozen=True)
class Unpaired:
    """Arrays without a twin.

    Attributes:
        jax: names of jax arrays, in the order of their layers' use.
        torch: names of torch tensors, in the order of their layers' use.
        shapes, tensors: shapes of jax's arrays and of torch's tensors.
        modules: torch's modules by name.
        rules: names that represent a rule among torch's names.
    """

    jax: Sequence[str]
    torch: Sequence[str]
    shapes: Shapes
    tensors: Shapes
    modules: Mapping[str, nn.Module]
    rules: Mapping[str, Rule] = field(default_factory=dict)

    def with_projections(self) -> "Unpaired":
        """Return the arrays with those of torch's attentions as layers query, key, value and out."""
        split = {name: dict(_of_projections(name, self.tensors[name], self.modules)) for name in self.torch}
        torch = [part for name in self.torch for part in split[name]]
        return replace(self, torch=torch, tensors={name: x for parts in split.values() for name, x in parts.items()})

    def without(self, names: Collection[str]) -> "Unpaired":
        """Return the arrays without these."""
        jax, torch = ([name for name in of_side if name not in names] for of_side in (self.jax, self.torch))
        return replace(self, jax=jax, torch=torch)

    def optional(self) -> tuple[set[str], ...]:
        """Return arrays of layers that do not pair off, which only one side may have; those of another size; GRUs'."""
        pairs, sizes = paired_layers(self), {n: math.prod(x) for n, x in (*self.shapes.items(), *self.tensors.items())}
        split = {name: name.rpartition(".") for name in (*self.jax, *self.torch)}
        left = pairs.jax.keys() | pairs.torch.keys()
        every = {name for name, (layer, _, leaf) in split.items() if leaf in OPTIONAL and left & {layer, name}}
        alone = {sizes[name] for name in self.jax} ^ {sizes[name] for name in self.torch}
        hidden = {
            name for name in self.torch if "bias_hh" in name and isinstance(self.modules.get(split[name][0]), GRUS)
        }
        return every, {name for name in every if sizes[name] in alone}, hidden

    def in_order(self, jax_order: Sequence[str], torch_order: Sequence[str]) -> "Unpaired":
        """Return the arrays in the order of these layers, or arrays; others come last."""
        return replace(self, jax=_sorted(self.jax, jax_order), torch=_sorted(self.torch, torch_order))


def _of_projections(name: str, shape: Shape, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Shape]]:
    """Yield the arrays of projections that a tensor of nn.MultiheadAttention holds; any other tensor as it is."""
    layer, _, leaf = name.rpartition(".")
    attention = layer.rpartition(".")[0]
    prefix = f"{layer}." if layer else ""
    if isinstance(modules.get(attention), nn.MultiheadAttention):
        yield f"{attention}.out.{leaf}".lstrip("."), shape
    elif isinstance(modules.get(layer), nn.MultiheadAttention) and leaf.startswith("in_proj_"):
        for projection in PROJECTIONS:
            yield f"{prefix}{projection}.{leaf.removeprefix('in_proj_')}", (shape[0] // 3, *shape[1:])
    elif isinstance(modules.get(layer), nn.MultiheadAttention) and leaf.endswith("_proj_weight"):
        projection = next(projection for projection in PROJECTIONS if projection[0] == leaf[0])
        yield f"{prefix}{projection}.weight", shape
    else:
        yield name, shape


def _sorted(names: Sequence[str], order: Sequence[str]) -> list[str]:
    """Sort arrays by the place of the nearest module that holds them, or by their own."""
    place = {layer: number for number, layer in enumerate(order)}

    def place_of(name: str) -> int:
        layer = name.rpartition(".")[0]
        return next((place[one] for one in (name, layer, layer.rpartition(".")[0]) if one in place), len(place))

    return sorted(names, key=place_of)


class Pairs(NamedTuple):
    """Layers, or arrays, that pair off by kind, name and order, and the others.

    Attributes:
        pairs: jax's to torch's, in jax's order.
        jax, torch: the others with their kinds, in the order of their use.
        by_order: groups of jax's of one kind that only their order pairs off.
    """

    pairs: dict[str, str]
    jax: dict[str, Kind]
    torch: dict[str, Kind]
    by_order: list[tuple[str, ...]]


def paired_layers(unpaired: Unpaired) -> Pairs:
    """Pair off layers of one kind, by name where names agree and else in the order of their use.

    Kinds that one side has more of are left out.

    >>> modules = {"fc1": nn.Linear(3, 5), "fc2": nn.Linear(5, 4)}
    >>> jax = {"Dense_0.kernel": (3, 5), "Dense_0.bias": (5,), "Dense_1.kernel": (5, 4), "Dense_1.bias": (4,)}
    >>> torch = {"fc1.weight": (5, 3), "fc1.bias": (5,), "fc2.weight": (4, 5), "fc2.bias": (4,)}
    >>> paired_layers(Unpaired([*jax], [*torch], jax, torch, modules)).pairs
    {'Dense_0': 'fc1', 'Dense_1': 'fc2'}
    """
    found = _paired(_kinds_of_jax(unpaired), _kinds_of_torch(unpaired))
    if "" in found.pairs:  # the arrays of the model itself have no prefix
        root = found.pairs.pop("")
        found.pairs.update({name: f"{root}.{name}".lstrip(".") for name in unpaired.jax if name in OF_FLAX})
    return found


def paired_arrays(unpaired: Unpaired) -> Pairs:
    """Pair off layers, and then one by one the arrays of the others, by their sizes, names and order.

    So pair arrays of plain functions, whose names need not show which of them are a layer, and those of torch's LSTM.
    """
    of_layers = paired_layers(unpaired)
    jax = _sizes(unpaired.jax, unpaired.shapes, of_layers.pairs, OF_FLAX)
    torch = _sizes(unpaired.torch, unpaired.tensors, of_layers.pairs.values(), OF_TORCH)
    found = _paired(jax, torch)
    return Pairs(of_layers.pairs | found.pairs, found.jax, found.torch, of_layers.by_order + found.by_order)


def _sizes(names: Sequence[str], shapes: Shapes, layers: Collection[str], leaves: Collection[str]) -> dict[str, Kind]:
    """Return the sizes of the arrays that are not in these layers, whose own arrays have these last names."""

    def is_paired(name: str) -> bool:
        layer, _, leaf = name.rpartition(".")
        return name in layers or (layer in layers and (leaf in leaves or leaf == COUNTER))

    others = [name for name in names if not is_paired(name)]
    return {name: ("array", tuple(sorted(squeezed(shapes[name])))) for name in others}


def _paired(jax: Mapping[str, Kind], torch: Mapping[str, Kind]) -> Pairs:
    of_jax, of_torch = _by_kind(jax), _by_kind(torch)
    same = {
        kind: pair_off(of_jax[kind], of_torch[kind])
        for kind in of_jax
        if len(of_jax[kind]) == len(of_torch.get(kind, ()))
    }
    pairs = {one: other for of_kind in same.values() for one, other in of_kind.pairs.items()}
    return Pairs(
        {one: pairs[one] for one in jax if one in pairs},
        {one: kind for one, kind in jax.items() if kind not in same},
        {other: kind for other, kind in torch.items() if kind not in same},
        [of_kind.by_order for of_kind in same.values() if of_kind.by_order],
    )


def _kinds_of_jax(unpaired: Unpaired) -> dict[str, Kind]:
    """Return the kind of each layer, and of each bare array."""
    layers: dict[str, dict[str, Shape]] = {}
    for name in unpaired.jax:
        layer, _, leaf = name.rpartition(".")
        if leaf != COUNTER:  # it follows its layer
            layers.setdefault(layer if leaf in OF_FLAX else name, {})[leaf] = unpaired.shapes[name]
    return {layer: _kind_of_jax(arrays) for layer, arrays in layers.items()}


def _kind_of_jax(arrays: Mapping[str, Shape]) -> Kind:
    if not arrays.keys() & OF_FLAX:
        (shape,) = arrays.values()
        return "array", squeezed(shape)
    weight, bias = (len(arrays.get(leaf, ())) for leaf in ("weight", "bias"))
    vector = weight == 1 or weight == bias > 0  # in Equinox's norms, and in a stack of them
    kind = "norm" if vector or arrays.keys() & OF_NORMS else "embedding" if "embedding" in arrays else ""
    return kind, tuple(sorted(map(math.prod, arrays.values())))


def _kinds_of_torch(unpaired: Unpaired) -> dict[str, Kind]:
    """Return the kind of each layer, and of each bare tensor."""
    sizes: dict[str, list[int]] = {}
    for name in unpaired.torch:
        layer, _, leaf = name.rpartition(".")
        sizes.setdefault(layer if leaf in OF_TORCH else name, []).append(math.prod(unpaired.tensors[name]))
    return {
        layer: ("array", squeezed(unpaired.tensors[layer]))
        if layer in unpaired.tensors
        else (_kind_of_torch(unpaired.modules.get(layer)), tuple(sorted(of)))
        for layer, of in sizes.items()
    }


def _kind_of_torch(module: nn.Module | None) -> str:
    if isinstance(module, EMBEDDINGS):
        return "embedding"
    weight = getattr(module, "weight", None)  # a vector in norms that models bring themselves
    return "norm" if isinstance(module, NORMS) or (isinstance(weight, Tensor) and weight.ndim == 1) else ""


def _by_kind(layers: Mapping[str, Kind]) -> dict[Kind, list[str]]:
    of_kind: dict[Kind, list[str]] = {}
    for layer, kind in layers.items():
        of_kind.setdefault(kind, []).append(layer)
    return of_kind
