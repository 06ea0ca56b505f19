"""Search for the faults of a loss: those that are located first, then those that only a replay of all calls shows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxddp.parity.diagnosis.forced.causes import LocatedFault
from jaxddp.parity.diagnosis.forced.lines import has_number
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.forward.candidates import (
    edits_of_inputs,
    edits_of_layers,
    names_of_all,
)
from jaxddp.parity.diagnosis.forward.fault_lines import lines_of_items
from jaxddp.parity.diagnosis.forward.located_causes import Planted, ruling_on
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.forward.replay import ModelEvidence
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.diagnosis.search.fault_search import find_faults
from jaxddp.parity.diagnosis.search.fit import Item
from jaxddp.parity.port.draws import examples_of, shown_entry

if TYPE_CHECKING:
    from jaxddp.parity.diagnosis.forward.loss_causes import LossAndGradients


@dataclass(frozen=True)
class LossSearch:
    """Search for the faults of a loss.

    Attributes:
        subject: the losses and gradients of all steps.
        evidence: the reference's loss, and JAX's steps.
        items: faults of the catalogue.
        probe: step and replica on which faults are tried first.
        floor: the largest residual that counts as rounding.
        replays: most replays.
        leading: see `find_faults`.
    """

    subject: "LossAndGradients"
    evidence: ModelEvidence
    items: Sequence[Item]
    probe: tuple[int, tuple[int, ...]]
    floor: float
    replays: int
    leading: Sequence[Item] | None

    def by_catalogue(self, pairs: bool = True) -> tuple[Ruling, tuple[Item, ...]]:
        """Return the ruling on the faults of the catalogue, and on pairs of these."""
        tried = self.subject, self.items, self.probe, self.floor, self.replays
        return find_faults(*tried, self.leading, self.evidence.thrifty, pairs)

    def located(self, reading: Reading, ruling: Ruling) -> Ruling:
        """Add to a ruling without names where the programs differ, without names: any NaN would explain another one."""
        faults = next(self.subject.located(reading, *self._words(reading)), [])
        segments = tuple(fault.text for fault in faults)
        return replace(ruling, lines=tuple(text.lines for text in segments[:1]), segments=segments)

    def _words(self, reading: Reading) -> tuple[dict[int, str], dict[int, str]]:
        """Return names by the ids of tensors: of parameters and what the batch has, and of its examples alone."""
        module, steps = self.evidence.module, self.evidence.steps
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        batch = steps[reading.step].micro_batches[reading.rank][0]
        entries = {id(x): shown_entry(name) for name, x in batch.items()}
        return {**entries, **names}, {id(x): name for name, x in examples_of(batch).items()}

    def with_reading(self, reading: Reading) -> tuple[Ruling, tuple[Item, ...]]:
        """Return the ruling where the port's program is known."""
        words, inputs = self._words(reading)
        rulings = list[Ruling]()
        for faults in self._located(reading, words, inputs):
            ruling, named = ruling_on(faults, self.subject, reading, self.evidence.made, self.floor, self._with_planted)
            if named:
                return self._with_title(reading, ruling, named)
            rulings.append(ruling)
        if not rulings:
            return self._with_lines(reading, *self.by_catalogue())
        ruling = max(rulings, key=lambda one: len(one.segments))
        for search in (partial(self.by_catalogue, pairs=False), partial(self._of_many_calls, reading, words, inputs)):
            by_replays, planted = search()
            if by_replays.named:
                return self._with_lines(reading, replace(by_replays, segments=ruling.segments), planted)
        return ruling, ()

    def _located(
        self, reading: Reading, words: Mapping[int, str], inputs: Mapping[int, str]
    ) -> Iterator[list[LocatedFault]]:
        """Yield the faults of the losses, or those of the gradients of equal losses."""
        found = False
        for faults in self.subject.located(reading, words, inputs):
            found = True
            yield faults
        if not found and (faults := self.subject.located_gradients(reading, words, inputs)):
            yield faults

    def _with_lines(self, reading: Reading, ruling: Ruling, named: tuple[Item, ...]) -> tuple[Ruling, tuple[Item, ...]]:
        return replace(ruling, lines=lines_of_items(self.subject, reading, named, self.evidence.made)), named

    def _with_planted(self, planted: tuple[CallEdit, ...]) -> tuple[Ruling, tuple[Item, ...]]:
        """Return the ruling on further faults of the catalogue beside some."""
        others = [item for item in self.items if not any(item.excludes(one) for one in planted)]
        subject = Planted(self.subject, planted)
        return find_faults(subject, others, self.probe, self.floor, self.replays, None, self.evidence.thrifty, False)

    def _with_title(self, reading: Reading, ruling: Ruling, named: tuple[Item, ...]) -> tuple[Ruling, tuple[Item, ...]]:
        """Return the ruling by a fault of the catalogue that no call shows alone, if there is one; else as it is."""
        if min(item.tier for item in named) <= 0:
            return ruling, named
        of_gradients = not ruling.segments
        of_all = [item for item in self.items if of_gradients or not _is_of_a_call(item)]
        by_all, planted = find_faults(self.subject, of_all, self.probe, self.floor, self.replays, pairs=False)
        stated, fitted = ({*_are_stated(items, reading)} for items in (named, planted))
        # A number that the port has is likelier than a fitted one, which may do the same.
        if not by_all.named or (stated == {True} and False in fitted):
            return ruling, named
        return self._with_lines(reading, replace(by_all, segments=ruling.segments), planted)

    def _of_many_calls(
        self, reading: Reading, words: Mapping[int, str], inputs: Mapping[int, str]
    ) -> tuple[Ruling, tuple[Item, ...]]:
        """Return the ruling on how the batch is taken, and on layers that were opened."""
        calls = self.subject.calls(reading.step, reading.rank, reads=True)
        names = names_of_all(calls, words)
        edits = [*edits_of_inputs(calls, names, inputs), *edits_of_layers(calls, names)]
        return find_faults(self.subject, edits, self.probe, self.floor, self.replays, pairs=False)


def _is_of_a_call(item: Item) -> bool:
    """Return whether a fault is one that a call shows alone; a fitted number needs more than one loss."""
    if not isinstance(item, CallEdit):
        return False
    return not (item.change.lockstep or item.change.counts or item.change.reference is not None)


def _are_stated(items: Sequence[Item], reading: Reading) -> Iterator[bool]:
    """Yield for each fault with a value whether the port has that number."""
    for item in items:
        if isinstance(item, CallEdit) and item.value is not None:
            yield any(has_number(node, item.value) for node in reading.graph or ())
