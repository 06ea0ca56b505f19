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
from jaxddp.parity.convert import COUNTER

ROUNDING = 1e-12  # of the whole gradient, in float64; measured: up to 2e-15
ROUNDING_ALLOWANCE = 100  # measured: up to 1.8 times the tolerance of 1e-10

MOVED = "running_mean"  # a bias that is all rounding shifts it


@dataclass(frozen=True)
class Residual:
    """The largest difference of one stage: how large, after which step, in which tensor."""

    value: float = 0.0
    step: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class Comparison:
    """The worst residual of every stage, and the first difference beyond the tolerance.

    Attributes:
        tolerance: the largest residual that counts as equal.
        worst: stage -> its worst residual.
        rounding_only: parameters whose true gradient is zero, and the running means -> their worst
            residual (see `compare`).
        first: stage and residual of the first difference; None if there is none.
    """

    tolerance: float
    worst: dict[str, Residual]
    rounding_only: dict[str, float]
    first: tuple[str, Residual] | None

    @property
    def equal(self) -> bool:
        """Whether no residual is beyond the tolerance."""
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

    A parameter that cannot change the loss (a bias in front of BatchNorm) has a gradient of
    rounding only. Adam divides it by itself, which makes 1e-17 an update of 1e-9 lr, another in
    each framework, and moves the running mean behind it. Such parameters are found, listed, and held
    to 100 times the tolerance, and so are the running means; the variances do not feel it.

    Args:
        a, b: trajectories of the same case; b is the reference that differences are scaled by.
        tolerance: the largest residual that still counts as equal.
        stages: what to compare; all by default.

    Raises:
        ValueError: the trajectories hold different steps or tensors, and so cannot be compared.

    >>> def run(w):
    ...     return Trajectory({"w": np.zeros(1)}, [{"params": {"w": np.array([w])}, "gradients": {"w": np.ones(1)}}])
    >>> print(compare(run(1.0), run(1.5), tolerance=1e-12, stages=("params",)))
    different at step 1 in params, tensor w: 3.3e-01, allowed 1e-12: params 3.3e-01
    """
    if len(a.records) != len(b.records):
        raise ValueError(f"{len(a.records)} steps against {len(b.records)}")
    noise = rounding_only(a) & rounding_only(b)
    worst = {stage: Residual() for stage in stages}
    noise_worst = dict.fromkeys(sorted(noise), 0.0)  # and running means, as they come
    first = None
    for step, (record_a, record_b) in enumerate(zip(a.records, b.records, strict=True), start=1):
        for stage in stages:
            start = b.start if stage in ("params", "buffers") else None
            for name, value in residuals(record_a[stage], record_b[stage], start).items():
                allowed = tolerance
                if noise and (name in noise if stage == "params" else name.endswith(MOVED)):
                    noise_worst[name] = max(noise_worst.get(name, 0.0), value)
                    allowed *= ROUNDING_ALLOWANCE
                elif value > worst[stage].value:
                    worst[stage] = Residual(value, step, name)
                if first is None and not value <= allowed:
                    first = (stage, Residual(value, step, name))
    return Comparison(tolerance, worst, noise_worst, first)


def residuals(a: Tensors, b: Tensors, start: Tensors | None = None) -> dict[str, float]:
    """Each tensor's ||a - b|| / ||all b - start||; infinite where a NaN or an integer differs.

    What a alone has is passed over: flax may have several arrays that in torch are one tied tensor.
    """
    b = {name: value for name, value in b.items() if name in a or not name.endswith(COUNTER)}
    if missing := b.keys() - a.keys():
        raise ValueError(f"missing tensors: {sorted(missing)}")
    scale = math.hypot(*(_norm(b[name] - start[name] if start else b[name]) for name in b if _real(b[name])))
    return {name: _difference(a[name], b[name], scale) for name in b}


def rounding_only(trajectory: Trajectory) -> set[str]:
    """Parameters whose gradient stays below `ROUNDING` of the whole gradient in every step."""
    names = set(trajectory.records[0]["gradients"]) if trajectory.records else set()
    for record in trajectory.records:
        norms = {name: _norm(gradient) for name, gradient in record["gradients"].items()}
        whole = math.hypot(*norms.values())
        names &= {name for name, norm in norms.items() if norm <= ROUNDING * whole}
    return names


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
    """The Euclidean norm of what is a number in x."""
    return float(np.linalg.norm(np.where(np.isnan(x), 0.0, x)))


def _difference(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    if not _real(b):
        return 0.0 if np.array_equal(a, b) else math.inf
    # A replica without a single valid label has the loss NaN in torch, so it must have it here.
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return math.inf
    difference = _norm(a - b)
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf
