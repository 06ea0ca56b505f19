"""Values of the port in place of a call's inputs: the call then computes what the port does, too."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np

from jaxddp.parity.diagnosis.forced.align import Aligner, Alignment, Twin, moments_of
from jaxddp.parity.diagnosis.forced.layouts import NEAR, Order, equal, repeated
from jaxddp.parity.diagnosis.forced.segments import CONSTANT, Hit, Segment
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import are_near

FEW = 3  # operations, from which on both sides of a segment must have almost the same inputs
STRANGE = 3  # inputs that only one side has
MOST_ELEMENTS = 2**26  # of values that are compared, or made again, in trials that make all later values
IN_PART, SEVERAL = 0.2, 4  # share of equal elements, and how many are different numbers, where others have no effect
EDIT = 2  # cost of a call with a fault
NEAREST = 12  # of the port's values that are tried in each of two places


class State:
    """Compare two programs while some segments are forced, and find the hits that this allows.

    Args:
        aligner: both programs.
        alignment: the segments that are forced.

    Attributes:
        of_torch, of_jax: values on which the loss depends, and which have no twin.
        trials: number of calls that were made with other values.
    """

    def __init__(self, aligner: Aligner, alignment: Alignment):
        self.aligner, self.alignment = aligner, alignment
        self.torch, self.jax = aligner.torch, aligner.jax
        self.of_torch, self.of_jax = aligner.unequal(alignment)
        self.trials = 0
        self._tried: set[tuple[object, ...]] = set()
        self._known_later: dict[int, set[int]] = {}
        self._inputs_of_torch: dict[int, set[int]] = {}
        self._inputs_of_jax: dict[int, set[int]] = {}

    @cached_property
    def before(self) -> dict[int, set[int]]:
        """Return for each value of the port that differs, or is given to one, those that differ and compute it."""
        border = self.jax.border(self.of_jax)
        return {k: self.jax.before(k, self.of_jax) for k in self.of_jax} | {k: set() for k in border}

    @cached_property
    def _costs(self) -> dict[int, int]:
        return {k: _cost(self.jax, before) for k, before in self.before.items()}

    @cached_property
    def given(self) -> set[int]:
        """Return the port's arguments, and arrays of one number that nothing makes, as zeros in place of a state."""
        made = ((k, before) for k, before in self.before.items() if before and self._is_uniform(k))
        constants = {k for k, before in made if all(map(self._is_constant, self.jax.border(before)))}
        return constants | {k for k in self.before if self.jax[k].call == ARGUMENT}

    def _is_uniform(self, of_jax: int) -> bool:
        m = self.jax[of_jax].moments
        return m is not None and m.size > 1 and m.least == m.largest

    def _is_constant(self, of_jax: int) -> bool:
        node = self.jax[of_jax]
        return node.name == CONSTANT or (node.call != ARGUMENT and not node.inputs)

    def hits(self, number: int, most: int, ends: set[int] | None = None, strange: int = STRANGE) -> Iterator[Hit]:
        """Yield the hits of a call that take at most some operations, except for those that were tried before.

        Args:
            number: number of the call.
            most: most operations.
            ends: indices of the port's values that are tried; None: all.
            strange: most inputs that only one side has.
        """
        if number in self.aligner.opaque:
            return
        inputs = dict.fromkeys(self.torch[self.torch.outputs[number][0]].inputs)
        suspected = [k for k in inputs if k in self.of_torch]
        for places in _places(suspected, [k for k in inputs if k not in suspected]):
            here = sum(_cost(self.torch, self.torch.before(k, self.of_torch)) for k in places)
            swapped = len(places) == 2 and self.of_torch.isdisjoint(places)
            among = {self.alignment.twins[k].jax for k in inputs if k in self.alignment.twins} if swapped else ends
            for cost, replaced in self._replacements(places, most - here, among) if here <= most else ():
                key = number, places, tuple((twin.jax, key_of(twin.order)) for twin in replaced.values())
                of_one = sum(self._strange(k, twin) for k, twin in replaced.items())
                if key in self._tried or (most > FEW and of_one > strange):
                    continue
                self._tried.add(key)
                self.trials += 1
                hit = self._hit(number, here + cost, replaced)
                if hit is not None:
                    yield hit

    def edited(self, number: int, edit: CallEdit) -> Hit | None:
        """Return a hit by a fault in a call whose inputs are equal; None: the port does not compute its result."""
        self.trials += 1
        outputs = self.torch.outputs[number]
        changed = self.alignment.copy()
        changed.edits[number] = (edit,)
        try:
            given = [changed.arrays[k] for k in self.torch[outputs[0]].inputs]
            results = self.aligner.loss.called(number, given, (edit,))
        except IMPOSSIBLE:
            return None
        if any(_moves_only(x, given) for x in results):
            return None
        twins = [self.aligner.twin_of(x, self.of_jax) for x in results]
        if len(twins) != len(outputs) or not all(twin and self.jax[twin.jax].is_telling for twin in twins):
            return None
        of_torch = self.aligner.unequal(self.aligner.follow(changed, {number}))[0]
        left = len(of_torch)
        if (
            left >= len(self.of_torch)
            or outputs[0] not in changed.twins
            or not self.follows(changed, of_torch, outputs)
        ):
            return None
        twin = changed.twins[outputs[0]]
        return Hit((self.of_edit(number, edit, twin),), EDIT, edit.tier, changed, left)

    def replayed(self, index: int, twin: Twin, cost: int) -> Hit | None:
        """Return a hit by a value of the port in place of one of torch's, after which later values are equal."""
        changed = self.alignment.copy()
        self.force(changed, index, twin)
        of_torch = self.aligner.unequal(self.aligner.follow(changed))[0]
        if not self.follows(changed, of_torch, [index]):
            return None
        regions = tuple(sorted(self.torch.before(index, self.of_torch))), tuple(sorted(self.before[twin.jax]))
        users = [self.torch[k].call for k in self.torch.users[index] if k in self.of_torch or k in changed.twins]
        one = Segment(*regions, (index, twin.jax), None, True, twin.order, min(users, default=ARGUMENT))
        return Hit((one,), cost, self._strange(index, twin), changed, len(of_torch))

    def pairs(self, most: int) -> Iterator[tuple[int, int, Twin]]:
        """Yield the number of operations, and a value of torch and one of the port that may take its place."""
        found = []
        for index in self.of_torch:
            here = _cost(self.torch, self.torch.before(index, self.of_torch))
            for cost, twin in self.candidates(index, None) if here <= most else ():
                if here + cost <= most:
                    found.append((here + cost, index, twin))
        yield from sorted(found, key=lambda one: one[:2])

    def force(self, alignment: Alignment, index: int, twin: Twin) -> None:
        """Put a value of the port in place of one of torch's."""
        alignment.forced[index] = twin
        alignment.arrays[index] = self.aligner.array(twin, self.torch[index].array)
        alignment.twins.pop(index, None)

    def follows(self, changed: Alignment, of_torch: set[int], changed_values: Iterable[int]) -> bool:
        """Return whether later values are equal since some have changed, and these are no coincidences.

        Args:
            changed: the alignment with the change.
            of_torch: values that still differ.
            changed_values: indices of the values that have changed.
        """
        later = self.after(changed_values)
        if any(self._collapses(k, changed) for k in later):
            return False
        return self.shows(changed, later & (self.of_torch - of_torch))

    def after(self, indices: Iterable[int]) -> set[int]:
        """Return the values of torch that are computed from some, without these."""
        sources = {*indices}
        return set().union(*(self.torch.after(k, range(len(self.torch))) for k in sources)) - sources

    def shows(self, changed: Alignment, equal: Iterable[int]) -> bool:
        """Return whether values that have become equal are those of the port that differed, and no coincidences."""
        twins = [k for k in equal if k in changed.twins and changed.twins[k].jax in self.of_jax]
        telling = [self.jax[changed.twins[k].jax].is_telling for k in twins if self._is_float(k)]
        return bool(telling) and all(telling)

    def _collapses(self, index: int, changed: Alignment) -> bool:
        """Return whether all elements of a value have become one number, as after a power that is too high."""
        x, y = self.torch[index].array, changed.arrays[index]
        varies = x is not None and x.size > 1 and x.dtype.kind == y.dtype.kind == "f" and np.ptp(x) > 0
        return varies and not np.ptp(y) > 0

    def _is_float(self, index: int) -> bool:
        return self.torch[index].array is not None and self.torch[index].array.dtype.kind in "fc"

    def of_edit(self, number: int, edit: CallEdit, twin: Twin) -> Segment:
        """Return the segment of a call that computes a value of the port with a fault."""
        outputs = self.torch.outputs[number]
        of_jax = tuple(sorted(self.before.get(twin.jax, ())))
        of_torch = tuple(sorted(self.of_torch.intersection(outputs)))
        ends = outputs[0], twin.jax
        return Segment(of_torch, of_jax, ends, ends, True, twin.order, number, (edit,))

    def in_effect(self) -> Alignment | None:
        """Return the alignment with a value of the port in place of one of torch's of which some elements differ.

        The loss must not: both programs leave these elements out later, such as those of padding.
        """
        left = MOST_ELEMENTS
        for index in sorted(self.of_torch):
            mine = self.alignment.arrays.get(index)
            if mine is None or mine.dtype.kind != "f" or mine.size < 2:
                continue
            for _, twin in self.candidates(index, self.of_jax):
                left -= mine.size
                if left < 0:
                    return None
                if not _is_equal_in_part(mine, self.aligner.array(twin, mine)):
                    continue
                changed = self.with_values(self.torch[index].call, {index: twin}, ())
                if equal(changed.arrays[self.torch.end], self.alignment.arrays[self.torch.end]):
                    return changed
        return None

    def _replacements(
        self, places: tuple[int, ...], most: int, among: set[int] | None
    ) -> list[tuple[int, dict[int, Twin]]]:
        """Return values of the port in these places, with the number of operations that make them; the fewest first.

        Args:
            places: indices of the values in whose place they are.
            most: most operations.
            among: indices of the port's values that are tried; None: all.
        """
        choices = [[one for one in self.candidates(k, among) if one[0] <= most] for k in places]
        if len(places) > 1:
            choices = [some[:NEAREST] for some in choices]
        every = (
            (sum(cost for cost, _ in chosen), dict(zip(places, (twin for _, twin in chosen), strict=True)))
            for chosen in itertools.product(*choices)
        )
        return sorted((one for one in every if one[0] <= most), key=lambda one: one[0])

    def candidates(self, index: int, among: set[int] | None) -> Iterator[tuple[int, Twin]]:
        node = self.torch[index]
        if node.array is None:
            return
        twin = self.alignment.twins.get(index)
        sizes = {node.size, *self.aligner.layouts.sizes_of_padded(node.array.shape)}
        sized = [(cost, k) for k, cost in self._costs.items() if self.jax[k].size in sizes or self._repeats(index, k)]
        near = sorted(one for one in sized if among is None or one[1] in among)
        for cost, k in near:
            array = self.jax[k].array
            if array is None or (array.dtype.kind == "f") != (node.array.dtype.kind == "f"):
                continue
            # A value in place of an equal one is there as it was elsewhere: there are too many others.
            orders = self.aligner.layouts.possible(node.array.shape, array.shape, seen=twin is not None)
            for order in orders:
                if twin is None or twin.jax != k or twin.order is None or not np.array_equal(order, twin.order):
                    yield cost, Twin(k, order)

    def _has(self, of_jax: int) -> bool:
        """Return whether torch has a value of the port elsewhere, as a mean that is a part of a deviation, too."""
        known, twins = self.jax[of_jax].moments, (self.jax[twin.jax].moments for twin in self.alignment.twins.values())
        return known is not None and any(x is not None and are_near(known, x) for x in twins)

    def _repeats(self, index: int, of_jax: int) -> bool:
        """Return whether a value that the port repeats along axes may take the place of one of torch that differs."""
        x, y = self.torch[index].array, self.jax[of_jax].array
        if index not in self.of_torch or x is None or y is None or not 0 < y.size < x.size:
            return False
        users = self.jax.users[of_jax]
        # With further axes, a later operation repeats it.
        later = {k for user in users for k in self.jax.users[user]} if y.size > 1 and y.ndim > x.ndim else set()
        is_used_so = any(self.jax[k].size == x.size for k in users) or any(self.jax[k].size >= x.size for k in later)
        return is_used_so and any(True for _ in repeated(x.shape, y.shape))

    def _hit(self, number: int, cost: int, replaced: Mapping[int, Twin]) -> Hit | None:
        aligner, alignment = self.aligner, self.alignment
        among = self.of_jax.intersection(*(self._later(twin.jax) for twin in replaced.values()))
        if not among:
            return None
        arrays = {k: aligner.array(twin, self.torch[k].array) for k, twin in replaced.items()}
        try:
            results = aligner.made(alignment, number, arrays)
        except IMPOSSIBLE:
            return None
        outputs = self.torch.outputs[number]
        needed = [(k, x) for k, x in zip(outputs, results, strict=False) if k in self.of_torch or len(outputs) == 1]
        joined: tuple[int, int] | None = None
        for k, result in needed:
            twin = None if _moves_only(result, arrays.values()) else aligner.twin_of(result, among)
            if twin is None or not self.jax[twin.jax].is_telling:
                return None
            joined = (k, twin.jax) if joined is None else joined
        if joined is None or (
            cost > FEW and not any(self._costs[x.jax] for x in replaced.values()) and self._has(joined[1])
        ):
            return None
        equal = {k for k in replaced if k not in self.of_torch}
        # The port uses another value in place of an equal one: in this call, or in all.
        ways = [self.with_values(number, replaced, edges) for edges in ([equal, set()] if equal else [equal])]
        changed = min(ways, key=lambda way: len(self.aligner.unequal(way)[0]))
        left = len(self.aligner.unequal(changed)[0])
        if left >= len(self.of_torch):
            return None
        strange = sum(self._strange(k, twin) for k, twin in replaced.items())
        inside = changed.forced.keys()
        is_early = any(self._first_call(twin.jax) > number for twin in replaced.values())
        return Hit(tuple(self._segments(number, replaced, joined, inside)), cost, strange, changed, left, is_early)

    def _first_call(self, of_jax: int) -> int:
        """Return the first call of torch that computes a value of the port; `ARGUMENT`: none does."""
        return min((self.torch[k].call for k in self._twins_of[of_jax]), default=ARGUMENT)

    @cached_property
    def _twins_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for k, twin in self.alignment.twins.items():
            found[twin.jax].append(k)
        return found

    def _later(self, index: int) -> set[int]:
        """Return the port's values that differ, are computed from a value, and are none of those that compute it."""
        if index not in self._known_later:
            self._known_later[index] = self.jax.after(index, self.of_jax) - self.before[index]
        return self._known_later[index]

    def _strange(self, index: int, twin: Twin) -> int:
        """Return the number of inputs of a segment that only one side has: the same operation has the same ones."""
        if index not in self._inputs_of_torch:
            of_torch = self.torch.before(index, self.of_torch)
            inputs = self.torch.border(of_torch) if of_torch else {index}
            self._inputs_of_torch[index] = {self.alignment.twins[k].jax for k in inputs if k in self.alignment.twins}
        if twin.jax not in self._inputs_of_jax:
            self._inputs_of_jax[twin.jax] = self.jax.border(self.before[twin.jax]) or {twin.jax}
        return len(self._inputs_of_torch[index] ^ self._inputs_of_jax[twin.jax])

    def with_values(self, number: int, replaced: Mapping[int, Twin], edges: Collection[int]) -> Alignment:
        changed = self.alignment.copy()
        for k, twin in replaced.items():
            if k in edges:
                changed.edges[k, number] = twin
            else:
                self.force(changed, k, twin)
        return self.aligner.follow(changed)

    def _segments(
        self, number: int, replaced: Mapping[int, Twin], joined: tuple[int, int], forced: Collection[int]
    ) -> Iterator[Segment]:
        """Yield the segments of a hit; operands that are equal values in other places are one."""
        count = 0
        for k, twin in replaced.items():
            inside = k in forced
            of_torch = tuple(sorted(self.torch.before(k, self.of_torch))) if k in self.of_torch else ()
            of_jax = tuple(sorted(self.before[twin.jax]))
            if of_torch or of_jax:
                count += 1
                yield Segment(of_torch, of_jax, (k, twin.jax), joined, inside, twin.order, number)
            assert twin.order is not None, "a value that is put in place of another one is known"
            self.aligner.layouts.note(self.torch[k].array.shape, self.jax[twin.jax].array.shape, twin.order)
        for k, twin in replaced.items() if not count else ():
            t, j = joined
            yield Segment((t,), (j,), (k, twin.jax), joined, k in forced, twin.order, number)


def key_of(order: Order | None) -> int | None:
    """Return what an order is known by: the address of an array that is gone is used again."""
    return None if order is None else hash(order.tobytes())


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


def _is_equal_in_part(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether some elements of two arrays are equal, and several of these differ from each other."""
    same = np.isclose(x, y, rtol=NEAR, atol=0.0)
    return bool(IN_PART <= same.mean() < 1) and np.unique(x[same]).size >= SEVERAL


def _moves_only(result: np.ndarray, given: Iterable[np.ndarray]) -> bool:
    """Return whether a call has only moved the values of one of its inputs."""
    known = moments_of(result)
    return any(are_near(known, moments_of(x)) for x in given)


def _cost(graph: Graph, indices: Iterable[int]) -> int:
    """Return the number of calls that do more than move values."""
    return len({graph[k].call for k in indices if not graph.moves[k]})
