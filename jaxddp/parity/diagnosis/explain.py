"""From stages that differ to their causes: each stage's evidence goes to the diagnosis that covers the stage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.examples import examples_in_words
from jaxddp.parity.compare.judge import OWN_LOCAL, OWN_LOSS, Located
from jaxddp.parity.compare.layers import first_difference, first_not_finite
from jaxddp.parity.compare.patterns import pattern
from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.forward.rank_job import ForwardDiagnosis
from jaxddp.parity.diagnosis.optimizer.update import differing_update, explain_update
from jaxddp.parity.diagnosis.reduction.explain import SHOWN, ReductionRecipe, ReductionStep, explain_reduction
from jaxddp.parity.diagnosis.samples import SampleEvidence, explain_samples
from jaxddp.parity.diagnosis.whole_step import (
    differing_losses,
    differing_updates,
    explain_gradients,
    explain_loss,
    located_gradients,
)
from jaxddp.parity.findings import Cause, Difference, Layer, Problem
from jaxddp.parity.flax_side.child import Micro
from jaxddp.parity.flax_side.layers import FlaxLayers
from jaxddp.parity.processes import ChildError
from jaxddp.parity.question import LOCAL_STAGES
from jaxddp.parity.records import Lazy, Records, Scratch, StoredRecord, Tensors, total_loss
from jaxddp.parity.torch_side.layers import TorchLayers
from jaxddp.parity.workers import Workers

T = TypeVar("T")

CUT_SHORT = "not all causes were tried"
REDUCTION_STEPS = 5  # steps whose micro-batches are replayed, from the first that differs


def explain(evidence: Evidence, workers: Workers, problems: list[Problem], layers: bool = True) -> list[Difference]:
    """Return every difference in the order of the stages, with its cause where the cause has a name.

    Args:
        evidence: records of both sides, compared.
        workers: processes in which hypotheses are replayed.
        problems: list to which errors that stop a search are appended.
        layers: look for the first layer that differs.
    """
    first = evidence.judgement.first
    if not evidence.judgement.residuals:
        return []
    if located := differing_update(evidence, problems):
        first["update"] = located
    differences: list[Difference] = []
    if "samples" in first:
        differences += _differences(evidence, "samples", _explain_samples(evidence))
    if evidence.facts.whole_step:
        return differences + [*_of_whole_step(evidence, workers, problems)]
    of_model = _explain_model(evidence, workers, problems, layers)
    of_step = [*_explain_reduction(evidence, workers, problems)]
    if OWN_LOSS in first and not of_model and not of_step:
        differences += _differences(evidence, OWN_LOSS, None)
    if any(difference.cause for difference in of_step):  # the difference in the buffers may follow from it
        of_model = [difference for difference in of_model if difference.cause or difference.stage != "buffers"]
    differences += of_model + of_step
    if "update" in first:
        differences += _differences(evidence, "update", explain_update(evidence))
    elif "optimizer_state" in first:
        differences += _differences(evidence, "optimizer_state", None)
    if "hyperparameters" in first and not any(d.stage == "update" and d.cause for d in differences):
        differences += _differences(evidence, "hyperparameters", None)
    return differences


def _of_whole_step(evidence: Evidence, workers: Workers, problems: list[Problem]) -> Iterator[Difference]:
    """Yield the differences of a `torch_step` and its twin: in losses, in what the optimizers get, in updates."""
    first, follow = evidence.judgement.first, False
    for located in [*differing_losses(evidence)]:
        found = explain_loss(
            evidence, located, lambda job: _attempt(lambda: workers.torch.do(job)[0], workers, problems)
        )
        follow = follow or found is not None
        if found is not None:
            yield from _differences(evidence, "local_loss", *found)
    updates = [*differing_updates(evidence)]
    if "gradients" in first and not follow:
        ruling = explain_gradients(evidence)
        if ruling.named or not updates:  # or they may be those of a loss behind an update that differs
            yield from _differences(evidence, "gradients", ruling, located_gradients(evidence, ruling))
    if "buffers" in first and not follow:
        yield from _differences(evidence, "buffers", None)
    for located, ruling_on_update in updates:
        yield from _differences(evidence, "update", ruling_on_update, located)


def _attempt(action: Callable[[], T], workers: Workers, problems: list[Problem]) -> T | None:
    """Return the action's result; if a process fails, append a problem and return None."""
    try:
        return action()
    except ChildError as error:
        workers.end_after(error)
        problems.append(Problem("flax" if error.child == "flax" else "torch", error.where, error.what))
        return None


def _differences(
    evidence: Evidence, stage: str, ruling: Ruling | None, located: Located | None = None
) -> Iterator[Difference]:
    """Yield one difference for each cause, or one without a cause; `located` None: where the stage first differs."""
    located = located or evidence.judgement.first[stage]
    stage = stage.removeprefix("own_")
    causes: list[Cause | None] = [*_causes(ruling)] if ruling is not None else []
    nearest = ruling.runner_up if ruling is not None and not causes else None
    cut_short = CUT_SHORT if ruling is not None and ruling.cut_short else ""
    common = "" if causes else _pattern(evidence, stage)
    for cause in causes or [None]:
        yield Difference(
            stage,
            located.step,
            located.tensor,
            located.residual,
            located.allowed,
            cause=cause,
            nearest=None if nearest is None else (nearest.says, nearest.residual),
            detail="; ".join(filter(None, [located.detail, common, cut_short])),
        )


def _pattern(evidence: Evidence, stage: str) -> str:
    """Say what an unexplained stage's tensors have in common over the run, or how its examples differ."""
    if stage == "samples":
        step = evidence.judgement.first[stage].step - 1
        return examples_in_words(evidence.torch[step]["samples"], evidence.jax[step]["samples"])
    if stage not in ("local_gradients", "gradients", "clipped_gradients", "update"):
        return ""
    both = zip(evidence.jax, evidence.torch, strict=False)
    return pattern((ours[stage], theirs[stage]) for ours, theirs in both if stage in ours)


def _causes(ruling: Ruling) -> Iterator[Cause]:
    """Yield the faults that are present at once, each with the names that this run cannot tell apart."""
    if not ruling.named:
        return
    other = ruling.runner_up
    runner_up = None if other is None else (other.says, other.residual)
    of_each = [_in_order(hypothesis, ruling.named[0].faults) for hypothesis in ruling.named]
    for position in range(len(ruling.named[0].faults)):
        says: dict[str, str] = {}
        for parts in of_each:
            says.setdefault(*parts[position])
        yield Cause.of(tuple(says), tuple(says.values()), ruling.named[0].residual, runner_up)


def _in_order(hypothesis: Hypothesis, faults: Sequence[str]) -> list[tuple[str, str]]:
    """Return (fault, line) pairs; a fault that is among `faults` takes its position there."""
    says = hypothesis.says.split("; ")
    one_each = len(says) == len(hypothesis.faults)
    left = [(fault, says[i] if one_each else hypothesis.says) for i, fault in enumerate(hypothesis.faults)]
    others = [part for part in left if part[0] not in faults]
    return [next((part for part in left if part[0] == fault), None) or others.pop(0) for fault in faults]


def _explain_samples(evidence: Evidence) -> Ruling:
    steps = min(len(evidence.torch), len(evidence.jax))
    of_torch = [evidence.torch[step]["samples"] for step in range(steps)]
    of_jax = [evidence.jax[step]["samples"] for step in range(steps)]
    facts = evidence.facts
    return explain_samples(SampleEvidence(of_torch, of_jax, facts.steps_per_epoch, facts.restore_at))


def _explain_model(evidence: Evidence, workers: Workers, problems: list[Problem], layers: bool) -> list[Difference]:
    """Explain losses, local gradients and buffers by replaying the torch loss in a torch rank."""
    first = evidence.judgement.first
    stages = [stage for stage in LOCAL_STAGES if stage in first]
    steps, compared = _comparable(evidence)

    layer, equal, casts = None, 0, ""
    stage = min(stages, key=lambda s: (first[s].step, LOCAL_STAGES.index(s)), default="")
    if stages and layers:
        # A layer that cannot be shown (a collective in the forward pass, say) is not a problem of the check.
        step = first[stage].step - 1
        found = _attempt(lambda: _first_layer(evidence, workers, step), workers, [])
        layer, equal, casts = found or (None, 0, "")
    of_model, of_buffers = None, None
    if steps and (stages or "buffers" in first):
        source, world_size = evidence.case.torch_source, evidence.case.world_size
        paths = evidence.start, evidence.torch_folder, evidence.jax_folder
        between = (layer.before, layer.torch) if layer is not None and evidence.is_large else None
        job = ForwardDiagnosis(source, bool(stages), "buffers" in first, steps, *paths, world_size, compared, between)
        of_model, of_buffers = _attempt(lambda: workers.torch.do(job)[0], workers, problems) or (None, None)
    differences: list[Difference] = []
    if stages:
        for one in _differences(evidence, stage, of_model):
            in_loss = layer is None and equal and not one.cause and stage == "local_loss"
            detail = f"all {equal} layers that can be compared are equal: look in the loss" if in_loss else one.detail
            detail = "; ".join(filter(None, [detail, "" if one.cause else casts]))
            differences.append(replace(one, layer=layer, detail=detail))
    # Buffers whose difference has no cause follow the model's difference.
    if "buffers" in first and (not stages or (of_buffers is not None and of_buffers.named)):
        differences += _differences(evidence, "buffers", of_buffers)
    return differences


def _comparable(evidence: Evidence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return steps, and the replicas that were given the same examples on both sides in all of these steps."""
    same, everyone = evidence.judgement.same_examples, set(range(evidence.case.world_size))
    if always := everyone.intersection(*same):
        return tuple(range(len(same))), tuple(sorted(always))
    return tuple(step for step, ranks in enumerate(same) if everyone <= set(ranks)), tuple(sorted(everyone))


def _first_layer(evidence: Evidence, workers: Workers, step: int) -> tuple[Layer | None, int, str] | None:
    """Return what `first_difference` finds on the replica whose loss differs most, and casts that flax makes alone.

    None for a built-in model.
    """
    if not isinstance(evidence.case, PortCase):
        return None
    theirs, ours = (total_loss(of_side[step]) for of_side in (evidence.torch, evidence.jax))
    same = evidence.judgement.same_examples[step]
    rank = max(same, key=lambda rank: abs(ours[rank] - theirs[rank]))
    scratch = Scratch()
    of_torch, of_flax = scratch.path / "torch", scratch.path / "flax"
    job = (evidence.start, evidence.torch_folder)
    workers.jax.start(FlaxLayers(evidence.case, *job, of_flax, step, rank))
    try:
        workers.torch.do(TorchLayers(evidence.case.torch_source, *job, of_torch, step, rank, evidence.case.world_size))
    except ChildError:
        workers.jax.wait()  # or its answer would be taken for the next job's
        raise
    workers.jax.wait()
    flax = Records([of_flax])[0]
    casts = (f"flax computes in {dtype} at {where}, and torch does not" for dtype, where in flax.notes["casts"].items())
    return *first_difference(Records([of_torch])[0], flax, flax.notes["twins"]), "; ".join(casts)


def born_in(evidence: Evidence, workers: Workers, step: int, rank: int) -> str:
    """Return the torch layer in which a loss that is not finite is born; "" if no layer's output shows it."""
    scratch, source = Scratch(), evidence.case.torch_source
    paths = evidence.start, evidence.torch_folder, scratch.path
    job = TorchLayers(source, *paths, step, rank, evidence.case.world_size)
    done = _attempt(lambda: workers.torch.do(job), workers, [])
    return "" if done is None else first_not_finite(Records([scratch.path])[0])


def _explain_reduction(evidence: Evidence, workers: Workers, problems: list[Problem]) -> Iterator[Difference]:
    """Explain how the port's own step combines the micro-batches' gradients."""
    first = evidence.judgement.first
    stages = [stage for stage in (OWN_LOCAL, "gradients", "clipped_gradients") if stage in first]
    if not stages:
        return
    stage = min(stages, key=lambda s: (first[s].step, stages.index(s)))
    start = first[stage].step - 1
    steps = tuple(range(start, min(start + REDUCTION_STEPS, len(evidence.jax))))
    ruling = _attempt(lambda: _search_reduction(evidence, workers, steps), workers, problems)
    yield from _differences(evidence, stage, ruling)


def _search_reduction(evidence: Evidence, workers: Workers, steps: tuple[int, ...]) -> Ruling:
    scratch = Scratch()
    workers.jax.do(Micro(evidence.case, evidence.start, evidence.torch_folder, scratch.path, steps))
    facts = evidence.facts
    # The norm that clips is unknown where the records hold excerpts of the micro-batches' gradients.
    large = bool(evidence.jax[0]["norms"])
    reference = ReductionRecipe(facts.loss_normalization, clip_norm=None if large else facts.clip_grad_norm)
    micro = Records([scratch.path])
    of_steps = Lazy(lambda: len(steps), lambda i: _reduction_step(evidence, micro[i], evidence.jax[steps[i]]))
    return explain_reduction(of_steps, reference, evidence.summary.tied)


def _reduction_step(evidence: Evidence, micro: StoredRecord, record: StoredRecord) -> ReductionStep:
    large = bool(record["norms"])
    stages = [stage for stage in SHOWN if stage in record and not (large and stage == "clipped_gradients")]
    shown = {stage: _of_all(evidence, record, stage) for stage in stages}
    return ReductionStep(micro["counts"]["counts"], micro["sums"], micro.get("stale"), shown)


def _of_all(evidence: Evidence, record: StoredRecord, stage: str) -> Tensors:
    """Return every replica's tensors of a stage, (W, ...)."""
    if stage in LOCAL_STAGES:
        return record[stage]
    spread, world_size = record["spread"], evidence.case.world_size
    same = {name: np.broadcast_to(value, (world_size, *value.shape)) for name, value in record[stage].items()}
    return {name: spread.get(f"{stage}:{name}", value) for name, value in same.items()}
