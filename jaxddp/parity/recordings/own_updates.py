"""Torch's updates, held against what its own optimizer makes of its recorded gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxddp.errors import listed
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.diagnosis.optimizer.update_causes import OptimizerStep
from jaxddp.parity.findings import Cause
from jaxddp.parity.recordings.aligned import total_norm
from jaxddp.parity.recordings.causes import as_float, evidence_of, replay, rounding_of_updates
from jaxddp.parity.recordings.run import RecordedStep, Recording

STATE_CHANGES = ("optimizer_state_changes_before", "optimizer_state_changes_after")


@dataclass(frozen=True)
class OwnUpdates:
    """Torch's updates against a replay of its optimizer.

    Attributes:
        residuals: step -> tensor -> residual; steps that a loss scaler skips are left out.
        floors: step -> the largest residual that counts as rounding.
    """

    residuals: dict[int, dict[str, float]]
    floors: dict[int, float]

    @property
    def foreign(self) -> Located | None:
        """First update that is not the optimizer's; None: there is none."""
        located = (Located.worst(number, tensors, self.floors[number]) for number, tensors in self.residuals.items())
        return next((step for step in located if step.residual > step.allowed), None)


def own_updates(run: Recording, numbers: Sequence[int]) -> OwnUpdates | None:
    """Replay torch's optimizer on torch's gradients.

    Args:
        run: torch's recording.
        numbers: steps, from the first on without a gap.

    Returns:
        The comparison; None if the optimizer cannot be replayed.
    """
    steps = [run.steps[number] for number in numbers if not run.steps[number].notes.get("skipped")]
    if not steps:
        return OwnUpdates({}, {})
    rounding, floor = rounding_of_updates(steps, steps, run.epsilon)
    floors = {step.number: floor + coarse for step, coarse in zip(steps, rounding, strict=True)}
    residuals = replay(evidence_of(run, steps, [*map(_optimizer_step, steps)], rounding), run)
    return None if residuals is None else OwnUpdates(dict(zip(floors, residuals, strict=True)), floors)


def _optimizer_step(step: RecordedStep) -> OptimizerStep:
    stage = "clipped_gradients" if step["clipped_gradients"] else "gradients"
    update, params, gradients = (as_float(step[shown]) for shown in ("update", "params", stage))
    unused = frozenset(update.keys() - gradients.keys())
    return OptimizerStep(step.notes["groups"], params, gradients, unused, update, norm=total_norm(step, stage))


def changed_state(run: Recording, numbers: Sequence[int]) -> str:
    """Return the parts of torch's optimizer state that change between updates around some steps; "": none does."""
    steps = [run.steps[number] for number in numbers if number in run.steps]
    keys = {key for step in steps for stage in STATE_CHANGES for key in step[stage]}
    return listed(sorted({key.partition(":")[0] for key in keys}), joint=", ")


def foreign_cause(run: Recording, foreign: Located) -> Cause:
    """Return the cause of updates that are not those of torch's optimizer."""
    kind = run.header["optimizer"]
    says = f"torch's update at step {foreign.step} is not what its {kind} makes of its gradients and state"
    if parts := changed_state(run, (foreign.step - 1, foreign.step)):
        says = f"torch changes its optimizer's state ({parts}) before its update at step {foreign.step}"
    fix = "do the same in jax's program, or leave it out in torch's"
    measured = f"without it, {kind}'s update of {foreign.tensor} would be another: residual {foreign.residual:.2g}"
    return Cause(("foreign_update",), (says,), (fix,), 0.0, measured=measured)
