"""Find single tensors that got another tensor's update, or an old one."""

from collections.abc import Mapping

import numpy as np

from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence, OptimizerStep, Tensors, replay
from jaxddp.parity.diagnosis.search.decide import Hypothesis
from jaxddp.parity.records import relative, stage_norm


def aliased(
    evidence: OptimizerEvidence, program: OptimizerProgram, residuals: list[dict[str, float]], floor: float
) -> Hypothesis | None:
    """Return the hypothesis that each wrong update has another source: another tensor, or the step before.

    Args:
        evidence: the run.
        program: the reference's program.
        residuals: residuals of that program, per step and tensor.
        floor: the largest residual that counts as rounding.

    Returns:
        The hypothesis; None if no tensor is wrong, or half of them or more are.
    """
    off = {name for of_step in residuals for name, value in of_step.items() if value > floor}
    if not off or 2 * len(off) >= len(program.names):
        return None
    worst = 0.0
    says: dict[str, str] = {}
    before: Tensors = {}
    for of_step, (step, predicted, _) in zip(residuals, replay(program, evidence), strict=True):
        norm = stage_norm(step.update)
        for name, value in of_step.items():
            if value > floor:
                value, source = _nearest(name, step, predicted, before, norm)
                says[name] = source
            worst = max(worst, value)
        before = predicted
    all_says = "; ".join(f"the update of {n} {what}" for n, what in says.items())
    return Hypothesis((Deviation("aliased_buffers", all_says),), worst)


def _nearest(name: str, step: OptimizerStep, predicted: Tensors, before: Tensors, norm: float) -> tuple[float, str]:
    """Return the residual of the nearest source of a tensor's update, and a description of the source."""
    observed, own = step.update[name], step.params[name].ravel()
    others = {other: value for other, value in predicted.items() if other != name and value.size == observed.size}
    candidates: Mapping[str, np.ndarray] = {
        **{f"is that of {other}": value for other, value in others.items()},
        **{f"makes it {other}": step.params[other].ravel() + value.ravel() - own for other, value in others.items()},
        **({"is that of the step before": before[name]} if before else {}),
    }
    distances = {
        says: relative(float(np.linalg.norm(value.ravel() - observed.ravel())), norm)
        for says, value in candidates.items()
    }
    says = min(distances, key=distances.__getitem__, default="")
    return distances.get(says, np.inf), says
