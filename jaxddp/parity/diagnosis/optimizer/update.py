"""The optimizer's part: what it was given, and why it made something else of it than torch's would."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxddp.parity.compare.clipping import TORCH_CLIP_EPSILON, clip
from jaxddp.parity.compare.judge import Located, shows_clipping
from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.optimizer.explain import (
    FLOOR,
    OptimizerEvidence,
    OptimizerStep,
    explain,
    reference_residuals,
)
from jaxddp.parity.findings import Problem
from jaxddp.parity.records import Lazy, StoredRecord, Tensors

KNOWN = "SGD, Adam, AdamW, RMSprop and Adagrad"
LARGEST_ROUNDING = 1e-9  # of an update, that a name may rest on
NEAR = 1e-6  # what a rate in float32 leaves of an update; measured: up to 2e-7, at the end of a cosine


class Unseen(NamedTuple):
    """What becomes of gradients where it is not seen, but in what the optimizer makes of it.

    Attributes:
        fault: of the catalogue; "": none, as torch does it.
        says: in a line.
        times: factor of the gradients before they are clipped.
        epsilon, factor: see `judge.clip`.
        clips: whether they are clipped at all.
    """

    fault: str = ""
    says: str = ""
    times: float = 1.0
    epsilon: float = TORCH_CLIP_EPSILON
    factor: float = 1.0
    clips: bool = True


def differing_update(evidence: Evidence, problems: list[Problem]) -> Located | None:
    """Where the update of a port's own step is not what torch's optimizer makes of the step's gradients.

    Args:
        problems: an optimizer that cannot be judged so is added here.
    """
    if not evidence.facts.own_step:
        return None
    found = reference_residuals(_optimizer_evidence(evidence))
    if found is None:
        message = f"what a flax_step's optimizer does is judged for {KNOWN}, and this is {evidence.summary.optimizer}"
        problems.append(Problem("port", "update", f"not judged: {message}; only the run by itself speaks for it"))
    for step, of_step in enumerate(found or [], start=1):
        tensor = max(of_step, key=lambda name: of_step[name])
        if not of_step[tensor] <= evidence.judgement.allowed("update", step):
            return Located(step, tensor, of_step[tensor], evidence.judgement.allowed("update", step))
    return None


def explain_update(evidence: Evidence) -> Ruling:
    """Name what the optimizer does otherwise, or what of the reduction and the clipping before it is not seen.

    What the run cannot tell apart is named together: to SGD a sum over the replicas is a rate.
    """
    ruling = _explain(evidence)
    scheduled = len(set(evidence.summary.rates)) > 1
    if ruling.named or not scheduled:
        return ruling
    with_float32 = _explain(evidence, NEAR)
    return with_float32 if with_float32.named else ruling


def _explain(evidence: Evidence, near: float = 0.0) -> Ruling:
    rounding = max(evidence.judgement.update_rounding, default=0.0)
    floor = FLOOR + min(rounding, LARGEST_ROUNDING)
    ruling = explain(_optimizer_evidence(evidence), floor, near)
    unseen = [*_reductions(evidence), *_clips(evidence)]
    singles = [Hypothesis((way.fault,), way.says, _residual(evidence, way)) for way in unseen]
    nearest = [ruling.runner_up] if ruling.runner_up else []
    alone = decide([*ruling.named, *singles, *nearest], floor)
    if alone.named or not unseen:
        return alone
    pairs = [pair for way in unseen for pair in _with_optimizer(evidence, way, floor, near)]
    return decide(pairs + singles + nearest, floor)


def _reductions(evidence: Evidence) -> Iterator[Unseen]:
    """Wrong factors of the gradients, where the port's own step shows none."""
    if not evidence.facts.own_step or {"gradients", "clipped_gradients"} & set(evidence.jax[0]):
        return
    world_size, pieces = evidence.case.world_size, evidence.facts.accumulation_steps
    if world_size > 1:
        yield Unseen("sum_not_mean", f"gradients times {world_size}, the number of replicas: a sum", world_size)
        yield Unseen("averaged_twice", f"gradients divided by {world_size} once too often", 1 / world_size)
    if pieces > 1:
        says = f"gradients times {pieces}, the number of micro-batches"
        yield Unseen("accumulation_not_divided", says, pieces)


def _clips(evidence: Evidence) -> Iterator[Unseen]:
    """Wrong ways to clip, where the port does not show how it clips."""
    facts, world_size = evidence.facts, evidence.case.world_size
    if facts.clip_grad_norm is None or shows_clipping(evidence.jax[0], facts):
        return
    if not (facts.own_step or facts.clips_inside):
        return
    yield Unseen("clip_missing", "the gradients are not clipped", clips=False)
    yield Unseen("clip_epsilon", "clipping divides by the norm; the reference adds 1e-06 to it", epsilon=0.0)
    for power in (0.5, 1.0) if world_size > 1 else ():
        says = f"clipped by a norm times {world_size**power:.4g}, with {world_size} replicas"
        yield Unseen("clip_norm_local", says, factor=world_size**power)


def _residual(evidence: Evidence, way: Unseen) -> float:
    """What the reference's optimizer leaves unexplained, given gradients treated in this way."""
    found = reference_residuals(_optimizer_evidence(evidence, way))
    return max((value for of_step in found or [] for value in of_step.values()), default=float("inf"))


def _with_optimizer(evidence: Evidence, way: Unseen, floor: float, near: float) -> Iterator[Hypothesis]:
    """This way, together with what then is left to the optimizer."""
    for named in explain(_optimizer_evidence(evidence, way), floor, near).named:
        yield replace(named, faults=(way.fault, *named.faults), says=f"{way.says}; {named.says}")


def _optimizer_evidence(evidence: Evidence, way: Unseen | None = None) -> OptimizerEvidence:
    way = way or Unseen()
    return OptimizerEvidence(
        evidence.summary.optimizer,
        Lazy(lambda: min(len(evidence.torch), len(evidence.jax)), lambda index: _optimizer_step(evidence, index, way)),
        evidence.summary.rates,
        evidence.case.world_size,
        evidence.facts.accumulation_steps,
        evidence.facts.restore_at,
    )


def _optimizer_step(evidence: Evidence, index: int, way: Unseen) -> OptimizerStep:
    theirs, ours = evidence.torch[index], evidence.jax[index]
    before = evidence.before(index)
    params = {name: before[name] for name in theirs["update"]}
    shares = evidence.judgement.shares[index]
    update = {name: ours["update"][name] / shares[name] for name in params}
    unused = frozenset(params.keys() - theirs["clipped_gradients"])
    return OptimizerStep(theirs.notes["groups"], params, _given(evidence, theirs, ours, way), unused, update)


def _given(evidence: Evidence, theirs: StoredRecord, ours: StoredRecord, way: Unseen) -> Tensors:
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
    gradients = {name: way.times * value for name, value in gradients.items()}
    if facts.clip_grad_norm is None or not way.clips:
        return gradients
    return clip(gradients, facts.clip_grad_norm, way.epsilon, way.factor)
