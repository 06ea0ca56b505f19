"""Find the causes of stages that differ: each stage's evidence goes to the diagnosis that covers the stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.case_interface import LOCAL_STAGES
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.clipping import NOT_CLIPPED, beyond_excerpts, beyond_local_excerpts, reference_clipping
from jaxddp.parity.compare.judge import OWN_LOCAL, OWN_LOSS, Located
from jaxddp.parity.compare.layers import first_difference
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.as_differences import CUT_SHORT, as_differences, joined
from jaxddp.parity.diagnosis.cause_lines import (
    CLIPPED,
    IN_STEP,
    REDUCTION,
    RESTORE,
    STEP,
    explain_forward,
    read_program,
    with_batch_lines,
    with_buffer_line,
    with_function_lines,
    with_loss_lines,
    with_optimizer_lines,
)
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.forward.rank_job import ForwardDiagnosis
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.micro_batches import over_of
from jaxddp.parity.diagnosis.multi_loss import differences_of_losses
from jaxddp.parity.diagnosis.optimizer.update import differing_update, explain_update
from jaxddp.parity.diagnosis.reduction.reduction_causes import SHOWN, ReductionRecipe, ReductionStep, explain_reduction
from jaxddp.parity.diagnosis.samples import SampleEvidence, explain_samples
from jaxddp.parity.diagnosis.schedule_numbers import with_schedule_number
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.findings import ORDER, Difference, Layer, Problem
from jaxddp.parity.jax_side.child import Micro
from jaxddp.parity.jax_side.layers import JaxLayers
from jaxddp.parity.jax_side.port_lines import StepCollectives
from jaxddp.parity.processes import ChildError
from jaxddp.parity.progress import CAUSES
from jaxddp.parity.records import Lazy, Records, Scratch, StoredRecord, Tensors, total_loss
from jaxddp.parity.torch_side.layers import TorchLayers
from jaxddp.parity.workers import Workers

NOT_SEARCHED = "a search, which this check leaves out"
ENDED = f"the search was ended: {CUT_SHORT}"
SEARCHING = "searching for the cause; Ctrl-C ends the search and prints what is known"
FREEZE = "freeze them, too: optax.partition with optax.set_to_zero() for their labels, or jax.lax.stop_gradient"
REDUCTION_STEPS = 5  # steps whose micro-batches are replayed, from the first that differs


def find_differences(
    evidence: Evidence, searches: InterruptibleSearches, layers: bool = True, causes: bool = True
) -> list[Difference]:
    """Return every difference in the order of the stages, with its cause if it has been named.

    Args:
        evidence: records of both sides, compared.
        searches: runs the searches for causes; once they are ended, the remaining differences have no cause.
        layers: look for the first layer that differs.
        causes: look for causes; False: return one difference without a cause for each stage that differs.
    """
    first = evidence.judgement.first
    if not evidence.judgement.residuals:
        return []
    if evidence.facts.custom_step:
        located, problems, given = searches.on_rank(differing_update, evidence) or (None, [], [])
        first |= {} if located is None else {"update": located}
        evidence.judgement.given |= {"update": given} if given else {}
        searches.problems += problems
    if not first:
        return []
    if not causes:
        stages = sorted(first, key=lambda stage: ORDER.index(stage.removeprefix("own_")))
        differences = [difference for stage in stages for difference in as_differences(evidence, stage, None)]
        return [replace(difference, needs=NOT_SEARCHED) for difference in differences]
    with searches.progress.stage(CAUSES, f"{_in_words(first)}: {SEARCHING}"):
        differences = _explain_all(evidence, searches, layers)
    if searches.ended:
        return [*map(_cut_short, differences)]
    return differences


def unexplained(evidence: Evidence) -> Iterator[Difference]:
    """Yield a difference for each stage that exceeds what is allowed, if a check has found none and no problem."""
    for stage, located in evidence.judgement.exceeding():
        yield from as_differences(evidence, stage, None, located)


def _in_words(first: Mapping[str, Located]) -> str:
    """Describe which stage differs first.

    >>> _in_words({"own_local_loss": Located(2, "loss", 0.025, 1e-12), "update": Located(2, "weight", 0.5, 1e-12)})
    'local loss differs at step 2 by 0.025'
    """
    stage = min(first, key=lambda stage: first[stage].step)
    words = stage.removeprefix("own_").replace("_", " ")
    return f"{words} differs at step {first[stage].step} by {first[stage].residual:.2g}"


def _explain_all(evidence: Evidence, searches: InterruptibleSearches, layers: bool) -> list[Difference]:
    first = evidence.judgement.first
    differences: list[Difference] = []
    if "samples" in first:
        ruling = with_batch_lines(evidence, searches, _explain_samples(evidence))
        differences += as_differences(evidence, "samples", ruling)
    if evidence.facts.multi_loss:
        return differences + [*differences_of_losses(evidence, searches)]
    restored = _restored(evidence, searches)
    shared = partial(_in_share, searches)
    # The optimizer first: its search is short, and that of a loss may take all of the time.
    stages = [("update", "optimizer_state"), (OWN_LOCAL, "gradients", "clipped_gradients")]
    parts = 1 + sum(bool(first.keys() & {*of_search}) for of_search in stages)
    of_optimizer = shared(parts, lambda: _explain_optimizer(evidence, searches, restored))
    of_step = shared(1 + bool(first.keys() & {*stages[1]}), lambda: [*_explain_reduction(evidence, searches)])
    of_model = shared(1, lambda: _explain_model(evidence, searches, layers, restored))
    if OWN_LOSS in first and not of_model and not of_step:
        differences += as_differences(evidence, OWN_LOSS, with_function_lines(evidence, searches, None, IN_STEP))
    if any(difference.cause for difference in of_step):  # the difference in the buffers may follow from it
        of_model = [difference for difference in of_model if difference.cause or difference.stage != "buffers"]
    return differences + of_model + of_step + of_optimizer


def _in_share(searches: InterruptibleSearches, parts: int, explain: Callable[[], list[Difference]]) -> list[Difference]:
    """Return the differences of one search, which takes at most one of so many parts of the time that is left."""
    with searches.share(parts):
        differences = explain()
        return [_cut_short(one) for one in differences] if searches.spent else differences


def _cut_short(difference: Difference) -> Difference:
    return difference if difference.cause else replace(difference, detail=joined(difference.detail, ENDED))


def _explain_optimizer(
    evidence: Evidence, searches: InterruptibleSearches, restored: Ruling | None
) -> list[Difference]:
    """Explain updates, states and hyperparameters, given the gradients."""
    first, differences = evidence.judgement.first, list[Difference]()
    in_optimizer = partial(with_optimizer_lines, evidence, searches)
    if "update" in first:
        ruling = restored if first["update"].step - 1 == evidence.facts.restore_at else None
        ruling = ruling or searches.on_rank(explain_update, evidence)
        ruling = restored if restored and not (ruling and ruling.named) else ruling
        ruling = ruling if ruling and ruling.named else _trained_alone(evidence) or ruling
        ruling = with_schedule_number(evidence, searches, ruling)
        differences += as_differences(evidence, "update", in_optimizer(ruling, first["update"].tensor))
    elif "optimizer_state" in first:
        state = first["optimizer_state"].tensor.partition(":")[2]
        differences += as_differences(evidence, "optimizer_state", in_optimizer(None, state))
    if "hyperparameters" in first and not any(d.stage == "update" and d.cause for d in differences):
        differences += as_differences(evidence, "hyperparameters", in_optimizer(None, ""))
    return differences


def _trained_alone(evidence: Evidence) -> Ruling | None:
    """Return the ruling that the port moves tensors for which torch never has a gradient; None: others differ, too."""
    judgement = evidence.judgement
    trained = {name for record in evidence.torch for name in record["clipped_gradients"]}
    moved = {
        name
        for step, of_tensors in enumerate(judgement.given["update"], start=1)
        for name, residual in of_tensors.items()
        if not residual <= judgement.allowed("update", step)
    }
    if not moved or moved & trained:
        return None
    names = tuple(sorted(moved))
    alone = Deviation("rate_of_some", Statement("updated_alone", names=names), where=", ".join(names), fix=FREEZE)
    return Ruling((Hypothesis((alone,), 0.0, measured="the updates of all other tensors are equal"),), None)


def _explain_samples(evidence: Evidence) -> Ruling:
    steps = min(len(evidence.torch), len(evidence.jax))
    of_torch = [evidence.torch[step]["samples"] for step in range(steps)]
    of_jax = [evidence.jax[step]["samples"] for step in range(steps)]
    facts = evidence.facts
    return explain_samples(SampleEvidence(of_torch, of_jax, facts.steps_per_epoch, facts.restore_at))


def _restored(evidence: Evidence, searches: InterruptibleSearches) -> Ruling | None:
    """Return the ruling that the port's `jax_restore` changes the state, with its line; None: it does not."""
    at = evidence.facts.restore_at
    changed = evidence.jax[at].get("restored", {}) if at is not None and at < len(evidence.jax) else {}
    if not changed:
        return None
    each = [f"{name} from {x:.6g} to {y:.6g}" for name, (x, y) in changed.items()]
    what = Statement("restoring_changes", step=at, changed=tuple(changed))
    measured = f"jax_restore, which must return the state that it is given, changes {listed(each, joint=', ')}"
    ruling = Ruling((Hypothesis((Deviation("resume_lost_state", what),), 0.0, measured=measured),), None)
    return with_function_lines(evidence, searches, ruling, RESTORE)


def _explain_model(
    evidence: Evidence, searches: InterruptibleSearches, layers: bool, restored: Ruling | None
) -> list[Difference]:
    """Explain losses, local gradients and buffers by a restore, or by replaying the torch loss in a torch rank."""
    first = evidence.judgement.first
    stages = [stage for stage in LOCAL_STAGES if stage in first]
    steps, compared = _comparable(evidence)

    layer, equal, casts = None, 0, ""
    stage = min(stages, key=lambda s: (first[s].step, LOCAL_STAGES.index(s)), default="")
    if restored and (at := first.get(stage or "buffers")) and at.step - 1 == evidence.facts.restore_at:
        return [*as_differences(evidence, stage or "buffers", restored)]
    if stages and layers:
        # A layer that cannot be shown, for example one with a collective, is not a problem of the check.
        step = first[stage].step - 1
        found = searches.run(lambda: first_layer(evidence, searches.workers, step), problems=[])
        layer, equal, casts = found or (None, 0, "")
    reading = None
    if (at := first.get(stage or "buffers")) and at.step - 1 in steps:
        rank = _worst_rank(evidence, at.step - 1, compared)
        backward = stage == "local_gradients"  # of losses that are equal
        reading = read_program(evidence, searches, "loss", at.step - 1, rank, backward)
    of_model, of_buffers = None, None
    if steps and (stages or "buffers" in first):
        source, world_size = evidence.case.torch_source, evidence.case.world_size
        paths = evidence.start, evidence.torch_folder, evidence.jax_folder
        between = None if layer is None else (layer.before, layer.torch)
        job = ForwardDiagnosis(source, bool(stages), "buffers" in first, steps, *paths, world_size, compared, between)
        job = replace(job, thrifty=evidence.is_large, reading=reading, summands=evidence.summands)
        of_model, of_buffers = explain_forward(evidence, searches, job) or (None, None)
    differences: list[Difference] = []
    if stages:
        for one in as_differences(evidence, stage, with_loss_lines(evidence, searches, of_model)):
            in_loss = layer is None and equal and not one.cause and stage == "local_loss"
            alike = (
                f"all {equal} layers that can be compared return equal values (the first, of several): look after them"
            )
            detail = alike if in_loss else one.detail
            differences.append(replace(one, layer=layer, detail=joined(detail, "" if one.cause else casts)))
    # Buffers whose difference has no cause follow the model's difference.
    if "buffers" in first and (not stages or (of_buffers is not None and of_buffers.named)):
        of_buffers = with_buffer_line(evidence, searches, of_buffers)
        of_buffers = with_function_lines(evidence, searches, of_buffers, STEP)
        differences += as_differences(evidence, "buffers", of_buffers)
    return differences


def _worst_rank(evidence: Evidence, step: int, ranks: Sequence[int]) -> int:
    """Return the replica whose loss differs most, among some."""
    of_torch, of_jax = (total_loss(of_side[step]) for of_side in (evidence.torch, evidence.jax))
    return max(ranks, key=lambda rank: abs(of_jax[rank] - of_torch[rank]))


def _comparable(evidence: Evidence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return steps, and the replicas that were given the same examples on both sides in all of these steps."""
    same, everyone = evidence.judgement.same_examples, set(range(evidence.case.world_size))
    if always := everyone.intersection(*same):
        return tuple(range(len(same))), tuple(sorted(always))
    return tuple(step for step, ranks in enumerate(same) if everyone <= set(ranks)), tuple(sorted(everyone))


def _explain_reduction(evidence: Evidence, searches: InterruptibleSearches) -> Iterator[Difference]:
    """Explain how the port's `jax_step` combines the micro-batches' gradients."""
    first = evidence.judgement.first
    stages = [stage for stage in (OWN_LOCAL, "gradients", "clipped_gradients") if stage in first]
    if not stages:
        return
    stage = min(stages, key=lambda s: (first[s].step, stages.index(s)))
    start = first[stage].step - 1
    steps = tuple(range(start, min(start + REDUCTION_STEPS, len(evidence.jax))))
    ruling = searches.run(lambda: _search_reduction(evidence, searches.workers, steps, stage))
    ruling = None if ruling is None else _possible(evidence, searches, ruling)
    functions = {OWN_LOCAL: IN_STEP, "clipped_gradients": CLIPPED}.get(stage, REDUCTION)
    yield from as_differences(evidence, stage, with_function_lines(evidence, searches, ruling, functions))


def _possible(evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling) -> Ruling:
    """Drop names of collectives that the step's program does not have, if another name is left."""
    if len(ruling.named) < 2:
        return ruling
    sizes = searches.run(
        lambda: searches.workers.jax.do(StepCollectives(evidence.case, evidence.start)), list[Problem]()
    )
    if sizes is None:
        return ruling
    # A loss is one number; a step without any collective has none of shard_map's either.
    possible = {"collective_in_loss": 1 in sizes, "check_vma": bool(sizes)}
    left = tuple(one for one in ruling.named if all(possible.get(fault, True) for fault in one.faults))
    return replace(ruling, named=left) if left else ruling


def _search_reduction(evidence: Evidence, workers: Workers, steps: tuple[int, ...], stage: str) -> Ruling:
    scratch = Scratch()
    workers.jax.do(Micro(evidence.case, evidence.start, evidence.torch_folder, scratch.path, steps))
    facts = evidence.facts
    clipping = NOT_CLIPPED if facts.clips_inside else reference_clipping(facts)  # by the step, not by the optimizer
    reference = ReductionRecipe(over_of(facts.loss_normalization), clipping=clipping)
    micro = Records([scratch.path])
    # Of excerpts of gradients that differ, the norm is not known.
    shown = SHOWN[:-1] if evidence.jax[0]["norms"] and stage != "clipped_gradients" else SHOWN
    of_steps = Lazy(lambda: len(steps), lambda i: _reduction_step(evidence, micro[i], steps[i], shown))
    return explain_reduction(of_steps, reference, evidence.summary.tied, evidence.summary.sizes)


def _reduction_step(evidence: Evidence, micro: StoredRecord, step: int, stages: Sequence[str]) -> ReductionStep:
    record = evidence.jax[step]
    shown = {stage: _of_all(evidence, record, stage) for stage in stages if stage in record}
    beyond = beyond_excerpts(evidence.torch[step]), beyond_local_excerpts(record)
    return ReductionStep(micro["counts"]["counts"], micro["sums"], micro.get("stale"), shown, *beyond)


def _of_all(evidence: Evidence, record: StoredRecord, stage: str) -> Tensors:
    """Return every replica's tensors of a stage, (W, ...)."""
    if stage in LOCAL_STAGES:
        return record[stage]
    spread, world_size = record["spread"], evidence.case.world_size
    same = {name: np.broadcast_to(value, (world_size, *value.shape)) for name, value in record[stage].items()}
    return {name: spread.get(f"{stage}:{name}", value) for name, value in same.items()}


def first_layer(evidence: Evidence, workers: Workers, step: int) -> tuple[Layer | None, int, str] | None:
    """Return `first_difference` on the replica whose loss differs most, and casts that only jax makes.

    None for a built-in model.
    """
    if not isinstance(evidence.case, PortCase):
        return None
    torch_loss, jax_loss = (total_loss(of_side[step]) for of_side in (evidence.torch, evidence.jax))
    same = evidence.judgement.same_examples[step]
    rank = max(same, key=lambda rank: abs(jax_loss[rank] - torch_loss[rank]))
    scratch = Scratch()
    of_torch, of_jax = scratch.path / "torch", scratch.path / "jax"
    job = (evidence.start, evidence.torch_folder)
    workers.jax.start(JaxLayers(evidence.case, *job, of_jax, step, rank))
    try:
        workers.torch.do(TorchLayers(evidence.case.torch_source, *job, of_torch, step, rank, evidence.case.world_size))
    except ChildError:
        workers.jax.wait()  # or the next job would receive this answer
        raise
    workers.jax.wait()
    jax = Records([of_jax])[0]
    casts = (f"jax computes in {dtype} at {where}, and torch does not" for dtype, where in jax.notes["casts"].items())
    return *first_difference(Records([of_torch])[0], jax, jax.notes["twins"]), "; ".join(casts)
