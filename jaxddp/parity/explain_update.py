"""The optimizer's part: what it was given, and why it made something else of it than torch's would."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxddp.parity.diagnosis import optimizer
from jaxddp.parity.diagnosis.search import Hypothesis, Ruling, decide
from jaxddp.parity.evidence import Evidence
from jaxddp.parity.judge import TORCH_CLIP_EPSILON, Located, clip, shows_clipping
from jaxddp.parity.records import Lazy, StoredRecord, Tensors


class Clip(NamedTuple):
    """A way to clip that is not seen, but in what the optimizer makes of it.

    Attributes:
        fault: of the catalogue; "": none, as torch does it.
        says: in a line.
        epsilon, factor: see `judge.clip`.
    """

    fault: str = ""
    says: str = ""
    epsilon: float = TORCH_CLIP_EPSILON
    factor: float = 1.0


def differing_update(evidence: Evidence) -> Located | None:
    """Where the update of a port's own step is not what torch's optimizer makes of the step's gradients."""
    if not evidence.facts.own_step:
        return None
    found = optimizer.reference_residuals(_optimizer_evidence(evidence))
    for step, of_step in enumerate(found or [], start=1):
        tensor = max(of_step, key=lambda name: of_step[name])
        if not of_step[tensor] <= evidence.judgement.allowed("update"):
            return Located(step, tensor, of_step[tensor])
    return None


def explain_update(evidence: Evidence) -> Ruling:
    """Name what the optimizer does otherwise, or the clipping before it where that is not seen.

    Nothing is named where a port's own step shows no gradients: a sum over the replicas would be taken for a rate.
    """
    if evidence.facts.own_step and not {"gradients", "clipped_gradients"} & set(evidence.jax[0]):
        return Ruling((), None)
    floor = optimizer.FLOOR + evidence.judgement.update_rounding
    ruling = optimizer.explain(_optimizer_evidence(evidence), floor)
    if ruling.named:
        return ruling
    clipped = [*_clips(evidence)]
    singles = [Hypothesis((way.fault,), way.says, _residual(evidence, way)) for way in clipped]
    nearest = [ruling.runner_up] if ruling.runner_up else []
    alone = decide(singles + nearest, floor)
    if alone.named or not clipped:
        return alone if alone.named else ruling
    pairs = [pair for way in clipped for pair in _with_optimizer(evidence, way, floor)]
    return decide(pairs + singles + nearest, floor)


def _clips(evidence: Evidence) -> Iterator[Clip]:
    """Wrong ways to clip, where the port does not show how it clips."""
    facts, world_size = evidence.facts, evidence.case.world_size
    if facts.clip_grad_norm is None or shows_clipping(evidence.jax[0], facts):
        return
    if not (facts.own_step or facts.clips_inside):
        return
    yield Clip("clip_epsilon", "clipping divides by the norm; the reference adds 1e-06 to it", epsilon=0.0)
    for power in (0.5, 1.0) if world_size > 1 else ():
        says = f"clipped by a norm times {world_size**power:.4g}, with {world_size} replicas"
        yield Clip("clip_norm_local", says, factor=world_size**power)


def _residual(evidence: Evidence, way: Clip) -> float:
    """What the reference's optimizer leaves unexplained, given gradients clipped in this way."""
    found = optimizer.reference_residuals(_optimizer_evidence(evidence, way))
    return max((value for of_step in found or [] for value in of_step.values()), default=float("inf"))


def _with_optimizer(evidence: Evidence, way: Clip, floor: float) -> Iterator[Hypothesis]:
    """This way of clipping, together with what then is left to the optimizer."""
    for named in optimizer.explain(_optimizer_evidence(evidence, way), floor).named:
        yield replace(named, faults=(way.fault, *named.faults), says=f"{way.says}; {named.says}")


def _optimizer_evidence(evidence: Evidence, way: Clip | None = None) -> optimizer.OptimizerEvidence:
    way = way or Clip()
    return optimizer.OptimizerEvidence(
        evidence.summary.optimizer,
        Lazy(lambda: min(len(evidence.torch), len(evidence.jax)), lambda index: _optimizer_step(evidence, index, way)),
        evidence.summary.rates,
        evidence.case.world_size,
        evidence.facts.accumulation_steps,
        evidence.facts.restore_at,
    )


def _optimizer_step(evidence: Evidence, index: int, way: Clip) -> optimizer.OptimizerStep:
    theirs, ours = evidence.torch[index], evidence.jax[index]
    before = evidence.before(index)
    params = {name: before[name] for name in theirs["update"]}
    update = {name: ours["update"][name] for name in params}
    unused = frozenset(params.keys() - theirs["clipped_gradients"])
    return optimizer.OptimizerStep(theirs.notes["groups"], params, _given(evidence, theirs, ours, way), unused, update)


def _given(evidence: Evidence, theirs: StoredRecord, ours: StoredRecord, way: Clip) -> Tensors:
    """The gradients that jax's optimizer was given, once they were clipped."""
    facts = evidence.facts
    if shows_clipping(ours, facts):
        return ours["clipped_gradients"] if facts.own_step else theirs["clipped_gradients"]
    if not facts.own_step:
        gradients = theirs["gradients"]
    elif "gradients" in ours:
        gradients = ours["gradients"]
    else:
        gradients = {name: value.mean(0) for name, value in ours["pure_local_gradients"].items()}
    if facts.clip_grad_norm is None:
        return gradients
    return clip(gradients, facts.clip_grad_norm, way.epsilon, way.factor)
