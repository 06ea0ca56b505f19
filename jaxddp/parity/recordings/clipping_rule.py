"""Find what a side does to its gradients between the all-reduce and its optimizer."""

from collections.abc import Sequence

import numpy as np

from jaxddp.parity.compare.clipping import NOT_CLIPPED, TORCH_EPSILON, Clipping
from jaxddp.parity.recordings.aligned import total_norm
from jaxddp.parity.recordings.run import RecordedStep
from jaxddp.parity.records import Tensors

CLOSE = 1e-4  # relative; of float32 norms and ratios over a model; measured: up to 3e-6
DIGITS = 4  # of a norm that somebody wrote


def clipping_of(steps: Sequence[RecordedStep]) -> Clipping | None:
    """Find how a side that shows its gradients twice clips them in all steps; None: they change by another rule."""
    norms, values = [], []
    for step in steps:
        before, after = step["gradients"], step["clipped_gradients"]
        if not before or not after:
            continue
        share = ratio(before, after)
        if share is not None:
            norms.append(total_norm(step, "clipped_gradients"))
        values.append(max(float(np.abs(x).max(initial=0.0)) for x in after.values()))
        if share is None and not _is_clamped(before, after, values[-1]):
            return None
    if norms and len(norms) == len(values) and np.ptp(norms) <= CLOSE * max(norms):
        return Clipping(_written(float(np.mean(norms))))
    if values and np.ptp(values) <= CLOSE * max(values):
        return Clipping(largest=_written(float(np.mean(values))))
    return None if values else NOT_CLIPPED


def ratio(before: Tensors, after: Tensors) -> float | None:
    """Return the factor that all elements have in common; None: there is none.

    >>> ratio({"w": np.ones(2)}, {"w": np.full(2, 0.5)}), ratio({"w": np.ones(2)}, {"w": np.arange(2.0)})
    (0.5, None)
    """
    if not before or not after:
        return None
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
    return short if abs(short - value) <= CLOSE * value + TORCH_EPSILON else value
