"""Recognise learning rates that one side computes in float32: the same schedule, rounded.

optax computes some schedules in float32 even where everything else is float64. Such an update has the same meaning:
it is s times the exact one, where s times the exact rate is a float32 number.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Tensors = Mapping[str, np.ndarray]

# Relative to the largest rate; measured: 1.5e-8 (exponential_decay) and 1.6e-7 (warmup_cosine_decay_schedule).
ALLOWED = 1e-6
# Relative distance between a rate and the nearest float32; the rounded schedules' updates then leave 1e-15 and 5e-15.
REPRESENTED = 1e-12
COARSEST = 1e-8  # rounding of an update that may be allowed for: float32 numbers are 6e-8 apart or more


def shares_of_float32(
    actual: Tensors,
    expected: Tensors,
    groups: Iterable[tuple[Sequence[str], float]],
    peak: float,
    rounding: float = 0.0,
) -> dict[str, float]:
    """Return the factor by which a float32 rate scales each tensor's update; 1 where the rate is not a float32 number.

    Args:
        actual, expected: updates by name.
        groups: names of tensors that share a rate, and their expected rate.
        peak: largest rate of the schedule; rounding errors are relative to it.
        rounding: relative rounding error of the expected updates; in the first steps of a warm-up they are small
            differences of parameters.

    >>> rate, direction = 0.1, np.array([3.0, 4.0])
    >>> actual, expected = {"w": float(np.float32(rate)) * direction}, {"w": rate * direction}
    >>> round(shares_of_float32(actual, expected, [(["w"], rate)], peak=rate)["w"], 12)
    1.000000014901
    >>> shares_of_float32({"w": 1.00000001 * actual["w"]}, expected, [(["w"], rate)], peak=rate)
    {'w': 1.0}
    """
    shares = dict.fromkeys(expected, 1.0)
    for names, rate in groups:
        share = share_of(actual, expected, names)
        near = abs(share - 1) * rate <= ALLOWED * peak
        if near and is_float32(share * rate, min(rounding, COARSEST)):
            shares |= dict.fromkeys(names, share)
    return shares


def share_of(actual: Tensors, expected: Tensors, names: Sequence[str]) -> float:
    """Return the factor by which some expected tensors are nearest to the actual ones; 1 where they are 0."""
    square = sum(float(np.vdot(expected[name], expected[name])) for name in names)
    return sum(float(np.vdot(expected[name], actual[name])) for name in names) / square if square else 1.0


def is_float32(rate: float, rounding: float = 0.0) -> bool:
    """Return whether a rate, known up to a relative rounding error, is a float32 number.

    >>> is_float32(0.1), is_float32(float(np.float32(0.1)))
    (False, True)
    """
    return abs(rate - float(np.float32(rate))) <= (REPRESENTED + rounding) * rate
