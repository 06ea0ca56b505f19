"""Describe patterns over the tensors and steps of an unexplained stage: zero tensors, constant ratios."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.deviation import Deviation, Statement, Value, rounded
from jaxddp.parity.records import Tensors

COMMON = 4  # factors up to this one have other causes too, such as the half in optax.l2_loss
EQUAL = 1e-9  # relative, of ratios and of what a ratio leaves; measured: up to 1e-13 where a rate was planted
ENDINGS = {2: "nd", 3: "rd"}
NAMED = 3  # tensors, or groups of tensors, listed
MOST_PLATEAUS, MOST_TURNS = 4, 4  # factors listed

Ratios = Mapping[str, Sequence[float]]


class Reduction(NamedTuple):
    """A sum in place of a mean, or a mean in place of a sum, over a size of the batch.

    Attributes:
        jax, torch: "sum" and "mean", or the other way round.
        over: the size, in words.
        factor: of the port's gradients, as code ("32", "1/32").
        is_certain: the size is so large that the factor has no other cause.
    """

    jax: str
    torch: str
    over: str
    factor: str
    is_certain: bool


def reduction(factor: float, sizes: Mapping[int, str]) -> Reduction | None:
    """Return the reduction that a factor shows, if it is a size of the batch, or the inverse of one.

    Args:
        factor: the factor.
        sizes: sizes of the batch, in words.
    """
    for size, over in sizes.items():
        for jax, torch, value, text in (("sum", "mean", size, f"{size}"), ("mean", "sum", 1 / size, f"1/{size}")):
            if np.isclose(factor, value, rtol=EQUAL, atol=0):
                return Reduction(jax, torch, over, text, size > COMMON)
    return None


def scaled(quantity: str, factor: float, sizes: Mapping[int, str]) -> Deviation:
    """Return what multiplies a quantity, such as "local_gradients", by a factor; see `reduction`.

    >>> scaled("loss", 33.0, {32: "the batch"}).what
    Statement(form='scaled', parts=(('of', 'loss'), ('factor', 33.0)))
    """
    number = f"{factor:.10g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    if (found := reduction(factor, sizes)) is None:
        times = Value(number, "1", key=quantity.replace("_", " "), is_factor=True)
        return Deviation("loss_scale", Statement("scaled", of=quantity, factor=rounded(factor)), (times,))
    values = Value(found.jax, found.torch, key=found.over), Value(number, "1", is_factor=True)
    what = Statement("reduced_otherwise", of=quantity, **found._asdict())
    return Deviation("loss_scale", what, values if found.is_certain else values[1:])


def pattern(steps: Iterable[tuple[Tensors, Tensors]], sizes: Mapping[int, str] | None = None) -> str:
    """Describe in a line which tensors of a stage differ, at which steps and by what factor; "" if no rule fits.

    Args:
        steps: the stage's tensors in jax and in torch, step by step.
        sizes: factors by which a sum over the batch differs from a mean, with words for each.

    >>> torch = {"a": np.ones(2), "b": np.ones(1)}
    >>> pattern([({"a": np.zeros(2), "b": np.ones(1)}, torch)] * 4)
    'frozen in the port: a'
    >>> pattern(({"a": (1 + (step > 1) / 2) * np.ones(2), "b": np.ones(1)}, torch) for step in range(4))
    "1.5 times torch's in a, from step 3 on"
    >>> pattern([({"a": 2 * np.ones(2), "b": np.ones(1) / 2}, torch)] * 4)
    "2 times torch's in a; 0.5 times torch's in b"
    """
    ratios: dict[str, list[float]] = {}
    for jax, torch in steps:
        for name in jax.keys() & torch.keys():
            ratios.setdefault(name, []).append(_ratio(jax[name], torch[name]))
    ratios = dict(sorted(ratios.items()))
    frozen = [name for name, of in ratios.items() if not any(of)]
    differing = {name: of for name, of in ratios.items() if name not in frozen and not np.allclose(of, 1, rtol=EQUAL)}
    said = [f"frozen in the port: {listed(frozen, NAMED, ', ')}"] if frozen else []
    said += _by_factor(differing, len(ratios) - len(frozen))
    factors = np.array([*differing.values()]).ravel()
    one_factor = factors.size and np.allclose(factors, factors[0], rtol=EQUAL, atol=0)
    if (found := reduction(factors[0], sizes or {}) if one_factor else None) is not None:
        perhaps = "" if found.is_certain else "perhaps "
        said.append(f"{perhaps}a {found.jax} over {found.over}, the reference takes the {found.torch}")
    return "; ".join(said)


def _by_factor(differing: Ratios, count: int) -> Iterator[str]:
    """Yield a text for each group of tensors with the same factors, or nothing unless every tensor has a rule.

    Args:
        differing: tensors -> ratios, step by step.
        count: number of all tensors.
    """
    groups: list[tuple[Sequence[float], list[str]]] = []
    for name, ratios in differing.items():
        same = next((names for of_group, names in groups if np.allclose(ratios, of_group, rtol=EQUAL)), None)
        if same is None:
            groups.append((ratios, [name]))
        else:
            same.append(name)
    rules = [_rule(np.asarray(ratios)) for ratios, _ in groups]
    if not all(rules):
        return
    for rule, (_, names) in islice(zip(rules, groups, strict=True), NAMED):
        where = "all tensors" if len(names) == count > 1 else listed(names, NAMED, ", ")
        yield rule.format(where=where)
    if len(groups) > NAMED:
        yield "..."


def _rule(ratios: np.ndarray) -> str:
    """Describe by what factor and at which steps the tensors "{where}" differ; "" if no rule fits.

    >>> for ratios in ([2, 2, 2, 2], [1, 2, 1, 2, 1, 2], [1, 1, 3, 3, 2, 2], [2, 3, 2, 3], [1, 2, 3, 4]):
    ...     _rule(np.array(ratios))
    "2 times torch's in {where}"
    "2 times torch's in {where}, at every 2nd step from step 2 on"
    "3 times torch's in {where}, from step 3 on; 2 times from step 5 on"
    "2, 3 times torch's in {where}, in turn from step 1 on"
    ''
    """
    if not np.isfinite(ratios).all():
        return ""
    (changed,) = np.nonzero(~np.isclose(ratios, 1, rtol=EQUAL))
    if np.allclose(ratios[changed], ratios[changed[0]], rtol=EQUAL):
        when = _when(changed, len(ratios))
        if when is not None:
            return f"{_factor(ratios[changed[0]])} torch's in {{where}}{when}"
    return _plateaus(ratios) or _turns(ratios)


def _plateaus(ratios: np.ndarray) -> str:
    """Describe which factor holds from which step on, if each holds for two steps or more on average."""
    begins = [0, *(np.flatnonzero(~np.isclose(ratios[1:], ratios[:-1], rtol=EQUAL)) + 1)]
    if len(begins) > MOST_PLATEAUS or 2 * len(begins) > len(ratios):
        return ""
    (first, *later) = [begin for begin in begins if begin or not np.isclose(ratios[0], 1, rtol=EQUAL)]
    texts = [f"{_factor(ratios[first])} torch's in {{where}}, from step {first + 1} on"]
    texts += [f"{_factor(ratios[begin])} from step {begin + 1} on" for begin in later]
    return "; ".join(texts)


def _turns(ratios: np.ndarray) -> str:
    """Describe factors that take turns, if they do so at least twice."""
    for period in range(2, min(MOST_TURNS, len(ratios) // 2) + 1):
        if np.allclose(ratios[period:], ratios[:-period], rtol=EQUAL):
            factors = ", ".join(f"{ratio:.10g}" for ratio in ratios[:period])
            return f"{factors} times torch's in {{where}}, in turn from step 1 on"
    return ""


def _factor(ratio: float) -> str:
    return "equal" if np.isclose(ratio, 1, rtol=EQUAL) else f"{ratio:.10g} times"


def _when(changed: np.ndarray, steps: int) -> str | None:
    """Describe at which of the steps something changed; None if no rule fits.

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


def _ratio(jax: np.ndarray, torch: np.ndarray) -> float:
    """Return the factor jax / torch; 1 if both are zero, NaN if they are not proportional."""
    scale = float(np.vdot(torch, torch))
    if not scale:
        return 1.0 if not jax.any() else np.nan
    ratio = float(np.vdot(torch, jax)) / scale
    rest = float(np.linalg.norm(jax - ratio * torch))
    return ratio if rest <= EQUAL * max(float(np.linalg.norm(jax)), EQUAL * scale**0.5) else np.nan
