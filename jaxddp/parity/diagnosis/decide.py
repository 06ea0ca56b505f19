"""Rule for naming a cause.

A hypothesis is a fault, replayed: the reference's step with the fault in it, in float64, compared
with the port's step. The right hypothesis leaves only rounding. A name is given only then, and only
if every other hypothesis with no more faults leaves at least `SEPARATION` times as much. Hypotheses
that the run cannot tell apart are named together. A wrong name is worse than none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SEPARATION = 100.0


@dataclass(frozen=True)
class Hypothesis:
    """One or several faults, and how much of the port's step they leave unexplained.

    Attributes:
        faults: names of `catalogue.FAULTS`; two or more for faults that are present at once.
        says: one line with the faults' values ("weight decay 0.0001, the reference has 0.01").
        residual: largest ||predicted - observed|| of any step and tensor, over the norm of the stage.
    """

    faults: tuple[str, ...]
    says: str
    residual: float


@dataclass(frozen=True)
class Ruling:
    """Outcome of a search for a cause.

    Attributes:
        named: the hypotheses that explain everything with the fewest faults; several where the run
            cannot tell them apart, none where nothing explains the difference.
        runner_up: the nearest hypothesis that does not explain the difference; None: there is no other.
        cut_short: True if the search's replays ran out before every hypothesis was tried.
    """

    named: tuple[Hypothesis, ...]
    runner_up: Hypothesis | None
    cut_short: bool = False


def decide(hypotheses: Iterable[Hypothesis], floor: float) -> Ruling:
    """Name the hypotheses that explain the difference, if they stand apart from all others.

    Args:
        hypotheses: in any order.
        floor: the largest residual that counts as rounding.

    >>> right, near = Hypothesis(("nesterov",), "nesterov", 5e-15), Hypothesis(("dampening",), "dampening", 5e-12)
    >>> decide([right, near], floor=1e-12).named[0].says
    'nesterov'
    >>> decide([right, near], floor=1e-11).named[1].says  # both explain the difference
    'dampening'
    >>> decide([Hypothesis(("nesterov",), "nesterov", 5e-13), near], floor=1e-12).named  # not far enough apart
    ()
    """
    ranked = sorted(hypotheses, key=lambda hypothesis: hypothesis.residual)
    explaining = [hypothesis for hypothesis in ranked if hypothesis.residual <= floor]
    fewest = min((len(hypothesis.faults) for hypothesis in explaining), default=0)
    named = tuple(hypothesis for hypothesis in explaining if len(hypothesis.faults) == fewest)
    others = [h for h in ranked if h.residual > floor and (not named or len(h.faults) <= fewest)]
    runner_up = others[0] if others else None
    if named and runner_up is not None and runner_up.residual < SEPARATION * named[-1].residual:
        return Ruling((), named[0])
    return Ruling(named, runner_up)
