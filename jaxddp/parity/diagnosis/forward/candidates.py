"""Edits of the calls where two programs part: first those after which a call gives what the port computes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Change, Site, tensors_in
from jaxddp.parity.diagnosis.forward.edits import MOVERS, edits_of_arguments
from jaxddp.parity.diagnosis.forward.index_edits import shifts
from jaxddp.parity.diagnosis.forward.reading import Parting
from jaxddp.parity.diagnosis.forward.rewiring import edits_of_connections, edits_of_gradients
from jaxddp.parity.diagnosis.forward.several_calls import (
    chains_left_out,
    gradients_let_through,
    inputs_moved,
    is_update,
    numbers_together,
    shared_constants,
    updates_too_late,
)
from jaxddp.parity.diagnosis.forward.sites import patches_of
from jaxddp.parity.diagnosis.forward.substitutes import shared_factors, substitutes
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.operations import Operation, Results, are_near, moments, origins

PLAIN = 3  # highest tier of an edit that cannot replace many others
MOST_PLAIN = 8  # of the port's numbers that are tried two at a time
LEFT_OUT = ("call_left_out", "operand_left_out", "call_moved")  # edits after which a call returns an input
# Edits that can replace many others: if several of them do the same, none of them is likely to be what was written.
LOOSE = frozenset({"factor", "addend", "other_operand", "call_added", "call_moved"})


def candidates(
    calls: Sequence[Call],
    parted: Parting,
    names: Mapping[int, str],
    known: Sequence[CallEdit],
    inputs: Mapping[int, str],
) -> tuple[list[CallEdit], list[CallEdit]]:
    """Return edits of the calls where the programs part, in the order of the calls.

    Where the losses are equal, the gradients part, and the edits are those of gradients.

    Args:
        calls: the calls of the loss, recorded with their moments.
        parted: where they part.
        names: id of a parameter -> its name.
        known: faults of the catalogue.
        inputs: id of a tensor of the batch -> its name.

    Returns:
        Edits after which a call returns what the port computes somewhere, and all others.
    """
    names = in_words(calls, {**inputs, **names})
    firsts = _first_of_sites(calls, _with_movers(calls, parted) if parted.of_torch else range(len(calls)))
    place, here = _first_of_sites(calls, range(len(calls))) | firsts, [*firsts.values()]
    listed = [one for one in known if place.keys() >= one.sites]
    trial, begins = CallTrial(calls, parted, place), _beginnings(calls, place)
    if not parted.of_torch:
        changes = [(calls[k], change) for k in here for change in edits_of_gradients(calls[k], names)]
        listed += patches_of([*changes, *gradients_let_through(calls, names)])
        return _split(listed, trial, begins)
    again, before = _again(calls, here, place), _before(parted, here)
    edits = [*patches_of(_changes(calls, parted, here, again, before, names))]
    of_numbers = [one for one in (*listed, *edits) if one.change.fault == "number" and one.change.reference is not None]
    some = [*with_numbers(of_numbers, parted.all_numbers), *_substitutes(calls, parted, here, names)]
    fitting, others = _split([*with_numbers([*listed, *edits], parted.likely_numbers)], trial, begins)
    fitting = sorted([*fitting, *filter(trial.gives, some)], key=partial(_order, begins))
    there = {calls[index].site for index in (*again, *before)}
    others = [patch for patch in others if not there >= patch.sites]
    others.sort(key=lambda patch: patch.given or patch.tier > PLAIN)
    shared = shared_constants(of_numbers, parted.numbers[:MOST_PLAIN])
    return [*shared, *fitting], [*patches_of(inputs_moved(calls, inputs)), *others]


def _split(
    patches: Iterable[CallEdit], trial: "CallTrial", begins: Mapping[Site, int]
) -> tuple[list[CallEdit], list[CallEdit]]:
    """Return the patches that fit, and the others, in the order of the calls."""
    fitting: list[CallEdit] = []
    others: list[CallEdit] = []
    for patch in sorted(patches, key=partial(_order, begins)):
        (fitting if trial.fits(patch) else others).append(patch)
    return fitting, others


def _order(begins: Mapping[Site, int], patch: CallEdit) -> tuple[int, int]:
    return min(map(begins.__getitem__, patch.sites)), patch.tier


def _beginnings(calls: Sequence[Call], place: Mapping[Site, int]) -> dict[Site, int]:
    """Return where the call of each site begins: one that is opened, with the first of its inner calls."""
    begins = dict(place)
    for k, call in reversed([*enumerate(calls)]):
        if call.within is not None:
            begins[call.within] = k
    return begins


def _changes(
    calls: Sequence[Call],
    parted: Parting,
    here: Sequence[int],
    again: Sequence[int],
    before: Sequence[int],
    names: Mapping[int, str],
) -> Iterator[tuple[Call, Change]]:
    """Yield edits of the calls that part, and of others, which are tried only if they fit."""
    every = sorted({*here, *again, *before})
    changes = [(calls[k], change) for k in every for change in edits_of_arguments(calls[k], names)]
    changes += [(calls[k], one) for k in here for one in numbers_together(calls[k], parted.numbers[:MOST_PLAIN])]
    changes += edits_of_connections(calls, sorted({*here, *again}), parted.primitives, names)
    changes += chains_left_out(calls, parted.of_torch, names)
    yield from ((call, change) for call, change in changes if not is_update(call))
    yield from updates_too_late(calls)


def _before(parted: Parting, here: Sequence[int]) -> list[int]:
    """Return the calls before the first that differ: the port may continue from their results in another way."""
    given = {index for k in origins(parted.torch, parted.of_torch) for index in parted.torch[k].inputs}
    return sorted(given.difference(here))


def _again(calls: Sequence[Call], here: Sequence[int], place: Mapping[Site, int]) -> list[int]:
    """Return the calls of the lines of others that part, because a function that is called again has its fault again.

    The port may have their results nonetheless, as where it normalises later what it has not normalised.
    """
    lines = {(calls[k].name, calls[k].line) for k in here if calls[k].line is not None}
    firsts = sorted(set(place.values()).difference(here))
    return [k for k in firsts if (calls[k].name, calls[k].line) in lines]


def _substitutes(
    calls: Sequence[Call], parted: Parting, here: Sequence[int], names: Mapping[int, str]
) -> Iterator[CallEdit]:
    """Yield edits that are tried only if a call then gives what the port computes: there are many of them."""
    changes = ((calls[index], change) for index in here for change in substitutes(calls, index, names))
    yield from with_numbers(patches_of(changes), parted.likely_numbers)
    yield from shifts(calls, here, names)
    yield from with_numbers(shared_factors(calls, here, names), parted.all_numbers)


def with_numbers(patches: Iterable[CallEdit], numbers: Sequence[float]) -> Iterator[CallEdit]:
    """Yield the patches, those with a value also with each of the port's numbers."""
    for patch in patches:
        if patch.change.reference is not None:
            yield from (replace(patch, value=x, given=True) for x in numbers if x != patch.change.reference)
        yield patch


def edits_of_inputs(calls: Sequence[Call], words: Mapping[int, str], inputs: Mapping[int, str]) -> Iterator[CallEdit]:
    """Yield faults of how entries of the batch are taken: slices by another offset, an entry moved by one.

    Args:
        calls: the calls of the loss.
        words: id of a tensor -> what it is.
        inputs: id of an entry of the batch -> its name.
    """
    yield from shifts(calls, range(len(calls)), words)
    yield from patches_of(inputs_moved(calls, inputs))


def edits_of_layers(calls: Sequence[Call], words: Mapping[int, str]) -> Iterator[CallEdit]:
    """Yield faults of calls that were opened, such as a recurrent layer that starts from zeros.

    Args:
        calls, words: see `edits_of_inputs`.
    """
    opened = {call.within for call in calls}
    chosen = [index for index, call in enumerate(calls) if call.site in opened]
    changes = [(calls[index], change) for index in chosen for change in edits_of_arguments(calls[index], words)]
    yield from patches_of([*changes, *edits_of_connections(calls, chosen, (), words)])


def in_words(calls: Sequence[Call], names: Mapping[int, str]) -> dict[int, str]:
    """Return what each tensor is: a parameter, or the result of a call."""
    words = {id(x): f"the result of {call.words}" for call in calls for x in tensors_in(call.result)}
    return words | dict(names)


class CallTrial:
    """Trials of an edit on the first call that it changes, without a replay of the loss.

    Args:
        calls: the calls of the loss, recorded with their moments.
        parted: where the programs part.
        place: site -> index of the call that is edited, the first of that site that parts.
    """

    def __init__(self, calls: Sequence[Call], parted: Parting, place: Mapping[Site, int]):
        self._calls, self._place = calls, place
        self._inside = set(parted.of_torch)
        self._known = Results(tuple(parted.jax[index] for index in parted.of_jax))
        self._origins = {calls[index].site for index in origins(parted.torch, self._inside)}
        # A call left out returns an input; it fits if both sides compute that.
        self._from_equal = {calls[k].site for k in self._inside if not self._inside.issuperset(parted.torch[k].inputs)}

    def fits(self, patch: CallEdit) -> bool:
        """Return whether the call, edited, returns what the port computes and the reference does not.

        What a call returns that is left out, both compute; it fits if the programs part there, and so may any number of
        such a call. Moments do not show in which order values are, so an edit that moves them fits as well.
        """
        site = min(patch.sites, key=self._place.__getitem__)
        change = patch.changes.get(site, patch.change)
        if patch.reference is not None:  # its value is not known yet
            return change.fault == "number" and site in self._origins
        if change.fault == "calls_left_out":  # what is left in their place, both sides compute
            return True
        if change.fault in LEFT_OUT:
            return self._moves(site) or site in self._from_equal or site in self._origins
        return self.gives(patch)

    def _moves(self, site: Site) -> bool:
        """Return whether the call only moves values, and both sides have them."""
        index = self._place[site]
        return self._calls[index].name in MOVERS and index not in self._inside

    def gives(self, patch: CallEdit) -> bool:
        """Return whether the call, edited, returns what the port computes and the reference does not."""
        if patch.reference is not None:
            return False
        site = min(patch.sites, key=self._place.__getitem__)
        change, index = patch.changes.get(site, patch.change), self._place[site]
        recorded = self._calls[index]
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in recorded.args)  # a call may work in place
        call = replace(recorded, args=copies, earlier=partial(self._earlier, index))
        try:
            with torch.no_grad():
                result = change.answer(call, Call.run, 0.0 if patch.value is None else patch.value)
        except IMPOSSIBLE:
            return False
        if any(result is x for x in call.args):  # a fault of the catalogue that leaves the call out
            return site in self._from_equal or site in self._origins
        results = tuple(moments(x.detach().to_dense().numpy()) for x in tensors_in(result))
        if (
            self._moves(site)
            and len(results) == len(recorded.results)
            and all(map(are_near, results, recorded.results))
        ):
            return True
        return bool(results) and self._known.has(Operation(call.name, (), (), None, results))

    def _earlier(self, index: int, site: Site) -> Any:
        """Return the last result at a site before a call."""
        return next((call.result for call in reversed(self._calls[:index]) if call.site == site), None)


def _first_of_sites(calls: Sequence[Call], indices: Iterable[int]) -> dict[Site, int]:
    """Return the first of some calls at each site: a call of a recurrent layer has one site at all time steps."""
    firsts: dict[Site, int] = {}
    for index in indices:
        firsts.setdefault(calls[index].site, index)
    return firsts


def _with_movers(calls: Sequence[Call], parted: Parting) -> list[int]:
    """Return the calls that part, and those that moments may not show: before them, moves of values; around them, the
    calls that make them as inner calls, and all moves inside of these.
    """
    found = set(parted.of_torch)
    waiting = list(origins(parted.torch, found))
    while waiting:
        for index in parted.torch[waiting.pop()].inputs:
            if index not in found and calls[index].name in MOVERS:
                found.add(index)
                waiting.append(index)
    outer = {calls[index].within for index in found} - {None}
    moves = {k for k, call in enumerate(calls) if call.within in outer and call.name in MOVERS}
    return sorted(found | moves | {k for k, call in enumerate(calls) if call.site in outer})
