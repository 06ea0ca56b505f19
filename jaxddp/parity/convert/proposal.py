"""Pairs of layers for the table `names`: by their kinds, their names, and the order in which they are used."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from jaxddp.parity.convert.layouts import EMBEDDINGS, NORMS, Shapes, squeezed
from jaxddp.parity.convert.pieces import PROJECTIONS
from jaxddp.parity.convert.similar_names import pair_off
from jaxddp.parity.records import COUNTER

Kind = tuple[str, tuple[int, ...]]  # kind of a layer, and the sizes of its arrays; of a bare array, its shape

OF_NORMS = ("scale", "mean", "var")
OF_TREES = {"w", "b", "offset", "embeddings", "weight"}  # of Haiku's and Equinox's layers
OF_FLAX = {*OF_NORMS, *OF_TREES, "kernel", "bias", "embedding"}  # arrays of jax's layers; others are bare
OF_TORCH = {"weight", "bias", "running_mean", "running_var"}
EMBEDDING = "embedding"  # kind of a table
ATTENTION = {*PROJECTIONS, "out"}


@dataclass(frozen=True)
class Unpaired:
    """Arrays without a twin.

    Attributes:
        jax: names of jax arrays, in the order of their layers' use.
        torch: names of torch tensors, in the order of their layers' use.
        shapes, tensors: shapes of jax's arrays and of torch's tensors.
        modules: torch's modules by name.
    """

    jax: Sequence[str]
    torch: Sequence[str]
    shapes: Shapes
    tensors: Shapes
    modules: Mapping[str, nn.Module]

    def in_order(self, jax_order: Sequence[str], torch_order: Sequence[str]) -> "Unpaired":
        """Return the arrays in the order of these layers, or arrays; others come last."""
        return replace(self, jax=_sorted(self.jax, jax_order), torch=_sorted(self.torch, torch_order))


def _sorted(names: Sequence[str], order: Sequence[str]) -> list[str]:
    place = {layer: number for number, layer in enumerate(order)}
    return sorted(names, key=lambda name: place.get(name, place.get(name.rpartition(".")[0], len(place))))


class Pairs(NamedTuple):
    """Layers that pair off by kind, name and order, and the others.

    Attributes:
        pairs: jax's layers to torch's, in jax's order.
        jax, torch: the other layers with their kinds, in the order of their use.
        by_order: groups of jax's layers of one kind that their order alone pairs off.
    """

    pairs: dict[str, str]
    jax: dict[str, Kind]
    torch: dict[str, Kind]
    by_order: tuple[tuple[str, ...], ...]


def paired(unpaired: Unpaired) -> Pairs:
    """Pair off layers of one kind, by name where names agree and else in the order of their use.

    Kinds of which one side has more are left out.

    >>> modules = {"fc1": nn.Linear(3, 5), "fc2": nn.Linear(5, 4)}
    >>> jax = {"Dense_0.kernel": (3, 5), "Dense_0.bias": (5,), "Dense_1.kernel": (5, 4), "Dense_1.bias": (4,)}
    >>> torch = {"fc1.weight": (5, 3), "fc1.bias": (5,), "fc2.weight": (4, 5), "fc2.bias": (4,)}
    >>> paired(Unpaired([*jax], [*torch], jax, torch, modules)).pairs
    {'Dense_0': 'fc1', 'Dense_1': 'fc2'}
    """
    torch = _of_torch(unpaired)
    joins = any(kind == "attention" for kind, _ in torch.values())
    jax = _of_jax({name: unpaired.shapes[name] for name in unpaired.jax}, joins)
    of_jax, of_torch = _by_kind(jax), _by_kind(torch)
    same = {
        kind: pair_off(of_jax[kind], of_torch[kind])
        for kind in of_jax
        if len(of_jax[kind]) == len(of_torch.get(kind, ()))
    }
    pairs = {one: other for of_kind in same.values() for one, other in of_kind.pairs.items()}
    in_order = {layer: pairs[layer] for layer in jax if layer in pairs}
    if "" in in_order:  # no prefix stands for the arrays of the model itself
        root = in_order.pop("")
        in_order |= {name: f"{root}.{name}".lstrip(".") for name in unpaired.jax if name in OF_FLAX}
    return Pairs(
        in_order,
        {layer: kind for layer, kind in jax.items() if kind not in same},
        {layer: kind for layer, kind in torch.items() if kind not in same},
        tuple(of_kind.by_order for of_kind in same.values() if of_kind.by_order),
    )


def _of_jax(shapes: Shapes, joins: bool) -> dict[str, Kind]:
    """Return the kind of each layer; if `joins`, query, key, value and out of an attention are one layer."""
    layers: dict[str, dict[str, int]] = {}
    dimensions: dict[str, dict[str, int]] = {}
    kinds: dict[str, Kind] = {}
    for name, shape in shapes.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == COUNTER:  # follows its layer
            continue
        if leaf in OF_FLAX:
            layers.setdefault(layer, {})[leaf] = math.prod(shape)
            dimensions.setdefault(layer, {})[leaf] = len(shape)
            kinds.setdefault(layer, ("", ()))  # keeps the order
        else:
            kinds[name] = "array", squeezed(shape)
    parts: dict[str, set[str]] = {}
    for layer in layers:
        parent, _, part = layer.rpartition(".")
        parts.setdefault(parent, set()).add(part)
    joint: dict[str, Kind] = {}
    for layer, kind_of_array in kinds.items():
        parent, _, part = layer.rpartition(".")
        sizes = layers.get(layer, {})
        if not sizes:
            joint[layer] = kind_of_array
        elif joins and part in ATTENTION and parts[parent] >= ATTENTION:
            joint.setdefault(parent, _of_attention(layers, parent))
        else:
            norm = not sizes.keys().isdisjoint(OF_NORMS) or _is_vector(dimensions[layer])
            kind = "norm" if norm else EMBEDDING if "embedding" in sizes else ""
            joint[layer] = kind, tuple(sorted(sizes.values()))
    return joint


def _is_vector(dimensions: Mapping[str, int]) -> bool:
    """Return whether a layer's weight is a vector, as a norm's in Equinox, or a stack of them beside biases."""
    number = dimensions.get("weight", 0)
    return number == 1 or number == dimensions.get("bias")


def _of_attention(layers: Mapping[str, Mapping[str, int]], parent: str) -> Kind:
    """Return the kind of an attention, with torch's sizes: the three projections in one tensor."""

    def total(parts: Iterable[str], leaf: str) -> int:
        return sum(layers[f"{parent}.{part}".lstrip(".")].get(leaf, 0) for part in parts)

    of_parts = ((PROJECTIONS, "kernel"), (PROJECTIONS, "bias"), (("out",), "kernel"), (("out",), "bias"))
    sizes = (total(parts, leaf) for parts, leaf in of_parts)
    return "attention", tuple(sorted(size for size in sizes if size))


def _of_torch(unpaired: Unpaired) -> dict[str, Kind]:
    """Return the kind of each layer."""
    sizes: dict[str, list[int]] = {}
    for name in unpaired.torch:
        layer = _layer_of_torch(name, unpaired.modules)
        sizes.setdefault(layer, []).append(math.prod(unpaired.tensors[name]))
    return {
        layer: ("array", squeezed(unpaired.tensors[layer]))
        if layer in unpaired.tensors
        else (_kind_of_torch(unpaired.modules.get(layer)), tuple(sorted(of)))
        for layer, of in sizes.items()
    }


def _by_kind(layers: Mapping[str, Kind]) -> dict[Kind, list[str]]:
    of_kind: dict[Kind, list[str]] = {}
    for layer, kind in layers.items():
        of_kind.setdefault(kind, []).append(layer)
    return of_kind


def _layer_of_torch(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the layer of a tensor; an attention's output projection belongs to the attention, bare arrays to none."""
    layer, _, leaf = name.rpartition(".")
    parent = layer.rpartition(".")[0]
    if isinstance(modules.get(parent), nn.MultiheadAttention):
        return parent
    return layer if leaf in OF_TORCH or isinstance(modules.get(layer), nn.MultiheadAttention) else name


def _kind_of_torch(module: nn.Module | None) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, EMBEDDINGS):
        return EMBEDDING
    weight = getattr(module, "weight", None)  # a vector in norms that models bring themselves
    return "norm" if isinstance(module, NORMS) or (isinstance(weight, Tensor) and weight.ndim == 1) else ""


def folded(pairs: Mapping[str, str]) -> dict[str, str]:
    """Replace the lines of a branch by one, as long as its layers have the same names on both sides.

    >>> folded({"a_0.q": "b.0.q", "a_0.k": "b.0.k", "a_1.x": "b.1.y"})
    {'a_0': 'b.0', 'a_1.x': 'b.1.y'}
    >>> folded({"a_0": "b.0", "a_0.q": "b.0.q", "a_0.k": "a_0.k"})  # the first line says the second
    {'a_0': 'b.0', 'a_0.k': 'a_0.k'}
    """
    table = dict(pairs)
    while True:
        branches: dict[str, list[str]] = {}
        for one, other in table.items():
            if "." in one and "." in other and one.rpartition(".")[2] == other.rpartition(".")[2]:
                branches.setdefault(one.rpartition(".")[0], []).append(other.rpartition(".")[0])
        alike = {
            one: others[0]
            for one, others in branches.items()
            if len({*others}) == 1 and len(others) == sum(layer.startswith(f"{one}.") for layer in table)
        }
        if not alike:
            return {one: other for one, other in table.items() if other != _by_prefix(one, table)}
        folded: dict[str, str] = {}
        for one, other in table.items():
            parent = one.rpartition(".")[0]
            folded |= {parent: alike[parent]} if parent in alike else {one: other}
        table = folded


def _by_prefix(name: str, table: Mapping[str, str]) -> str:
    """Return the twin of a name by the longest line for one of its branches; the name itself if there is none."""
    branches = [branch for branch in table if name.startswith(f"{branch}.")]
    branch = max(branches, key=len, default="")
    return table[branch] + name[len(branch) :] if branch else name
