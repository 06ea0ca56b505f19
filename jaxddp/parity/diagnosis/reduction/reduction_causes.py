"""Causes of a difference between the loss and the optimizer of a port's `jax_step`.

Each hypothesis predicts the step's gradients from the gradients of each micro-batch's loss. These
come from the port's loss, so they are correct whatever the step does with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.diagnosis.reduction.faults import aliases, clip_values, edits, not_averaged
from jaxddp.parity.diagnosis.reduction.recipe import SHOWN, ReductionRecipe, ReductionStep
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.diagnosis.search.fault_search import find_faults
from jaxddp.parity.diagnosis.search.fit import Stages, residual_at

__all__ = ["FLOOR", "SHOWN", "ReductionRecipe", "ReductionStep", "explain_reduction"]

FLOOR = 1e-12  # of the stage's norm; measured: right names up to 1e-15
REPLAYS = 4000  # of a search; measured: 1,178 where nothing explains a step of 4 replicas and 3 micro-batches


def explain_reduction(
    steps: Sequence[ReductionStep],
    reference: ReductionRecipe,
    tied: Sequence[str] = (),
    sizes: Mapping[int, str] | None = None,
    floor: float = FLOOR,
) -> Ruling:
    """Name the mistakes in the step's reduction and clipping.

    Args:
        steps: steps that differ, the first of them included.
        reference: the torch side's reduction.
        tied: parameters that have two names.
        sizes: sizes of the batch, in words.
        floor: the largest residual that counts as rounding.

    Returns:
        The ruling; nothing is named if nothing explains what is shown, or nothing differs there.
    """
    subject = ReducedGradients(steps, reference)
    probes = ((step, subject.ranks) for step in range(len(steps)))
    probe = next((probe for probe in probes if residual_at(subject, probe) > floor), None)
    if probe is None:
        return Ruling((), None)
    first = steps[probe[0]]
    items = [*edits(reference, first, tied, sizes or {}), *clip_values(reference, steps)]
    items += [*aliases(reference, first, floor), *not_averaged(reference, first, floor)]
    return find_faults(subject, items, probe, floor, REPLAYS)[0]


@dataclass(frozen=True)
class ReducedGradients:
    """Gradients that a step shows, a `fit.Subject`.

    Attributes:
        of_steps: the steps.
        reference: the torch side's reduction.
    """

    of_steps: Sequence[ReductionStep]
    reference: ReductionRecipe

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.of_steps)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All replicas."""
        return tuple(range(len(self.of_steps[0].counts)))

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return the gradients that JAX's step shows."""
        return _of_ranks(self.of_steps[step].shown, ranks)

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the reference's gradients with faults planted."""
        recipe = self.reference
        for item in items:
            recipe = item.change(recipe, item.times)
        with np.errstate(all="ignore"):  # wild factors are tried on the way
            return _of_ranks(recipe.predict(self.of_steps[step]), ranks)


def _of_ranks(stages: Stages, ranks: Sequence[int]) -> Stages:
    return {stage: {name: value[list(ranks)] for name, value in of.items()} for stage, of in stages.items()}
