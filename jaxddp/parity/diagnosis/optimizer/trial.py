"""Edits of the reference's optimizer with fitted values, and the residual that they leave."""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.search.decide import is_plain
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values

TWINS = {"loss_scale": "eps_value"}  # equivalent for an optimizer that divides gradients by their own scale
TWINS_PART = frozenset({"adagrad_accumulator", "rmsprop_centred"})  # faults beside which twins are not equivalent


@dataclass(frozen=True)
class Trial:
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

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(edit.fault for edit in self.edits)

    def without(self, edit: OptimizerEdit) -> "Trial":
        """Return the trial without one of its edits, the others' values unchanged."""
        left = iter(self.values)
        values = [(one, tuple(itertools.islice(left, len(one.unknowns)))) for one in self.edits]
        kept = [(one, of_one) for one, of_one in values if one is not edit]
        return replace(self, edits=tuple(one for one, _ in kept), values=tuple(itertools.chain(*(v for _, v in kept))))

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

    def says(self) -> str:
        left = iter(self.values)
        return "; ".join(edit.says(tuple(itertools.islice(left, len(edit.unknowns)))) for edit in self.edits)
