"""Rule for naming a cause.

A hypothesis is a fault, replayed: the reference's step with the fault in it, in float64, compared
with the port's step. The right hypothesis leaves only rounding. A name is given only then, and only
if every other hypothesis with no more faults leaves at least `SEPARATION` times as much. Hypotheses
that the run cannot tell apart are named together, those without a fitted number first. A fitted number
that no programmer would write does not count as a name. A wrong name is worse than none.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.parity.deviation import Deviating, Deviation
from jaxddp.parity.operations import Lines, SegmentText

SEPARATION = 100.0
DIGITS, DENOMINATOR = 8, 10_000  # of numbers that a programmer writes, or makes from integers
PLAIN = 1e-30, 1e12  # sizes of such numbers; the eps of Adafactor is 1e-30
CLOSE = 1e-10  # relative; a fit that explains everything is nearer


def is_plain(value: float) -> bool:
    """Return whether a programmer may have written a number: it has few digits, or is a simple fraction or its root.

    >>> [is_plain(value) for value in (0.0, 1e-8, 0.00037, 3 / 7, 1 / 768, 0.5**0.5)]
    [True, True, True, True, True, True]
    >>> [is_plain(value) for value in (1e-300, 2e149, 0.99985160961234)]
    [False, False, False]
    """
    if not PLAIN[0] <= abs(value) <= PLAIN[1]:
        return value == 0
    if any(math.isclose(x, float(f"{x:.{DIGITS}g}"), rel_tol=CLOSE) for x in (value, 1 / value)):
        return True
    return any(math.isclose(x, Fraction(x).limit_denominator(DENOMINATOR), rel_tol=CLOSE) for x in (value, value**2))


@dataclass(frozen=True)
class Hypothesis(Deviating):
    """One or several faults, and how much of the port's step they leave unexplained.

    Attributes:
        deviations: the faults; two or more if they are present at once.
        residual: largest ||predicted - observed|| of any step and tensor, over the norm of the stage.
        values: number of fitted values.
        plain: a programmer may have written each of the values; see `is_plain`.
        measured: evidence of the faults, if they are not replayed.
        removes: the port only lacks parts of the reference.
    """

    deviations: tuple[Deviation, ...]
    residual: float
    values: int = 0
    plain: bool = True
    measured: str = ""
    removes: bool = False


@dataclass(frozen=True)
class Ruling:
    """Outcome of a search for a cause.

    Attributes:
        named: the hypotheses that explain everything with the fewest faults; several where the run
            cannot tell them apart, none where nothing explains the difference.
        runner_up: the nearest hypothesis with plain values that does not explain the difference; None: there is none.
        cut_short: whether the search's replays ran out before every hypothesis was tried.
        lines: the user's lines of each fault of the first hypothesis that is named; without one, those where the two
            programs part.
        segments: the operations of the loss that get equal inputs and give other values, fault by fault.
    """

    named: tuple[Hypothesis, ...]
    runner_up: Hypothesis | None
    cut_short: bool = False
    lines: tuple[Lines, ...] = ()
    segments: tuple[SegmentText, ...] = ()


def decide(hypotheses: Iterable[Hypothesis], floor: float) -> Ruling:
    """Name the hypotheses that explain the difference, if they explain it much better than all others.

    Args:
        hypotheses: in any order.
        floor: the largest residual that counts as rounding.

    >>> from jaxddp.parity.deviation import Statement
    >>> nesterov, dampening = (Deviation(name, Statement(name)) for name in ("nesterov", "dampening"))
    >>> right, near = Hypothesis((nesterov,), 5e-15), Hypothesis((dampening,), 5e-12)
    >>> decide([right, near], floor=1e-12).named[0].faults
    ('nesterov',)
    >>> decide([right, near], floor=1e-11).named[1].faults  # both explain the difference
    ('dampening',)
    >>> decide([Hypothesis((nesterov,), 5e-13), near], floor=1e-12).named  # not far enough apart
    ()
    >>> odd = Hypothesis((Deviation("loss_scale", Statement("scaled", by=2e149)),), 0.0, 1, plain=False)
    >>> decide([right, odd], floor=1e-12).named == (right,)
    True
    """
    ranked = sorted(hypotheses, key=lambda hypothesis: hypothesis.residual)
    explaining = [hypothesis for hypothesis in ranked if hypothesis.residual <= floor and hypothesis.plain]
    fewest = min((len(hypothesis.faults) for hypothesis in explaining), default=0)
    named = tuple(hypothesis for hypothesis in explaining if len(hypothesis.faults) == fewest)
    others = [h for h in ranked if h.residual > floor and (not named or len(h.faults) <= fewest)]
    if named and others and others[0].residual < SEPARATION * named[-1].residual:
        return Ruling((), named[0])
    named = tuple(sorted(named, key=lambda hypothesis: hypothesis.values))
    return Ruling(named, next((hypothesis for hypothesis in others if hypothesis.plain), None))
