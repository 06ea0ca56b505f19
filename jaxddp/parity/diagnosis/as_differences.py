"""Turn the rulings of the diagnosis into the differences of a report."""

from collections.abc import Iterator, Sequence

from jaxddp.parity.catalogue import TorchOptimizer
from jaxddp.parity.compare.examples import examples_in_words
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.compare.patterns import pattern
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.findings import Cause, Difference, NextBest, Segment
from jaxddp.parity.operations import Lines
from jaxddp.parity.quote import Quote
from jaxddp.parity.records import KIND, NUMBER
from jaxddp.parity.user_code.stated import where_stated

CUT_SHORT = "not all causes were tried"
MOST_LEFT = 0.9  # of the residual without a fault; a fitted factor of 1 leaves all of it


def as_differences(
    evidence: Evidence, stage: str, ruling: Ruling | None, located: Located | None = None
) -> Iterator[Difference]:
    """Yield one difference per cause, or one without a cause; `located` None: where the stage first differs."""
    located = located or evidence.judgement.first[stage]
    stage = stage.removeprefix("own_")
    causes: list[Cause | None] = []
    if ruling is not None and ruling.named:
        causes = [*causes_of(ruling, _optimizer(evidence, located), located.residual)]
    nearest = next_best(ruling, located.residual) if ruling is not None and not causes else None
    cut_short = CUT_SHORT if ruling is not None and ruling.cut_short else ""
    common = "" if causes else _pattern(evidence, stage)
    segments = () if ruling is None else tuple(map(Segment.of, ruling.segments))
    part = ruling.lines[0] if ruling is not None and ruling.lines and not causes else Lines()
    for place, cause in enumerate(causes or [None]):
        yield Difference(
            stage,
            located.step,
            located.tensor,
            located.residual,
            located.allowed,
            cause=cause,
            nearest=nearest,
            detail=joined(located.detail, common, cut_short),
            jax=Quote.of(part.jax),
            torch=Quote.of(part.torch),
            segments=segments[place : place + 1] if causes else segments,
        )


def joined(*details: str) -> str:
    """Join the parts of a detail that are not empty."""
    return "; ".join(filter(None, details))


def _pattern(evidence: Evidence, stage: str) -> str:
    """Describe what an unexplained stage's tensors have in common over the run, or how its examples differ."""
    if stage == "samples":
        step = evidence.judgement.first[stage].step - 1
        return examples_in_words(evidence.torch[step]["samples"], evidence.jax[step]["samples"])
    if stage not in ("local_gradients", "gradients", "clipped_gradients", "update"):
        return ""
    both = zip(evidence.jax, evidence.torch, strict=False)
    return pattern(((jax[stage], torch[stage]) for jax, torch in both if stage in jax), evidence.summary.sizes)


def _optimizer(evidence: Evidence, located: Located) -> TorchOptimizer:
    """Return torch's optimizer; if a step has several, the one that updates the tensor that differs."""
    groups = [group for group in evidence.torch[located.step - 1].notes["groups"] if group["names"]]
    if not evidence.facts.multi_loss:
        return TorchOptimizer(evidence.summary.optimizer, groups)
    numbers = {group[NUMBER] for group in groups if located.tensor in group["names"]}
    holding = [group for group in groups if group[NUMBER] in numbers]
    return TorchOptimizer(holding[0][KIND] if holding else "", holding)


def next_best(ruling: Ruling, residual: float) -> NextBest | None:
    """Return the next best explanation and the residual that it leaves, if the reference without a fault leaves more.

    >>> from jaxddp.parity.deviation import Statement
    >>> from jaxddp.parity.diagnosis.search.decide import Hypothesis
    >>> other = Hypothesis((Deviation("decay_mask", Statement("decay_mask")),), 3e-4)
    >>> next_best(Ruling((), other), 6.6e-4).residual, next_best(Ruling((), other), 3.1e-4)
    (0.0003, None)
    """
    other = ruling.runner_up
    if other is None or other.residual > MOST_LEFT * residual:
        return None
    return NextBest(other.deviations, other.residual)


def causes_of(ruling: Ruling, optimizer: TorchOptimizer, residual: float) -> Iterator[Cause]:
    """Yield the faults of a named ruling that are present at once, each with the names that cannot be told apart."""
    first, worst = ruling.named[0], max(hypothesis.residual for hypothesis in ruling.named)
    of_each = [_in_order(hypothesis.deviations, first.faults) for hypothesis in ruling.named]
    runner_up = next_best(ruling, residual)
    for position, deviation in enumerate(first.deviations):
        alike: dict[str, Deviation] = {}
        for parts in of_each:
            alike.setdefault(parts[position].kind, parts[position])
        lines = ruling.lines[position] if position < len(ruling.lines) else Lines()
        lines = where_stated(lines, deviation)
        yield Cause.of(alike.values(), worst, runner_up, optimizer, first.measured, lines)


def _in_order(deviations: Sequence[Deviation], kinds: Sequence[str]) -> list[Deviation]:
    """Return deviations, each whose kind is in `kinds` at its position there.

    >>> from jaxddp.parity.deviation import Statement
    >>> kinds = (("factor", "2"), ("eps", "1"), ("factor", "3"))
    >>> deviations = [Deviation(kind, Statement(form)) for kind, form in kinds]
    >>> [one.what.form for one in _in_order(deviations, ("eps", "factor", "a"))]
    ['1', '2', '3']
    """
    left, ordered = [*deviations], list[Deviation | None]()
    for kind in kinds:
        ordered.append(next((one for one in left if one.kind == kind), None))
        if ordered[-1] is not None:
            left.remove(ordered[-1])
    return [one or left.pop(0) for one in ordered]
