"""Causes of a difference in a run's update: the optimizer, or factors of gradients that the port does not show."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxddp.parity.compare.clipping import (
    NOT_CLIPPED,
    Clipping,
    beyond_local_excerpts,
    mean_gradients,
    reference_clipping,
    shows_clipping,
)
from jaxddp.parity.compare.judge import Located
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.micro_batches import not_divided
from jaxddp.parity.diagnosis.optimizer.update_causes import (
    FLOOR,
    OptimizerEvidence,
    OptimizerStep,
    explain_optimizer,
    reference_residuals,
)
from jaxddp.parity.diagnosis.optimizer.update_evidence import by_part
from jaxddp.parity.diagnosis.reduction.faults import NO_MEAN, wrong_means
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling, decide
from jaxddp.parity.findings import Problem
from jaxddp.parity.records import KIND, NUMBER, Lazy, StoredRecord, Tensors, full_norm, stage_norm, steps_in_memory
from jaxddp.parity.sums import FAULT

LARGEST_ROUNDING = 1e-9  # of an update; coarser ones cannot support a name
CLOSE = 1e-9  # relative; of norms
NEAR = 1e-6  # residual of an update whose learning rate is in float32; measured: up to 2e-7, at the end of a cosine


def differing_update(evidence: Evidence) -> tuple[Located | None, list[Problem], list[dict[str, float]]]:
    """Locate the first update of a port's `jax_step` that torch's optimizer would not have made.

    Torch's optimizer is replayed on the gradients of the port's step.

    Args:
        evidence: records of both sides, compared.

    Returns:
        Step and tensor, None if no update differs; a problem if the optimizer cannot be replayed; and the residuals of
        each step, if it can.
    """
    if not evidence.facts.custom_step or not evidence.summary.optimizer:  # torch's run failed, which is a problem
        return None, [], []
    residuals = reference_residuals(_optimizer_evidence(evidence))
    if residuals is None and "update" not in dict(evidence.judgement.exceeding()):
        return None, [], []  # with gradients that are torch's up to rounding, the updates are torch's
    if residuals is None:
        what = "the optimizer of a jax_step is judged if torch.optim has it"
        message = f"{what}, and this is {evidence.summary.optimizer}"
        return None, [Problem("port", "update", f"not judged: {message}; see the residuals of the free run")], []
    for step, (of_step, direct) in enumerate(zip(residuals, evidence.judgement.residuals["update"], strict=True), 1):
        of_step |= {one.first: min(of_step[one.first], direct[one.first]) for one in evidence.summands}
        located = Located.worst(step, of_step, evidence.judgement.allowed("update", step))
        if not located.residual <= located.allowed:
            return located, [], residuals
    return next(iter(_moved_once(evidence)), None), [], residuals


def explain_one_of(evidence: Evidence, number: int) -> Ruling:
    """Name the fault in one optimizer of a `torch_step`, counted from 0."""
    steps = range(min(len(evidence.torch), len(evidence.jax)))
    groups = [_groups(evidence.torch[step], number) for step in steps]
    clipping = reference_clipping(evidence.facts) if evidence.facts.clips_inside else NOT_CLIPPED
    if not all(_clips_alone(evidence.torch[k], groups[k], clipping) for k in steps):
        return Ruling((), None)  # it is clipped by a norm that other gradients enter
    one = OptimizerEvidence(
        groups[0][0][KIND],
        Lazy(lambda: len(steps), lambda index: _restricted(evidence, index, groups[index])),
        [of_step[0]["lr"] for of_step in groups],
        evidence.case.world_size,
        evidence.facts.accumulation_steps,
        evidence.facts.restore_at,
        clipping,
        highest=evidence.summary.highest,
        rounding=evidence.judgement.update_rounding,
        sizes=evidence.summary.sizes,
    )
    ruling = explain_optimizer(one, _floor(evidence), NEAR if len(set(one.rates)) > 1 else 0.0)
    return _with_sums(evidence, one, ruling)


def _norms(record: StoredRecord, groups: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the norms of the gradients that torch gives one optimizer, before and after it clips them."""
    names = {name for group in groups for name in group["names"]}

    def norm(stage: str) -> float:
        large = {name: x for name, x in record["norms"].items() if name.partition(":")[2] in names}
        return full_norm(
            {stage: {name: x for name, x in record[stage].items() if name in names}, "norms": large}, stage
        )

    return norm("gradients"), norm("clipped_gradients")


def _clips_alone(record: StoredRecord, groups: list[dict[str, Any]], clipping: Clipping) -> bool:
    """Return whether torch clips one optimizer's gradients by their own norm, if by any."""
    if clipping.max_norm is None:
        return True
    before, after = _norms(record, groups)
    return math.isclose(after, before * float(clipping.factor(before)), rel_tol=CLOSE)


def _restricted(evidence: Evidence, index: int, groups: list[dict[str, Any]]) -> OptimizerStep:
    """Return a step of one optimizer, which has these groups."""
    step, share = _optimizer_step(evidence, index), 1.0
    if evidence.facts.clips_inside:
        before, after = _norms(evidence.torch[index], groups)
        share = after / before if before else 1.0
    names = {name for group in groups for name in group["names"]}

    def of_group(tensors: Mapping[str, np.ndarray]) -> Tensors:
        return {name: x for name, x in tensors.items() if name in names}

    gradients, state = of_group(step.gradients), {part: of_group(of_part) for part, of_part in step.state.items()}
    params, update = of_group(step.params), of_group(step.update)
    return OptimizerStep(groups, params, gradients, step.unused & names, update, state, share, shares=step.shares)


def _groups(record: StoredRecord, number: int) -> list[dict[str, Any]]:
    return [group for group in record.notes["groups"] if group[NUMBER] == number]


def _moved_once(evidence: Evidence) -> list[Located]:
    """Return where jax first moves each sum otherwise than torch, which moves the summands one by one."""
    judgement, given = evidence.judgement, evidence.torch[0]["clipped_gradients"]
    places = [
        Located(step, one.first, of_step[one.first], judgement.allowed("update", step))
        for one in evidence.summands
        for step, of_step in enumerate(judgement.residuals["update"], start=1)
        if one.other in given
    ]
    return [*{one.tensor: one for one in reversed(places) if not one.residual <= one.allowed}.values()]


def _with_sums(evidence: Evidence, given: OptimizerEvidence, ruling: Ruling) -> Ruling:
    """Add to what explains the updates that torch moves a sum by an update of each summand: the replay makes one."""
    once = [one.tensor for one in _moved_once(evidence) if one.tensor in given.steps[0].update]
    if not once:
        return ruling
    left = [] if ruling.named else [x for of_step in reference_residuals(given) or [] for x in of_step.values()]
    explained = (Hypothesis((), max(left)),) if left and max(left) <= _floor(evidence) else ruling.named
    names = dict.fromkeys([*once, *(one.other for one in evidence.summands if one.first in once)])
    clips = evidence.facts.clip_grad_norm is not None
    moved = Deviation(FAULT, Statement("sum_moved_once", names=tuple(names), clips=clips))
    return replace(ruling, named=tuple(replace(x, deviations=(*x.deviations, moved)) for x in explained))


def _floor(evidence: Evidence) -> float:
    return FLOOR + min(max(evidence.judgement.update_rounding, default=0.0), LARGEST_ROUNDING)


def explain_update(evidence: Evidence) -> Ruling:
    """Name the fault in the optimizer, or in the part of the reduction that the port does not show.

    Faults that the run cannot tell apart are named together: for SGD, a sum over the replicas is the
    same as a larger learning rate.
    """
    given = _optimizer_evidence(evidence)
    return _with_sums(evidence, given, _explain_at_rates(evidence, given))


def _explain_at_rates(evidence: Evidence, given: OptimizerEvidence) -> Ruling:
    scheduled = len(set(evidence.summary.rates)) > 1
    # A single fault at rates in float32 is plainer than two at exact ones, and faster to find.
    for deep in (False, True) if scheduled else (True,):
        ruling = _explain(evidence, given, 0.0, deep)
        if ruling.named or not scheduled:
            return ruling
        with_float32 = _explain(evidence, given, NEAR, deep)
        if with_float32.named:
            return with_float32
    return ruling


def _explain(evidence: Evidence, given: OptimizerEvidence, near: float, deep: bool) -> Ruling:
    floor = _floor(evidence)
    ruling = explain_optimizer(given, floor, near, deep)
    if evidence.case.world_size == 1 or not _hides_mean(evidence):
        return ruling
    of_own = _optimizer_evidence(evidence, averaged=False)
    left = [value for of_step in reference_residuals(of_own) or [] for value in of_step.values()]
    others = [Hypothesis((NO_MEAN,), max(left, default=math.inf)), *filter(None, [ruling.runner_up])]
    alone = decide([*ruling.named, *others], floor)
    if alone.named or not deep:
        return alone
    beside = explain_optimizer(of_own, floor, near).named
    pairs = [replace(one, deviations=(NO_MEAN, *one.deviations)) for one in beside]
    return decide([*pairs, *others], floor)


def _hides_mean(evidence: Evidence) -> bool:
    """Return whether a `jax_step` does not show its gradients after the mean over the replicas."""
    return evidence.facts.custom_step and not {"gradients", "clipped_gradients"} & set(evidence.jax[0])


def _hidden_factors(evidence: Evidence) -> Iterator[tuple[Deviation, float]]:
    """Yield faults that multiply the gradients that the port does not show, and their factors."""
    if not _hides_mean(evidence):
        return
    if evidence.case.world_size > 1:
        yield from wrong_means(evidence.case.world_size)
    if evidence.facts.accumulation_steps > 1 and "local_gradients" not in evidence.jax[0]:
        yield not_divided(evidence.facts.accumulation_steps)


def _optimizer_evidence(evidence: Evidence, averaged: bool = True) -> OptimizerEvidence:
    """Return what the optimizer did with its gradients; `averaged` false: only with those of replica 0."""
    count = min(len(evidence.torch), len(evidence.jax))
    held = steps_in_memory(evidence.judgement.shapes.values())
    return OptimizerEvidence(
        evidence.summary.optimizer,
        Lazy(lambda: count, lambda index: _optimizer_step(evidence, index, averaged), keep=held),
        evidence.summary.rates,
        evidence.case.world_size,
        evidence.facts.accumulation_steps,
        evidence.facts.restore_at,
        _hidden_clipping(evidence),
        evidence.summary.highest,
        evidence.judgement.update_rounding,
        evidence.summary.sizes,
        tuple(_hidden_factors(evidence)) if averaged else (),
    )


def _hidden_clipping(evidence: Evidence) -> Clipping:
    """Return how the reference clips, if the port does not show its clipped gradients."""
    return NOT_CLIPPED if _shown(evidence) else reference_clipping(evidence.facts)


def _shown(evidence: Evidence) -> bool:
    return shows_clipping(evidence.jax[0], evidence.facts)


def _optimizer_step(evidence: Evidence, index: int, averaged: bool = True) -> OptimizerStep:
    of_torch, of_jax = evidence.torch[index], evidence.jax[index]
    before = evidence.before(index)
    params = {name: before[name] for name in of_torch["update"]}
    shares = evidence.judgement.shares[index]
    update = {name: of_jax["update"][name] / (shares[name] or 1.0) for name in params}
    unused = frozenset(params.keys() - of_torch["clipped_gradients"])
    given = _given(evidence, of_torch, of_jax, averaged)
    state = by_part(of_jax["optimizer_state"])
    return OptimizerStep(
        of_torch.notes["groups"], params, given.gradients, unused, update, state, given.clipped, given.norm, shares
    )


class _Given(NamedTuple):
    """Gradients, their norm, and the factor by which the reference clips them."""

    gradients: Tensors
    norm: float
    clipped: float


def _given(evidence: Evidence, of_torch: StoredRecord, of_jax: StoredRecord, averaged: bool) -> "_Given":
    """Return the gradients that jax's optimizer got, clipped by norm."""
    facts = evidence.facts
    if _shown(evidence) or facts.multi_loss:
        shown = of_jax if facts.custom_step else of_torch
        return _Given(shown["clipped_gradients"], full_norm(shown, "clipped_gradients"), 1.0)
    if not facts.custom_step or "gradients" in of_jax:
        shown = of_jax if facts.custom_step else of_torch
        gradients, norm = shown["gradients"], full_norm(shown, "gradients")
    else:
        gradients, norm = mean_gradients(of_torch, of_jax, shown=True)
        if not averaged:  # the update is that of replica 0
            gradients = {name: x[0] for name, x in of_jax["pure_local_gradients"].items()}
            norm = beyond_local_excerpts(of_jax)[0] * stage_norm(gradients)
    share = float(reference_clipping(facts).factor(norm))
    return _Given({name: share * value for name, value in gradients.items()}, share * norm, share)
