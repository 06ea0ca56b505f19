"""Rounding: how far float32 carries each side from its own float64 run, both forced by the same reference."""

import math

import numpy as np

from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.findings import Difference, Numerics
from jaxddp.parity.records import Records, Tensors, stage_norm

ALLOWED = 10.0  # jax's distance over torch's, either way; measured: 0.9 to 1.8 times, and 5 in small models
SMALL = 1e-9  # no mistake in meaning has been seen to be smaller and to grow in float32
GROWTH = 1e4  # float32 rounds 5e8 times as coarsely as float64
EPSILON = float(np.finfo(np.float32).eps)
STAGES = ("local_loss", "local_gradients", "gradients", "update", "buffers")


def compare_numerics(
    jax: tuple[Records, Records], torch: tuple[Records, Records], own_step: bool
) -> tuple[dict[str, Numerics], list[Difference]]:
    """Each side's float32 against its float64.

    Args:
        jax, torch: (float64, float32).
        own_step: the port's optimizer was not given the reference's gradients, and Adam makes
            much of the rounding of small ones: its updates say nothing here.
    """
    results, differences = {}, []
    for stage in STAGES:
        if own_step and stage == "update":
            continue
        ours, theirs = _distances(*jax, stage), _distances(*torch, stage)
        if not ours or not theirs or not np.isfinite([d for d, _ in ours + theirs]).all():
            continue
        results[stage] = Numerics(max(d for d, _ in ours), max(d for d, _ in theirs), ALLOWED)
        floors = _update_floors(torch[0]) if stage == "update" else [EPSILON] * len(ours)
        for step, ((mine, tensor), (other, _), floor) in enumerate(zip(ours, theirs, floors, strict=False), start=1):
            low, high = sorted((mine, other))
            if high > ALLOWED * max(low, floor):
                side = "jax" if mine > other else "torch"
                detail = f"in float32 {side} is {high:.0e} from its float64 run, the other side {low:.0e}"
                differences.append(Difference(stage, step, tensor, high, ALLOWED * low, "numeric", detail=detail))
                break
    return results, differences


def rounds_only(found: Difference, jax32: Records, torch32: Records) -> bool:
    """Whether a difference in float64 is rounding, which grows in float32, as a difference in meaning does not."""
    step = found.step - 1
    if found.residual > SMALL or not 0 <= step < min(len(jax32), len(torch32)) or found.stage not in STAGES:
        return False
    ours, theirs = jax32[step], torch32[step]
    if found.stage not in ours:
        return False
    distance = max(residuals({n: ours[found.stage][n] for n in theirs[found.stage]}, theirs[found.stage]).values())
    return distance > GROWTH * found.residual


def _update_floors(torch: Records) -> list[float]:
    """Rounding of an update that is seen as a difference of parameters: eps |p| / |u|."""
    return [EPSILON * stage_norm(record["params"]) / (stage_norm(record["update"]) or 1.0) for record in torch]


def _distances(exact: Records, rounded: Records, stage: str) -> list[tuple[float, str]]:
    """Per step ||x32 - x64|| / ||x64|| of the stage, and the tensor with the largest share."""
    found = []
    for truth, other in zip(exact, rounded, strict=False):
        if stage not in truth or stage not in other or not any(x.dtype.kind == "f" for x in truth[stage].values()):
            continue
        found.append(_distance(truth[stage], other[stage]))
    return found


def _distance(truth: Tensors, rounded: Tensors) -> tuple[float, str]:
    of_float = {name: value for name, value in truth.items() if value.dtype.kind == "f"}
    errors = {name: float(np.linalg.norm(rounded[name] - value)) for name, value in of_float.items()}
    return math.hypot(*errors.values()) / (stage_norm(of_float) or 1.0), max(errors, key=lambda name: errors[name])
