"""Compare rounding: each side's distance between its float32 and its float64 run, both forced by one reference."""

import math
from collections.abc import Sequence

import numpy as np

from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.findings import Difference, Numerics
from jaxddp.parity.port import Facts
from jaxddp.parity.records import Records, Tensors, relative, stage_norm

ALLOWED = 10.0  # one side's distance over the other's; measured: 0.4 to 2.9, and from 0.02 where a floor allows it
SMALL = 1e-9  # largest float64 residual that may be rounding; no fault in meaning was smaller and grew in float32
GROWTH = 1e4  # least growth of rounding from float64 to float32, which rounds 5e8 times as coarsely
EPSILON = float(np.finfo(np.float32).eps)
Distance = tuple[float, str]  # with the tensor that contributes most
Step = tuple[Distance, Distance, float]  # jax's and torch's distances, and the rounding below which neither counts
STAGES = ("local_loss", "local_gradients", "gradients", "update", "buffers")
KINKED = ("local_gradients", "gradients")  # jump where rounding moves a value across the kink of a ReLU or a maximum


def compare_numerics(
    jax: tuple[Records, Records], torch: tuple[Records, Records], facts: Facts
) -> tuple[dict[str, Numerics], list[Difference]]:
    """Compare each side's float32 run with its float64 run.

    Args:
        jax, torch: (float64 records, float32 records).
        facts: facts about the training loop. The updates of a port's `jax_step` are left out: its optimizer does not
            get the reference's gradients, and Adam amplifies the rounding of small ones.

    Returns:
        Largest distances by stage, and each stage's first step at which one side's distance is more than `ALLOWED`
        times the other's, if it is so for the same side in at least half of the steps, and for gradients also between
        the nearest steps of the sides. A program that loses digits loses them in every step; rounding that moves a
        value across the kink of a ReLU makes gradients far in single ones (measured in resnet18: in 24 of 100 steps, on
        jax's side in 10; no 10 steps in a row are then a difference, and 4 of 96 times 3 in a row).
    """
    results, differences = {}, []
    after_update = _of_updates(jax, torch) if facts.multi_loss else []
    for stage in STAGES:
        if facts.custom_step and stage == "update":
            continue
        of_jax, of_torch = _distances(*jax, stage), _distances(*torch, stage)
        if not of_jax or not of_torch or not np.isfinite([d for d, _ in of_jax + of_torch]).all():
            continue
        floors = _update_floors(torch[0]) if stage == "update" else after_update or [EPSILON] * len(of_jax)
        steps = [*zip(of_jax, of_torch, floors, strict=False)]
        sides = [_far_side(step) for step in steps]
        side, nearest = max(("jax", "torch"), key=sides.count), (min(of_jax), min(of_torch), max(floors))
        if 2 * sides.count(side) >= len(steps) and (stage not in KINKED or _far_side(nearest)):
            first = sides.index(side)
            differences.append(_difference(stage, first, steps[first]))
            kept, allowed = steps, ALLOWED
        else:
            kept = [step for step, far in zip(steps, sides, strict=True) if far is None] or [nearest]
            allowed = _allowed(kept)
        results[stage] = Numerics(
            max(mine for (mine, _), _, _ in kept), max(other for _, (other, _), _ in kept), allowed
        )
    return results, differences


def _far_side(step: Step) -> str | None:
    (mine, _), (other, _), floor = step
    low, high = sorted((mine, other))
    if high <= ALLOWED * max(low, floor):
        return None
    return "jax" if mine > other else "torch"


def _difference(stage: str, step: int, distances: Step) -> Difference:
    (mine, tensor), (other, _), _ = distances
    low, high = sorted((mine, other))
    detail = f"in float32 {_far_side(distances)} is {high:.0e} from its float64 run, the other side {low:.0e}"
    return Difference(stage, step + 1, tensor, high, ALLOWED * low, "numeric", detail=detail)


def rounds_only(difference: Difference, jax32: Records, torch32: Records) -> bool:
    """Return whether a float64 difference is rounding: in float32 rounding grows, and a difference in meaning does not.

    Args:
        difference: difference between the float64 runs.
        jax32, torch32: float32 records.
    """
    stage, step = difference.stage, difference.step - 1
    if difference.residual > SMALL or not 0 <= step < min(len(jax32), len(torch32)) or stage not in STAGES:
        return False
    of_jax, of_torch = jax32[step], torch32[step][stage]
    if stage not in of_jax:
        return False
    distance = max(residuals({name: of_jax[stage][name] for name in of_torch}, of_torch).values())
    return distance > GROWTH * difference.residual


def _allowed(steps: Sequence[Step]) -> float:
    """Return the largest ratio that counts as equal: `ALLOWED`, or more if a floor allows it at jax's worst step."""
    (mine, _), (other, _), floor = max(steps, key=lambda of_step: of_step[0][0])
    if mine <= ALLOWED * max(distance for _, (distance, _), _ in steps):
        return ALLOWED
    return ALLOWED * floor / (other or EPSILON)


def _update_floors(torch: Records) -> list[float]:
    """Return each step's rounding error of an update taken as a difference of parameters: eps ||p|| / ||u||."""
    return [relative(EPSILON * stage_norm(record["params"]), stage_norm(record["update"])) for record in torch]


def _of_updates(jax: tuple[Records, Records], torch: tuple[Records, Records]) -> list[float]:
    """Return the updates' rounding error in each step of a `torch_step`, whose later losses may depend on them."""
    of_sides = zip(_distances(*jax, "update"), _distances(*torch, "update"), strict=False)
    return [max(EPSILON, of_jax, of_torch) for (of_jax, _), (of_torch, _) in of_sides]


def _distances(exact: Records, rounded: Records, stage: str) -> list[Distance]:
    """Compute ||x32 - x64|| / ||x64|| of a stage for each step, with the tensor that contributes most."""
    distances = []
    for truth, other in zip(exact, rounded, strict=False):
        if stage not in truth or stage not in other or not any(x.dtype.kind == "f" for x in truth[stage].values()):
            continue
        distances.append(_distance(truth[stage], other[stage]))
    return distances


def _distance(truth: Tensors, rounded: Tensors) -> Distance:
    of_float = {name: value for name, value in truth.items() if value.dtype.kind == "f"}
    errors = {name: float(np.linalg.norm(rounded[name] - value)) for name, value in of_float.items()}
    of_rounded = stage_norm({name: rounded[name] for name in of_float})
    distance = relative(math.hypot(*errors.values()), stage_norm(of_float), of_rounded)
    return distance, max(errors, key=lambda name: errors[name])
