"""Torch's updates, held against what its own optimizer makes of its recorded gradients."""

from collections.abc import Sequence

from jaxddp.errors import listed
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.optimizer.update_causes import OptimizerStep
from jaxddp.parity.findings import Cause
from jaxddp.parity.recordings.aligned import total_norm
from jaxddp.parity.recordings.causes import as_float, evidence_of, replay, rounding_of_updates
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.sums import FAULT

STATE_CHANGES = ("optimizer_state_changes_before", "optimizer_state_changes_after")


def foreign_update(run: Recording, numbers: Sequence[int]) -> tuple[bool, Located | None]:
    """Find the first update that is not what torch's optimizer makes of torch's gradients.

    Args:
        run: torch's recording.
        numbers: steps, from the first on without a gap; those that a loss scaler skips are left out.

    Returns:
        Whether the optimizer can be replayed; and the update, None if there is none.
    """
    steps = [run.steps[number] for number in numbers if not run.steps[number].notes.get("skipped")]
    if not steps:
        return True, None
    rounding, floor = rounding_of_updates(steps, steps, run.epsilon)
    residuals = replay(evidence_of(run, steps, [*map(_optimizer_step, steps)], rounding), run)
    if residuals is None:
        return False, None
    of_steps = zip(steps, residuals, rounding, strict=True)
    worst = (Located.worst(step.number, of_step, floor + coarse) for step, of_step, coarse in of_steps)
    return True, next((located for located in worst if located.residual > located.allowed), None)


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
    what = Statement("foreign_update", step=foreign.step, optimizer=kind)
    if changed := changed_state(run, (foreign.step - 1, foreign.step)):
        what = Statement("state_changed", step=foreign.step, changed=changed)
    fix = "do the same in jax's program, or leave it out in torch's"
    given = run.steps[foreign.step]["gradients"]
    if apart := [x.other for x in run.summands if x.first == foreign.tensor and {x.first, x.other} <= given.keys()]:
        what = Statement("summands_moved", names=(foreign.tensor, *apart))
        return Cause.of([Deviation(FAULT, what)], 0.0, measured=f"the other update is {foreign.residual:.2g} of all")
    measured = f"without it, {kind}'s update of {foreign.tensor} would be another: residual {foreign.residual:.2g}"
    return Cause((Deviation("foreign_update", what, fix=fix),), 0.0, measured=measured)
