"""What a port's own step does between the loss and the optimizer, told from its gradients.

Given the gradients of each micro-batch's loss (taken from the port's own loss, and so right
whatever the step does with them), each hypothesis predicts all that follows.
"""

import itertools
from collections.abc import Sequence

from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.reduction.faults import Edit, aliases, edits
from jaxddp.parity.diagnosis.reduction.recipe import SHOWN, Recipe, ReductionStep, residual_of

__all__ = ["FLOOR", "SHOWN", "Recipe", "ReductionStep", "explain_reduction", "residual_of"]

FLOOR = 1e-12  # of the stage's norm; measured: right names up to 1e-15


def explain_reduction(
    steps: Sequence[ReductionStep], reference: Recipe, tied: Sequence[str] = (), floor: float = FLOOR
) -> Ruling:
    """Name what the step does otherwise than the reference.

    Args:
        steps: some that differ, the first among them.
        reference: what the torch side does.
        tied: parameters that have two names.
        floor: the largest residual that is rounding.
    """
    world_size, pieces = steps[0].counts.shape
    found = [*edits(reference, world_size, pieces, tied), *aliases(reference, steps[0], floor)]
    singles = [_tried((edit,), reference, steps) for edit in found]
    ruling = decide(singles, floor)
    if ruling.named:
        return ruling
    pairs = [(a, b) for a, b in itertools.combinations(found, 2) if a.kind != b.kind]
    return decide(singles + [_tried(pair, reference, steps) for pair in pairs], floor)


def _tried(edits: tuple[Edit, ...], reference: Recipe, steps: Sequence[ReductionStep]) -> Hypothesis:
    recipe = reference
    for edit in edits:
        recipe = edit.change(recipe)
    worst = 0.0
    for step in steps:
        worst = max(worst, residual_of(recipe, step))
        if worst > 1.0:
            break
    return Hypothesis(tuple(e.fault for e in edits), "; ".join(e.says for e in edits), worst)
