"""How far apart two trajectories are, stage by stage, and whether that is too far.

A tensor's residual is ||a - b|| over the norm of its whole stage (for parameters and buffers:
over the norm of the change since the start), so that the rounding of a tensor that is all
noise, such as the gradient of a bias in front of BatchNorm, is not mistaken for a
difference. A stage's residual is its worst tensor's. Integers must be equal.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.case import STAGES, Tensors, Trajectory

ADAM_FAMILY = ("adam", "adamw", "rmsprop", "adagrad")


@dataclass(frozen=True)
class Residual:
    """The largest difference of one stage: how large, after which step, in which tensor."""

    value: float = 0.0
    step: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class Comparison:
    """The worst residual of every stage, and the first difference beyond the tolerance."""

    tolerance: float
    worst: dict[str, Residual]
    first: tuple[str, Residual] | None

    @property
    def equal(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        worst = "  ".join(f"{stage} {residual.value:.1e}" for stage, residual in self.worst.items())
        if self.first is None:
            return f"equal to {self.tolerance:.0e}: {worst}"
        stage, residual = self.first
        return (
            f"different at step {residual.step} in {stage}, tensor {residual.tensor}: {residual.value:.1e}, "
            f"allowed {self.tolerance:.0e}: {worst}"
        )


def compare(a: Trajectory, b: Trajectory, tolerance: float, stages: tuple[str, ...] = STAGES) -> Comparison:
    """Compare every tensor of every stage after every step.

    Args:
        a, b: trajectories of the same case; b is the reference that differences are scaled by.
        tolerance: the largest residual that still counts as equal.

    Raises:
        ValueError: the trajectories hold different steps or tensors, and so cannot be compared.
    """
    if len(a.records) != len(b.records):
        raise ValueError(f"{len(a.records)} steps against {len(b.records)}")
    worst = {stage: Residual() for stage in stages}
    first = None
    for step, (record_a, record_b) in enumerate(zip(a.records, b.records, strict=True), start=1):
        for stage in stages:
            start = b.start if stage in ("params", "buffers") else None
            residual = stage_residual(record_a[stage], record_b[stage], start, step)
            if not residual.value <= worst[stage].value:
                worst[stage] = residual
            if first is None and not residual.value <= tolerance:
                first = (stage, residual)
    return Comparison(tolerance, worst, first)


def stage_residual(a: Tensors, b: Tensors, start: Tensors | None, step: int) -> Residual:
    """The worst tensor's ||a - b|| / ||all b - start||; infinite where a NaN or an integer differs."""
    if a.keys() != b.keys():
        raise ValueError(f"different tensors: {sorted(a.keys() ^ b.keys())}")
    scale = math.hypot(*(_norm(b[name] - start[name] if start else b[name]) for name in b if _real(b[name])))
    residual = Residual(step=step)
    for name in b:
        value = _difference(a[name], b[name], scale)
        if value > residual.value:
            residual = Residual(value, step, name)
    return residual


def numeric_error(trajectory: Trajectory, truth: Trajectory, stage: str = "params") -> list[float]:
    """||x - truth|| / ||truth - start|| after each step: how far rounding has carried a run."""
    errors = []
    for record, true_record in zip(trajectory.records, truth.records, strict=True):
        names = [name for name, value in true_record[stage].items() if _real(value)]
        error = math.hypot(*(_norm(record[stage][name] - true_record[stage][name]) for name in names))
        moved = math.hypot(*(_norm(true_record[stage][name] - truth.start[name]) for name in names))
        errors.append(error / moved)
    return errors


def _real(x: np.ndarray) -> bool:
    return x.dtype.kind == "f"


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _difference(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    if not _real(b):
        return 0.0 if np.array_equal(a, b) else math.inf
    difference = _norm(a - b)
    if difference == 0:
        return 0.0
    return difference / scale if scale and not math.isnan(difference) else math.inf
