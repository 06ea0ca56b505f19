"""Residuals: relative differences between two records, tensor by tensor.

A tensor's residual is ||a - b|| over the norm of its stage (for parameters and buffers: over the norm of the
change since the start). The rounding of a tensor that is all noise, such as the gradient of a bias in front of
BatchNorm, is therefore not mistaken for a difference. Integers must be equal. If the reference is all 0, the other
side's norm is used; see `records.relative`.
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.records import COUNTER, Tensors, relative

ROUNDING = 1e-12  # relative to the norm of all gradients, in float64; measured: up to 2e-15
MOVED = "running_mean"  # the buffer that shifts with a bias whose gradient is only rounding


def residuals(a: Tensors, b: Tensors, start: Tensors | None = None) -> dict[str, float]:
    """Compute each tensor's ||a - b|| / ||all b - start||; infinite where only one side is finite, 1 for integers.

    Args:
        a: tensors to compare. Tensors that b lacks are ignored: jax may have several arrays for one tied tensor.
        b: reference tensors.
        start: reference tensors before the first step; None: 0.

    Returns:
        name -> residual, for the tensors of b.

    Raises:
        ValueError: a tensor of b is missing in a or has another shape.

    >>> residuals({"w": np.array([3.0, 4.5])}, {"w": np.array([3.0, 4.0])})
    {'w': 0.1}
    >>> residuals({"w": np.array([3.0]), "b": np.array([4.0])}, {"w": np.zeros(1), "b": np.zeros(1)})
    {'w': 0.6, 'b': 0.8}
    """
    b = {name: value for name, value in b.items() if name in a or not name.endswith(COUNTER)}
    if missing := b.keys() - a.keys():
        raise ValueError(f"missing tensors: {sorted(missing)}")
    real = [name for name in b if is_real(b[name])]
    scales = (math.hypot(*(norm(x[name] - start[name] if start else x[name]) for name in real)) for x in (b, a))
    scale = next(filter(None, scales), 0.0)  # reads `a` only if b is all 0
    return {name: _difference(a[name], b[name], scale) for name in b}


def rounding_only(trajectory: Trajectory) -> set[str]:
    """Return the parameters whose gradient stays below `ROUNDING` of the norm of all gradients in every step."""
    names = set(trajectory.records[0]["gradients"]) if trajectory.records else set()
    for record in trajectory.records:
        norms = {name: norm(gradient) for name, gradient in record["gradients"].items()}
        total = math.hypot(*norms.values())
        names &= {name for name, norm in norms.items() if norm <= ROUNDING * total}
    return names


def largest_shares(gradients: Sequence[Tensors]) -> dict[str, np.ndarray]:
    """Return the size of each element relative to the norm of all gradients, in the step where it is largest.

    Args:
        gradients: of each step, by name.

    >>> largest_shares([{"w": np.array([4.0, 0.0]), "b": np.array([3.0])}])
    {'w': array([0.8, 0. ]), 'b': array([0.6])}
    """
    norms = [math.hypot(*map(norm, of_step.values())) or 1.0 for of_step in gradients]
    steps = [*zip(gradients, norms, strict=True)]
    return {name: np.max([np.abs(of_step[name]) / norm for of_step, norm in steps], axis=0) for name in gradients[0]}


def is_real(x: np.ndarray) -> bool:
    """Return whether an array holds floating-point numbers."""
    return x.dtype.kind == "f"


def norm(x: np.ndarray) -> float:
    """Compute the Euclidean norm of the finite elements."""
    return float(np.linalg.norm(np.where(np.isfinite(x), x, 0.0)))


def _difference(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    if not is_real(b):
        return 0.0 if np.array_equal(a, b) else 1.0
    # The loss of a replica without a single valid label is NaN in torch, so it must be NaN here; a mask may hold -inf.
    finite = np.isfinite(a) & np.isfinite(b)
    if finite.all():
        return relative(norm(a - b), scale)
    return relative(norm(a[finite] - b[finite]), scale) if np.array_equal(a[~finite], b[~finite], True) else math.inf
