"""Find the segments in which two programs of a loss differ: their inputs are equal, and what they compute is not."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.diagnosis.forced.align import Aligner, Alignment, Twin, moments_of
from jaxddp.parity.diagnosis.forced.layouts import Order
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import Graph, calls_of
from jaxddp.parity.operations import are_near

MOST_SEGMENTS = 40
MOST_TRIALS = 6000  # of all segments; measured: up to 2,481, of a causal mask that is off by one in a GPT
# Most operations of a segment that is looked for, in turn.
COSTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 10_000)
NEAREST = 12  # of the port's values that are tried in each of two places


@dataclass(frozen=True, eq=False)
class Segment:
    """Operations of both sides that get equal inputs and give other outputs.

    Attributes:
        torch, jax: indices of the values that they compute; one of them may be empty.
        ends: the values, torch's and the port's, from which both continue alike.
        joined: values of both, torch's and the port's, that are equal after these; None: the losses.
        inside: whether the segment computes torch's value; False: it is equal, and the port uses another one here.
        order: order in which torch's value would hold the port's; None: unknown.
    """

    torch: tuple[int, ...]
    jax: tuple[int, ...]
    ends: tuple[int, int]
    joined: tuple[int, int] | None = None
    inside: bool = True
    order: Order | None = None


@dataclass(frozen=True)
class Hit:
    """Values of the port with which a call computes what the port does.

    Attributes:
        call: number of the call.
        replaced: index of a value of torch -> the port's value in its place.
        cost: number of the port's operations that make these.
        left: number of torch's values that still differ.
        strange: number of inputs of the segments that only one side has.
        joined: values of both sides that are equal with these.
        alignment: with these values forced.
    """

    call: int
    replaced: Mapping[int, Twin]
    cost: int
    left: int
    strange: int
    joined: tuple[int, int]
    alignment: Alignment


class Location:
    """Search for the segments of two programs.

    Args:
        loss: torch's program.
        jax: the port's program.

    Attributes:
        segments: what was found.
        trials: number of calls that were made with other values.
    """

    def __init__(self, loss: TorchGraph, jax: Graph):
        self.aligner = Aligner(loss, jax)
        self.torch, self.jax = loss.graph, jax
        self.segments: list[Segment] = []
        self.trials = 0
        self._alignment = self.aligner.start()
        self._of_torch, self._of_jax = self.aligner.unequal(self._alignment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a call may divide by 0 when it gets other values
            self._search()

    def _search(self) -> None:
        while self._of_torch and len(self.segments) < MOST_SEGMENTS:
            if not self._step():
                return
        if self._of_torch:
            self._add_rest()

    def _step(self) -> bool:
        """Add the cheapest segments after which a call computes what the port does; if there are none, the rest."""
        border = self.jax.border(self._of_jax)
        self._before = {k: self.jax.before(k, self._of_jax) for k in self._of_jax} | {k: set() for k in border}
        self._costs = {k: _cost(self.jax, before) for k, before in self._before.items()}
        self._tried: set[tuple[object, ...]] = set()
        for most in COSTS:
            for number in calls_of(self.torch, self._of_torch):
                if number in self.aligner.opaque or self.trials > MOST_TRIALS:
                    continue
                hits = [*self._hits(number, most)]
                if hits:
                    self._accept(min(hits, key=lambda hit: (hit.cost, hit.strange, hit.left)))
                    return True
        self._add_rest()
        return False

    def _add_rest(self) -> None:
        """Add what still differs as one segment, which ends with the losses."""
        ends = self.torch.end, self.jax.end
        self.segments.append(Segment(tuple(sorted(self._of_torch)), tuple(sorted(self._of_jax)), ends))

    def _hits(self, number: int, most: int) -> Iterator[Hit]:
        inputs = dict.fromkeys(self.torch[self.torch.outputs[number][0]].inputs)
        suspected = [k for k in inputs if k in self._of_torch]
        for places in _places(suspected, [k for k in inputs if k not in suspected]):
            here = sum(_cost(self.torch, self.torch.before(k, self._of_torch)) for k in places)
            for cost, replaced in self._replacements(places, most - here) if here <= most else ():
                key = number, places, tuple((twin.jax, id(twin.order)) for twin in replaced.values())
                if key in self._tried:
                    continue
                self._tried.add(key)
                self.trials += 1
                hit = self._hit(number, here + cost, replaced)
                if hit is not None:
                    yield hit

    def _replacements(self, places: tuple[int, ...], most: int) -> list[tuple[int, dict[int, Twin]]]:
        """Return values of the port in these places, with the number of operations that make them; the fewest first."""
        choices = [[one for one in self._candidates(k) if one[0] <= most] for k in places]
        if len(places) > 1:
            choices = [some[:NEAREST] for some in choices]
        every = (
            (sum(cost for cost, _ in chosen), dict(zip(places, (twin for _, twin in chosen), strict=True)))
            for chosen in itertools.product(*choices)
        )
        return sorted((one for one in every if one[0] <= most), key=lambda one: one[0])

    def _candidates(self, index: int) -> Iterator[tuple[int, Twin]]:
        node = self.torch[index]
        if node.array is None:
            return
        twin = self._alignment.twins.get(index)
        near = sorted((cost, k) for k, cost in self._costs.items() if self.jax[k].size == node.size)
        for cost, k in near:
            array = self.jax[k].array
            if array is None or (array.dtype.kind == "f") != (node.array.dtype.kind == "f"):
                continue
            for order in self.aligner.layouts.possible(node.array.shape, array.shape):
                if twin is None or twin.jax != k or not np.array_equal(order, twin.order):
                    yield cost, Twin(k, order)

    def _hit(self, number: int, cost: int, replaced: Mapping[int, Twin]) -> Hit | None:
        aligner, alignment = self.aligner, self._alignment
        arrays = {k: aligner.array(twin, self.torch[k].array) for k, twin in replaced.items()}
        try:
            results = aligner.made(alignment, number, arrays)
        except IMPOSSIBLE:
            return None
        among = self._of_jax.intersection(
            *(self.jax.after(twin.jax, self._of_jax) - self._before[twin.jax] for twin in replaced.values())
        )
        if not among:
            return None
        given = [moments_of(x) for x in arrays.values()]
        for result in results:
            known = moments_of(result)
            if any(are_near(known, x) for x in given):  # it only moves them
                return None
            twin = aligner.twin_of(result, among)
            if twin is None or not self.jax[twin.jax].is_telling:
                return None
            joined = self.torch.outputs[number][0], twin.jax
        changed = self._with(number, replaced)
        left = len(self.aligner.unequal(changed)[0])
        strange = sum(self._strange(k, twin) for k, twin in replaced.items())
        return Hit(number, replaced, cost, left, strange, joined, changed) if left < len(self._of_torch) else None

    def _strange(self, index: int, twin: Twin) -> int:
        """Return the number of inputs of a segment that only one side has: the same operation has the same ones."""
        of_torch = self.torch.before(index, self._of_torch)
        inputs = self.torch.border(of_torch) if of_torch else {index}
        twins = {self._alignment.twins[k].jax for k in inputs if k in self._alignment.twins}
        return len(twins ^ (self.jax.border(self._before[twin.jax]) or {twin.jax}))

    def _with(self, number: int, replaced: Mapping[int, Twin]) -> Alignment:
        changed = self._alignment.copy()
        for k, twin in replaced.items():
            if k in self._of_torch:
                changed.forced[k] = twin
                changed.arrays[k] = self.aligner.array(twin, self.torch[k].array)
            else:
                changed.edges[k, number] = twin
        return self.aligner.follow(changed)

    def _accept(self, hit: Hit) -> None:
        """Keep the segments of a hit; operands that are equal values in other places are one."""
        found = []
        for k, twin in hit.replaced.items():
            inside = k in self._of_torch
            of_torch = tuple(sorted(self.torch.before(k, self._of_torch))) if inside else ()
            of_jax = tuple(sorted(self._before[twin.jax]))
            if of_torch or of_jax:
                found.append(Segment(of_torch, of_jax, (k, twin.jax), hit.joined, inside, twin.order))
            self.aligner.layouts.note(self.torch[k].array.shape, self.jax[twin.jax].array.shape, twin.order)
        if not found:
            (k, twin), *_ = hit.replaced.items()
            t, j = hit.joined
            found.append(Segment((t,), (j,), (k, twin.jax), hit.joined, False, twin.order))
        self.segments += found
        self._alignment = hit.alignment
        self._of_torch, self._of_jax = self.aligner.unequal(hit.alignment)


def _places(suspected: list[int], others: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the inputs of a call that are replaced together, at most two.

    >>> [*_places([], [1, 2])], [*_places([3], [1])], [*_places([3, 4], [1])]
    ([(1,), (2,), (1, 2)], [(3,), (3, 1)], [(3, 4), (3,), (4,)])
    """
    if len(suspected) > 2:
        return
    if len(suspected) == 2:
        yield (suspected[0], suspected[1])
        yield from ((k,) for k in suspected)
    elif suspected:
        yield (suspected[0],)
        yield from ((suspected[0], k) for k in others)
    else:
        yield from ((k,) for k in others)
        yield from itertools.combinations(others, 2)


def _cost(graph: Graph, indices: Iterable[int]) -> int:
    """Return the number of calls that do more than move values."""
    return len({graph[k].call for k in indices if not _moves(graph, k)})


def _moves(graph: Graph, index: int) -> bool:
    node = graph[index]
    given = (graph[k].moments for k in node.inputs)
    return node.moments is not None and any(x is not None and are_near(node.moments, x) for x in given)
