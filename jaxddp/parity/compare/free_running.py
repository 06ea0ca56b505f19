"""Compare jax on its own with torch on its own, from the same start: a state that is not carried over shows here alone.

Rounding grows over such a run, in a deep net severalfold in each step. It is no difference, however far it comes; a
state that is wrong makes a jump.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from jaxddp.parity.case_interface import Arrays, Trajectory
from jaxddp.parity.compare.residuals import MOVED, residuals, rounding_only
from jaxddp.parity.excerpts import excerpts
from jaxddp.parity.findings import Difference, StageResult
from jaxddp.parity.records import Records

ALLOWED = 1e-8  # over the distance from the start; measured: up to 2e-11 after 20 steps
RATE_GROWTH = 10.0  # growth of a learning rate's rounding over a run; measured: 1.4 and 1.6 times in 10 steps
ROUNDING = 1e-13  # of a step, from which growth is counted; measured: up to 3e-14
# Most by which rounding grows in a step; measured in ResNet-18s whose runs come to 1e-7 and 1e-2: 12 and 600 times.
GROWTH = 1e4


def free_running(
    start: Arrays, torch: Records, free: Records, count: int, rate_rounding: float
) -> dict[str, StageResult]:
    """Return the residuals of jax on its own against torch on its own, over the distance from the start.

    Adam turns a gradient that is all rounding into a full-size step, different in each framework. Parameters with such
    gradients are left out, and so are the running means that they shift.

    Args:
        start: parameters and buffers before the first step.
        torch, free: records of both sides.
        count: number of steps to compare.
        rate_rounding: rounding of a float32 learning rate of jax.
    """
    noise = rounding_only(Trajectory(start, torch))
    steps: dict[str, list[float]] = {"params": [], "buffers": []}
    for of_jax, of_torch in islice(zip(free, torch, strict=False), count):
        for stage, values in steps.items():
            left_out = {name for name in of_torch[stage] if name in noise or (noise and name.endswith(MOVED))}
            if expected := {name: x for name, x in of_torch[stage].items() if name not in left_out}:
                both = {name: x for name, x in of_jax[stage].items() if name in expected}  # not untied weights
                begin = {name: start[name] for name in expected}
                values.append(max(residuals(both, expected, excerpts(begin) if stage == "params" else begin).values()))
    allowed = ALLOWED + RATE_GROWTH * rate_rounding
    return {stage: StageResult(allowed, tuple(values)) for stage, values in steps.items() if values}


def drifts(free: Mapping[str, StageResult], forced: int) -> Iterator[Difference]:
    """Yield the stages that drift apart by more than rounding, although every single step is equal.

    Args:
        free: what `free_running` returns.
        forced: number of single steps that were compared.
    """
    for stage, result in free.items():
        step = _beyond(result)
        if step is not None and not _grown(result, step):
            steps = "every forced step is" if forced >= step else f"{forced} forced steps are"
            detail = f"{steps} equal, but the port drifts from the reference when it runs on its own"
            yield Difference(stage, step, "", result.residuals[step - 1], result.allowed, detail=detail)


def grown_rounding(free: Mapping[str, StageResult]) -> Iterator[str]:
    """Yield a sentence on rounding that has grown beyond what is allowed, step by step.

    >>> smooth = StageResult(1e-8, tuple(1e-15 * 8.0**step for step in range(12)))
    >>> print(*grown_rounding({"params": smooth}))
    On its own the port is 2e-08 from the reference at step 9: rounding that grows, by at most 8 times in a step.
    >>> [*drifts({"params": smooth}, 12)], [found.step for found in drifts({"params": StageResult(1e-8, (0, 2e-8))}, 2)]
    ([], [2])
    """
    found = [(step, result) for result in free.values() if (step := _beyond(result)) and _grown(result, step)]
    if found:
        step, result = min(found, key=lambda one: one[0])
        times = max(b / a for a, b in _pairs(result, step))
        yield (
            f"On its own the port is {result.residuals[step - 1]:.0e} from the reference at step {step}: rounding that "
            f"grows, by at most {times:.0f} times in a step."
        )


def _beyond(result: StageResult) -> int | None:
    steps = (step for step, value in enumerate(result.residuals, start=1) if not value <= result.allowed)
    return next(steps, None)


def _grown(result: StageResult, step: int) -> bool:
    """Return whether rounding alone may have come as far as this in a step, given each step before it."""
    return all(after <= GROWTH * before for before, after in _pairs(result, step))


def _pairs(result: StageResult, step: int) -> Iterator[tuple[float, float]]:
    """Yield the largest residual before each step up to one, and the step's own; neither is below rounding."""
    floor = ROUNDING + result.allowed - ALLOWED
    before = floor
    for value in result.residuals[:step]:
        yield before, max(value, floor) if value == value else value
        before = max(before, value)
