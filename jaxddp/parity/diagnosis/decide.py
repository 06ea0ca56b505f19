"""When a cause may be named.

A hypothesis is a fault, replayed: the reference's step with the fault in it, in float64, compared
with what the port did. The right one leaves nothing but rounding. A name is given only then, and only
if every other hypothesis of no more edits is at least `SEPARATION` times further away; those
that the run cannot tell apart are given together. A wrong name is worse than none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SEPARATION = 100.0


@dataclass(frozen=True)
class Hypothesis:
    """One or several faults, and how much of what the port did they leave unexplained.

    Attributes:
        faults: names of `catalogue.FAULTS`; more than one for a pair.
        says: the fault with its values, in a line ("weight decay 0.0001, the reference has 0.01").
        residual: largest ||predicted - found|| of any step and tensor, over the norm of the stage.
    """

    faults: tuple[str, ...]
    says: str
    residual: float

    @property
    def edits(self) -> int:
        """How many faults it takes."""
        return len(self.faults)


@dataclass(frozen=True)
class Ruling:
    """What was decided.

    Attributes:
        named: the hypotheses that explain everything with the fewest faults, which this run cannot
            tell apart if there are several; empty: unexplained.
        runner_up: the nearest of those that do not explain it; None: there was no other.
        cut_short: whether some hypotheses were left untried for want of time.
    """

    named: tuple[Hypothesis, ...]
    runner_up: Hypothesis | None
    cut_short: bool = False


def decide(hypotheses: Iterable[Hypothesis], floor: float) -> Ruling:
    """Name what explains the difference, or nothing.

    Args:
        floor: the largest residual that is rounding.

    >>> right, near = Hypothesis(("nesterov",), "nesterov", 5e-15), Hypothesis(("dampening",), "dampening", 5e-12)
    >>> decide([right, near], floor=1e-12).named[0].says
    'nesterov'
    >>> decide([right, near], floor=1e-11).named[1].says  # both explain it
    'dampening'
    >>> decide([Hypothesis(("nesterov",), "nesterov", 5e-13), near], floor=1e-12).named  # not far enough apart
    ()
    """
    ranked = sorted(hypotheses, key=lambda hypothesis: hypothesis.residual)
    explaining = [hypothesis for hypothesis in ranked if hypothesis.residual <= floor]
    fewest = min((hypothesis.edits for hypothesis in explaining), default=0)
    named = tuple(hypothesis for hypothesis in explaining if hypothesis.edits == fewest)
    others = [h for h in ranked if h.residual > floor and (not named or h.edits <= fewest)]
    runner_up = others[0] if others else None
    if named and runner_up is not None and runner_up.residual < SEPARATION * named[-1].residual:
        return Ruling((), named[0])
    return Ruling(named, runner_up)
