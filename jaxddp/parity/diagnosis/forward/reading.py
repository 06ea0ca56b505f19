"""Read both programs of a loss: the calls that part from the port's equations, and edits of these calls."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaxddp.parity.diagnosis.forward.calls import Call, Patch, Site, tensors_in
from jaxddp.parity.diagnosis.forward.edits import MOVERS, edits_of_arguments, numbers_of
from jaxddp.parity.diagnosis.forward.fit import IMPOSSIBLE
from jaxddp.parity.diagnosis.forward.rewiring import edits_of_connections, edits_of_gradients
from jaxddp.parity.diagnosis.forward.sites import patches_of
from jaxddp.parity.operations import (
    Lines,
    Operation,
    Operations,
    Results,
    SourceLine,
    are_near,
    differing,
    moments,
    origins,
    readings,
)

LEFT_OUT = ("call_left_out", "operand_left_out", "call_moved")  # edits after which a call returns an input
MOST_NUMBERS = 24  # of the port that are tried in a place


@dataclass(frozen=True)
class Reading:
    """Program of the port, run on one micro-batch.

    Attributes:
        program: equations of the jax loss; (): they could not be read.
        step, rank: step (index into the evidence's steps) and rank whose first micro-batch they computed.
    """

    program: Operations
    step: int
    rank: int


def program_of(calls: Sequence[Call]) -> Operations:
    """Return the calls of a loss, recorded with their moments, as operations.

    >>> import torch
    >>> from jaxddp.parity.diagnosis.forward.sites import trace
    >>> calls = trace(torch.nn.ReLU(), lambda model, batch: {"loss": (2 * model(batch["x"])).sum()},
    ...     {"x": torch.ones(3)}, reads=True)
    >>> [(one.name, one.inputs, one.numbers) for one in program_of(calls)]
    [('relu', (), ()), ('mul', (0,), (2.0,)), ('sum', (1,), ())]
    """
    makers: dict[int, int] = {}
    operations = []
    opened = {call.within for call in calls}  # what they return, their inner calls make
    for index, call in enumerate(calls):
        given = tensors_in((call.args, call.kwargs))
        inputs = dict.fromkeys(makers[id(x)] for x in given if id(x) in makers)
        operations.append(Operation(call.name, tuple(inputs), tuple(numbers_of(call)), call.line, call.results))
        if call.site not in opened:
            makers |= {id(x): index for x in tensors_in(call.result)}
    return tuple(operations)


@dataclass(frozen=True)
class Parting:
    """Place where two programs of a loss part.

    Attributes:
        torch, jax: the programs.
        of_torch, of_jax: operations whose results the other program does not compute, and on which the loss depends.
    """

    torch: Operations
    jax: Operations
    of_torch: tuple[int, ...]
    of_jax: tuple[int, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that stand in the port's operations here and not in the reference's, as either may have made them."""
        there = {number for index in self.of_torch for one in self.torch[index].numbers for number in readings(one)}
        here = dict.fromkeys(number for index in self.of_jax for number in self.jax[index].numbers)
        return tuple(x for x in here if not any(abs(x - y) <= 1e-9 * abs(x) for y in there))

    @property
    def primitives(self) -> frozenset[str]:
        """Primitives of the port's operations here."""
        return frozenset(self.jax[index].name for index in self.of_jax)


def parting(torch: Operations, jax: Operations) -> Parting:
    """Return where two programs part."""
    return Parting(torch, jax, tuple(differing(torch, jax)), tuple(differing(jax, torch)))


def candidates(
    calls: Sequence[Call], parted: Parting, names: Mapping[int, str], known: Sequence[Patch]
) -> tuple[list[Patch], list[Patch]]:
    """Return edits of the calls where the programs part, in the order of the calls.

    Where the losses are equal, the gradients part, and the edits are those of gradients.

    Args:
        calls: the calls of the loss, recorded with their moments.
        parted: where they part.
        names: id of a parameter -> its name.
        known: faults of the catalogue.

    Returns:
        Edits after which a call returns what the port computes somewhere, and all others.
    """
    names = _in_words(calls, names)
    here = _first_of_sites(calls, _with_movers(calls, parted) if parted.of_torch else range(len(calls)))
    if parted.of_torch:
        changes = [(calls[index], change) for index in here.values() for change in edits_of_arguments(calls[index])]
        changes += edits_of_connections(calls, here.values(), parted.primitives, names)
    else:
        changes = [
            (call, change)
            for call in map(calls.__getitem__, here.values())
            for change in edits_of_gradients(call, names)
        ]
    place = _first_of_sites(calls, range(len(calls))) | here
    ways = zip(*map(readings, parted.numbers), strict=False) if parted.of_torch else ()
    numbers = [*dict.fromkeys(itertools.chain(*ways))][:MOST_NUMBERS]  # as they are first
    patches = []
    for patch in (*(one for one in known if place.keys() >= one.sites), *patches_of(changes)):
        if patch.change.reference is not None:
            patches += [replace(patch, value=x, given=True) for x in numbers if x != patch.change.reference]
        patches.append(patch)
    patches.sort(key=lambda patch: (min(map(place.__getitem__, patch.sites)), patch.tier))
    trial = CallTrial(calls, parted, place)
    fitting = [patch for patch in patches if trial.fits(patch)]
    chosen = {id(patch) for patch in fitting}
    return fitting, [patch for patch in patches if id(patch) not in chosen]


def lines_of(parted: Parting, index: int | None = None, number: float | None = None) -> Lines:
    """Return the lines of a fault.

    Args:
        parted: where the programs part, with all other faults planted.
        index: torch's call that is at fault; None: the first that parts.
        number: the port's number, if the fault is a number.
    """
    if index is None:
        index = min(origins(parted.torch, parted.of_torch), default=None)
    return Lines(_line_of_jax(parted, index, number), None if index is None else parted.torch[index].line)


def _line_of_jax(parted: Parting, index: int | None, number: float | None) -> SourceLine | None:
    """Return the port's line that has the number; else the first that parts, or one that does what torch's does."""
    region = [parted.jax[k] for k in parted.of_jax if parted.jax[k].line is not None]
    if number is not None:
        for one in region:
            if any(math.isclose(x, y, rel_tol=1e-9) for x in one.numbers for y in readings(number)):
                return one.line
    inside = set(parted.of_jax)
    for k in parted.of_jax:  # the first that is given what both sides compute
        one = parted.jax[k]
        if one.line is not None and one.inputs and not inside.intersection(one.inputs):
            return one.line
    if region:
        return region[0].line
    twins = () if index is None else parted.jax
    return next((one.line for one in twins if one.line and Results((one,)).has(parted.torch[index or 0])), None)


def _in_words(calls: Sequence[Call], names: Mapping[int, str]) -> dict[int, str]:
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

    def fits(self, patch: Patch) -> bool:
        """Return whether the call, edited, returns what the port computes and the reference does not.

        What a call returns that is left out, both compute; it fits if the programs part there, and so may any number of
        such a call. Moments do not show in which order values are, so an edit that moves them fits as well.
        """
        site = min(patch.sites, key=self._place.__getitem__)
        change = patch.changes.get(site, patch.change)
        index = self._place[site]
        recorded = self._calls[index]
        moves = recorded.name in MOVERS and index not in self._inside
        if patch.reference is not None:  # its value is not known yet
            return change.fault == "number" and site in self._origins
        if change.fault in LEFT_OUT:
            return moves or site in self._from_equal or site in self._origins
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in recorded.args)  # a call may work in place
        call = replace(recorded, args=copies, earlier=partial(self._earlier, index))
        try:
            with torch.no_grad():
                result = change.answer(call, Call.run, 0.0 if patch.value is None else patch.value)
        except IMPOSSIBLE:
            return False
        if any(result is x for x in call.args):  # a fault of the catalogue that leaves the call out
            return site in self._from_equal or site in self._origins
        results = tuple(moments(x.detach().numpy()) for x in tensors_in(result))
        if moves and len(results) == len(recorded.results):
            return all(map(are_near, results, recorded.results))
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
    calls of which they are inner calls, and all moves inside of these.
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
