"""Compare jax on its own with torch on its own, from the same start: only this shows a state that is not carried over.

Rounding grows over such a run, in a deep net severalfold in each step. It is no difference, however far it comes; a
state that is wrong makes a jump.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from jaxddp.parity.case_interface import Arrays, Trajectory
from jaxddp.parity.compare.residuals import MOVED, residuals, rounding_only
from jaxddp.parity.excerpts import excerpts
from jaxddp.parity.findings import Difference, StageResult
from jaxddp.parity.records import COUNTER, Record, Records, Tensors, of_loss, relative, stage_norm
from jaxddp.parity.sums import Summand, folded

ALLOWED = 1e-8  # over the distance from the start; measured: up to 2e-11 after 20 steps
RATE_GROWTH = 10.0  # growth of a learning rate's rounding over a run; measured: 1.4 and 1.6 times in 10 steps
ROUNDING = 1e-13  # of a step, from which growth is counted; measured: up to 3e-14
# Over the reference's own drift under the rounding of its gradients; measured with Adam and saturated units: 1.0.
OF_REFERENCE = 10.0
# Most by which rounding grows in a step; measured in ResNet-18s whose runs come to 1e-7 and 1e-2: 12 and 600 times.
GROWTH = 1e4


def free_running(
    start: Arrays, torch: Records, free: Records, count: int, rate_rounding: float, summands: Sequence[Summand] = ()
) -> dict[str, StageResult]:
    """Return the residuals of jax on its own against torch on its own, over the distance from the start.

    Adam turns a gradient that is all rounding into a full-size step, different in each framework. Parameters with such
    gradients are left out, and so are the running means that they shift.

    Args:
        start: parameters and buffers before the first step.
        torch, free: records of both sides.
        count: number of steps to compare.
        rate_rounding: rounding of a float32 learning rate of jax.
        summands: see `jaxddp.parity.sums`; the reference's records are folded.
    """
    start = folded("params", start, summands)
    noise = rounding_only(Trajectory(start, torch)) - {summand.other for summand in summands}
    steps: dict[str, list[float]] = {"params": [], "buffers": []}
    for of_jax, of_torch in islice(zip(free, torch, strict=False), count):
        for stage, values in steps.items():
            unsettled = (COUNTER, MOVED) if noise else COUNTER
            left_out = {name for name in of_torch[stage] if name in noise or name.endswith(unsettled)}
            if expected := {name: x for name, x in of_torch[stage].items() if name not in left_out}:
                both = {name: x for name, x in of_jax[stage].items() if name in expected}  # not untied weights
                begin = {name: start[name] for name in expected}
                values.append(max(residuals(both, expected, excerpts(begin) if stage == "params" else begin).values()))
    allowed = ALLOWED + RATE_GROWTH * rate_rounding
    return {stage: StageResult(allowed, tuple(values)) for stage, values in steps.items() if values}


def rounding_of_gradients(torch: Record, jax: Record) -> Tensors:
    """Return what jax's gradients differ by, in a forced step, from those that torch's optimizer gets.

    Args:
        torch, jax: records of the step; jax's may lack gradients that its step does not show.
    """
    stage = next((stage for stage in ("clipped_gradients", "gradients") if stage in jax), "")
    if stage:
        torch_gradients, jax_gradients = torch[stage], jax[stage]
    else:
        torch_gradients, jax_gradients = (
            {name: x.mean(0) for name, x in of_loss(record, "local_gradients").items()} for record in (torch, jax)
        )
    share = relative(stage_norm(torch["clipped_gradients"]), stage_norm(torch_gradients))
    return {name: share * (jax_gradients[name] - x) for name, x in torch_gradients.items() if name in jax_gradients}


def with_drift_of_rounding(
    free: Mapping[str, StageResult], rounded: Mapping[str, StageResult]
) -> dict[str, StageResult]:
    """Allow each stage `OF_REFERENCE` times what the rounding of gradients has moved the reference until each step.

    Adam makes a full step of a gradient that is only rounding. A state that is wrong does not move the reference.

    Args:
        free: what `free_running` returns for jax's run.
        rounded: the same for a run of the reference to whose gradients that rounding was added.

    >>> free, rounded = ({"params": StageResult(1e-8, values)} for values in ((6e-8, 7e-8), (5e-8, 5e-8)))
    >>> with_drift_of_rounding(free, rounded)["params"].allowed
    5e-07
    """
    results = dict(free)
    for stage in free.keys() & rounded.keys():
        moved = [*accumulate(rounded[stage].residuals, max)]
        allowed = [max(free[stage].allowed, OF_REFERENCE * x) for x in moved]
        at_steps = zip(free[stage].residuals, allowed, strict=False)
        # At the first step beyond, every step before it is within; this number is then what the report shows.
        results[stage] = replace(free[stage], allowed=next((a for x, a in at_steps if not x <= a), allowed[-1]))
    return results


def drifts(free: Mapping[str, StageResult], forced: int, rate_rounding: float = 0.0) -> Iterator[Difference]:
    """Yield the stages that drift apart by more than rounding, although every single step is equal.

    Args:
        free: what `free_running` returns.
        forced: number of single steps that were compared.
        rate_rounding: see `free_running`.
    """
    for stage, result in free.items():
        step = _beyond(result)
        if step is not None and not _grown(result, step, rate_rounding):
            steps = "every forced step is" if forced >= step else f"{forced} forced steps are"
            detail = f"{steps} equal, but the port drifts from the reference when it runs on its own"
            yield Difference(stage, step, "", result.residuals[step - 1], result.allowed, detail=detail)


def grown_rounding(free: Mapping[str, StageResult], rate_rounding: float = 0.0) -> Iterator[str]:
    """Yield a sentence on rounding that has grown step by step, or by the optimizer, beyond what is otherwise allowed.

    >>> smooth = StageResult(1e-8, tuple(1e-15 * 8.0**step for step in range(12)))
    >>> print(*grown_rounding({"params": smooth}))
    On its own the port is 2e-08 from the reference at step 9: rounding that grows, by at most 8 times in a step.
    >>> print(*grown_rounding({"params": StageResult(6e-7, (6e-8, 4e-8))}))
    On its own the port is 6e-08 from the reference: rounding of its gradients moves the reference as far.
    >>> [*drifts({"params": smooth}, 12)], [found.step for found in drifts({"params": StageResult(1e-8, (0, 2e-8))}, 2)]
    ([], [2])
    """
    beyond = [(_beyond(result), result) for result in free.values()]
    grown = [(step, result) for step, result in beyond if step and _grown(result, step, rate_rounding)]
    farthest = max((x for step, result in beyond if step is None for x in result.residuals), default=0.0)
    if grown:
        step, result = min(grown, key=lambda pair: pair[0])
        times = max(b / a for a, b in _pairs(result, step, rate_rounding))
        yield (
            f"On its own the port is {result.residuals[step - 1]:.0e} from the reference at step {step}: rounding that "
            f"grows, by at most {times:.0f} times in a step."
        )
    elif farthest > ALLOWED + RATE_GROWTH * rate_rounding:
        yield (
            f"On its own the port is {farthest:.0e} from the reference: rounding of its gradients moves the reference "
            "as far."
        )


def _beyond(result: StageResult) -> int | None:
    steps = (step for step, value in enumerate(result.residuals, start=1) if not value <= result.allowed)
    return next(steps, None)


def _grown(result: StageResult, step: int, rate_rounding: float) -> bool:
    """Return whether rounding may explain a difference as large as in this step, given each step before it."""
    return all(after <= GROWTH * before for before, after in _pairs(result, step, rate_rounding))


def _pairs(result: StageResult, step: int, rate_rounding: float) -> Iterator[tuple[float, float]]:
    """Yield the largest residual before each step up to one, and the step's own; neither is below rounding."""
    floor = ROUNDING + RATE_GROWTH * rate_rounding
    before = floor
    for value in result.residuals[:step]:
        yield before, max(value, floor) if value == value else value
        before = max(before, value)
