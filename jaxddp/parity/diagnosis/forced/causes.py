"""Causes of a difference between two losses: its segments, each with a name, or with what both sides compute there."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.forced.describe import text_of
from jaxddp.parity.diagnosis.forced.expressions import Expressions
from jaxddp.parity.diagnosis.forced.forced_values import (
    OtherInputs,
    collapses,
    forced_values,
    holds,
    unedited,
    with_names,
)
from jaxddp.parity.diagnosis.forced.labels import FLOOR, Changes, Edits, is_alike, labelled, labelled_pair
from jaxddp.parity.diagnosis.forced.lines import lines_of_name, lines_of_trees
from jaxddp.parity.diagnosis.forced.locate import Location, places_of
from jaxddp.parity.diagnosis.forced.segments import CONSTANT, Segment
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.forced.trees import Description
from jaxddp.parity.diagnosis.forced.trials import RANKS, SegmentSubject
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Change
from jaxddp.parity.diagnosis.forward.sites import patches_of
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE, residual_at
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import SegmentText, are_near

MOST_COVERING = 6  # faults whose names are tried on others
NEARBY = 4  # faults after one, of which one may be a part of it
MOST_OPERATIONS = 64  # of the port, in such a segment
MAY_COLLAPSE = ("factor", "addend", "other_operand", "call_added", "number")  # they explain anything if values vanish
READ = ("number", "other_function", "other_order")  # what expressions say, which is likelier than what can be fitted
FITTED = ("factor", "addend")
OTHER_VALUES = "other_values"  # fault of a batch
REDUCTION = "other_expression"  # fault of a mean or sum over other elements, see `substitutes`
MOST_NAMES = 3  # of a segment, if a run cannot tell them apart
MOST_CALLS = 8  # of torch, in a segment that may have two faults
MOST_SAID = 24  # of torch, in a segment that is named by what both sides compute


@dataclass(frozen=True)
class LocatedFault:
    """A fault that was found.

    Attributes:
        names: edits of the reference that do the same, each with all of its places; (): none was found.
        kind: name in the catalogue of what it is without an edit.
        what: what both sides compute; None: too much to be said in a line.
        text: its operations.
        call: the first call that has the fault; None: unknown.
        place: its segments at the first place.
        values: numbers or functions of both sides that differ, where nothing else does.
    """

    names: tuple[CallEdit, ...]
    kind: str
    what: Statement | None
    text: SegmentText
    call: Call | None = None
    place: "Place" = field(default_factory=list)
    values: tuple[Value, ...] = ()


Place = list[Segment]  # the segments of a fault before one call


def located_faults(
    loss: TorchGraph,
    jax: Graph,
    others: Sequence[OtherInputs],
    names: Mapping[int, str],
    inputs: Mapping[int, str],
    catalogue: Changes,
) -> tuple[list[LocatedFault], bool]:
    """Return the faults that make two programs of a loss differ, and whether these are all on the same batch.

    Args:
        loss: torch's program.
        jax: the port's program.
        others: other inputs, on which names must be true, too.
        names: id of a parameter or of an entry of the batch -> its name.
        inputs: id of an entry of the batch -> its name.
        catalogue: faults of a call that have a name in the catalogue.
    """
    edits = Edits(loss, names, inputs, catalogue)

    def name(location: Location, segments: Sequence[Segment]) -> Sequence[CallEdit]:
        return labelled(location, segments, [forced_values(location)], edits)[:MOST_NAMES]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a call may divide by 0 when it gets other values
        location = Location(loss, jax, others, edits, name)
        faults = [*Naming(location, edits).faults()]
        same_batch = (other for other in others if other.same_batch)
        return faults, all(holds(location, unedited(location), other) for other in same_batch)


class Naming:
    """Names for the segments of a location.

    Args:
        location: the segments.
        edits: faults that can be tried.
    """

    def __init__(self, location: Location, edits: Edits):
        self._location, self._edits, others = location, edits, location.others
        self._values = [forced_values(location)]
        # What is forced elsewhere may be another value of the port on other inputs; then they show nothing.
        alone = len(location.segments) == 1
        telling = [inputs for inputs in others if holds(location, unedited(location), inputs)]
        self._others = [*others] if alone else telling
        # Of values that are equal here and not there, the port may use another one than the expressions say.
        self._is_certain = not alone or len(telling) == len(others)
        self._expressions = Expressions(location)
        self._whole: set[tuple[object, ...]] = set()  # faults that were tried as two

    def faults(self) -> Iterator[LocatedFault]:
        """Yield the faults; those that are the same at the same lines as one."""
        units = list[LocatedFault]()
        for segments in self._location.found:
            known: Sequence[CallEdit] | None = None
            for place in places_of(segments):
                units += self._split(self._fault(place, known))
                known = units[-1].names if known is None else known
        alike: dict[object, list[LocatedFault]] = defaultdict(list)
        for fault in self._combined([*self._uncovered(units)]):
            whats = tuple(one.change.what.of_any_layer for one in fault.names)
            text = fault.text
            alike[(text.lines.torch, whats) if whats else (text.lines, text.jax, text.torch)].append(fault)
        of_lines: dict[object, list[LocatedFault]] = defaultdict(list)
        for k, fault in enumerate(map(self._merged, alike.values())):
            is_said = not fault.names and any(fault.text.code)
            # As a function, whatever is computed in it, or as one difference, whatever follows from it.
            said = fault.text.code if fault.kind == REDUCTION else fault.what
            of_lines[(fault.text.lines, said) if is_said else k].append(fault)
        yield from self._titled_together([self._merged(same) for same in of_lines.values()])

    def _titled_together(self, faults: Sequence[LocatedFault]) -> Iterator[LocatedFault]:
        """Yield the faults; the same one in layers that a pattern names as one."""
        alike: dict[object, list[LocatedFault]] = defaultdict(list)
        for k, fault in enumerate(faults):
            titles = tuple((name.change.fault, name.value, name.change.what) for name in fault.names)
            alike[titles or k].append(fault)
        for same in alike.values():
            every = zip(*(fault.names for fault in same), strict=True)
            is_one = len(same) > 1 and all(self._pattern(names) for names in every)
            yield from [self._merged(same)] if is_one else same

    def _fault(self, place: Place, known: Sequence[CallEdit] | None = None) -> LocatedFault:
        """Return the fault of a place; `known`: its names in another place."""
        (kind, what, values, at), code = self._described(place)
        text = text_of(self._location, place)
        text = replace(text, code=code, lines=lines_of_trees(self._location, text.lines, at))
        fault = LocatedFault((), kind, what, text, None, place, values)
        names = tuple(self._names(place, known))
        if kind in READ and all(name.change.fault in FITTED for name in names):
            names = ()
        return self._named(fault, names)

    def _split(self, fault: LocatedFault) -> list[LocatedFault]:
        """Return a fault without a name as two that have one, if the segment of two calls or more has two."""
        place, key = fault.place, (fault.text.lines, fault.text.jax, fault.text.torch)
        calls = {self._location.torch[k].call for one in place for k in one.torch}
        if fault.names or key in self._whole or not 1 < len(calls) <= MOST_CALLS:
            return [fault]
        self._whole.add(key)  # in other places, it has no pair either
        pair = labelled_pair(self._location, place, self._values, self._edits)
        if not pair or not self._is_true(place, pair):
            return [fault]
        self._whole.discard(key)
        return [self._named(fault, (self._together([name]),)) for name in pair]

    def _named(self, fault: LocatedFault, names: tuple[CallEdit, ...]) -> LocatedFault:
        """Return a fault with names, and the lines of their call."""
        call = next((one for name in names for one in self._location.loss.calls if one.site in name.sites), None)
        if call is None:
            return fault
        lines = lines_of_name(self._location, fault.place, fault.text.lines, call, names[0])
        return replace(fault, names=names, call=call, text=replace(fault.text, lines=lines))

    def _uncovered(self, faults: Sequence[LocatedFault]) -> Iterator[LocatedFault]:
        """Yield the faults, without those that have no name and that the name of another one explains, too."""
        named = [fault for fault in faults if fault.names]
        for fault in faults:
            if fault.names or not any(self._covers(one, fault) for one in named[:MOST_COVERING]):
                yield fault

    def _covers(self, named: LocatedFault, fault: LocatedFault) -> bool:
        """Return whether a fault's name, planted where it was found, explains another fault, too."""
        subject = SegmentSubject(self._location, [*named.place, *fault.place], self._values)
        try:
            return residual_at(subject, (0, RANKS), named.names[:1]) <= FLOOR
        except IMPOSSIBLE:
            return False

    def _combined(self, faults: Sequence[LocatedFault]) -> Iterator[LocatedFault]:
        """Yield the faults; two that are close, as the two places of a call that is moved, as one."""
        # A segment that ends with the losses is the last one.
        waiting = sorted(_different(faults), key=lambda one: (one.place[0].call == ARGUMENT, one.place[0].call))
        while waiting:
            first = waiting.pop(0)
            for second in waiting[:NEARBY]:
                both = self._both(first, second)
                if both is not None:
                    waiting.remove(second)
                    first = both
                    break
            yield first

    def _both(self, first: LocatedFault, second: LocatedFault) -> LocatedFault | None:
        """Return two faults as one if one of them has no sure name, and what they compute can be said in a line.

        Two that have names are one reduction in place of another, such as a mean of all elements.
        """
        place = [*first.place, *second.place]
        if any(one.user_call for one in place):
            return None
        if first.names and second.names:
            both = self._fault(place) if self._expressions.is_chain(place) else None
            return both if both and any(name.change.fault == REDUCTION for name in both.names) else None
        if self._expressions.is_chain(place):
            both = self._fault(place)
            return both if both.names or both.what else None
        is_moved = not second.what and not second.text.torch and first.text.torch and not first.text.jax
        moved = labelled(self._location, place, self._values, self._edits, fault="call_moved") if is_moved else []
        return self._fault(place, moved[:1]) if moved else None

    def _merged(self, alike: Sequence[LocatedFault]) -> LocatedFault:
        """Return faults that are the same in several places as one."""
        if len(alike) == 1:
            return alike[0]
        names = tuple(self._together(same) for same in zip(*(fault.names for fault in alike), strict=True))
        places = sum(fault.text.places for fault in alike)
        return replace(alike[0], names=names, text=replace(alike[0].text, places=places))

    def _names(self, place: Place, known: Sequence[CallEdit] | None) -> Iterator[CallEdit]:
        """Yield the names of a fault that are true on other inputs, too."""
        if place[0].user_call is not None:
            return
        tried = self._location, place, self._values, self._edits
        for like in [None] if known is None else known:
            found = labelled(*tried, like, is_true=lambda name: self._is_true(place, [name]))
            # Without an effect here, it was planted here since it has one elsewhere.
            found = found or [edit for one in place for edit in one.edits if like and is_alike(edit, like)]
            yield from (self._together([name]) for name in found[: 1 if like else MOST_NAMES])

    def _is_true(self, place: Place, names: Sequence[CallEdit]) -> bool:
        """Return whether faults do the same on other inputs, too, and not only since values vanish."""
        planted = with_names(self._location, place, names)
        if not all(holds(self._location, planted, other) for other in self._others):
            return False
        # Of whole numbers, such as the k of topk, few are tried; a loop may begin with 0.
        sure = [name for name in names if (name.change.fault == "number" and name.value is None) or _is_of_loop(name)]
        may_collapse = any(name.change.fault in MAY_COLLAPSE for name in names if name not in sure)
        return not may_collapse or not collapses(self._location, planted)

    def _together(self, alike: Sequence[CallEdit]) -> CallEdit:
        """Return a fault in several places as one, with the pattern of their layers if there is one."""
        alike = [*alike, *self._without_end(alike[0])]
        if (named := self._pattern(alike)) is not None:
            return named
        sites = frozenset(site for one in alike for site in one.sites)
        return replace(alike[0], sites=sites, changes={k: x for one in alike for k, x in one.changes.items()})

    def _without_end(self, name: CallEdit) -> Iterator[CallEdit]:
        """Yield a fault of a step that moves weights at the calls of its line for other weights than the end."""
        torch, calls = self._location.torch, self._location.loss.calls
        if not self._location.loss.parameter:  # a loss has calls on its lines that it does not need, as of its count
            return
        needed = {torch[k].call for k in torch.before(torch.end, range(len(torch)))}
        lines = {(call.name, call.line) for call in calls if call.site in name.sites}
        for number, call in enumerate(calls):
            if number not in needed and (call.name, call.line) in lines:
                yield replace(name, sites=frozenset({call.site}), changes={call.site: name.change})

    def _pattern(self, alike: Sequence[CallEdit]) -> CallEdit | None:
        """Return a fault in several places as one that the pattern of their layers names; None: none does."""
        sites = frozenset(site for one in alike for site in one.sites)
        changes = {site: change for one in alike for site, change in one.changes.items()}
        first = alike[0]
        kind = self._edits.everywhere(first)
        everywhere = [(call, change) for call, change in kind if is_alike(_one(call, change, first), first)]
        named = next((patch for patch in patches_of(everywhere) if patch.sites == sites), None)
        return named and replace(named, value=first.value, given=first.given, changes=changes)

    def _described(self, place: Place) -> tuple[Description, tuple[str, str]]:
        """Return what both sides compute at a place, and the code of each side.

        There is no statement if it is long, or not known.
        """
        torch, jax = self._location.torch, self._location.jax
        if place[0].user_call is not None:
            given = self._expressions.of_arguments(place, place[0].user_call.name)
            return Description("other_operand", given), ("", "")
        t, j = torch[place[-1].ends[0]], jax[place[-1].ends[1]]
        is_argument = len(place) == 1 and t.call == j.call == ARGUMENT
        if is_argument and t.moments is not None and j.moments is not None and not are_near(t.moments, j.moments):
            return Description(OTHER_VALUES, Statement("other_values", entry=t.name)), ("", "")
        calls = {torch[k].call for one in place for k in one.torch}
        operations = {jax[k].call for one in place for k in one.jax}
        is_known = self._is_certain and not any(one.edits and one.order is None for one in place)
        short = is_known and len(calls) <= MOST_SAID and len(operations) <= MOST_OPERATIONS
        what, code = self._expressions.statement(place) if short else (None, ("", ""))
        label = self._expressions.in_place(place) if what is None else self._expressions.label(place)
        if label is not None:
            return label, code
        is_added = any(one.jax for one in place) or j.name == CONSTANT  # which takes the place of calls
        kind, by = "other_expression", ""
        if calls and not is_added:
            kind, by = "call_left_out" if len(calls) == 1 else "calls_left_out", "left_out"
        elif not calls:
            kind, by = ("call_added", "added") if is_added else ("other_operand", "")
        return Description(kind, what.but(by=by) if what is not None and by else what), code


def _is_of_loop(name: CallEdit) -> bool:
    """Return whether a fault gives the calls of a loop results of other steps."""
    return len(name.sites) > 1 and bool(name.change.needs)


def _different(faults: Sequence[LocatedFault]) -> Iterator[LocatedFault]:
    """Yield faults, without those whose name, at all of its calls, is that of one before."""
    seen: set[tuple[object, ...]] = set()
    for fault in faults:
        keys = {(name.change.what, name.sites) for name in fault.names if len(name.sites) > 1}
        if not keys or not seen.issuperset(keys):
            yield fault
        seen |= keys


def _one(call: Call, change: Change, like: CallEdit) -> CallEdit:
    return CallEdit(change, frozenset({call.site}), value=like.value)
