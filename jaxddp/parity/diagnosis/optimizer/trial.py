"""Edits of the reference's optimizer with fitted values, and the residual that they leave."""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.deviation import Deviating, Deviation
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.schedules import FAULT as SCHEDULE
from jaxddp.parity.diagnosis.optimizer.warmup import FAULT as WARMUP
from jaxddp.parity.diagnosis.search.decide import is_plain
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values

SAME_RATES = 1e-6  # relative; a rate may be a float32
SCHEDULES = frozenset({WARMUP, SCHEDULE})
COPIES = SCHEDULES | {"loss_scale"}  # what may do the same as a plainer fault
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

    def without(self, edit: OptimizerEdit) -> "Trial":
        """Return the trial without one of its edits, the others' values unchanged."""
        left = iter(self.values)
        values = [(one, tuple(itertools.islice(left, len(one.unknowns)))) for one in self.edits]
        kept = [(one, of_one) for one, of_one in values if one is not edit]
        return replace(self, edits=tuple(one for one, _ in kept), values=tuple(itertools.chain(*(v for _, v in kept))))

    @property
    def removes(self) -> bool:
        """Return whether the port only lacks parts of the reference, or has 0 for their numbers."""
        left = iter(self.values)
        of_each = [(edit, [*itertools.islice(left, len(edit.unknowns))]) for edit in self.edits]
        return all(edit.removes or (values and not any(values)) for edit, values in of_each)

    @property
    def kind(self) -> frozenset[str]:
        """Faults, twins under one name, unless the squares start from another value."""
        apart = not TWINS_PART.isdisjoint(self.faults)
        return frozenset(fault if apart else TWINS.get(fault, fault) for fault in self.faults)

    def program(self, reference: OptimizerProgram, values: Values) -> OptimizerProgram:
        """Apply the edits to the reference's program, one after the other."""
        left = iter(values)
        for edit in self.edits:
            reference = edit.change(reference, tuple(itertools.islice(left, len(edit.unknowns))))
        return reference

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        left = iter(self.values)
        return tuple(edit.deviation(tuple(itertools.islice(left, len(edit.unknowns)))) for edit in self.edits)


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
