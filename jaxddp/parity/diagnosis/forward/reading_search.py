"""Search among the edits of the calls where the two programs of a loss part, fault after fault if there are several."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.forward.candidates import LEFT_OUT, LOOSE, PLAIN, candidates
from jaxddp.parity.diagnosis.forward.reading import NO_TRACE, LossSubject, Reading, parted_with
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.search.fault_search import Explanation, confirm, find_faults
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE, Item, Stages, Subject

BATCH = 96  # edits that are tried before it is asked whether one explains the difference
PER_FAULT = 10  # replays for each edit
MOST_FAULTS = 3  # that are found one after the other
OTHERS = 4 * BATCH  # most edits that are tried although no call, edited, returns what the port computes
FIRSTS = 4  # edits that are followed when none explains the difference


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


@dataclass(frozen=True)
class ReadingSearch:
    """A search that starts from where the programs part.

    An edit after which a call returns what the port computes brings the programs together up to a later call, where
    the next fault is looked for.

    Attributes:
        subject: the stages that are to be explained.
        reading: the port's program.
        patches: faults of the catalogue.
        names: id of a parameter -> its name.
        inputs: id of a tensor of the batch -> its name.
        floor: the largest residual that counts as rounding.
        excluded: faults that are not tried.
    """

    subject: LossSubject
    reading: Reading
    patches: Sequence[CallEdit]
    names: Mapping[int, str]
    inputs: Mapping[int, str]
    floor: float
    excluded: frozenset[str] = frozenset()
    _places: "dict[tuple[CallEdit, ...], _Place]" = field(default_factory=dict, init=False)

    def find(self) -> tuple[Ruling, tuple[Item, ...]] | None:
        """Return the ruling, and the faults of the first hypothesis that it names; None: nothing explains it."""
        start = self._place(())
        level = [start]
        for _ in range(MOST_FAULTS):
            found = [one for place in level if (one := self._explain(place.known, place.fitting)) is not None]
            if found:
                return _together(found)
            level = [later for place in level for later in self._following(place)]
        return self._explain((), start.others[:OTHERS])

    def _place(self, known: tuple[CallEdit, ...]) -> "_Place":
        """Return where the programs part with some faults planted."""
        if known not in self._places:
            self._places[known] = self._place_with(known)
        return self._places[known]

    def _place_with(self, known: tuple[CallEdit, ...]) -> "_Place":
        calls, parted = parted_with(self.subject, self.reading, known)
        edits = candidates(calls, parted, self.names, self.patches, self.inputs)
        fitting, others = ([x for x in of if self._tells(x)] for of in edits)
        begin = min(parted.of_torch, default=len(calls))
        apart = [x for x in fitting if not any(x.excludes(y) for y in known)]
        # Two edits that can replace many others would explain anything.
        return _Place(known, begin, [x for x in apart if x.tier <= PLAIN] if known else apart, others)

    def _tells(self, edit: CallEdit) -> bool:
        """Return whether an edit can be told from others: if values hide a term, any number in it does the same."""
        if not self.excluded:
            return True
        is_free = edit.reference is not None or (edit.given and edit.value not in NO_TRACE)
        return not is_free and edit.change.fault not in self.excluded

    def _following(self, place: "_Place") -> Iterator["_Place"]:
        """Yield the places where the programs part after one more edit, if that is at a later call."""
        sure = [x for x in place.fitting if x.reference is None and x.change.fault not in LEFT_OUT]
        unsure = [x for x in place.fitting if x.change.fault in LEFT_OUT and not place.known]
        for patch in [x for x in (*sure, *unsure) if x.tier <= PLAIN][:FIRSTS]:
            with contextlib.suppress(*IMPOSSIBLE):
                later = self._place((*place.known, patch))
                if later.begin > place.begin:
                    yield later

    def _explain(
        self, known: tuple[CallEdit, ...], edits: Sequence[CallEdit]
    ) -> tuple[Ruling, tuple[Item, ...]] | None:
        """Return the ruling on edits in addition to the known faults; None: no edit explains what is left."""
        probe = self.reading.step, (self.reading.rank,)
        subject = Planted(self.subject, known)
        for start in range(0, len(edits), BATCH):
            batch = edits[start : start + BATCH]
            ruling, named = find_faults(subject, batch, probe, self.floor, PER_FAULT * BATCH, pairs=False)
            loose = all(set(one.faults) <= LOOSE for one in ruling.named)
            if ruling.named and not (loose and len(ruling.named) > 1):
                needed = self._without_idle(known, named)
                fewer = self._by_fewer((*needed, *named)) if needed else None
                return fewer or (replace(ruling, named=tuple(joined(needed, ruling.named))), (*needed, *named))
        return None

    def _by_fewer(self, items: tuple[Item, ...]) -> tuple[Ruling, tuple[Item, ...]] | None:
        """Return an explanation by all faults but one, of which another one has another value; None: there is none.

        For example, a mean in place of the reference's sum makes up for a wrong factor of this sum.
        """
        edits = [item for item in items if isinstance(item, CallEdit)]
        for idle, free in itertools.permutations(edits, 2) if len(edits) == len(items) else ():
            if free.change.reference is not None:
                rest = tuple(edit for edit in edits if edit not in (idle, free))
                explained = self._explain(rest, [replace(free, value=None, given=False)])
                if explained is not None:
                    return explained
        return None

    def _without_idle(self, known: tuple[CallEdit, ...], named: tuple[Item, ...]) -> tuple[CallEdit, ...]:
        """Drop known faults that the named ones do not need, as where a later edit of the same call hides one."""
        for idle in known:
            rest = tuple(one for one in known if one is not idle)
            explanations, _ = confirm(self.subject, [Explanation((), (*rest, *named), 0.0)], self.floor)
            if explanations[0].residual <= self.floor:
                return self._without_idle(rest, named)
        return known


@dataclass(frozen=True)
class _Place:
    """A place where the programs part.

    Attributes:
        known: faults that are planted.
        begin: index of the first call that differs.
        fitting, others: see `candidates`.
    """

    known: tuple[CallEdit, ...]
    begin: int
    fitting: list[CallEdit]
    others: list[CallEdit]


def joined(known: Sequence[CallEdit], named: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield the hypotheses with the faults that were planted before."""
    for one in named:
        faults = tuple(fault for patch in known for fault in patch.faults)
        says = "; ".join([*(patch.says for patch in known), one.says])
        yield replace(one, faults=(*faults, *one.faults), says=says)


def _together(found: Sequence[tuple[Ruling, tuple[Item, ...]]]) -> tuple[Ruling, tuple[Item, ...]]:
    """Return the plainest of several explanations, and all that are as plain."""
    tier = min(_tier(items) for _, items in found)
    plainest = [(ruling, items) for ruling, items in found if _tier(items) == tier]
    said: dict[frozenset[str], Hypothesis] = {}
    for ruling, _ in plainest:
        for one in ruling.named:
            said.setdefault(frozenset(one.says.split("; ")), one)
    ruling, items = plainest[0]
    return replace(ruling, named=tuple(said.values())), items


def _tier(items: Sequence[Item]) -> int:
    return sum(item.tier for item in items)
