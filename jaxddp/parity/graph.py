"""Programs as graphs of values: what each value is computed from, and which values both programs compute."""

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxddp.parity.operations import Moments, Operation, Operations, Results, SourceLine, are_near, moments

SLICE = "slice of a loop's step"
NOTHING = moments(np.zeros(0))
MOST_NEEDED = 2**24  # elements of the values of a large program that are read as arrays
SMALL = 2**20  # elements of a weight that may be one of them
BEFORE = 8  # operations before a value: they may have moved numbers, which moments do not show
ARGUMENT = -1  # number of the call of a parameter, a buffer, an entry of the batch or a constant


@dataclass(frozen=True, eq=False)
class Node:
    """A value of a program: one result of a call of torch or of an equation, or an argument.

    Attributes:
        name: name of the function or of the primitive; of an argument, what it is.
        call: number of the call that computes it; `ARGUMENT`: none does.
        output: which of the call's results it is.
        inputs: indices of the values that the call is given, one for each of its arrays.
        numbers: numbers that the program gives the call.
        leading: how many of the numbers it gives before the values, as in 1 - x.
        line: the user's line; None: unknown.
        callers: the user's lines that call the function of `line`, the innermost first.
        moments: order-free statistics; None: it is not a number.
        array: the value; None: it is too large, or not a number.
        cotangent: gradient of the loss with respect to it; None: unknown, or it is no float.
    """

    name: str
    call: int = ARGUMENT
    output: int = 0
    inputs: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    line: SourceLine | None = None
    callers: tuple[SourceLine, ...] = ()
    moments: Moments | None = None
    array: np.ndarray | None = None
    cotangent: np.ndarray | None = None
    leading: int = 0

    @property
    def size(self) -> int:
        """Number of elements; 0 if unknown."""
        return 0 if self.moments is None else self.moments.size

    @property
    def is_telling(self) -> bool:
        """Return whether an equal value elsewhere is no coincidence: it has finite values, and not just one.

        >>> from jaxddp.parity.operations import moments
        >>> [Node("x", moments=moments(np.array(x))).is_telling for x in ([0.5, 0.2], 0.3, [1.0, 1.0], [True, False])]
        [True, True, False, False]
        """
        m = self.moments
        if m is None or not m.finite:
            return False
        if m.least == m.largest:
            return m.finite == 1 and m.least != round(m.least)
        return m.total != round(m.total) or m.squares != round(m.squares)

    def is_near(self, other: "Node") -> bool:
        """Return whether both hold the same numbers up to rounding, in any order."""
        known = self.moments, other.moments
        return known[0] is not None and known[1] is not None and are_near(known[0], known[1])

    @property
    def is_zero(self) -> bool:
        """Return whether it holds floats that are all 0."""
        m = self.moments
        is_float = self.array is not None and self.array.dtype.kind == "f"
        return m is not None and is_float and m.finite > 0 and not m.absolute

    @property
    def is_spoiled(self) -> bool:
        """Return whether no value of it is a finite number."""
        return self.moments is not None and self.moments.finite == 0 < self.moments.size


class Graph(Sequence[Node]):
    """Values of a program, in the order of their computation.

    Args:
        nodes: the values.
        end: index of the loss.
    """

    def __init__(self, nodes: Iterable[Node], end: int | None = None):
        self._nodes = tuple(nodes)
        self.end = len(self._nodes) - 1 if end is None else end

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def is_partial(self) -> bool:
        """Return whether values are known only by their moments."""
        return any(node.size and node.array is None for node in self._nodes)

    @cached_property
    def users(self) -> list[list[int]]:
        """For each value, the values that are computed from it."""
        users: list[list[int]] = [[] for _ in self._nodes]
        for index, node in enumerate(self._nodes):
            for source in dict.fromkeys(node.inputs):
                users[source].append(index)
        return users

    @cached_property
    def outputs(self) -> dict[int, list[int]]:
        """For each call, the indices of its results."""
        outputs: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self._nodes):
            outputs[node.call].append(index)
        return outputs

    @cached_property
    def moves(self) -> list[bool]:
        """For each value, whether it holds the numbers of one from which it is computed."""
        return [any(node.is_near(self._nodes[k]) for k in node.inputs) for node in self._nodes]

    def before(self, index: int, within: Collection[int]) -> set[int]:
        """Return a value of a region and all values of the region from which it is computed."""
        return self._reached([index], within, lambda k: self._nodes[k].inputs)

    def after(self, index: int, within: Collection[int]) -> set[int]:
        """Return the values of a region that are computed from a value, through values of the region."""
        return self._reached(self.users[index], within, self.users.__getitem__)

    def near(self, index: int, most: int) -> set[int]:
        """Return a value and those from which at most some operations compute it."""
        found = {index}
        for _ in range(most):
            found |= {x for k in found for x in self._nodes[k].inputs}
        return found

    def own_arguments(self, indices: Iterable[int]) -> dict[int, int]:
        """Return for each of some values the only argument of which it is made, and none of the others is.

        >>> nodes = [Node(name) for name in ("offset", "senders", "receivers")]
        >>> ends = [Node("add", call=0, inputs=(0, 1)), Node("add", call=1, inputs=(0, 2))]
        >>> Graph([*nodes, *ends]).own_arguments([3, 4])
        {3: 1, 4: 2}
        """
        reached = {k: self.before(k, range(len(self))) for k in indices}
        behind = {k: [i for i in of_one if self[i].call == ARGUMENT] for k, of_one in reached.items()}
        shared = Counter(i for of_one in behind.values() for i in of_one)
        own = {k: [i for i in of_one if shared[i] == 1] for k, of_one in behind.items()}
        return {k: alone[0] for k, alone in own.items() if len(alone) == 1}

    def border(self, region: Collection[int]) -> set[int]:
        """Return the values outside of a region from which it is computed."""
        return {k for index in region for k in self._nodes[index].inputs if k not in region}

    @staticmethod
    def _reached(starts, within, following) -> set[int]:  # type: ignore[no-untyped-def]
        found: set[int] = set()
        waiting = [k for k in starts if k in within]
        while waiting:
            k = waiting.pop()
            if k not in found:
                found.add(k)
                waiting += [x for x in following(k) if x in within and x not in found]
        return found


def differing(graph: Graph, equal: Container[int]) -> set[int]:
    """Return the values on which the loss depends, and which are not equal.

    What an equal value is computed from makes no difference.
    """
    found: set[int] = set()
    waiting = [graph.end]
    while waiting:
        index = waiting.pop()
        if index not in found and index not in equal and graph[index].call != ARGUMENT:
            found.add(index)
            waiting += graph[index].inputs
    return found


def needed_values(jax: Graph, torch: Operations) -> tuple[int, ...]:
    """Return the first values of a large program that torch does not compute, and what they are computed from.

    Args:
        jax: the port's program, whose large values are known by their moments.
        torch: the reference's program.

    Returns:
        Indices of the port's values, of at most `MOST_NEEDED` elements together.

    >>> x, y, z = (moments(np.array(values)) for values in ([0.5, 1.5], [1.5, 2.5], [2.5, 3.5]))
    >>> jax = Graph([Node("x", moments=x), Node("add", 0, 0, (0,), moments=y), Node("add", 1, 0, (1,), moments=z)])
    >>> needed_values(jax, (Operation("add", (), (), None, (y,)),))  # torch does not compute the last one
    (0, 1, 2)
    """
    known = Results(torch)
    equal = {k for k, node in enumerate(jax) if node.moments is not None and known.has_value(node.moments)}
    weights = Results((Operation("", (), (), None, tuple(_large_weights(jax))),))
    needed, chosen = dict[int, int](), tuple[int, ...]()
    for index in sorted(differing(jax, equal)):
        for k in jax.near(index, BEFORE):
            held = jax[k].moments
            needed |= {} if held is None or weights.has_value(held) else {k: held.size}
        if sum(needed.values()) > MOST_NEEDED:
            break
        chosen = tuple(needed)
    return chosen


def _large_weights(graph: Graph) -> Iterator[Moments]:
    arguments = (node.moments for node in graph if node.call == ARGUMENT)
    yield from (x for x in arguments if x is not None and x.size > SMALL)


def calls_of(graph: Graph, indices: Iterable[int]) -> Iterator[int]:
    """Yield the numbers of the calls that compute some values, each once, in order."""
    yield from sorted({graph[k].call for k in indices} - {ARGUMENT})


def operations_of(graph: Graph) -> Operations:
    """Return the calls of a program as operations, without their values."""
    numbers: dict[int, int] = {}  # call -> its operation; a slice of a loop's step counts as what it is taken from
    operations: list[Operation] = []
    for call, outputs in graph.outputs.items():
        first = graph[outputs[0]]
        makers = [numbers[graph[k].call] for k in first.inputs if graph[k].call in numbers]
        if call == ARGUMENT:
            continue
        if first.name == SLICE:
            numbers |= {call: makers[0]} if makers else {}
            continue
        numbers[call] = len(operations)
        results = tuple(graph[k].moments or NOTHING for k in outputs)
        operations.append(
            Operation(first.name, (*dict.fromkeys(makers),), first.numbers, first.line, results, first.callers)
        )
    return tuple(operations)
