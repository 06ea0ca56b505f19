"""Search for one or two faults that make the reference's replay do what JAX did."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.search.fit import (
    IMPOSSIBLE,
    Budget,
    Differences,
    Fit,
    Item,
    Point,
    Probe,
    Subject,
    residual_at,
)
from jaxddp.parity.diagnosis.search.grow import grow

FITTED = 12  # number of the nearest faults with a value that are fitted in full
NEAR = 1000.0  # faults whose promised residual is below this many floors are fitted in full too
ROUNDS = 3  # searches; each adds the step that contradicted the one before


@dataclass(frozen=True)
class Explanation:
    """Faults and the residual that they leave.

    Attributes:
        listed: the faults as they were given.
        items: the faults with their values.
        residual: at fitted values; for unlikely faults, the one that their slopes promise.
    """

    listed: tuple[Item, ...]
    items: tuple[Item, ...]
    residual: float

    @property
    def hypothesis(self) -> Hypothesis:
        """Explanation as a `decide.Hypothesis`."""
        deviations = tuple(one for item in self.items for one in item.deviations)
        return Hypothesis(deviations, self.residual, self.fitted, self.plausible and not self.idle)

    @property
    def plausible(self) -> bool:
        """Return whether a programmer may have written each of the values."""
        return all(item.plausible for item in self.items)

    @property
    def idle(self) -> bool:
        """Return whether a value reads the same as the reference's, so that the statement says nothing."""
        values = [(item, item.reference) for item in self.items if item.reference is not None]
        return any(item.at(reference).statements == item.statements for item, reference in values)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Number of faults, their highest tier, and number of fitted values; the least is the plainest."""
        return len(self.hypothesis.faults), max((item.tier for item in self.items), default=0), self.fitted

    @property
    def fitted(self) -> int:
        """Number of fitted values."""
        return sum(item.reference is not None for item in self.items)


def find_faults(
    subject: Subject,
    items: Sequence[Item],
    probe: Probe,
    floor: float,
    replays: int,
    leading: Sequence[Item] | None = None,
    thrifty: bool = False,
    pairs: bool = True,
) -> tuple[Ruling, tuple[Item, ...]]:
    """Find the faults that explain JAX's steps, at the probe first and then at every step.

    Args:
        subject: the stages that are to be explained.
        items: faults to choose from, the likelier first.
        probe: a step and replicas that differ.
        floor: the largest residual that counts as rounding.
        replays: number of replays after which nothing more is tried; the same on every machine, unlike a time.
        leading: every pair must contain one of these faults; None: any.
        thrifty: replays are slow, so stop after the first complete explanation, except for faults that scored almost
            as well.
        pairs: try two faults at a time, too.

    Returns:
        The ruling, and the faults of the first hypothesis that it names, with their values.
    """
    budget = Budget(replays)
    probes = [probe]
    for _ in range(ROUNDS):
        search = Search(Differences(subject, probes, budget), items, floor, budget, thrifty)
        explanations, against = confirm(subject, search.singles(), floor)
        if pairs and against is None and not _explained(explanations, floor):
            firsts = [one for one in explanations if leading is None or one.listed[0] in leading]
            of_two, against = confirm(subject, search.pairs(firsts), floor)
            explanations += of_two
        if against is None or _explained(explanations, floor):
            break
        probes.append(against)
    plainest = _plainest(explanations, floor)
    ruling = replace(decide((explanation.hypothesis for explanation in plainest), floor), cut_short=budget.refused)
    first = [explanation.items for explanation in plainest if [explanation.hypothesis] == [*ruling.named[:1]]]
    return ruling, first[0] if first else ()


def confirm(
    subject: Subject, explanations: Sequence[Explanation], floor: float
) -> tuple[list[Explanation], Probe | None]:
    """Return the explanations with their residuals over all steps, and a step and replica that contradicts one."""
    confirmed, against = [], None
    for explanation in explanations:
        residual = explanation.residual
        for step in range(subject.steps):
            if residual > floor or not explanation.plausible:
                break
            residual = max(residual, _residual_at(subject, step, subject.ranks, explanation.items))
            if residual > floor:
                against = step, (worst_rank(subject, step, explanation.items),)
        confirmed.append(Explanation(explanation.listed, explanation.items, residual))
    return confirmed, against


def _residual_at(subject: Subject, step: int, ranks: tuple[int, ...], items: Sequence[Item]) -> float:
    """Return the residual on some replicas; infinity if the faults cannot be planted there."""
    try:
        return residual_at(subject, (step, ranks), items)
    except IMPOSSIBLE:
        return math.inf


def worst_rank(subject: Subject, step: int, items: Sequence[Item] = ()) -> int:
    """Return the replica that differs most."""
    return max(subject.ranks, key=lambda rank: _residual_at(subject, step, (rank,), items))


class Search:
    """Trials of faults, one and two at a time.

    Args:
        differences: predicted minus observed, at the probes.
        items: the faults.
        floor: the largest residual that counts as rounding.
        budget: replays that may still be made; half of them are kept for pairs.
        thrifty: see `find_faults`.
    """

    def __init__(
        self, differences: Differences, items: Sequence[Item], floor: float, budget: Budget, thrifty: bool = False
    ):
        self._budget, self._thrifty = budget, thrifty
        self._fit = Fit(differences, floor)
        self._clean = Point((), differences())
        self._items = items
        self._floor = floor

    def singles(self) -> list[Explanation]:
        """Return each fault that changes the replay, the nearest first."""
        return self._nearest((), self._clean, self._items, reserve=self._budget.left // 2)

    def pairs(self, singles: Sequence[Explanation]) -> list[Explanation]:
        """Try the nearest of some singles with each other fault, then the next, until a pair explains it."""
        by_residual = sorted(singles, key=lambda explanation: explanation.residual)
        tried: list[Item] = []
        return grow(
            (single.listed[0] for single in by_residual if not tried or self._budget.allows()),
            lambda first: self._with_others(first, tried),
            lambda pair: _explained([pair], self._floor),
            lambda pair: pair.listed[1:],
        )

    def _with_others(self, first: Item, tried: list[Item]) -> list[Explanation]:
        """Pair a fault with each other fault, except those that were paired with all others before."""
        tried.append(first)
        point = self._fit.add(self._clean, first)
        if point is None or len(first.faults) > 1:
            return []
        others = [item for item in self._items if item not in tried and len(item.faults) == 1]
        compatible = [item for item in others if not first.excludes(item)]
        return self._nearest((first,), self._fit.reach(point), compatible)

    def _nearest(
        self, listed: tuple[Item, ...], point: Point, items: Sequence[Item], reserve: int = 0
    ) -> list[Explanation]:
        """Add each fault to those of a point; fit the nearest in full; return all, the nearest first.

        Once a pair explains everything, only faults that scored almost as well are still fitted.

        Args:
            listed: faults of the point.
            point: the point to which the faults are added.
            items: faults to add, the likelier first.
            reserve: replays that are kept for later.
        """
        promised = []
        for item in items:
            if not self._budget.allows(reserve):
                break
            if (added := self._fit.add(point, item)) is not None:
                promised.append(Explanation((*listed, item), added.items, self._fit.promise(added)))
        promised.sort(key=lambda explanation: explanation.residual)
        reached: list[Explanation] = []
        fits, enough = 0, math.inf
        for explanation in promised:
            near = fits < FITTED and explanation.residual <= enough and self._budget.allows(reserve)
            if explanation.fitted and (near or explanation.residual <= NEAR * self._floor):
                fits, promise = fits + 1, explanation.residual
                added = self._fit.add(point, explanation.listed[-1])
                assert added is not None, "it was added before"
                best = self._fit.reach(added)
                explanation = _without_idle(Explanation(explanation.listed, best.items, self._fit.residual(best)))
                if (self._thrifty or listed) and _explained([explanation], self._floor):
                    enough = min(enough, NEAR * promise)
            reached.append(explanation)
        return sorted((one for one in reached if one.items), key=lambda explanation: explanation.residual)


def _without_idle(explanation: Explanation) -> Explanation:
    """Return the explanation without the faults whose fitted value is the reference's."""
    pairs = zip(explanation.listed, explanation.items, strict=True)
    kept = [(listed, item) for listed, item in pairs if item.value is None or item.value != item.reference]
    return Explanation(tuple(one for one, _ in kept), tuple(one for _, one in kept), explanation.residual)


def _explained(explanations: Sequence[Explanation], floor: float) -> bool:
    return any(explanation.residual <= floor and explanation.plausible for explanation in explanations)


def _plainest(explanations: Sequence[Explanation], floor: float) -> list[Explanation]:
    """Drop the explanations with more faults than the plainest one, or as many of a higher tier, or more fitted values.

    An edit that another one makes at fewer calls is dropped, too. Explanations that leave more than the floor stay.
    """
    explaining = [e for e in explanations if e.residual <= floor and e.plausible]
    singles = [e.items[0] for e in explaining if len(e.items) == 1]
    wider = {item for item in singles if any(item.is_wider(other) for other in singles)}
    explaining = [e for e in explaining if wider.isdisjoint(e.items)]
    fewest = min((e.rank for e in explaining), default=None)
    plainest = {e.hypothesis.statements: e for e in explaining if e.rank == fewest}
    return [*plainest.values()] + [e for e in explanations if e.residual > floor]
