"""Causes of a difference in a run's update: its optimizer, and parts of the reduction that the port does not show."""

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
    explain_optimizer,
    reference_residuals,
)
from jaxddp.parity.findings import Problem
from jaxddp.parity.records import Lazy, StoredRecord, Tensors

KNOWN = "SGD, Adam, AdamW, RMSprop and Adagrad"
LARGEST_ROUNDING = 1e-9  # of an update; a name may not rest on coarser ones
NEAR = 1e-6  # residual of an update whose learning rate is in float32; measured: up to 2e-7, at the end of a cosine


class Unseen(NamedTuple):
    """Reduction and clipping that the port does not show, except through the optimizer's update.

    Attributes:
        fault: a name of `catalogue.FAULTS`; "": no fault.
        says: the fault in words.
        times: factor of the gradients before they are clipped.
        epsilon, factor: `epsilon` and `norm_scale` of `compare.clipping.clip`.
        clips: the gradients are clipped.
    """

    fault: str = ""
    says: str = ""
    times: float = 1.0
    epsilon: float = TORCH_CLIP_EPSILON
    factor: float = 1.0
    clips: bool = True


def differing_update(evidence: Evidence, problems: list[Problem]) -> Located | None:
    """Locate the first update of a port's own `flax_step` that torch's optimizer would not have made.

    Torch's optimizer is replayed on the gradients of the port's step.

    Args:
        evidence: records of both sides, compared.
        problems: list to which a problem is appended if the optimizer cannot be replayed.

    Returns:
        Step and tensor; None: no update differs.
    """
    if not evidence.facts.own_step:
        return None
    residuals = reference_residuals(_optimizer_evidence(evidence))
    if residuals is None:
        message = f"the optimizer of a flax_step is judged for {KNOWN} only, and this is {evidence.summary.optimizer}"
        problems.append(Problem("port", "update", f"not judged: {message}; see the residuals of the free run"))
    for step, of_step in enumerate(residuals or [], start=1):
        tensor = max(of_step, key=lambda name: of_step[name])
        if not of_step[tensor] <= evidence.judgement.allowed("update", step):
            return Located(step, tensor, of_step[tensor], evidence.judgement.allowed("update", step))
    return None


def explain_update(evidence: Evidence) -> Ruling:
    """Name the fault in the optimizer, or in the part of the reduction and the clipping that is not shown.

    Faults that the run cannot tell apart are named together: for SGD, a sum over the replicas is the
    same as a larger learning rate.
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
    ruling = explain_optimizer(_optimizer_evidence(evidence), floor, near)
    unseen = [*_reductions(evidence), *_clips(evidence)]
    singles = [Hypothesis((way.fault,), way.says, _residual(evidence, way)) for way in unseen]
    nearest = [ruling.runner_up] if ruling.runner_up else []
    alone = decide([*ruling.named, *singles, *nearest], floor)
    if alone.named or not unseen:
        return alone
    pairs = [pair for way in unseen for pair in _with_optimizer(evidence, way, floor, near)]
    return decide(pairs + singles + nearest, floor)


def _reductions(evidence: Evidence) -> Iterator[Unseen]:
    """Yield wrong factors of the gradients if the port's own step does not show its gradients."""
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
    """Yield wrong ways to clip if the port does not show its clipped gradients."""
    facts, world_size = evidence.facts, evidence.case.world_size
    if facts.clip_grad_norm is None or shows_clipping(evidence.jax[0], facts):
        return
    if not (facts.own_step or facts.clips_inside):
        return
    yield Unseen("clip_missing", "the gradients are not clipped", clips=False)
    yield Unseen("clip_epsilon", "clipping divides by the norm, to which the reference adds 1e-06", epsilon=0.0)
    for power in (0.5, 1.0) if world_size > 1 else ():
        says = f"clipped by a norm times {world_size**power:.4g}, with {world_size} replicas"
        yield Unseen("clip_norm_local", says, factor=world_size**power)


def _residual(evidence: Evidence, way: Unseen) -> float:
    """Return the residual that the reference's optimizer leaves, given gradients treated in this way."""
    residuals = reference_residuals(_optimizer_evidence(evidence, way))
    return max((value for of_step in residuals or [] for value in of_step.values()), default=float("inf"))


def _with_optimizer(evidence: Evidence, way: Unseen, floor: float, near: float) -> Iterator[Hypothesis]:
    """Yield this way together with the faults that the optimizer then has."""
    for named in explain_optimizer(_optimizer_evidence(evidence, way), floor, near).named:
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
    """Return the clipped gradients that jax's optimizer was given."""
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
