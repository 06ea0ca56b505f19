"""From stages that differ to their causes: each stage's evidence to the diagnosis that knows it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from jaxddp.parity.cases import LOCAL_STAGES, PortCase, Tensors
from jaxddp.parity.compare.judge import OWN_LOCAL, OWN_LOSS
from jaxddp.parity.compare.layers import first_difference
from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.forward.rank_job import Explain
from jaxddp.parity.diagnosis.optimizer.update import differing_update, explain_update
from jaxddp.parity.diagnosis.reduction.explain import SHOWN, Recipe, ReductionStep, explain_reduction
from jaxddp.parity.diagnosis.samples import SampleEvidence, explain_samples
from jaxddp.parity.findings import Cause, Difference, Layer, Problem
from jaxddp.parity.flax_side.child import Micro
from jaxddp.parity.flax_side.layers import FlaxLayers
from jaxddp.parity.processes import ChildError
from jaxddp.parity.records import Lazy, Records, Scratch, StoredRecord, of_loss
from jaxddp.parity.torch_side.layers import TorchLayers
from jaxddp.parity.workers import Workers

T = TypeVar("T")

CUT_SHORT = "time for the search was up: other causes may do the same"
REDUCTION_STEPS = 5  # whose micro-batches are looked into, from the first that differs


def explain(evidence: Evidence, workers: Workers, problems: list[Problem], layers: bool = True) -> list[Difference]:
    """Every difference, in the order of the stages, with its cause where it has a name.

    Args:
        problems: what keeps a cause from being looked for is added here.
        layers: whether to look for the first layer that differs.
    """
    first = evidence.judgement.first
    if not evidence.judgement.residuals:
        return []
    if own := differing_update(evidence, problems):
        first["update"] = own
    differences: list[Difference] = []
    if "samples" in first:
        differences += _told(evidence, "samples", _explain_samples(evidence))
    of_model = _explain_model(evidence, workers, problems, layers)
    of_step = [*_explain_reduction(evidence, workers, problems)]
    if OWN_LOSS in first and not of_model and not of_step:
        differences += _told(evidence, OWN_LOSS, None)
    if any(found.cause for found in of_step):  # then what a forward pass leaves may follow from it
        of_model = [found for found in of_model if found.cause or found.stage != "buffers"]
    differences += of_model + of_step
    if "update" in first:
        differences += _told(evidence, "update", explain_update(evidence))
    elif "optimizer_state" in first:
        differences += _told(evidence, "optimizer_state", None)
    if "hyperparameters" in first and not any(d.stage == "update" and d.cause for d in differences):
        differences += _told(evidence, "hyperparameters", None)
    return differences


def _attempted(action: Callable[[], T], workers: Workers, problems: list[Problem]) -> T | None:
    """What comes of it; None, and a problem more, if a process fails: then a cause is not looked for."""
    try:
        return action()
    except ChildError as error:
        if error.child == "flax":
            workers.end_jax()
        problems.append(Problem("flax" if error.child == "flax" else "torch", error.where, error.what))
        return None


def _told(evidence: Evidence, stage: str, ruling: Ruling | None) -> Iterator[Difference]:
    """A difference for each cause; one without a cause if it has no name."""
    located = evidence.judgement.first[stage]
    stage = stage.removeprefix("own_")
    causes: list[Cause | None] = [*_causes(ruling)] if ruling is not None else []
    nearest = ruling.runner_up if ruling is not None and not causes else None
    cut_short = CUT_SHORT if ruling is not None and ruling.cut_short else ""
    for cause in causes or [None]:
        yield Difference(
            stage,
            located.step,
            located.tensor,
            located.residual,
            located.allowed,
            cause=cause,
            nearest=None if nearest is None else (nearest.says, nearest.residual),
            detail="; ".join(filter(None, [located.detail, cut_short])),
        )


def _causes(ruling: Ruling) -> Iterator[Cause]:
    """The faults that are there at once; each with the names that this run cannot tell apart."""
    if not ruling.named:
        return
    other = ruling.runner_up
    runner_up = None if other is None else (other.says, other.residual)
    of_each = [_in_order(hypothesis, ruling.named[0].faults) for hypothesis in ruling.named]
    for position in range(ruling.named[0].edits):
        says: dict[str, str] = {}
        for parts in of_each:
            says.setdefault(*parts[position])
        yield Cause.of(tuple(says), tuple(says.values()), ruling.named[0].residual, runner_up)


def _in_order(hypothesis: Hypothesis, faults: Sequence[str]) -> list[tuple[str, str]]:
    """Each fault with what is said of it; those that are among `faults` stand where these do."""
    says = hypothesis.says.split("; ")
    whole = len(says) == hypothesis.edits
    left = [(fault, says[i] if whole else hypothesis.says) for i, fault in enumerate(hypothesis.faults)]
    others = [part for part in left if part[0] not in faults]
    return [next((part for part in left if part[0] == fault), None) or others.pop(0) for fault in faults]


def _explain_samples(evidence: Evidence) -> Ruling:
    steps = min(len(evidence.torch), len(evidence.jax))
    of_torch = [evidence.torch[step]["samples"] for step in range(steps)]
    of_jax = [evidence.jax[step]["samples"] for step in range(steps)]
    facts = evidence.facts
    return explain_samples(SampleEvidence(of_torch, of_jax, facts.steps_per_epoch, facts.restore_at))


def _explain_model(evidence: Evidence, workers: Workers, problems: list[Problem], layers: bool) -> list[Difference]:
    """Loss, local gradients and buffers, replayed in torch."""
    first = evidence.judgement.first
    stages = [stage for stage in LOCAL_STAGES if stage in first]
    steps, compared = _comparable(evidence)

    of_model, of_buffers = None, None
    if steps and (stages or "buffers" in first):
        source, world_size = evidence.case.torch_source, evidence.case.world_size
        paths = evidence.start, evidence.reference, evidence.found
        job = Explain(source, bool(stages), "buffers" in first, steps, *paths, world_size, compared)
        of_model, of_buffers = _attempted(lambda: workers.torch.do(job)[0], workers, problems) or (None, None)
    differences: list[Difference] = []
    if stages:
        stage = min(stages, key=lambda s: (first[s].step, LOCAL_STAGES.index(s)))
        # A layer that cannot be shown (a collective in the forward pass, say) is no problem of the check.
        step = first[stage].step - 1
        layer = _attempted(lambda: _first_layer(evidence, workers, step), workers, []) if layers else None
        differences += [replace(found, layer=layer) for found in _told(evidence, stage, of_model)]
    # Buffers without a cause of their own follow from the model's difference.
    if "buffers" in first and (not stages or (of_buffers is not None and of_buffers.named)):
        differences += _told(evidence, "buffers", of_buffers)
    return differences


def _comparable(evidence: Evidence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Steps, and the replicas that were given the same examples in all of them on both sides."""
    same, everyone = evidence.judgement.same_examples, set(range(evidence.case.world_size))
    if always := everyone.intersection(*same):
        return tuple(range(len(same))), tuple(sorted(always))
    return tuple(step for step, ranks in enumerate(same) if everyone <= set(ranks)), tuple(sorted(everyone))


def _first_layer(evidence: Evidence, workers: Workers, step: int) -> Layer | None:
    """The first layer whose output differs, on the replica whose loss differs most."""
    if not isinstance(evidence.case, PortCase):
        return None
    theirs, found = (of_loss(of_side[step], "local_loss")["loss"] for of_side in (evidence.torch, evidence.jax))
    same = evidence.judgement.same_examples[step]
    rank = max(same, key=lambda rank: abs(found[rank] - theirs[rank]))
    scratch = Scratch()
    of_torch, of_flax = scratch.path / "torch", scratch.path / "flax"
    job = (evidence.start, evidence.reference)
    workers.jax.start(FlaxLayers(evidence.case, *job, of_flax, step, rank))
    try:
        workers.torch.do(TorchLayers(evidence.case.torch_source, *job, of_torch, step, rank, evidence.case.world_size))
    except ChildError:
        workers.jax.wait()  # or its answer would be taken for that of the next job
        raise
    workers.jax.wait()
    flax = Records([of_flax])[0]
    return first_difference(Records([of_torch])[0], flax, flax.notes["twins"])


def _explain_reduction(evidence: Evidence, workers: Workers, problems: list[Problem]) -> Iterator[Difference]:
    """What the port's own step makes of the micro-batches' gradients."""
    first = evidence.judgement.first
    stages = [stage for stage in (OWN_LOCAL, "gradients", "clipped_gradients") if stage in first]
    if not stages:
        return
    stage = min(stages, key=lambda s: (first[s].step, stages.index(s)))
    start = first[stage].step - 1
    last = min(start + REDUCTION_STEPS, len(evidence.jax))
    steps = tuple(range(start, last))
    yield from _told(
        evidence, stage, _attempted(lambda: _search_reduction(evidence, workers, steps), workers, problems)
    )


def _search_reduction(evidence: Evidence, workers: Workers, steps: tuple[int, ...]) -> Ruling:
    scratch = Scratch()
    workers.jax.do(Micro(evidence.case, evidence.start, evidence.reference, scratch.path, steps))
    facts = evidence.facts
    reference = Recipe(facts.loss_normalization, clip_norm=facts.clip_grad_norm)
    micro = Records([scratch.path])
    of_steps = Lazy(lambda: len(steps), lambda i: _reduction_step(evidence, micro[i], evidence.jax[steps[i]]))
    return explain_reduction(of_steps, reference, evidence.summary.tied)


def _reduction_step(evidence: Evidence, micro: StoredRecord, found: StoredRecord) -> ReductionStep:
    shown = {stage: _of_all(evidence, found, stage) for stage in SHOWN if stage in found}
    return ReductionStep(micro["counts"]["counts"], micro["sums"], micro.get("stale"), shown)


def _of_all(evidence: Evidence, found: StoredRecord, stage: str) -> Tensors:
    """A stage as every replica has it, (W, ...)."""
    if stage in LOCAL_STAGES:
        return found[stage]
    spread, world_size = found["spread"], evidence.case.world_size
    same = {name: np.broadcast_to(value, (world_size, *value.shape)) for name, value in found[stage].items()}
    return {name: spread.get(f"{stage}:{name}", value) for name, value in same.items()}
