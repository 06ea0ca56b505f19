"""Names for segments: faults of their calls with which these compute what the port does, on all inputs."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxddp.parity.catalogue import FAULTS
from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forced.expressions import SHORT
from jaxddp.parity.diagnosis.forced.forced_values import ForcedValues
from jaxddp.parity.diagnosis.forced.lines import LEFT_OUT
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forced.segments import Segment
from jaxddp.parity.diagnosis.forced.torch_graph import WRITTEN, TorchGraph
from jaxddp.parity.diagnosis.forced.trials import RANKS, SegmentSubject
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Change, Name
from jaxddp.parity.diagnosis.forward.candidates import LOOSE, edits_of_inputs, names_of_all, with_numbers
from jaxddp.parity.diagnosis.forward.edits import edits_of_arguments
from jaxddp.parity.diagnosis.forward.reading import MOST_NUMBERS, NO_TRACE
from jaxddp.parity.diagnosis.forward.rewiring import (
    ADDED,
    JOINS,
    edits_of_connections,
    edits_of_gradients,
    exchanged,
    left_out,
    moved,
    operands_left_out,
    reordered,
)
from jaxddp.parity.diagnosis.forward.several_calls import (
    blocks_without_gradients,
    chains_left_out,
    is_update,
    numbers_together,
    of_step_before,
    updates_too_late,
    with_gradient,
)
from jaxddp.parity.diagnosis.forward.sites import patches_of
from jaxddp.parity.diagnosis.forward.substitutes import FAULT as EXPRESSION
from jaxddp.parity.diagnosis.forward.substitutes import substitutes
from jaxddp.parity.diagnosis.search.decide import is_plain
from jaxddp.parity.diagnosis.search.fault_search import Search, confirm
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE, Budget, Differences, Item
from jaxddp.parity.graph import ARGUMENT
from jaxddp.parity.operations import readings
from jaxddp.parity.port.draws import shown_entry

FLOOR = 1e-11  # of what the next calls compute
TRIALS = 4000  # of a segment
TRIALS_OF_PAIRS = 1000
WORK = 2**28  # elements of the calls that are made in these
MOST_CALLS = 12  # of a segment that gets a name
MOST_PAIRS = 8  # of the port's numbers that are tried two at a time
OTHER = "other_function"
ADDED_TO = ("call_added", "factor", "addend")
Changes = Callable[[Call], Iterable[Change]]


@dataclass(frozen=True)
class Edits:
    """Faults of calls that can be tried.

    Attributes:
        loss: torch's program.
        names: id of a parameter or of an entry of the batch -> its name.
        inputs: id of an entry of the batch -> its name.
        catalogue: faults of a call that have a name in the catalogue.
    """

    loss: TorchGraph
    names: Mapping[int, str]
    inputs: Mapping[int, str]
    catalogue: Changes = lambda call: ()

    @cached_property
    def names_of_all(self) -> dict[int, Name]:
        """Return what each tensor is: a parameter, the user's variable, or the result of a call."""
        return names_of_all(self.loss.calls, {**self._parts, **self.variables, **self.names})

    @cached_property
    def _parts(self) -> dict[int, str]:
        """Return the arguments of which the parts of a join are made, and no other part is."""
        graph = self.loss.graph
        joins = (number for number, call in enumerate(self.loss.calls) if call.name in JOINS)
        parts = (graph[graph.outputs[number][0]].inputs for number in joins)
        own = (pair for of_one in parts for pair in graph.own_arguments(of_one).items())
        return {id(self.loss.tensor(k)): shown_entry(graph[argument].name) for k, argument in own}

    @cached_property
    def variables(self) -> dict[int, str]:
        """Return the user's variables that say what they hold, unlike x and h2."""
        known = self.loss.variables.items()
        return {id(self.loss.tensor(k)): name for k, name in known if len(name) > SHORT}

    def of_call(self, number: int, numbers: Sequence[float]) -> Iterator[CallEdit]:
        """Yield faults of a call's own arguments and function, numbers only as the port has them."""
        call = self.loss.calls[number]
        orders = ((call, change) for change in reordered(call, self.names_of_all))
        edits = with_numbers(map(single, (*self._own(number), *orders)), likely(numbers))
        yield from (edit for edit in edits if edit.reference is None)

    def of_operands(self, number: int) -> Iterator[CallEdit]:
        """Yield a call left out, or an operand of it."""
        call = self.loss.calls[number]
        yield from map(single, ((call, one) for one in (*left_out(call), *operands_left_out(call, self.names_of_all))))

    def of_loop(self, numbers: Sequence[int]) -> Iterator[CallEdit]:
        """Yield the calls of a loop given what it has carried on from the step before."""
        yield from of_step_before(self.loss.calls, numbers, self.names_of_all)

    def of_order(self, number: int) -> Iterator[CallEdit]:
        """Yield a call made after one that uses its result, instead of before."""
        graph, calls = self.loss.graph, self.loss.calls
        users = {calls[graph[k].call].site for output in graph.outputs[number] for k in graph.users[output]}
        changes = [change for change in moved(calls, number) if users.issuperset(change.also)]
        yield from map(
            single, [*((calls[number], change) for change in changes), *exchanged(calls, number, self.names_of_all)]
        )

    def of_inputs(self) -> Iterator[CallEdit]:
        """Yield faults of how entries of the batch are taken, and of the direction of recurrent layers."""
        calls = self.loss.calls
        yield from edits_of_inputs(calls, self.names_of_all, self.inputs)
        yield from patches_of((call, one) for call in calls for one in left_out(call) if one.setting)

    def of_gradients(self) -> Iterator[CallEdit]:
        """Yield faults of the gradients that calls pass on."""
        changes = [(call, change) for call in self.loss.calls for change in edits_of_gradients(call, self.names_of_all)]
        passed = [one for one in changes if one[1].fault == "gradient_not_stopped"]
        yield from patches_of(passed)  # several states may be detached together
        for one in changes:
            yield from patches_of([one]) if one[1].fault != "gradient_not_stopped" else ()
        for begin, end in blocks_without_gradients(self.loss.recorded):
            inside = {id(call) for call in self.loss.recorded[begin:end]}
            block = {number for number, call in enumerate(self.loss.calls) if id(call) in inside}
            yield from map(single, self._let_through(block))

    def _let_through(self, block: set[int]) -> Iterator[tuple[Call, Change]]:
        """Yield results of a `no_grad` block whose gradient is not stopped: through all of it, or one line."""
        graph, calls = self.loss.graph, self.loss.calls
        for k, node in enumerate(graph):
            if node.call not in block or block.issuperset(graph[user].call for user in graph.users[k]):
                continue
            before = {graph[i].call for i in graph.before(k, range(k + 1))} & block
            on_line = {number for number in before if calls[number].line == node.line}
            for chosen, on_its_line in ((before, False), (on_line, True)):
                if not on_its_line or chosen != before:
                    sites = tuple(calls[number].site for number in sorted(chosen))
                    at = self.names_of_all.get(id(calls[node.call].result), node.name)
                    what = Statement("gradient_passes_no_grad", at=at, on_line=on_its_line)
                    change = Change("gradient_not_stopped", what, with_gradient, tier=3, also=sites)
                    yield calls[min(chosen)], change

    def of_segments(self, location: Location, subject: SegmentSubject) -> Iterator[CallEdit]:
        """Yield faults of the calls of some segments, and of the next ones; numbers as the port has them, and any."""
        of_jax = {k for one in subject.segments for k in (*one.jax, *((one.joined or one.ends)[1:]))}
        numbers = [*dict.fromkeys(x for k in sorted(of_jax) for x in location.jax[k].numbers)]
        primitives = {location.jax[k].name for k in of_jax}
        yield from with_numbers(map(single, self._changes(subject.inside, numbers, primitives)), likely(numbers))

    def everywhere(self, edit: CallEdit) -> Iterator[tuple[Call, Change]]:
        """Yield the changes of the fault's kind of all calls of its function."""
        name = next(call.name for call in self.loss.calls if call.site in edit.sites)
        alike = [n for n, call in enumerate(self.loss.calls) if call.name == name]
        numbers = () if edit.value is None else (edit.value,)
        changes = self._changes(alike, numbers, {part for _, parts in ADDED.values() for part in parts})
        yield from (one for one in changes if one[1].fault == edit.change.fault)

    def _changes(
        self, inside: Sequence[int], numbers: Sequence[float], primitives: Collection[str]
    ) -> Iterator[tuple[Call, Change]]:
        calls = self.loss.calls
        inside = [n for n in inside if calls[n].name != WRITTEN]
        yield from (one for n in inside for one in self._own(n))
        inside = [n for n in inside if not is_update(calls[n])]
        yield from ((calls[n], one) for n in inside for one in numbers_together(calls[n], numbers[:MOST_PAIRS]))
        connections = edits_of_connections(calls, inside, primitives, self.names_of_all, self.variables)
        yield from ((call, change) for call, change in connections if not change.setting)  # those are of two calls
        yield from chains_left_out(calls, inside, self.names_of_all)
        yield from ((calls[n], change) for n in inside for change in substitutes(calls, n, self.names_of_all))

    def _own(self, number: int) -> Iterator[tuple[Call, Change]]:
        call = self.loss.calls[number]
        if is_update(call):
            yield from updates_too_late([call])
        elif call.name != WRITTEN:
            yield from ((call, change) for change in self.catalogue(call))
            yield from ((call, change) for change in edits_of_arguments(call, self.names_of_all))


def single(of: tuple[Call, Change]) -> CallEdit:
    """Return a change of one call as a fault."""
    call, change = of
    sites = frozenset({call.site, *change.also})
    return CallEdit(change, sites, changes=dict.fromkeys(sites, change))


def likely(numbers: Sequence[float]) -> list[float]:
    """Return the port's numbers, what Python may have made of them, and those that leave no trace."""
    ways = zip(*map(readings, numbers), strict=False)
    return [*dict.fromkeys((*[x for way in ways for x in way][:MOST_NUMBERS], *NO_TRACE))]


def labelled(
    location: Location,
    segments: Sequence[Segment],
    values: Sequence[ForcedValues],
    edits: Edits,
    like: CallEdit | None = None,
    fault: str = "",
    is_true: Callable[[CallEdit], bool] = lambda edit: True,
) -> list[CallEdit]:
    """Return the faults with which some segments compute what the port does on all inputs, the likeliest first.

    Args:
        location, segments: the segments; all others stay forced.
        values: for each of the inputs, the values.
        edits: faults that can be tried.
        like: only such a fault is tried.
        fault: only faults of this kind are tried; "": all.
        is_true: whether a fault does the same on other inputs.
    """
    subject = SegmentSubject(location, segments, values)
    tried = [one for one in _tried(location, subject, edits) if fault in ("", one.change.fault)]
    items = [one for one in tried if like is None or is_alike(one, like)]
    try:
        found, _ = confirm(subject, _search(subject, items).singles(), FLOOR)
    except IMPOSSIBLE:
        return []
    fitting = [one for one in found if one.residual <= FLOOR and one.plausible and not one.idle]
    edits_found = [edit for one in fitting for edit in one.items if isinstance(edit, CallEdit)]
    edited = {(edit.statements, *edit.sites): edit for edit in sorted(edits_found, key=lambda edit: edit.given)}
    edited = {key: edit for key, edit in edited.items() if edit.value is None or math.isfinite(edit.value)} or edited
    counted = Counter((edit.change.what, *edit.sites) for edit in edited.values())
    # If several numbers do the same, none of them is likely to be what was written.
    every = [edit for edit in edited.values() if counted[edit.change.what, *edit.sites] == 1]
    every = [edit for edit in every if edit.value is None or edit.given or is_plain(edit.value)] or every
    ordered = {edit for one in segments for edit in one.edits if edit.change.setting or len(edit.sites) > 1}
    groups = [edit for edit in every if edit in ordered], *_by_likelihood(location, segments, every)
    true = (list(filter(is_true, group)) for group in groups)
    return next((group for group in true if group), [])


def _by_likelihood(
    location: Location, segments: Sequence[Segment], every: Sequence[CallEdit]
) -> Iterator[Sequence[CallEdit]]:
    """Yield groups of faults that do the same, those first that are likelier to be what was written."""
    yield [edit for edit in every if edit.change.fault in FAULTS]
    # 1 * x is equal to x: the segment may end before it.
    of_port = {k for one in segments for k in (*one.jax, *location.jax.users[one.ends[1]])}
    numbers = {x for k in of_port for x in location.jax[k].numbers}
    yield [edit for edit in every if edit.change.fault == "number" and edit.given and edit.value in numbers]
    ends = {one.ends[1]: one.jax or [k for k in (one.ends[1],) if location.jax[k].is_zero] for one in segments}
    alone = {end for end, of in ends.items() if of and all(k == end or location.jax[k].is_zero for k in of)}
    made = {location.jax[end].name for end in alone}
    yield [edit for edit in every if edit.change.fault == OTHER and made & {one.jax for one in edit.change.values}]
    for fault in LEFT_OUT:  # what a call is given does the same as any function that returns it
        yield [edit for edit in every if edit.change.fault == fault]
    every = [edit for edit in every if edit.change.fault not in LEFT_OUT]
    for rank in sorted({*map(_rank, every)}):
        best = [edit for edit in every if _rank(edit) == rank]
        best = [edit for edit in best if edit.change.fault != EXPRESSION] or best  # a name says more
        loose = [edit for edit in best if edit.change.fault in LOOSE]
        if len(loose) > 1:
            yield _of_loose(location, segments, loose)
            return
        yield [
            edit for edit in best if edit.change.fault != "number" or not edit.given or edit.value in numbers
        ] or best


def _of_loose(location: Location, segments: Sequence[Segment], loose: Sequence[CallEdit]) -> Sequence[CallEdit]:
    """Return the likeliest of faults that can replace many others; (): they are different."""
    # What is added to a result, or to an operand of the next call, is the same.
    later = {location.loss.calls[one.call].site for one in segments if one.call != ARGUMENT}
    last = [edit for edit in loose if edit.sites <= later and edit.change.fault != "other_operand"]
    mine = {location.loss.calls[location.torch[k].call].site for one in segments for k in one.torch}
    own = [edit for edit in loose if edit.sites <= mine]
    alike = {(edit.change.fault, edit.value) for edit in loose}
    return (own or last or loose)[:1] if len(alike) == 1 and loose[0].change.fault in ADDED_TO else ()


def labelled_pair(
    location: Location, segments: Sequence[Segment], values: Sequence[ForcedValues], edits: Edits
) -> tuple[CallEdit, ...]:
    """Return two faults with which segments compute what the port does; (): none do.

    One is of the catalogue, or one of the port's numbers.
    """
    subject = SegmentSubject(location, segments, values)
    try:
        search = _search(subject, _tried(location, subject, edits), TRIALS_OF_PAIRS)
        titled = [one for one in search.singles() if one.listed[0].faults[0] in FAULTS or _is_stated(one.listed[0])]
        found, _ = confirm(subject, search.pairs(titled), FLOOR)
    except IMPOSSIBLE:
        return ()
    pairs = [one for one in found if one.residual <= FLOOR and one.plausible and len(one.items) == 2]
    best = min(pairs, key=lambda one: one.rank, default=None)
    pair = () if best is None else tuple(item for item in best.items if isinstance(item, CallEdit))
    return tuple(
        sorted(pair, key=lambda edit: next(n for n, call in enumerate(edits.loss.calls) if call.site in edit.sites))
    )


def _is_stated(edit: Item) -> bool:
    """Return whether a fault is a number of the port in place of another one."""
    return isinstance(edit, CallEdit) and edit.change.fault == "number" and edit.given and edit.value not in NO_TRACE


def _search(subject: SegmentSubject, items: Sequence[CallEdit], trials: int = TRIALS) -> Search:
    return Search(Differences(subject, [(0, RANKS)]), items, FLOOR, Budget(min(trials, WORK // subject.work)))


def _tried(location: Location, subject: SegmentSubject, edits: Edits) -> list[CallEdit]:
    """Return the faults that are tried: those by which segments were found, and those of their calls."""
    if len(subject.inside) > MOST_CALLS:
        return []
    tried = [*(edit for one in subject.segments for edit in one.edits), *edits.of_segments(location, subject)]
    # Any number can be fitted to one number.
    fitted = any(x.size > 1 for x in subject.observed(0, RANKS)["values"].values())
    return [one for one in tried if fitted or one.reference is None]


def _rank(edit: CallEdit) -> tuple[int, bool]:
    return edit.tier, edit.reference is not None


def is_alike(one: CallEdit, other: CallEdit) -> bool:
    """Return whether two faults are the same in different places."""
    first, second = ((x.change.fault, x.value, (x.change.group or x.change.what).of_any_layer) for x in (one, other))
    return first == second
