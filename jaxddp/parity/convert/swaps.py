"""Exchanges of twins in a table `names`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from jaxddp.parity.convert.entries import find_entry
from jaxddp.parity.convert.layouts import Shape
from jaxddp.parity.convert.pieces import Piece
from jaxddp.parity.convert.similar_names import branches
from jaxddp.parity.port.rules import Names, Rule

FEW = 5  # of fewer layers of one kind any two are swapped, of more each with the next


class Unit(NamedTuple):
    """A jax layer, or an array without one.

    Attributes:
        name: its name.
        value: what `names` maps it to, or would map it to.
        layer: torch's layer.
        shapes: the rest of the name and the shape of each of its arrays.
    """

    name: str
    value: str | Rule
    layer: str
    shapes: list[tuple[str, Shape]]


def units_of(pieces: Iterable[Piece], table: Names) -> dict[str, Unit]:
    """Return the units of jax's arrays by name; a rule for a branch has none."""
    units: dict[str, Unit] = {}
    for piece in pieces:
        entry, layer = find_entry(piece.jax, table), piece.jax.rpartition(".")[0]
        name = piece.jax if entry.key == piece.jax else layer or piece.jax
        path = entry.paths(())[0]
        value = entry.value if entry.key == name else path if name == piece.jax else path.rpartition(".")[0]
        if isinstance(entry.value, str) or entry.key == name:
            unit = units.setdefault(name, Unit(name, value, piece.torch.rpartition(".")[0], []))
            unit.shapes.append((piece.jax[len(name) :], piece.jax_shape))
    return units


def swap(table: Names, units: Mapping[str, Unit], one: str, other: str) -> dict[str, str | Rule] | None:
    """Return the table with the twins of two layers, or branches, swapped; None if they differ in shapes."""
    of_one, of_other = (
        {name[len(branch) :]: unit for name, unit in units.items() if is_within(name, branch)}
        for branch in (one, other)
    )
    if of_one.keys() != of_other.keys() or any(of_one[rest].shapes != of_other[rest].shapes for rest in of_one):
        return None
    pairs = [(of_one[rest], of_other[rest]) for rest in of_one]
    return {**table, **{a.name: b.value for a, b in pairs}, **{b.name: a.value for a, b in pairs}}


def moves(group: Sequence[str], units: Mapping[str, Unit]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield exchanges among layers, each as swaps of two: all of three layers, else swaps only.

    >>> list(moves(["a", "b"], {})), len(list(moves("abc", {}))), len(list(moves("abcdef", {})))
    ([(('a', 'b'),)], 5, 5)
    """
    for pair in combinations(group, 2) if len(group) < FEW else pairwise(group):
        yield (widest(units, *pair),)
    if len(group) == 3:
        first, second = widest(units, *group[:2]), widest(units, *group[1:])
        yield from ((first, second), (second, first))


def widest(units: Mapping[str, Unit], one: str, other: str) -> tuple[str, str]:
    """Return the branches of two layers if they can be swapped, the layers themselves if not."""
    pair = branches(one, other)
    return (one, other) if swap({}, units, *pair) is None else pair


def is_within(name: str, branch: str) -> bool:
    """Return whether a layer is a branch, or in it."""
    return name == branch or name.startswith(f"{branch}.")
