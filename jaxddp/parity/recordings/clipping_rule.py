"""Find what a side does to its gradients between the all-reduce and its optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.compare.clipping import TORCH_CLIP_EPSILON
from jaxddp.parity.recordings.aligned import total_norm
from jaxddp.parity.recordings.run import RecordedStep

CLOSE = 1e-4  # relative; of float32 norms and ratios over a model; measured: up to 3e-6
DIGITS = 4  # of a norm that somebody wrote


@dataclass(frozen=True)
class Clipping:
    """A rule that explains the gradients of all recorded steps.

    Attributes:
        norm: largest norm; None: no clipping by norm shows.
        value: largest absolute value; None: no clipping by value shows.
        unknown: the gradients change by another rule.
    """

    norm: float | None = None
    value: float | None = None
    unknown: bool = False


def clipping_of(steps: Sequence[RecordedStep]) -> Clipping:
    """Find how a side that shows its gradients twice clips them."""
    norms, values = [], []
    for step in steps:
        before, after = step["gradients"], step["clipped_gradients"]
        if not before or not after:
            continue
        ratio = _ratio(before, after)
        if ratio is not None:
            norms.append(total_norm(step, "clipped_gradients"))
        values.append(max(float(np.abs(x).max(initial=0.0)) for x in after.values()))
        if ratio is None and not _is_clamped(before, after, values[-1]):
            return Clipping(unknown=True)
    if norms and len(norms) == len(values) and np.ptp(norms) <= CLOSE * max(norms):
        return Clipping(norm=_written(float(np.mean(norms))))
    if values and np.ptp(values) <= CLOSE * max(values):
        return Clipping(value=_written(float(np.mean(values))))
    return Clipping(unknown=bool(values))


def _ratio(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float | None:
    """Return the factor that all elements have in common; None: there is none."""
    one, other = (np.concatenate([np.ravel(x) for x in side.values()]).astype(float) for side in (before, after))
    if one.shape != other.shape or not (square := float(one @ one)):
        return None
    factor = float(one @ other) / square
    return factor if np.linalg.norm(other - factor * one) <= CLOSE * np.linalg.norm(other) else None


def _is_clamped(before: dict[str, np.ndarray], after: dict[str, np.ndarray], most: float) -> bool:
    return all(np.allclose(np.clip(before[n], -most, most), x, rtol=CLOSE) for n, x in after.items() if n in before)


def _written(value: float) -> float:
    """Return the number of few digits that a value is, up to float32's rounding and torch's epsilon; or the value.

    >>> _written(0.4999990), _written(0.123456789)
    (0.5, 0.123456789)
    """
    short = float(f"{value:.{DIGITS}g}")
    return short if abs(short - value) <= CLOSE * value + TORCH_CLIP_EPSILON else value
