"""Lines of a table `names`: one for each layer, or one for a branch of them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from jaxddp.parity.convert.entries import find_entry
from jaxddp.parity.convert.layouts import Shapes
from jaxddp.parity.convert.pieces import Piece
from jaxddp.parity.port.rules import Names, Rule

Table = dict[str, str | Rule]

FEW = 5  # of fewer layers any two are exchanged, of more each with the next


def lines_of(pieces: Iterable[Piece], table: Names) -> Table:
    """Return a line for each layer of jax, or for an array that has its own; a rule for a branch stays one line."""
    lines: Table = {}
    for piece in pieces:
        entry, layer = find_entry(piece.jax, table), piece.jax.rpartition(".")[0]
        name = piece.jax if entry.key == piece.jax else layer or piece.jax
        path = entry.paths()[0]
        if isinstance(entry.value, Rule) and entry.key is not None:
            lines[entry.key] = entry.value
        else:
            lines[name] = path if name == piece.jax else path.rpartition(".")[0]
    return lines


def folded(lines: Mapping[str, str | Rule], left_out: Collection[str] = ()) -> Table:
    """Replace the lines of a branch by one, as long as its layers have the same names on both sides; rules come last.

    Args:
        lines: a line for each layer.
        left_out: layers that get no line, nor one for a branch around them.

    >>> folded({"a_0.q": "b.0.q", "a_0.k": "b.0.k", "a_1.x": "b.1.y"})
    {'a_0': 'b.0', 'a_1.x': 'b.1.y'}
    >>> folded({"a_0": "b.0", "a_0.q": "b.0.q", "a_0.k": "a_0.k"})  # the first line says the second
    {'a_0': 'b.0', 'a_0.k': 'a_0.k'}
    >>> folded({"a.q": "b.q", "a.k": "b.x"}, left_out=["a.k"])
    {'a.q': 'b.q'}
    """
    table = {one: other for one, other in lines.items() if isinstance(other, str) and one not in left_out}
    rules = {one: other for one, other in lines.items() if isinstance(other, Rule) and one not in left_out}
    while True:
        branches: dict[str, list[str]] = {}
        for one, other in table.items():
            if "." in one and "." in other and one.rpartition(".")[2] == other.rpartition(".")[2]:
                branches.setdefault(one.rpartition(".")[0], []).append(other.rpartition(".")[0])
        alike = {
            one: others[0]
            for one, others in branches.items()
            if len({*others}) == 1 and len(others) == sum(layer.startswith(f"{one}.") for layer in (*table, *left_out))
        }
        if not alike:
            return {one: other for one, other in table.items() if other != _by_prefix(one, table)} | rules
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


def exchanges(group: Sequence[str], shapes: Shapes, lines: Table) -> Iterator[Table]:
    """Yield the lines with the twins of some layers exchanged: of three in each order, of others two at a time.

    >>> [*exchanges("ab", {"a": (2,), "b": (2,)}, {"a": "x", "b": "y"})]
    [{'a': 'y', 'b': 'x'}]
    >>> [len([*exchanges(group, {}, dict.fromkeys(group, "x"))]) for group in ("abc", "abcdef")]
    [5, 5]
    """
    pairs = [*(combinations(group, 2) if len(group) < FEW else pairwise(group))]
    moves: list[tuple[tuple[str, str], ...]] = [(pair,) for pair in pairs]
    if len(group) == 3:
        moves += [(pairs[0], pairs[2]), (pairs[2], pairs[0])]
    for move in moves:
        other = lines
        for pair in move:
            other = exchanged(*widest(*pair, shapes, lines), shapes, other)
        if other is not lines:
            yield other


def exchanged(one: str, other: str, shapes: Shapes, lines: Table) -> Table:
    """Return the lines with the twins of two layers, or branches, exchanged; the same ones if shapes differ."""
    first, second = within(one, lines), within(other, lines)
    if first.keys() != second.keys() or within(one, shapes) != within(other, shapes):
        return lines
    return lines | {one + end: twin for end, twin in second.items()} | {other + end: x for end, x in first.items()}


def widest(one: str, other: str, shapes: Shapes, lines: Table) -> tuple[str, str]:
    """Return the branches of two layers that differ in one word if they can be exchanged; the layers if not.

    >>> widest("q_net.body.fc", "target_net.body.fc", {}, {"q_net.body.fc": "a", "target_net.body.fc": "b"})
    ('q_net', 'target_net')
    """
    words, others = one.split("."), other.split(".")
    places = [place for place, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]]
    if len(words) != len(others) or len(places) != 1:
        return one, other
    branch, twin = (".".join(path[: places[0] + 1]) for path in (words, others))
    return (one, other) if exchanged(branch, twin, shapes, lines) is lines else (branch, twin)


def within(branch: str, of: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs to a layer or branch, by the rest of its name."""
    return {name[len(branch) :]: x for name, x in of.items() if name == branch or name.startswith(f"{branch}.")}
