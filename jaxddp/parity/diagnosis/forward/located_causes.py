"""Rule on a difference between two losses: names of the faults that were located, or what both sides compute."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.diagnosis.forced.causes import OTHER_VALUES, LocatedFault
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.forward.fault_lines import OF_CALLS, of_layer, of_model
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.search.fault_search import Explanation, confirm
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE, Item, Stages, Subject
from jaxddp.parity.operations import Lines, SourceLine

LOSS = "local_loss"
MOST_COMBINATIONS = 8  # of names that a run may not tell apart
FORCED = "in one micro-batch, with the port's values in place of these, the losses are equal"
MOVED = "in one step, with the port's values in place of these, the new weights are equal"
LOSSES = "planted in the reference, these give the losses of every step, and the gradients differ further"
GRADIENTS = "in one micro-batch, with the port's gradients in place of these, those of all parameters are equal"
Search = Callable[[tuple[CallEdit, ...]], tuple[Ruling, tuple[Item, ...]]]


@dataclass(frozen=True)
class Planted:
    """A subject with faults planted in every replay.

    Attributes:
        subject: the subject without them.
        known: the faults.
    """

    subject: Subject
    known: tuple[CallEdit, ...]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.subject.steps

    @property
    def ranks(self) -> tuple[int, ...]:
        """All replicas."""
        return self.subject.ranks

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return the stages of JAX's step."""
        return self.subject.observed(step, ranks)

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the stages of the reference's step with these and further faults planted in it."""
        return self.subject.predicted(step, ranks, (*self.known, *items))


def ruling_on(
    faults: Sequence[LocatedFault],
    subject: Subject,
    reading: Reading,
    made: Mapping[str, SourceLine],
    floor: float,
    search: Search,
) -> tuple[Ruling, tuple[Item, ...]]:
    """Return the ruling, and the edits that replay all of the difference, if there are such.

    Names count if they explain every step; if these show a further fault, it is searched for.

    Args:
        faults: the faults that were located.
        subject: the losses and gradients of all steps.
        reading: the port's program.
        made: library's module -> the user's line that makes it.
        floor: the largest residual that counts as rounding.
        search: search for a further fault, with some planted.
    """
    faults = _without_idle(faults, subject, floor)
    lines = tuple(_lines(fault, reading, made) for fault in faults)
    segments = tuple(fault.text for fault in faults if fault.place)
    ruling = Ruling((), None, lines=lines, segments=segments)
    has_loss = LOSS in subject.observed(reading.step, subject.ranks)
    proof = GRADIENTS if not segments else FORCED if has_loss else MOVED
    if all(fault.names for fault in faults):
        ways = itertools.islice(itertools.product(*(fault.names for fault in faults)), MOST_COMBINATIONS)
        explanations, _ = confirm(subject, [Explanation((), way, 0.0) for way in ways], floor)
        fitting = [one for one in explanations if one.residual <= floor]
        if fitting:
            return replace(ruling, named=tuple(one.hypothesis for one in fitting)), fitting[0].items
        named = tuple(fault.names[0] for fault in faults)
        further, items = search(named)
        if further.named:
            every = tuple(_joined(named, further.named))
            return replace(ruling, named=every, lines=(*lines, *further.lines)), (*named, *items)
        if _explain_losses(subject, named, floor):
            proof = LOSSES
        else:
            faults = [replace(fault, names=()) for fault in faults]
    if not any(fault.names or fault.what for fault in faults):
        return replace(ruling, lines=lines[:1]), ()
    deviations = tuple(fault.names[0].deviations[0] if fault.names else _without_name(fault) for fault in faults)
    return replace(ruling, named=(Hypothesis(deviations, 0.0, measured=proof),)), ()


def _without_name(fault: LocatedFault) -> Deviation:
    """Return a fault by what both sides compute: as code, or if that is too long, by their operations."""
    if fault.what:
        code = (Value(*fault.text.code),) if any(fault.text.code) else ()
        return Deviation(fault.kind, fault.what, (*fault.values, *code))
    return Deviation(fault.kind, Statement("operations", jax=fault.text.jax, torch=fault.text.torch))


def _without_idle(faults: Sequence[LocatedFault], subject: Subject, floor: float) -> Sequence[LocatedFault]:
    """Drop faults that the names of the others do not need, as where the last segment contains another one."""
    for fault in faults if len(faults) > 1 and all(one.names for one in faults) else ():
        rest = [one for one in faults if one is not fault]
        (explanation,), _ = confirm(subject, [Explanation((), tuple(one.names[0] for one in rest), 0.0)], floor)
        if explanation.residual <= floor:
            return _without_idle(rest, subject, floor)
    return faults


def _explain_losses(subject: Subject, named: Sequence[CallEdit], floor: float) -> bool:
    """Return whether faults explain the losses of all steps, though not the gradients; moved weights have no loss."""
    for step in range(subject.steps):
        observed = subject.observed(step, subject.ranks).get(LOSS, {})
        try:
            predicted = subject.predicted(step, subject.ranks, named).get(LOSS, {})
        except IMPOSSIBLE:
            return False
        near = [np.allclose(predicted[name], x, rtol=floor, atol=0.0) for name, x in observed.items()]
        if not near or not all(near):
            return False
    return True


def _lines(fault: LocatedFault, reading: Reading, made: Mapping[str, SourceLine]) -> Lines:
    """Return the lines of a fault; if it is an option of a library's layer, those that make the layer.

    Other values of the batch are made by none of the loss's lines.
    """
    if fault.kind == OTHER_VALUES and not fault.names:
        return Lines()
    if not fault.names or fault.call is None:
        return fault.text.lines
    if fault.call.within is None and fault.names[0].change.fault in OF_CALLS:
        return of_model(fault.text.lines, fault.call, reading, made)
    return of_layer(fault.text.lines, fault.call, reading, made)


def _joined(known: Sequence[CallEdit], named: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield the hypotheses with the faults that were planted before."""
    planted = tuple(deviation for patch in known for deviation in patch.deviations)
    yield from (replace(one, deviations=(*planted, *one.deviations)) for one in named)
