"""What an unexplained stage has in common over its tensors and steps: tensors that are zero, constant ratios."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.records import Tensors

EQUAL = 1e-9  # relative, of ratios and of what a ratio leaves; measured: up to 1e-13 where a rate was planted
ENDINGS = {2: "nd", 3: "rd"}
NAMED = 3  # tensors that are listed

Ratios = Mapping[str, Sequence[float]]


def pattern(steps: Iterable[tuple[Tensors, Tensors]]) -> str:
    """Say in a line in what tensors, at what steps and by what factor a stage differs; "" if no rule fits.

    Args:
        steps: the stage's tensors in flax and in torch, step by step.

    >>> torch = {"a": np.ones(2), "b": np.ones(1)}
    >>> pattern([({"a": np.zeros(2), "b": np.ones(1)}, torch)] * 4)
    'frozen in the port: a'
    >>> pattern(({"a": (1 + (step > 1) / 2) * np.ones(2), "b": np.ones(1)}, torch) for step in range(4))
    "1.5 times torch's in a, from step 3 on"
    """
    ratios: dict[str, list[float]] = {}
    for ours, theirs in steps:
        for name in ours.keys() & theirs.keys():
            ratios.setdefault(name, []).append(_ratio(ours[name], theirs[name]))
    ratios = dict(sorted(ratios.items()))
    frozen = [name for name, of in ratios.items() if not any(of)]
    differing = {name: of for name, of in ratios.items() if name not in frozen and not np.allclose(of, 1, rtol=EQUAL)}
    said = [f"frozen in the port: {listed(frozen, NAMED, ', ')}"] if frozen else []
    return "; ".join([*said, *_by_factor(differing, len(ratios) - len(frozen))])


def _by_factor(differing: Ratios, count: int) -> list[str]:
    """Say by what factor tensors differ, if it is the same in all of them."""
    of_each = list(differing.values())
    if not of_each or not np.isfinite(of_each).all() or not np.allclose(of_each, of_each[0], rtol=EQUAL):
        return []
    where = "all tensors" if len(differing) == count > 1 else listed(list(differing), NAMED, ", ")
    (changed,) = np.nonzero(~np.isclose(of_each[0], 1, rtol=EQUAL))
    factors = np.asarray(of_each[0])[changed]
    if not np.allclose(factors, factors[0], rtol=EQUAL):
        return []
    times = f"{factors[0]:.10g} times torch's in {where}"
    return [f"{times}{when}"] if (when := _when(changed, len(of_each[0]))) is not None else []


def _when(changed: np.ndarray, steps: int) -> str | None:
    """Say at which of the steps something changed; None: at steps without a rule.

    >>> [_when(np.array(steps), 6) for steps in ([0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [1, 3, 5], [0, 4])]
    ['', ', from step 3 on', ', at every 2nd step from step 2 on', None]
    """
    first = int(changed[0])
    if len(changed) == steps - first:
        return "" if first == 0 else f", from step {first + 1} on"
    apart = int(changed[1] - first) if len(changed) > 1 else 0
    if len(changed) > 2 and changed.tolist() == list(range(first, steps, apart)):
        return f", at every {apart}{ENDINGS.get(apart, 'th')} step from step {first + 1} on"
    return None


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the factor by which one array is the other; 1 if both are zero, NaN if they are not proportional."""
    scale = float(np.vdot(theirs, theirs))
    if not scale:
        return 1.0 if not ours.any() else np.nan
    ratio = float(np.vdot(theirs, ours)) / scale
    rest = float(np.linalg.norm(ours - ratio * theirs))
    return ratio if rest <= EQUAL * max(float(np.linalg.norm(ours)), EQUAL * scale**0.5) else np.nan
