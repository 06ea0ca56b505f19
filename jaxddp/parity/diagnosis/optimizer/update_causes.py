"""Causes of a difference in the update, given equal gradients and weights.

The reference's program is replayed with one mistake, then with two, then with three, until the
replay differs from the port's updates by rounding only.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.deviation import Deviating, Deviation
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit
from jaxddp.parity.diagnosis.optimizer.faults import edits
from jaxddp.parity.diagnosis.optimizer.optax_rules import optax_rule
from jaxddp.parity.diagnosis.optimizer.other_updates import aliased, free_rates, of_gradients, rounded_rate
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.sample import Sample, survey, take_sample
from jaxddp.parity.diagnosis.optimizer.schedules import FAULT as SCHEDULE
from jaxddp.parity.diagnosis.optimizer.update_evidence import (
    OptimizerEvidence,
    OptimizerStep,
    contradiction,
    reference_program,
    residuals,
    with_rates_of_float32,
)
from jaxddp.parity.diagnosis.optimizer.warmup import FAULT as WARMUP
from jaxddp.parity.diagnosis.search.decide import SEPARATION, Hypothesis, Ruling, decide, is_plain
from jaxddp.parity.diagnosis.search.grow import grow
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values, far_off, polish, round_values, sensible, solve
from jaxddp.parity.diagnosis.threads import torch_threads

__all__ = ["OptimizerEvidence", "OptimizerStep", "explain_optimizer", "reference_residuals"]

FLOOR = 1e-12  # of the stage's norm; measured: up to 6e-15 in clean ports
PROMISING = 1e-7  # largest screened residual of a trial that is fitted on the full sample
SCREEN_STEPS = 3  # steps of the screen beyond the first that differs
SCREEN_ELEMENTS = 300
SIDE_BY_SIDE = 16  # trials that are replayed on the full run at once, so that each step is read once for all
# Edits, and pairs, to which one more is added; measured: the 6th edit and the 1st pair are needed.
NEAREST = {1: 8, 2: 3}
SAME_RATES = 1e-6  # relative; a rate may be a float32
SCHEDULES = frozenset({WARMUP, SCHEDULE})
COPIES = SCHEDULES | {"loss_scale"}  # what may do the same as a plainer fault
RATES = COPIES | {"lr_scaled", "lr_off_by_one", "scheduler_too_fast"}  # faults that multiply the updates of a step
TWINS = {"loss_scale": "eps_value"}  # equivalent for an optimizer that divides gradients by their own scale
TWINS_PART = frozenset({"adagrad_accumulator", "rmsprop_centred"})  # faults with which twins are not equivalent


@dataclass(frozen=True)
class Trial(Deviating):
    """Edits with the values that fit best.

    Attributes:
        edits: in the order in which they are made.
        values: of all their unknowns.
        residual: left by the edits.
        round: every value is likely, or has few digits.
    """

    edits: tuple[OptimizerEdit, ...]
    values: Values = ()
    residual: float = np.inf
    round: bool = True

    @property
    def plain(self) -> bool:
        """Return whether somebody may have written every value."""
        pairs = zip(self.values, self.unknowns, strict=True)
        return self.round or all(unknown.rounded or is_plain(value) for value, unknown in pairs)

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        return tuple(unknown for edit in self.edits for unknown in edit.unknowns)

    def of_each(self, values: Values) -> list[tuple[OptimizerEdit, Values]]:
        """Return the edits with their shares of some values of all unknowns."""
        left = iter(values)
        return [(edit, tuple(itertools.islice(left, len(edit.unknowns)))) for edit in self.edits]

    def without(self, edit: OptimizerEdit) -> "Trial":
        """Return the trial without one of its edits, the others' values unchanged."""
        kept = [(one, values) for one, values in self.of_each(self.values) if one is not edit]
        return replace(self, edits=tuple(one for one, _ in kept), values=tuple(itertools.chain(*(v for _, v in kept))))

    @property
    def removes(self) -> bool:
        """Return whether the port only lacks parts of the reference, or has 0 for their numbers."""
        return all(edit.removes or (values and not any(values)) for edit, values in self.of_each(self.values))

    @property
    def kind(self) -> frozenset[str]:
        """Faults, twins under one name, unless the squares start from another value."""
        apart = not TWINS_PART.isdisjoint(self.faults)
        return frozenset(fault if apart else TWINS.get(fault, fault) for fault in self.faults)

    def program(self, reference: OptimizerProgram, values: Values) -> OptimizerProgram:
        """Apply the edits to the reference's program, one after the other."""
        for edit, of_edit in self.of_each(values):
            reference = edit.change(reference, of_edit)
        return reference

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        return tuple(edit.deviation(values) for edit, values in self.of_each(self.values))


def without_copies(explaining: list[Trial], reference: OptimizerProgram) -> list[Trial]:
    """Drop a schedule, or a fitted scale, with the same rates and the same scale as a plainer fault.

    A shift by one step may make the same rates, and a sum over the replicas the same scale.
    """
    programs = {trial: trial.program(reference, trial.values) for trial in explaining}

    def weight(trial: Trial) -> tuple[int, bool]:
        return len(trial.values), not SCHEDULES.isdisjoint(trial.faults)

    def copies(trial: Trial, other: Trial) -> bool:
        plainer = len(other.edits) <= len(trial.edits) and weight(other) < weight(trial)
        beside = set(trial.faults) - COPIES
        one, same = programs[trial], programs[other]
        alike = np.allclose(one.lr, same.lr, rtol=SAME_RATES) and np.isclose(one.scale, same.scale, rtol=SAME_RATES)
        return plainer and beside <= set(other.faults) and bool(alike)

    others = [trial for trial in explaining if not COPIES.isdisjoint(trial.faults)]
    copied = [trial for trial in others if any(copies(trial, other) for other in explaining)]
    return [trial for trial in explaining if trial not in copied]


def plainest(explaining: list[Trial]) -> list[Trial]:
    """Return the trial with the fewest edits for each set of faults; one with odd values only if none is round."""
    by_merit = sorted(explaining, key=lambda trial: (len(trial.edits), len(trial.values), not trial.round))
    some_round = [trial for trial in by_merit if trial.round]
    fewest = len((some_round or by_merit)[0].edits) if by_merit else 0
    one_each = {trial.faults: trial for trial in reversed(by_merit) if len(trial.edits) == fewest}.values()
    kinds = {trial.kind for trial in some_round}
    return [trial for trial in one_each if trial.round or not kinds or trial.kind in kinds]


def reference_residuals(evidence: OptimizerEvidence) -> list[dict[str, float]] | None:
    """Compute how far the updates are from the reference's program, given the same gradients.

    Returns:
        Per step, tensor -> ||predicted - observed|| over the norm of the step's full update. None for an
        optimizer that cannot be replayed.
    """
    program = reference_program(evidence)
    if program is None:
        return None
    replays = with_rates_of_float32([program], evidence)
    return [residuals(step.update, predicted) for ((step, predicted, _),) in replays]


def explain_optimizer(
    evidence: OptimizerEvidence, floor: float = FLOOR, near: float = 0.0, deep: bool = True
) -> Ruling:
    """Name the mistakes that make the reference's optimizer do what the port's does.

    Args:
        evidence: the run.
        floor: the largest residual that counts as rounding.
        near: the largest residual of a trial that is tried again with learning rates in float32; 0: only
            trials at the floor are.
        deep: try pairs and more where no single mistake explains the updates.

    Returns:
        The ruling; nothing is named if nothing explains the updates, nothing differs, or the optimizer is
        not one of `evidence.FAMILIES`.
    """
    reference = reference_program(evidence)
    if reference is None:
        return Ruling((), None)
    coarse = max(floor, near)
    surveyed = survey(evidence, reference)
    worst = [max(of_step.values()) for of_step in surveyed.residuals]
    first = next((step for limit in (coarse, floor) for step, value in enumerate(worst) if value > limit), None)
    if first is None or not np.isfinite(surveyed.scale).all():
        return Ruling((), None)
    tiny = max(worst) <= coarse  # on the sample, where rates are not rounded, everything explains it
    sample = take_sample(evidence, surveyed.chosen, surveyed.scale)
    few = SCREEN_ELEMENTS if reference.step.elementwise else 0
    search = _Search(reference, sample, sample.cut(first + 1 + SCREEN_STEPS, few), coarse)
    updates = aliased(evidence, reference, surveyed.residuals, coarse), optax_rule(evidence, reference)
    others = [*filter(None, (*updates, of_gradients(evidence, reference)))]
    with np.errstate(all="ignore"):  # wild values are tried on the way
        rounded = [*_with_rounded_rates([Trial(())], reference, evidence, floor)]
        alone = bool(rounded) or any(other.residual <= coarse for other in others)
        # Other optimizers than elementwise ones take full tensors, and long.
        pairs = deep and not tiny and not alone and (reference.step.elementwise or bool(evidence.factors))
        free = free_rates(evidence, reference) if deep else None
        among = RATES if free is not None and free.residual <= coarse else None
        with torch_threads(1):
            trials = search.run(edits(reference, sample, evidence, floor), pairs, among)
        hypotheses = _confirmed(trials, reference, evidence, coarse)
        if tiny:
            hypotheses = _better_than_none(hypotheses, reference, evidence, floor)
        ruling = decide([*hypotheses, *others], floor)
        if not (ruling.named or rounded or tiny) and near:
            explaining = [trial for trial in trials if trial.residual <= near and trial.plain]
            rounded = [*_with_rounded_rates(plainest(explaining), reference, evidence, floor)]
    last = deep and (near or not reference.scheduled)  # faults together with rates in float32 are tried first
    if not (ruling.named or rounded or tiny) and last and free is not None:
        rounded = [free]
    return ruling if ruling.named else decide([*hypotheses, *others, *rounded], floor)


@dataclass(frozen=True)
class _Search:
    """Trials on a sample, screened on a small part of the sample."""

    reference: OptimizerProgram
    sample: Sample
    screen: Sample
    floor: float

    def run(self, possible: Sequence[OptimizerEdit], deep: bool, among: Collection[str] | None = None) -> list[Trial]:
        """Try every edit, then the nearest with another, then the nearest pairs with a third, until one explains it.

        Args:
            possible: edits to choose from.
            deep: go beyond single edits.
            among: faults that are tried together; None: all.
        """
        trials = self._attempt((edit,) for edit in possible)
        if not deep or any(trial.plain for trial in self._explained(trials)):
            return trials
        possible = [edit for edit in possible if among is None or edit.fault in among]
        pairs = self._grown([trial for trial in trials if trial.edits[0] in possible], possible, size=1)
        trials += pairs
        # A pair that needs an odd number may be three mistakes with round ones.
        if any(trial.round for trial in self._explained(pairs)):
            return trials
        return trials + self._grown(pairs, possible, size=2)

    def _grown(self, trials: Sequence[Trial], possible: Sequence[OptimizerEdit], size: int) -> list[Trial]:
        """Try the nearest trial of `size` edits with each further edit, then the next, until a new one explains it."""
        tried: set[tuple[OptimizerEdit, ...]] = set()

        def with_others(base: tuple[OptimizerEdit, ...]) -> list[Trial]:
            larger = (tuple(e for e in possible if e in (*base, other)) for other in possible if other not in base)
            new = [edits for edits in larger if edits not in tried]
            tried.update(new)
            return self._attempt(new)

        return grow(
            (trial.edits for trial in sorted(trials, key=lambda trial: trial.residual)[: NEAREST[size]]),
            with_others,
            lambda trial: bool(self._explained([trial])),
            lambda trial: itertools.combinations(trial.edits, size),
        )

    def _attempt(self, combinations: Iterable[tuple[OptimizerEdit, ...]]) -> list[Trial]:
        trials = (self._screened(combination) for combination in combinations if _compatible(combination))
        promising = max(PROMISING, self.floor)
        return [self._refined(trial) if trial.residual <= promising else trial for trial in trials]

    def _explained(self, trials: list[Trial]) -> list[Trial]:
        return [trial for trial in trials if trial.residual <= self.floor]

    def _screened(self, combination: tuple[OptimizerEdit, ...]) -> Trial:
        trial = Trial(combination)
        trial = replace(trial, round=not trial.unknowns)
        return self._at(trial, solve(self._misfit(trial, self.screen), trial.unknowns), self.screen)

    def _refined(self, trial: Trial) -> Trial:
        """Fit again on the full sample, and take round values where these fit as well.

        If any large multiple of a value fits as well, such as an infinite scale of gradients, the value explains
        nothing: a fault without values does the same.
        """
        values = polish(self._misfit(trial, self.sample), trial.unknowns, trial.values)
        fitted = self._at(trial, values, self.sample)
        if fitted.residual > self.floor:
            return fitted
        allowed = max(2 * fitted.residual, self.floor / 10)

        def accepts(values: Values) -> bool:
            return self._at(trial, values, self.sample).residual <= allowed

        if any(accepts(other) for other in far_off(fitted.values, trial.unknowns)):
            return replace(trial, residual=np.inf)
        values, are_round = round_values(self._misfit(trial, self.screen), trial.unknowns, fitted.values, accepts)
        return self._without_idle(replace(self._at(trial, values, self.sample), round=are_round))

    def _without_idle(self, trial: Trial) -> Trial:
        """Drop edits that the explanation does not need, such as one whose value is the reference's."""
        for edit in trial.edits if len(trial.edits) > 1 else ():
            rest = self._at(trial.without(edit), trial.without(edit).values, self.sample)
            if rest.residual <= self.floor:
                return self._without_idle(rest)
        return trial

    def _misfit(self, trial: Trial, sample: Sample) -> Callable[[Values], np.ndarray]:
        return lambda values: sample.misfit(trial.program(self.reference, values))

    def _at(self, trial: Trial, values: Values, sample: Sample) -> Trial:
        """Return the trial with these values, and their residual on a sample."""
        values = tuple(u.within(value) for u, value in zip(trial.unknowns, values, strict=True))
        allowed = sensible(values, trial.unknowns)
        residual = sample.residual(trial.program(self.reference, values)) if allowed else np.inf
        return replace(trial, values=values, residual=residual)


def _compatible(combination: tuple[OptimizerEdit, ...]) -> bool:
    faults = [edit.fault for edit in combination]
    excluded = frozenset().union(*(edit.excludes for edit in combination))
    return len(set(faults)) == len(faults) and excluded.isdisjoint(faults)


def _confirmed(
    trials: list[Trial], reference: OptimizerProgram, evidence: OptimizerEvidence, floor: float
) -> list[Hypothesis]:
    """Return hypotheses; the residuals that decide are computed over the full run."""
    explaining = without_copies([trial for trial in trials if trial.residual <= floor], reference)
    named = _hypotheses(plainest(explaining), reference, evidence)
    fewest = min((len(hypothesis.faults) for hypothesis in named), default=len(trials))
    others = [trial for trial in trials if trial.residual > floor and len(trial.edits) <= fewest]
    others.sort(key=lambda trial: trial.residual)
    bar = SEPARATION * max((one.residual for one in named if one.residual <= floor), default=0.0)
    plain = next((trial for trial in others if trial.plain), None) if named else None  # the next best
    near = [trial for place, trial in enumerate(others) if place == 0 or trial is plain or trial.residual < bar]
    return named + _hypotheses(near, reference, evidence)


def _hypotheses(trials: list[Trial], reference: OptimizerProgram, evidence: OptimizerEvidence) -> list[Hypothesis]:
    """Return the hypotheses with their residuals over the full run, of updates and of the state that the port shows."""
    worst = [0.0] * len(trials)
    for first in range(0, len(trials), SIDE_BY_SIDE):
        programs = [trial.program(reference, trial.values) for trial in trials[first : first + SIDE_BY_SIDE]]
        for of_step in with_rates_of_float32(programs, evidence):
            for place, (program, replayed) in enumerate(zip(programs, of_step, strict=True), start=first):
                of_update = max(residuals(replayed.step.update, replayed.update).values())
                worst[place] = max(worst[place], of_update, min(contradiction(replayed, program), 1.0))
    return [
        Hypothesis(trial.deviations, residual, len(trial.values), trial.plain, removes=trial.removes)
        for trial, residual in zip(trials, worst, strict=True)
    ]


def _with_rounded_rates(
    trials: Iterable[Trial], reference: OptimizerProgram, evidence: OptimizerEvidence, floor: float
) -> Iterator[Hypothesis]:
    """Yield the trials that explain everything if the learning rate is in float32 in part, too."""
    for trial in trials:
        rounded = rounded_rate(evidence, trial.program(reference, trial.values), floor)
        if rounded is not None:
            yield replace(rounded, deviations=(*trial.deviations, *rounded.deviations), values=len(trial.values))


def _better_than_none(
    hypotheses: list[Hypothesis], reference: OptimizerProgram, evidence: OptimizerEvidence, floor: float
) -> list[Hypothesis]:
    """Drop the hypotheses that explain no more than the reference without a fault, and add that one.

    None is left if the reference without a fault explains everything.
    """
    (none,) = _hypotheses([Trial(())], reference, evidence)
    if none.residual <= floor:
        return []
    return [*(hypothesis for hypothesis in hypotheses if hypothesis.residual < none.residual), none]
