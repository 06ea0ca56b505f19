"""Causes of a difference between the loss and the optimizer of a port's `flax_step`.

Each hypothesis predicts the step's gradients from the gradients of each micro-batch's loss. These
come from the port's loss, so they are correct whatever the step does with them.
"""

import itertools
from collections.abc import Mapping, Sequence

from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.reduction.faults import ReductionEdit, aliases, clip_values, edits, not_averaged
from jaxddp.parity.diagnosis.reduction.recipe import SHOWN, ReductionRecipe, ReductionStep, residual_of

__all__ = ["FLOOR", "SHOWN", "ReductionRecipe", "ReductionStep", "explain_reduction", "residual_of"]

FLOOR = 1e-12  # of the stage's norm; measured: right names up to 1e-15


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
    """
    if _tried((), reference, steps).residual <= floor:  # what differs is not shown to the search
        return Ruling((), None)
    world_size, pieces = steps[0].counts.shape
    possible = [*edits(reference, world_size, pieces, tied, sizes or {}), *clip_values(reference, steps)]
    possible += [*aliases(reference, steps[0], floor), *not_averaged(reference, steps[0], floor)]
    singles = [_tried((edit,), reference, steps) for edit in possible]
    ruling = decide(singles, floor)
    if ruling.named:
        return ruling
    pairs = [(a, b) for a, b in itertools.combinations(possible, 2) if a.kind != b.kind]
    return decide(singles + [_tried(pair, reference, steps) for pair in pairs], floor)


def _tried(edits: tuple[ReductionEdit, ...], reference: ReductionRecipe, steps: Sequence[ReductionStep]) -> Hypothesis:
    recipe = reference
    for edit in edits:
        recipe = edit.change(recipe)
    worst = 0.0
    for step in steps:
        worst = max(worst, residual_of(recipe, step))
        if worst > 1.0:
            break
    return Hypothesis(tuple(e.fault for e in edits), "; ".join(e.says for e in edits), worst)
