"""Propose lines of the table `names` that agree with shapes, names and the order of use.

A stack is proposed if torch's layers "h.0", "h.1", ..., or "q1", "q2", ..., have equal arrays. Fused layers are
proposed if a run of layers of one kind is as large as one layer of the other side. Shapes do not show the order of the
parts of a fused layer; a run of both models decides between the orders.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jaxddp.errors import listed
from jaxddp.parity.convert.layer_pairs import OF_FLAX, Kind, Pairs, Unpaired, paired_arrays, paired_layers
from jaxddp.parity.convert.layouts import GRUS, RECURRENT, Shape
from jaxddp.parity.convert.lines import Table, folded
from jaxddp.parity.port.rules import NUMBER, Names, Rule, fused, part, summed

Group = tuple[tuple[str, ...], tuple[str, ...]]  # layers of jax, and the layers of torch that they correspond to

PARTS = (3, 2)  # numbers of layers that are fused: q, k and v; two halves
MOST_STACKS = 3  # each may be one layer in jax, or several


@dataclass(frozen=True)
class Proposal:
    """Proposed lines for arrays without a twin.

    Attributes:
        lines: a line for each layer that has a counterpart, or for each array.
        by_order: groups of jax's layers, or arrays, of one kind that only their order pairs off.
        others: jax's arrays that have a twin without these lines.
        orders: the lines of the parts of fused layers, in each order that shapes allow.
        is_complete: each array has a twin.
        why: which layers have no counterpart of their size, or how single arrays get one; "" if all have one.
        alone: arrays that only one side's layer has, such as a bias.
    """

    lines: Table
    by_order: Sequence[tuple[str, ...]]
    others: Set[str]
    orders: Sequence[Table] = ()
    is_complete: bool = True
    why: str = ""
    alone: tuple[str, ...] = ()

    def certain(self, names: Names) -> Table:
        """Return `names` with the proposed lines that are not doubtful."""
        doubtful = {name for group in (*self.by_order, *self.orders[1:]) for name in group}
        return {**names, **folded(self.lines, doubtful | self.others)}


def propose(unpaired: Unpaired, tied: Mapping[str, str], fits: Callable[[Table], bool]) -> Proposal:
    """Propose lines for layers, stacks and fused layers, or for single arrays; if none fit, for layers that pair off.

    Args:
        unpaired: arrays without a twin.
        tied: further names of tied torch parameters.
        fits: returns whether each array has a twin with these lines.

    >>> jax, torch = {"blocks.kernel": (2, 3, 5)}, {"h.0.weight": (5, 3), "h.1.weight": (5, 3)}
    >>> propose(Unpaired([*jax], [*torch], jax, torch, {}), {}, lambda lines: True).lines
    {'blocks': 'h.{}'}
    """
    once = replace(unpaired, torch=[name for name in unpaired.torch if name not in tied])
    several = [unpaired, once] if once != unpaired else [unpaired]
    ways = [(one, paired_layers(one)) for each in several for one in _with_stacks(each)]
    ways.sort(key=lambda way: bool(way[1].jax or way[1].torch))  # first those without fused layers
    others = unpaired.shapes.keys() - {*unpaired.jax}
    by_array = ((x, paired_arrays(x)) for each in several for one in _with_stacks(each) for x in _with_sums(one))
    for one, pairs in itertools.chain(ways, by_array):
        orders = [order for order in _orders(one, pairs) if fits(_narrowed({**pairs.pairs, **order}, one))]
        if orders:
            return Proposal(_narrowed({**pairs.pairs, **orders[0]}, one), pairs.by_order, others, orders)
    pairs = paired_layers(unpaired)
    why = _without_counterpart(pairs)
    return Proposal(_narrowed(dict(pairs.pairs), unpaired), pairs.by_order, others, is_complete=False, why=why)


def _narrowed(lines: Table, unpaired: Unpaired) -> Table:
    """Replace the line of a layer by one of its only array, if jax's layer also holds other layers.

    >>> jax, torch = {"decoder.table": (5, 3), "decoder.out.kernel": (3, 5)}, {"tokens.weight": (5, 3)}
    >>> _narrowed({"decoder": "tokens"}, Unpaired(["decoder.table"], [*torch], jax, torch, {}))
    {'decoder.table': 'tokens.weight'}
    """
    narrowed: dict[str, str | Rule] = {}
    for jax, torch in lines.items():
        inside = [name for name in unpaired.shapes if name.startswith(f"{jax}.")]
        direct = [name for name in inside if name.rpartition(".")[0] == jax]
        arrays = [name for name in direct if name.rpartition(".")[2] in OF_FLAX] or direct
        tensors = [name for name in unpaired.tensors if name.rpartition(".")[0] == torch]
        is_alone = len(inside) > len(arrays) == len(tensors) == 1
        narrowed |= {arrays[0]: tensors[0]} if is_alone else {jax: unpaired.rules.get(str(torch), torch)}
    return narrowed


def _without_counterpart(pairs: Pairs) -> str:
    if not pairs.jax or not pairs.torch or len(pairs.jax) == len(pairs.torch) == 1:
        return ""
    sides = ("jax", pairs.jax), ("torch", pairs.torch)
    named = ((side, [layer or "(model)" for layer in layers]) for side, layers in sides)
    left = " and ".join(f"{side}'s {listed(layers, joint=', ')}" for side, layers in named)
    return (
        f"no table is proposed for {left}: they differ in size or number, and parts of fused layers are found only "
        "if one layer holds two or three equal ones of one module, used in the same order on both sides"
    )


def _with_stacks(unpaired: Unpaired) -> Iterator[Unpaired]:
    """Yield the arrays, and variants in which some of torch's stacks are one layer, as in jax."""
    stacks = _stacks(unpaired)[:MOST_STACKS]
    for number in range(len(stacks) + 1):
        for chosen in itertools.combinations(stacks, number):
            yield _stacked(unpaired, chosen)


def _with_sums(unpaired: Unpaired) -> Iterator[Unpaired]:
    """Yield the arrays with the two biases of torch's recurrent layers summed, a GRU's only in part, and unchanged."""
    torch, tensors, rules = [*unpaired.torch], dict(unpaired.tensors), dict[str, Rule]()
    for first in unpaired.torch:
        module, name = unpaired.modules.get(first.rpartition(".")[0]), first.replace("bias_ih", "bias_hh")
        if name == first or not isinstance(module, RECURRENT):
            continue
        if isinstance(module, GRUS):
            *stack, size = tensors[first]
            added, rules[name] = (part(name, index, of=(size // 3 * 2, size // 3)) for index in (0, 1))
            rules[first], tensors[name] = summed(first, added), (*stack, size // 3)
        elif name in torch:
            torch.remove(name)
            learns = [module.get_parameter(x.rpartition(".")[2]).requires_grad for x in (first, name)]
            rules[first] = summed(*(first, name)[:: -1 if learns == [False, True] else 1])
    if rules:
        yield replace(unpaired, torch=torch, tensors=tensors, rules=rules)
    yield unpaired


def _stacks(unpaired: Unpaired) -> list[str]:
    """Return the prefixes, "h." or "q", of torch layers numbered from 0 or 1 with equal arrays, none within another."""
    members: dict[str, dict[int, set[tuple[str, Shape]]]] = {}
    for name in unpaired.torch:
        for number in re.finditer(r"(?<!\d)(?:0|[1-9]\d*)(?=\.)", name):
            rest = name[number.end() :], unpaired.tensors[name]
            members.setdefault(name[: number.start()], {}).setdefault(int(number[0]), set()).add(rest)
    counts = {shape[0] for name in unpaired.jax if (shape := unpaired.shapes[name])}
    alike = [
        prefix
        for prefix, layers in members.items()
        if len(layers) > 1 and len(layers) in counts and len({*map(frozenset, layers.values())}) == 1
        if sorted(layers) in ([*range(len(layers))], [*range(1, len(layers) + 1)])
    ]
    outer = [prefix for prefix in alike if not any(_joint(prefix, [other]) != prefix for other in alike)]
    return sorted(outer, key=lambda prefix: not prefix.endswith("."))  # lists of layers first


def _joint(name: str, stacks: Sequence[str]) -> str:
    """Return the name with `NUMBER` in place of the number of a layer of these stacks."""
    prefixes = "|".join(map(re.escape, stacks)) or "(?!)"  # which nothing matches
    return re.sub(rf"^({prefixes})\d+(?=\.|$)", rf"\g<1>{NUMBER}", name)


def _stacked(unpaired: Unpaired, stacks: Sequence[str]) -> Unpaired:
    """Return the arrays with one tensor for the tensors of each stack; its first axis counts the layers."""
    torch: dict[str, Shape] = {}
    for name in unpaired.torch:
        joint, shape = _joint(name, stacks), unpaired.tensors[name]
        torch[joint] = shape if joint == name else (torch.get(joint, (0,))[0] + 1, *shape)
    modules = {_joint(name, stacks): module for name, module in unpaired.modules.items()} | dict(unpaired.modules)
    return replace(unpaired, torch=[*torch], tensors={**unpaired.tensors, **torch}, modules=modules)


def _orders(unpaired: Unpaired, pairs: Pairs) -> Iterator[Table]:
    """Yield the lines of layers that do not pair off, one for one or fused, in each order of the parts.

    The parts follow one another, or alternate by the numbers of heads that torch's modules say.
    """
    groups = _aligned([*pairs.jax.items()], [*pairs.torch.items()])
    if groups is None:
        return
    most = max((max(map(len, group)) for group in groups), default=1)
    heads = [None, *_heads(groups, unpaired)] if most > 1 else [None]
    for order, number in itertools.product(itertools.permutations(range(most)), heads):
        yield dict(line for group in groups for line in _lines(group, order, number))


def _aligned(jax: list[tuple[str, Kind]], torch: list[tuple[str, Kind]]) -> list[Group] | None:
    """Group both sides' layers in order, one to one or several siblings to one; None if that is impossible.

    The sizes of the next two layers decide how many form a group, so there is only one way.
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


def _heads(groups: list[Group], unpaired: Unpaired) -> list[int]:
    """Return the numbers of heads in the attributes of the torch modules around fused layers."""
    above = {torch[0].rpartition(".")[0] for jax, torch in groups if len(jax) != len(torch)}
    above |= {layer.rpartition(".")[0] for layer in above}
    said = {
        value
        for module in map(unpaired.modules.get, above)
        for name, value in (vars(module) if module is not None else {}).items()
        if "head" in name and not name.endswith(("dim", "size")) and type(value) is int and value > 1
    }
    return sorted(said)


def _lines(group: Group, order: tuple[int, ...], heads: int | None) -> Iterator[tuple[str, str | Rule]]:
    """Yield the table's lines for a group: of one layer, or of the parts of a fused layer."""
    jax, torch = group
    number = max(len(jax), len(torch))
    places = [place for place in order if place < number]
    if number == 1:
        yield jax[0], torch[0]
    elif len(torch) > 1:
        yield jax[0], fused(*(torch[place] for place in places), heads=heads)
    else:
        for layer, place in zip(jax, places, strict=True):
            yield layer, part(torch[0], place, of=number, heads=heads)
