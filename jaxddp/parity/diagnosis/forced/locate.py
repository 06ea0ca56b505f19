"""Find the segments in which two programs of a loss differ: their inputs are equal, and what they compute is not."""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from jaxddp.parity.diagnosis.forced.align import Aligner, Alignment, Twin
from jaxddp.parity.diagnosis.forced.arguments import other_arguments
from jaxddp.parity.diagnosis.forced.forced_values import OtherInputs, holds
from jaxddp.parity.diagnosis.forced.hits import EDIT, MOST_ELEMENTS, State
from jaxddp.parity.diagnosis.forced.layouts import contains, equal
from jaxddp.parity.diagnosis.forced.needed import needed_faults
from jaxddp.parity.diagnosis.forced.segments import Hit, Segment, signature
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.forced.zeros import vanished_in
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Site
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import ARGUMENT, Graph, calls_of
from jaxddp.parity.operations import are_near

MOST_SEGMENTS = 60
MOST_TRIALS = 6000  # calls that are made with other values, of all segments of few operations
MOST_FAR_TRIALS = 16_000  # of all segments; measured: 14,000 for another rotary embedding
# Most operations of a segment that is looked for, in turn.
COSTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 10_000)
CHEAP = 8  # operations of segments that are looked for first
MOST_LEFT = 0.6  # of the values that differ, after a fault of a line: that of one direction of a recurrent layer
WEAK = 2  # values that an equal value in another place makes equal: other segments that are as cheap come first
KINDS = 6  # of segments at equal cost that are compared
MOST_REPLAYS = 80  # of what follows from a value of the port in place of one of torch's
MOST_IN_LOOPS = 160  # of these, in calls that are made several times
MOST_GIVEN = 120  # arguments of functions that are exchanged
MOST_EVERYWHERE = 240  # faults of a line that are planted in all of its calls


class CallEdits(Protocol):
    """Faults of calls that can be tried."""

    def of_call(self, number: int, numbers: Sequence[float]) -> Iterable[CallEdit]:
        """Return those of a call, with some numbers in place of those that it has."""

    def of_operands(self, number: int) -> Iterable[CallEdit]:
        """Return a call left out, or an operand of it."""

    def of_loop(self, numbers: Sequence[int]) -> Iterable[CallEdit]:
        """Return those of all calls of a loop at once."""

    def of_order(self, number: int) -> Iterable[CallEdit]:
        """Return those of when a call is made."""

    def of_inputs(self) -> Iterable[CallEdit]:
        """Return those of the batch and of directions, each at all of its calls."""


class Location:
    """Search for the segments of two programs.

    Args:
        loss: torch's program.
        jax: the port's program.
        others: other inputs of both programs.
        edits: faults that are tried where all inputs of a call are equal; None: none.
        names_of: faults with which segments that were found compute what the port does.

    Attributes:
        found: what was found: each fault's segments, those of all places.
        trials: number of calls that were made with other values.
        others: the other inputs, on which layouts are the same.
        alignment: what the port has in place of torch's values, with all segments forced.
    """

    def __init__(
        self,
        loss: TorchGraph,
        jax: Graph,
        others: Sequence[OtherInputs] = (),
        edits: CallEdits | None = None,
        names_of: "Callable[[Location, Sequence[Segment]], Sequence[CallEdit]]" = lambda location, segments: (),
    ):
        self.aligner = Aligner(loss, jax)
        self.loss, self.torch, self.jax = loss, loss.graph, jax
        self.found: list[tuple[Segment, ...]] = []
        self.trials = 0
        self.others = [one for one in others if one.same_batch == self.aligner.layouts.has_rows]
        self._calls_edits, self._names_of = edits, names_of
        self._tried_everywhere = self._tried_in_loops = self._replays = 0
        self._start = self.aligner.start()
        self.alignment = self._start.copy()
        self._search()

    @property
    def segments(self) -> list[Segment]:
        """All segments."""
        return [segment for of_fault in self.found for segment in of_fault]

    def _search(self) -> None:
        while len(self.segments) < MOST_SEGMENTS:
            state = State(self.aligner, self.alignment)
            if not state.of_torch:
                break
            hit = self._next(state)
            if hit is None or self._is_weak(state, hit):
                alignment = state.in_effect()
                if alignment is not None:
                    self.alignment = alignment
                    continue
            if hit is None and (hit := self._cheapest(state, COSTS) or self._replayed(state)) is None:
                break
            self._accept(state, hit)
        self._add_rest()
        if 1 < len(self.found) < self._most(MOST_REPLAYS):
            with contextlib.suppress(*IMPOSSIBLE):  # a fault may need another one
                self.found = needed_faults(self.aligner, self._start, self.alignment, self.found)

    def _next(self, state: State) -> Hit | None:
        """Return the segments after which the fewest values differ, cheap ones first; None: there are none."""
        if again := self._again(state) or self._found_again():
            return again
        cheap = self._cheapest(state, [most for most in COSTS if most <= CHEAP])
        if (cheap is None or cheap.left) and (vanished := vanished_in(state)) is not None:
            return vanished
        ordered = self._planted(state, itertools.islice(self._orders(state), self._most(MOST_EVERYWHERE)))
        if ordered is not None and (cheap is None or ordered.left < cheap.left):
            return ordered
        if cheap is None and (left_out := self._left_out(state)) is not None:
            return left_out
        given = self._given_otherwise(state) if cheap is None or cheap.left else None
        if given is not None and (cheap is None or given.left < cheap.left):
            return given
        if cheap is not None and cheap.left <= len(state.of_torch) // 2:
            in_loops = self._planted(state, self._edits_in_loops(state)) if cheap.left else None
            return in_loops if in_loops is not None and not in_loops.left else cheap
        planted = self._planted(state, self._edits_everywhere(state))
        is_better = planted and cheap and planted.left < MOST_LEFT * cheap.left and not takes_others(planted)
        if planted is not None and (cheap is None or is_better):
            return planted
        replayed = self._replayed(state)
        if replayed is not None and not replayed.left:
            return replayed
        return cheap

    def _left_out(self, state: State) -> Hit | None:
        """Return the argument or constant in place of all that torch makes, after which the fewest values differ."""
        before, numbers = state.trials, calls_of(self.torch, state.of_torch) if state.given else ()
        hits = [hit for number in numbers for hit in state.hits(number, COSTS[-1], state.given, len(self.torch))]
        self.trials += state.trials - before
        return self._best(state, hits) if hits else None

    def _given_otherwise(self, state: State) -> Hit | None:
        """Return the arguments of a function after which the fewest values differ; None: there are none."""
        hits = itertools.islice(other_arguments(state), self._most(MOST_GIVEN))
        return min((hit for hit in hits if hit and self._holds(hit)), key=lambda hit: hit.left, default=None)

    def _again(self, state: State) -> Hit | None:
        """Return a fault of the order of calls that was found before, at other calls; None: there is none."""
        edits = [edit for segments in self.found for segment in segments for edit in segment.edits]
        known = {edit.change.what for edit in edits if edit.change.also}
        tried = set[frozenset[Site]]()
        for number in calls_of(self.torch, state.of_torch) if known else ():
            for edit in self._orders_of(number):
                if edit.change.what in known and edit.sites not in tried:
                    tried.add(edit.sites)
                    if hit := self._edited_everywhere(state, edit):
                        return hit
        return None

    def _found_again(self) -> Hit | None:
        """Return a segment of the lines of one that was found before, at a later call; None: there is none."""
        earlier = (x for of_fault in self.found for x in of_fault if not x.edits and x.call != ARGUMENT)
        known = {(_kind(self.loss.calls[x.call]), self._lines(x)): self.jax[x.ends[1]] for x in earlier}
        state = State(self.aligner, self.alignment)  # what is tried here is no trial of the search that follows
        for number in calls_of(self.torch, state.of_torch) if known else ():
            for (kind, lines), end in known.items():
                if _kind(self.loss.calls[number]) != kind or self.trials + state.trials > MOST_FAR_TRIALS:
                    continue
                ends = {k for k, node in enumerate(self.jax) if (node.name, node.line) == (end.name, end.line)}
                hits = state.hits(number, COSTS[-1], ends)
                hit = next((hit for hit in hits if [*map(self._lines, hit.segments)] == [lines]), None)
                if hit is not None:
                    self.trials += state.trials
                    return hit
        self.trials += state.trials
        return None

    def _lines(self, segment: Segment) -> tuple[object, ...]:
        """Return what the segments of one fault in several places have in common, whatever its values are made of."""
        torch, jax = self.torch[segment.ends[0]], self.jax[segment.ends[1]]
        return torch.name, torch.line, jax.name, jax.line, frozenset(self.torch[k].line for k in segment.torch)

    def _replayed(self, state: State) -> Hit | None:
        """Return the value of the port in place of one of torch's after which the fewest values differ."""
        found: list[Hit] = []
        for cost, index, twin in state.pairs(CHEAP):
            self._replays += 1
            if self._replays > self._most(MOST_REPLAYS):
                break
            if hit := state.replayed(index, twin, cost):
                found.append(hit)
        return min(found, key=lambda hit: (hit.left, hit.cost), default=None)

    def _cheapest(self, state: State, costs: Sequence[int]) -> Hit | None:
        """Return the best hit that takes the fewest operations; a fault of a call may leave less."""
        edits = [*self._edits(state)] if costs[0] == 0 and not state.trials else []
        edited = self._best(state, edits) if edits else None
        by_values, by_edit = list[Hit](), [edited] if edited else []
        for most in costs:
            hits: list[Hit] = []
            for number in calls_of(self.torch, state.of_torch) if edited is None or edited.left else ():
                if self.trials + state.trials > (MOST_TRIALS if most <= CHEAP else MOST_FAR_TRIALS):
                    break
                hits += state.hits(number, most)
            by_values += [self._best(state, hits)] if hits else []
            sure = [hit for hit in (*by_values, *by_edit) if not self._is_weak(state, hit)]
            best = min(sure, key=lambda hit: hit.rank, default=None)
            if best is not None and (best is not edited or most >= EDIT or not best.left):
                self.trials += state.trials
                return best
        self.trials += state.trials
        return min((*by_values, *by_edit), key=lambda hit: hit.rank, default=None)

    def _is_weak(self, state: State, hit: Hit) -> bool:
        """Return whether a hit puts a value in place of an equal one, and little more than its result is equal then.

        What the port alone computes, and with which the losses are equal, is no such value.
        """
        if not hit.left and all(one.jax for one in hit.segments):
            return False
        is_equal = hit.segments[0].ends[0] not in state.of_torch
        return is_equal and len(state.of_torch) - hit.left <= WEAK * len(hit.segments)

    def _edits(self, state: State) -> Iterator[Hit]:
        """Yield hits by a fault of a call whose inputs are equal."""
        for number in self._origins(state):
            edits = self._edits_of(number, state)
            hits = [hit for edit in edits if (hit := state.edited(number, edit)) is not None]
            counted = Counter(hit.segments[0].edits[0].change for hit in hits)
            yield from (hit for hit in hits if counted[hit.segments[0].edits[0].change] == 1)

    def _origins(self, state: State) -> list[int]:
        """Return the calls that differ although their inputs are equal."""
        found = []
        for number in calls_of(self.torch, state.of_torch):
            inputs = self.torch[self.torch.outputs[number][0]].inputs
            if state.of_torch.isdisjoint(inputs) and number not in self.aligner.opaque:
                found.append(number)
        return found

    def _edits_of(self, number: int, state: State) -> Iterable[CallEdit]:
        """Return the faults that a call may have, numbers only as the port has them where it differs."""
        numbers = tuple(dict.fromkeys(x for k in sorted(state.of_jax) for x in self.jax[k].numbers))
        return () if self._calls_edits is None else self._calls_edits.of_call(number, numbers)

    def _orders_of(self, number: int) -> Iterable[CallEdit]:
        return () if self._calls_edits is None else self._calls_edits.of_order(number)

    def _best(self, state: State, hits: Sequence[Hit]) -> Hit:
        """Return the hit that leaves the least, made in all places of its lines."""
        kinds: dict[object, Hit] = {}
        for hit in sorted(hits, key=lambda hit: (hit.rank, hit.cost, hit.strange)):
            kinds.setdefault(signature(self.torch, self.jax, hit.segments), hit)
        everywhere = [self._everywhere(state, hit) for hit in [*kinds.values()][:KINDS]]
        return min(everywhere, key=lambda hit: (hit.rank, hit.cost, hit.strange))

    def _everywhere(self, state: State, hit: Hit) -> Hit:
        """Return a hit with those of equal lines that follow from it."""
        if hit.segments[0].edits:
            return self._edited_everywhere(state, hit.segments[0].edits[0], hit) or hit
        known = signature(self.torch, self.jax, hit.segments)
        first = self.loss.calls[hit.segments[0].call]
        here = State(self.aligner, hit.alignment)
        while here.of_torch:
            alike = [
                number
                for number in calls_of(self.torch, here.of_torch)
                if (call := self.loss.calls[number]).name == first.name and call.line == first.line
            ]
            more = (one for number in alike for one in here.hits(number, hit.cost))
            found = next((one for one in more if signature(self.torch, self.jax, one.segments) == known), None)
            self.trials += here.trials
            if found is None or len(hit.segments) > MOST_SEGMENTS:
                return hit
            hit = replace(found, segments=(*hit.segments, *found.segments), cost=hit.cost, strange=hit.strange)
            here = State(self.aligner, hit.alignment)
        return hit

    def _edited_everywhere(self, state: State, edit: CallEdit, hit: Hit | None = None) -> Hit | None:
        """Return the hit by a fault in all calls of its line, if less differs than with another hit; None: it does not.

        Args:
            state: what differs without the fault.
            edit: a fault of one call.
            hit: the other hit; None: less must differ than without the fault.
        """
        if edit.change.needs and len(edit.sites) == 1:
            return None
        alike = [n for n, call in enumerate(self.loss.calls) if call.site in edit.sites]
        if len(edit.sites) == 1:
            first = self.loss.calls[alike[0]]
            alike = [n for n, call in enumerate(self.loss.calls) if _kind(call) == _kind(first)]
        changed = state.alignment.copy()
        for number in alike:
            site = self.loss.calls[number].site
            change = edit.changes.get(site, edit.change)
            one = replace(edit, change=change, sites=frozenset({site}), changes={site: change})
            changed.edits[number] = (*changed.edits.get(number, ()), one if len(edit.sites) == 1 else edit)
        try:
            of_torch, of_jax = self.aligner.unequal(self.aligner.follow(changed, set(alike)))
        except IMPOSSIBLE:
            return None
        left = len(of_torch)
        if left > (MOST_LEFT * len(state.of_torch) if hit is None else hit.left - 1):
            return None
        if not state.follows(changed, of_torch, [k for number in alike for k in self.torch.outputs[number]]):
            return None
        segments = tuple(self._of_edits(state, changed, alike, state.of_jax - of_jax))
        return Hit(segments, EDIT, edit.tier, changed, left)

    def _of_edits(
        self, state: State, changed: Alignment, numbers: Sequence[int], of_jax: set[int]
    ) -> Iterator[Segment]:
        for place, number in enumerate(self._shown(changed, numbers)):
            t, edit = self.torch.outputs[number][0], changed.edits[number][-1]
            twin = changed.twins.get(t)
            if twin is not None:
                one = state.of_edit(number, edit, twin)
                yield replace(one, jax=() if place else one.jax)
            else:  # what it computes is equal only later
                first = self._alike(state, changed, number, sorted(self._leading(changed, t, of_jax)))
                yield Segment((t,), (first,), (t, first), None, True, None, number, (edit,))

    def _leading(self, changed: Alignment, index: int, of_jax: set[int]) -> set[int]:
        """Return the values of the port, of some, that make the first equal one that follows from a value of torch."""
        later = sorted(self.torch.after(index, range(len(self.torch))))
        following = next(
            (changed.twins[k].jax for k in later if k in changed.twins and changed.twins[k].jax in of_jax), 0
        )
        return self.jax.before(following, of_jax) or of_jax

    def _alike(self, state: State, changed: Alignment, number: int, of_jax: Sequence[int]) -> int:
        """Return the port's value that is likeliest that of a call: of its elements, given the same, or named so."""
        output = self.torch.outputs[number][0]
        node, array = self.torch[output], changed.arrays[output]
        given = [self.jax[changed.twins[k].jax].moments for k in node.inputs if k in changed.twins]
        inputs = {k: [self.jax[i].moments for i in self.jax[k].inputs] for k in of_jax}
        ways: list[Callable[[int], bool]] = [
            lambda k: contains(self.jax[k].array, array),
            lambda k: any(x is not None and y is not None and are_near(x, y) for x in given for y in inputs[k]),
            lambda k: self.jax[k].name == node.name,
            lambda k: state.of_jax.isdisjoint(self.jax[k].inputs),
        ]
        # A fault of several calls has no call of its own.
        ways = ways[-1:] if any(edit.change.setting for edit in changed.edits[number]) else ways
        return next((k for way in ways for k in of_jax if way(k)), self.jax.end)

    def _shown(self, changed: Alignment, numbers: Sequence[int]) -> Sequence[int]:
        """Return the calls of a fault, those that it changes first; of one of their order, the last of each place.

        The last of these places is first: in a first step, a state may be 0.
        """
        if not any(changed.edits[n][-1].change.also for n in numbers):
            return sorted(numbers, key=lambda n: self._is_idle(changed, n))
        last = self.loss.calls[max(numbers)].site
        return [n for n in reversed(numbers) if self.loss.calls[n].site == last]

    def _is_idle(self, changed: Alignment, number: int) -> bool:
        """Return whether a call with a fault returns what it returned, as one that leaves out a factor of 1."""
        pairs = ((changed.arrays[k], self.torch[k].array) for k in self.torch.outputs[number])
        return all(x.shape == y.shape and equal(x, y) for x, y in pairs)

    def _planted(self, state: State, edits: Iterable[CallEdit]) -> Hit | None:
        """Return the fault, planted in all calls of its line, after which the fewest values differ, later ones too."""
        found = [hit for edit in edits if (hit := self._edited_everywhere(state, edit))]
        counted = Counter(hit.segments[0].edits[0].change for hit in found)  # any number would do
        found = [hit for hit in found if counted[hit.segments[0].edits[0].change] == 1]
        found.sort(key=lambda hit: (hit.left, hit.cost))
        return next((hit for hit in found if self._holds(hit)), None)

    def _orders(self, state: State) -> Iterator[CallEdit]:
        """Yield faults of the order of calls that are made several times."""
        for numbers in self._places(state) if self._calls_edits is not None else ():
            if len(numbers) > 1:
                yield from self._orders_of(numbers[0])
                yield from self._calls_edits.of_loop(sorted(numbers)) if self._calls_edits is not None else ()

    def _edits_everywhere(self, state: State) -> Iterator[CallEdit]:
        """Yield faults of how entries of the batch are taken, and some of calls."""
        if self._calls_edits is None:
            return
        yield from itertools.islice(self._calls_edits.of_inputs(), self._most(MOST_EVERYWHERE))
        edits = (edit for numbers in self._places(state) for edit in self._edits_of(numbers[0], state))
        for edit in itertools.chain(self._edits_in_loops(state), edits):
            self._tried_everywhere += 1
            if self._tried_everywhere > self._most(MOST_EVERYWHERE):
                return
            yield edit

    def _edits_in_loops(self, state: State) -> Iterator[CallEdit]:
        """Yield calls left out, or operands, and other numbers, of those that are made several times.

        The port may compute at once what torch computes in a loop: then no value of it is one of the calls' results.
        """
        if self._calls_edits is None:
            return
        loops = [numbers[0] for numbers in self._places(state) if len(numbers) > 1]
        numbers = (edit for n in loops for edit in self._edits_of(n, state) if edit.change.fault == "number")
        operands = (edit for n in loops for edit in self._calls_edits.of_operands(n))
        for edit in itertools.chain(operands, numbers):
            self._tried_in_loops += 1
            if self._tried_in_loops > self._most(MOST_IN_LOOPS):
                return
            yield edit

    def _most(self, trials: int) -> int:
        """Return the number of trials that make later values again: fewer in a program of many elements."""
        return min(trials, MOST_ELEMENTS // (1 + sum(node.size for node in self.torch)))

    def _places(self, state: State) -> list[list[int]]:
        """Return the calls that differ, those that are made several times together; first those with equal inputs.

        Those by which a differing value is made of an equal one, and which do nothing, as a product by 1, come last.
        """
        places = defaultdict(list)
        idle = (k for k in sorted(self.torch.border(state.of_torch)) if self.torch.moves[k] and self.torch[k].numbers)
        after = [self.torch[k].call for k in idle if self.torch[k].call != ARGUMENT]
        for number in dict.fromkeys([*self._origins(state), *calls_of(self.torch, state.of_torch), *after]):
            call = self.loss.calls[number]
            places[call.words, call.line, call.place].append(number)
        return [*places.values()]

    def _holds(self, hit: Hit) -> bool:
        """Return whether a hit that leaves nothing leaves nothing on other inputs, too."""
        return bool(hit.left) or all(holds(self, hit.alignment, other) for other in self.others)

    def _accept(self, state: State, hit: Hit) -> None:
        """Keep a hit; or the fault that explains its segments, if less differs with it in all calls of its line."""
        self.found.append(hit.segments)
        self.alignment = hit.alignment
        if hit.left and not hit.segments[0].edits:
            named = [
                self._edited_everywhere(state, edit, hit) for edit in self._names_of(self, places_of(hit.segments)[0])
            ]
            better = min((one for one in named if one), key=lambda one: (one.left, one.cost), default=None)
            if better is not None:
                self.found[-1] = better.segments
                self.alignment = better.alignment

    def _add_rest(self) -> None:
        """Add what still differs as one segment, which ends with the losses."""
        state = State(self.aligner, self.alignment)
        if not state.of_torch:
            return
        ends = self.torch.end, self.jax.end
        self.found.append((Segment(tuple(sorted(state.of_torch)), tuple(sorted(state.of_jax)), ends),))
        self.alignment.forced[ends[0]] = Twin(ends[1], np.zeros(1, np.intp))
        self.alignment.arrays[ends[0]] = self.jax[ends[1]].array.reshape(self.torch[ends[0]].array.shape)


def _kind(call: Call) -> tuple[object, ...]:
    """Return what the calls of one expression in a loop have in common: a line may have several calls of a function."""
    return call.words, call.line, call.place, *map(type, call.args)


def places_of(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments of a fault, place by place: those before one call are one."""
    return [[*place] for _, place in itertools.groupby(segments, key=lambda segment: segment.call)]


def takes_others(hit: Hit) -> bool:
    """Return whether a fault takes other elements, which may do the same as many faults of a mask."""
    return any(edit.change.fault == "other_index" for segment in hit.segments for edit in segment.edits)
