"""Learning rates that one side has in float32: the same schedule, rounded.

optax computes some schedules in float32 even where all else is float64. That is no other meaning: an
update is then s times what it would be, and s times the rate is a number that float32 has.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Tensors = Mapping[str, np.ndarray]

# Of the largest rate so far; measured: 1.5e-8 (exponential_decay) and 1.6e-7 (warmup_cosine_decay_schedule).
ALLOWED = 1e-6
REPRESENTED = 1e-12  # how near a rate that comes from a float32 is to it; such updates then leave 1e-15 and 5e-15


def shares_of_float32(
    found: Tensors, expected: Tensors, groups: Iterable[tuple[Sequence[str], float]], peak: float
) -> dict[str, float]:
    """How much longer each tensor's update is than expected, where it is as if its rate were a float32; else 1.

    Args:
        found, expected: updates.
        groups: names of tensors that share a rate, and the rate that is expected.
        peak: the largest rate up to this step; what is computed from it is rounded as it is.

    >>> rate, direction = 0.1, np.array([3.0, 4.0])
    >>> found, expected = {"w": float(np.float32(rate)) * direction}, {"w": rate * direction}
    >>> round(shares_of_float32(found, expected, [(["w"], rate)], peak=rate)["w"], 12)
    1.000000014901
    >>> shares_of_float32({"w": 1.00000001 * found["w"]}, expected, [(["w"], rate)], peak=rate)
    {'w': 1.0}
    """
    shares = dict.fromkeys(expected, 1.0)
    for names, rate in groups:
        square = sum(float(np.vdot(expected[name], expected[name])) for name in names)
        share = sum(float(np.vdot(expected[name], found[name])) for name in names) / square if square else 1.0
        rounded = share * rate
        near = abs(share - 1) * rate <= ALLOWED * peak
        if near and abs(rounded - float(np.float32(rounded))) <= REPRESENTED * rounded:
            shares |= dict.fromkeys(names, share)
    return shares
