"""Candidates for the table `names`, which shapes, names and the order of use allow.

A stack is proposed where torch's layers "h.0", "h.1", ... have equal arrays, and fused layers where a run of layers of
one kind is as large as one layer of the other side. Shapes do not show in which order the parts of a fused layer
stand, so each order is a candidate; a run of both models decides between them. A table of embeddings is paired with
several if these have as many rows, in the order of their use or of their numbers.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from jaxddp.errors import listed
from jaxddp.parity.convert.layouts import Shape, Shapes, squeezed
from jaxddp.parity.convert.proposal import EMBEDDING, Kind, Unpaired, folded, paired
from jaxddp.parity.convert.similar_names import pair_off
from jaxddp.parity.port.rules import NUMBER, Rule, fused, part

Table = dict[str, str | Rule]
Group = tuple[tuple[str, ...], tuple[str, ...]]  # layers of jax and of torch that are one another

PARTS = (3, 2)  # numbers of layers that are fused: q, k and v; two halves
MOST_STACKS = 3  # each may be one in jax or not


class Candidate(NamedTuple):
    """A table under which every layer may have a twin.

    Attributes:
        table: the table.
        by_order: groups of jax's layers of one kind that their order alone pairs off.
    """

    table: Table
    by_order: tuple[tuple[str, ...], ...] = ()


def layer_tables(unpaired: Unpaired) -> list[Candidate]:
    """Return the tables under which every layer may have a twin; those without fused layers first.

    >>> modules = {"h.0": nn.Linear(3, 5), "h.1": nn.Linear(3, 5)}
    >>> jax, torch = {"blocks.kernel": (2, 3, 5)}, {"h.0.weight": (5, 3), "h.1.weight": (5, 3)}
    >>> layer_tables(Unpaired([*jax], [*torch], jax, torch, modules))[0]
    Candidate(table={'blocks': 'h.{}'}, by_order=())
    """
    stacks = _stacks(unpaired)[:MOST_STACKS]
    subsets = [chosen for number in range(len(stacks) + 1) for chosen in itertools.combinations(stacks, number)]
    stacked = [_stacked(unpaired, chosen) for chosen in subsets]
    return [candidate for fuses in (False, True) for one in stacked for candidate in _candidates(one, fuses)]


def array_tables(unpaired: Unpaired) -> list[Candidate]:
    """Return the table in which the arrays of layers that do not pair off do so one by one, by sizes, names and order.

    So do arrays of plain functions, whose names need not show which of them are a layer, and those of torch's LSTM.

    >>> jax, torch = {"w_x": (2, 12), "w_h": (3, 12)}, {"rnn.weight_ih_l0": (12, 2), "rnn.weight_hh_l0": (12, 3)}
    >>> array_tables(Unpaired([*jax], [*torch], jax, torch, {"rnn": nn.LSTM(2, 3)}))[0].table
    {'w_x': 'rnn.weight_ih_l0', 'w_h': 'rnn.weight_hh_l0'}
    """
    of_layers = paired(unpaired)
    pairs = of_layers.pairs
    jax = _by_sizes((name for name in unpaired.jax if not _within(name, pairs)), unpaired.shapes)
    torch = _by_sizes((name for name in unpaired.torch if not _within(name, pairs.values())), unpaired.tensors)
    if {sizes: len(names) for sizes, names in jax.items()} != {sizes: len(names) for sizes, names in torch.items()}:
        return []
    of_sizes = [pair_off(names, torch[sizes]) for sizes, names in jax.items()]
    lines = {one: other for found in of_sizes for one, other in found.pairs.items()}
    table: Table = {**folded(pairs), **{name: lines[name] for name in unpaired.jax if name in lines}}
    return [Candidate(table, (*of_layers.by_order, *(found.by_order for found in of_sizes if found.by_order)))]


def why_none(unpaired: Unpaired) -> str:
    """Say which layers have no counterpart of their size, so that no table can be proposed; "" if all have one."""
    _, jax, torch, _ = paired(unpaired)
    if not jax or not torch:
        return ""
    left = " and ".join(
        f"{side}'s {listed([*layers], joint=', ')}" for side, layers in (("jax", jax), ("torch", torch))
    )
    return (
        f"no table is proposed for {left}: they differ in size or number, and parts of fused layers are found only "
        "where one layer holds two or three equal ones of one module, used in the same order on both sides"
    )


def _within(name: str, layers: Iterable[str]) -> bool:
    return any(name == layer or name.rpartition(".")[0] == layer or name.startswith(f"{layer}.") for layer in layers)


def _by_sizes(names: Iterable[str], shapes: Shapes) -> dict[Shape, list[str]]:
    arrays: dict[Shape, list[str]] = {}
    for name in names:
        arrays.setdefault(tuple(sorted(squeezed(shapes[name]))), []).append(name)
    return arrays


def _stacks(unpaired: Unpaired) -> list[str]:
    """Return the prefixes, such as "h.", of numbered torch layers with equal arrays, none within another."""
    members: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = {}
    for name in unpaired.torch:
        words = name.split(".")
        for position, word in enumerate(words[:-1]):
            if word.isdecimal():
                prefix = "".join(f"{word}." for word in words[:position])
                rest = ".".join(words[position + 1 :]), unpaired.tensors[name]
                members.setdefault(prefix, {}).setdefault(int(word), set()).add(rest)
    alike = [
        prefix
        for prefix, layers in members.items()
        if len(layers) > 1 and sorted(layers) == [*range(len(layers))] and len({*map(frozenset, layers.values())}) == 1
    ]
    return [prefix for prefix in alike if not any(prefix != other and prefix.startswith(other) for other in alike)]


def _stacked(unpaired: Unpaired, stacks: Sequence[str]) -> Unpaired:
    """Return the arrays with the tensors of each stack as one, whose first axis counts its layers."""
    torch: dict[str, tuple[int, ...]] = {}
    modules: dict[str, nn.Module] = dict(unpaired.modules)
    counts: dict[str, int] = {}
    for name in unpaired.torch:
        prefix = next((prefix for prefix in stacks if name.startswith(prefix)), None)
        if prefix is None:
            torch[name] = unpaired.tensors[name]
            continue
        rest = name[len(prefix) :].partition(".")[2]
        joint = f"{prefix}{NUMBER}.{rest}"
        counts[joint] = counts.get(joint, 0) + 1
        torch[joint] = (counts[joint], *unpaired.tensors[name])
    for prefix in stacks:
        first = f"{prefix}0"
        below = {name: module for name, module in unpaired.modules.items() if f"{name}.".startswith(f"{first}.")}
        modules |= {f"{prefix}{NUMBER}{name[len(first) :]}": module for name, module in below.items()}
    return replace(unpaired, torch=[*torch], tensors={**unpaired.tensors, **torch}, modules=modules)


def _candidates(unpaired: Unpaired, fuses: bool) -> Iterator[Candidate]:
    """Yield the tables that pair off all layers."""
    pairs, jax, torch, by_order = paired(unpaired)
    if not fuses:
        if not jax and not torch:
            yield Candidate(dict(folded(pairs)), by_order)
        return
    if not jax or not torch:
        return
    for lines in _split_embeddings(jax, torch, unpaired):
        others = [
            [(layer, kind) for layer, kind in layers.items() if not (lines and kind[0] == EMBEDDING)]
            for layers in (jax, torch)
        ]
        groups = _aligned(*others)
        if groups is not None and any(len(of_jax) != len(of_torch) for of_jax, of_torch in groups):
            for order, heads in _orders(groups, unpaired):
                yield Candidate(_table(pairs, groups, order, heads) | lines, by_order)
        elif lines and groups is not None:
            yield Candidate(_table(pairs, groups, (), None) | lines, by_order)


def _split_embeddings(jax: Mapping[str, Kind], torch: Mapping[str, Kind], unpaired: Unpaired) -> list[Table]:
    """Return the lines for tables of embeddings that are one on one side and several on the other; [{}]: none are."""
    by_use = [[layer for layer, (kind, _) in layers.items() if kind == EMBEDDING] for layers in (jax, torch)]
    of_jax = {layer: unpaired.shapes[f"{layer}.embedding".lstrip(".")] for layer in by_use[0]}
    of_torch = {layer: unpaired.tensors[f"{layer}.weight".lstrip(".")] for layer in by_use[1]}
    by_number = [_by_number(layers) for layers in by_use]
    tables: list[Table] = []
    for first, second in (by_use, by_number):
        lines: Table | None = Table()
        for width in sorted({shape[1:] for shape in (*of_jax.values(), *of_torch.values())}):
            groups = _rows_aligned(
                [(layer, of_jax[layer][0]) for layer in first if of_jax[layer][1:] == width],
                [(layer, of_torch[layer][0]) for layer in second if of_torch[layer][1:] == width],
            )
            lines = None if groups is None or lines is None else lines | _lines_of_rows(groups, of_jax)
        if lines and lines not in tables:
            tables.append(lines)
    return tables or [Table()]


def _by_number(layers: Sequence[str]) -> list[str]:
    """Return layers whose names differ in their numbers only in the order of these; the others stay in their order.

    >>> _by_number(["b_10", "a", "b_9"])
    ['b_9', 'b_10', 'a']
    """
    stems = [re.sub(r"\d+", "", layer) for layer in layers]
    first = {stem: place for place, stem in reversed([*enumerate(stems)])}
    numbers = [[*map(int, re.findall(r"\d+", layer))] for layer in layers]
    places = sorted(range(len(layers)), key=lambda place: (first[stems[place]], numbers[place]))
    return [layers[place] for place in places]


def _rows_aligned(jax: list[tuple[str, int]], torch: list[tuple[str, int]]) -> list[Group] | None:
    """Go through both sides' tables of one width in order, one by one or several for one, by their numbers of rows."""
    groups: list[Group] = []
    while jax and torch:
        m, n = 1, 1
        while (less := _rows(jax[:m]) - _rows(torch[:n])) and m <= len(jax) and n <= len(torch):
            m, n = (m + 1, n) if less < 0 else (m, n + 1)
        if less or min(m, n) > 1:
            return None
        groups.append((tuple(layer for layer, _ in jax[:m]), tuple(layer for layer, _ in torch[:n])))
        jax, torch = jax[m:], torch[n:]
    return None if jax or torch else groups


def _rows(tables: list[tuple[str, int]]) -> int:
    return sum(rows for _, rows in tables)


def _lines_of_rows(groups: list[Group], of_jax: Mapping[str, tuple[int, ...]]) -> Table:
    """Return the lines for these tables."""
    lines = Table()
    for jax, torch in groups:
        if len(torch) > 1:
            lines[jax[0]] = fused(*torch)
        elif len(jax) > 1:
            sizes = tuple(of_jax[layer][0] for layer in jax)
            lines |= {layer: part(torch[0], place, of=sizes) for place, layer in enumerate(jax)}
        else:
            lines[jax[0]] = torch[0]
    return lines


def _aligned(jax: list[tuple[str, Kind]], torch: list[tuple[str, Kind]]) -> list[Group] | None:
    """Go through both sides' layers in order, one by one or several siblings for one; None if that is impossible.

    The sizes of the next two layers decide how many are one, so there is only one way.
    """
    groups: list[Group] = []
    while jax or torch:
        counts = ((1, 1), *((number, 1) for number in PARTS), *((1, number) for number in PARTS))
        fitting = [(m, n) for m, n in counts if _fit(jax[:m], torch[:n], m, n)]
        if not fitting:
            return None
        m, n = fitting[0]
        groups.append((tuple(layer for layer, _ in jax[:m]), tuple(layer for layer, _ in torch[:n])))
        jax, torch = jax[m:], torch[n:]
    return groups


def _fit(jax: list[tuple[str, Kind]], torch: list[tuple[str, Kind]], m: int, n: int) -> bool:
    """Return whether m and n layers, siblings of one kind on each side, are as large as one another."""
    if len(jax) < m or len(torch) < n:
        return False
    for layers in (jax, torch):
        if len({layer.rpartition(".")[0] for layer, _ in layers}) > 1 or len({kind for _, kind in layers}) > 1:
            return False
    (kind, sizes), (other, others) = jax[0][1], torch[0][1]
    return kind == other and [size * m for size in sizes] == [size * n for size in others]


def _orders(groups: list[Group], unpaired: Unpaired) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """Yield orders of the parts of a fused layer, and numbers of heads by which they stand; None: not by head."""
    number = max(max(map(len, group)) for group in groups)
    yield from itertools.product(itertools.permutations(range(number)), [None, *_heads(groups, unpaired)])


def _heads(groups: list[Group], unpaired: Unpaired) -> list[int]:
    """Return the numbers of heads that the torch modules around fused layers say."""
    above = {torch[0].rpartition(".")[0] for jax, torch in groups if len(jax) != len(torch)}
    above |= {layer.rpartition(".")[0] for layer in above}
    said = {
        value
        for module in map(unpaired.modules.get, above)
        for name, value in (vars(module) if module is not None else {}).items()
        if "head" in name and not name.endswith(("dim", "size")) and type(value) is int and value > 1
    }
    return sorted(said)


def _table(pairs: Mapping[str, str], groups: list[Group], order: tuple[int, ...], heads: int | None) -> Table:
    """Return the table with these groups."""
    plain, rules = dict(pairs), Table()
    for jax, torch in groups:
        if len(jax) == len(torch):
            plain |= zip(jax, torch, strict=True)
            continue
        number = max(len(jax), len(torch))
        places = [place for place in order if place < number]
        if len(torch) > 1:
            rules[jax[0]] = fused(*(torch[place] for place in places), heads=heads)
        else:
            parts = zip(jax, places, strict=True)
            rules |= {layer: part(torch[0], place, of=number, heads=heads) for layer, place in parts}
    return {**folded(plain), **rules}
