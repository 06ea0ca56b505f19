"""Which faults, planted in a replay, do what JAX did: one of them, or two."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.forward.fit import Differences, Fit, Item, Point, Probe, Subject, residual_at

FITTED = 12  # how many of the nearest that have a value are fitted in full
NEAR = 1000.0  # and all that promise less than so many floors
ROUNDS = 3  # how often a step that contradicts is looked at as well


@dataclass(frozen=True)
class Explanation:
    """Faults, and what they leave: with their values fitted or, for the unlikely, as their slopes promise.

    Attributes:
        listed: the faults as they were given.
        items: with their values.
    """

    listed: tuple[Item, ...]
    items: tuple[Item, ...]
    residual: float

    @property
    def hypothesis(self) -> Hypothesis:
        """As the rule for naming takes it."""
        faults = tuple(fault for item in self.items for fault in item.faults)
        return Hypothesis(faults, "; ".join(item.says for item in self.items), self.residual)

    @property
    def plausible(self) -> bool:
        """Whether all of its values are such that somebody may have written them."""
        return all(item.plausible for item in self.items)

    @property
    def fitted(self) -> int:
        """How many values were fitted."""
        return sum(item.reference is not None for item in self.items)


def explain(
    subject: Subject, items: Sequence[Item], probe: Probe, floor: float, seconds: float
) -> tuple[Ruling, tuple[Item, ...]]:
    """Find the faults that explain what JAX did, at the probe first and then at every step.

    Args:
        items: the faults to choose from, the likelier first.
        probe: a step and replicas that differ.
        floor: the largest residual that is rounding.
        seconds: after which no more is tried.

    Returns:
        The ruling, and the faults that it names with their values; none where it names several or nothing.
    """
    end = time.monotonic() + seconds
    probes = [probe]
    for _ in range(ROUNDS):
        search = Search(Differences(subject, probes), items, floor)
        halfway = (time.monotonic() + end) / 2
        explanations, against = confirm(subject, search.singles(halfway), floor)
        if against is None and not _explained(explanations, floor):
            pairs, against = confirm(subject, search.pairs(explanations, end), floor)
            explanations += pairs
        if against is None or _explained(explanations, floor):
            break
        probes.append(against)
    plainest = _plainest(explanations, floor)
    ruling = replace(
        decide((explanation.hypothesis for explanation in plainest), floor), cut_short=time.monotonic() > end
    )
    named = [explanation.items for explanation in plainest if explanation.hypothesis in ruling.named]
    return ruling, named[0] if len(named) == 1 else ()


def confirm(
    subject: Subject, explanations: Sequence[Explanation], floor: float
) -> tuple[list[Explanation], Probe | None]:
    """The explanations with their residuals over all steps, and a step and replica that contradicts one."""
    confirmed, against = [], None
    for explanation in explanations:
        residual = explanation.residual
        for step in range(subject.steps):
            if residual > floor or not explanation.plausible:
                break
            residual = max(residual, residual_at(subject, (step, subject.ranks), explanation.items))
            if residual > floor:
                against = step, (worst_rank(subject, step, explanation.items),)
        confirmed.append(Explanation(explanation.listed, explanation.items, residual))
    return confirmed, against


def worst_rank(subject: Subject, step: int, items: Sequence[Item] = ()) -> int:
    """The replica that differs most."""
    return max(subject.ranks, key=lambda rank: residual_at(subject, (step, (rank,)), items))


class Search:
    """Tries faults, alone and two at a time.

    Args:
        differences: at the probes.
        items: the faults.
        floor: the largest residual that is rounding.

    Deadlines are on the clock of `time.monotonic`.
    """

    def __init__(self, differences: Differences, items: Sequence[Item], floor: float):
        self._fit = Fit(differences, floor)
        self._clean = Point((), differences())
        self._items = items
        self._floor = floor

    def singles(self, deadline: float) -> list[Explanation]:
        """Each fault that makes a difference, the nearest first."""
        return self._nearest((), self._clean, self._items, deadline)

    def pairs(self, singles: Sequence[Explanation], deadline: float) -> list[Explanation]:
        """The nearest single with each other fault, then the next, until two explain it or time is up."""
        found: list[Explanation] = []
        tried: list[Item] = []
        for single in sorted(singles, key=lambda explanation: explanation.residual):
            found += self._with_others(single.listed[0], tried, deadline)
            if _explained(found, self._floor):
                # Its other half may go with something else as well: then neither is certain.
                seconds = [one.listed[-1] for one in found if _explained([one], self._floor)]
                return found + [more for second in seconds for more in self._with_others(second, tried, deadline)]
            if time.monotonic() > deadline:
                break
        return found

    def _with_others(self, first: Item, tried: list[Item], deadline: float) -> list[Explanation]:
        """A fault with each other one that was not tried with all."""
        tried.append(first)
        point = self._fit.add(self._clean, first)
        if point is None or len(first.faults) > 1:
            return []
        others = [item for item in self._items if item not in tried and len(item.faults) == 1]
        compatible = [item for item in others if not first.excludes(item)]
        return self._nearest((first,), self._fit.reach(point), compatible, deadline)

    def _nearest(
        self, listed: tuple[Item, ...], point: Point, items: Sequence[Item], deadline: float
    ) -> list[Explanation]:
        """Each fault added to those of a point, the nearest first; the nearest of them are fitted in full."""
        promised = []
        for item in items:
            if time.monotonic() > deadline:
                break
            if (added := self._fit.add(point, item)) is not None:
                promised.append(Explanation((*listed, item), added.items, self._fit.promise(added)))
        promised.sort(key=lambda explanation: explanation.residual)
        reached, fits = [], 0
        for explanation in promised:
            near = fits < FITTED and time.monotonic() < deadline
            if explanation.fitted and (near or explanation.residual <= NEAR * self._floor):
                fits += 1
                added = self._fit.add(point, explanation.listed[-1])
                assert added is not None, "it was added before"
                best = self._fit.reach(added)
                explanation = _without_idle(Explanation(explanation.listed, best.items, self._fit.residual(best)))
            reached.append(explanation)
        return sorted((one for one in reached if one.items), key=lambda explanation: explanation.residual)


def _without_idle(explanation: Explanation) -> Explanation:
    """Without faults whose value came out as the reference's."""
    pairs = zip(explanation.listed, explanation.items, strict=True)
    kept = [(listed, item) for listed, item in pairs if item.value is None or item.value != item.reference]
    return Explanation(tuple(one for one, _ in kept), tuple(one for _, one in kept), explanation.residual)


def _explained(explanations: Sequence[Explanation], floor: float) -> bool:
    return any(explanation.residual <= floor and explanation.plausible for explanation in explanations)


def _plainest(explanations: Sequence[Explanation], floor: float) -> list[Explanation]:
    """Of those that explain it with the fewest faults only the ones with the fewest fitted values; and all others."""
    explaining = [e for e in explanations if e.residual <= floor and e.plausible]
    fewest = min(((e.hypothesis.edits, e.fitted) for e in explaining), default=None)
    plainest = {e.hypothesis.says: e for e in explaining if (e.hypothesis.edits, e.fitted) == fewest}
    return [*plainest.values()] + [e for e in explanations if e.residual > floor]
