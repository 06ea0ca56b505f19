"""Find the causes of stages that differ: each stage's evidence goes to the diagnosis that covers the stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.parity.case_interface import LOCAL_STAGES
from jaxddp.parity.catalogue import TorchOptimizer, is_of_optimizer
from jaxddp.parity.compare.examples import examples_in_words
from jaxddp.parity.compare.judge import OWN_LOCAL, OWN_LOSS, Located
from jaxddp.parity.compare.patterns import pattern
from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.first_layer import first_layer
from jaxddp.parity.diagnosis.forward.rank_job import ForwardDiagnosis
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.multi_loss import (
    NO_OPTIMIZER,
    differing_losses,
    differing_updates,
    explain_gradients,
    explain_loss,
    explain_moved,
    located_gradients,
)
from jaxddp.parity.diagnosis.optimizer.update import differing_update, explain_one_of, explain_update
from jaxddp.parity.diagnosis.reduction.reduction_causes import SHOWN, ReductionRecipe, ReductionStep, explain_reduction
from jaxddp.parity.diagnosis.samples import SampleEvidence, explain_samples
from jaxddp.parity.findings import Cause, Difference, Problem, Quote
from jaxddp.parity.jax_side.child import Micro
from jaxddp.parity.jax_side.equations import ReadEquations
from jaxddp.parity.jax_side.optimizer_line import JaxOptimizerLine
from jaxddp.parity.operations import Lines
from jaxddp.parity.progress import CAUSES
from jaxddp.parity.records import KIND, NUMBER, Lazy, Records, Scratch, StoredRecord, Tensors, total_loss
from jaxddp.parity.torch_side.optimizer_line import TorchOptimizerLine
from jaxddp.parity.workers import Workers

CUT_SHORT = "not all causes were tried"
REMAINS = "this explains a part; another fault remains"
ENDED = f"the search was ended: {CUT_SHORT}"
SEARCHING = "searching for the cause; Ctrl-C ends the search and prints what is known"
REDUCTION_STEPS = 5  # steps whose micro-batches are replayed, from the first that differs


def find_differences(evidence: Evidence, searches: InterruptibleSearches, layers: bool = True) -> list[Difference]:
    """Return every difference in the order of the stages, with its cause if it has been named.

    Args:
        evidence: records of both sides, compared.
        searches: runs the searches for causes; once they are ended, the remaining differences have no cause.
        layers: look for the first layer that differs.
    """
    first = evidence.judgement.first
    if not evidence.judgement.residuals:
        return []
    if located := differing_update(evidence, searches.problems):
        first["update"] = located
    if not first:
        return []
    with searches.progress.stage(CAUSES, f"{_in_words(first)}: {SEARCHING}"):
        differences = _explain_all(evidence, searches, layers)
    if searches.ended:
        return [one if one.cause else replace(one, detail=_joined(one.detail, ENDED)) for one in differences]
    return differences


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
        differences += _differences(evidence, "samples", _explain_samples(evidence))
    if evidence.facts.multi_loss:
        return differences + [*_of_multi_loss(evidence, searches)]
    of_model = _explain_model(evidence, searches, layers)
    of_step = [*_explain_reduction(evidence, searches)]
    if OWN_LOSS in first and not of_model and not of_step:
        differences += _differences(evidence, OWN_LOSS, None)
    if any(difference.cause for difference in of_step):  # the difference in the buffers may follow from it
        of_model = [difference for difference in of_model if difference.cause or difference.stage != "buffers"]
    differences += of_model + of_step
    if "update" in first:
        ruling = searches.run(lambda: explain_update(evidence))
        ruling = _with_optimizer_lines(evidence, searches, ruling, first["update"].tensor)
        differences += _differences(evidence, "update", ruling)
    elif "optimizer_state" in first:
        differences += _differences(evidence, "optimizer_state", None)
    if "hyperparameters" in first and not any(d.stage == "update" and d.cause for d in differences):
        differences += _differences(evidence, "hyperparameters", None)
    return differences


def _with_optimizer_lines(
    evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling | None, tensor: str
) -> Ruling:
    """Add the lines at which both sides make the optimizer of a tensor to its faults, and to no cause at all."""
    ruling = ruling or Ruling((), None)
    workers, unseen = searches.workers, list[Problem]()
    of_torch = TorchOptimizerLine(evidence.case.torch_source, tensor)
    of_jax = JaxOptimizerLine(evidence.case, evidence.start, tensor)
    jax = searches.run(lambda: workers.jax.do(of_jax), unseen)
    torch = searches.run(lambda: workers.torch.do(of_torch)[0], unseen)
    lines = Lines(jax, torch)
    if not ruling.named:
        return replace(ruling, lines=(lines,))
    return replace(ruling, lines=tuple(lines if is_of_optimizer(x) else Lines() for x in ruling.named[0].faults))


def _of_multi_loss(evidence: Evidence, searches: InterruptibleSearches) -> Iterator[Difference]:
    """Yield the differences of a `torch_step` and its twin: in losses, in what the optimizers get, in updates."""
    first, follow = evidence.judgement.first, False
    read = partial(_read, evidence, searches)

    def search(job: ForwardDiagnosis) -> tuple[Ruling | None, Ruling | None] | None:
        return searches.run(lambda: searches.workers.torch.do(job)[0])

    for located in [*differing_losses(evidence)]:
        found = explain_loss(evidence, located, search, read)
        follow = follow or found is not None
        if found is not None:
            yield from _differences(evidence, "local_loss", *found)
    updates: list[tuple[Located, Ruling | None]] = []
    for located, number in differing_updates(evidence):
        if number is not None:
            ruling = searches.run(partial(explain_one_of, evidence, number))
            updates.append((located, _with_optimizer_lines(evidence, searches, ruling, located.tensor)))
        else:
            alone = located.detail == NO_OPTIMIZER
            ruling = explain_moved(evidence, located, search, read) if alone else None
            updates.append((replace(located, detail="") if ruling and ruling.named else located, ruling))
    if "gradients" in first and not follow:
        ruling = explain_gradients(evidence)
        if ruling.named or not updates:  # else a loss after a wrong update may explain them
            yield from _differences(evidence, "gradients", ruling, located_gradients(evidence, ruling))
    if "buffers" in first and not follow:
        yield from _differences(evidence, "buffers", None)
    for located, ruling_on_update in updates:
        yield from _differences(evidence, "update", ruling_on_update, located)


def _differences(
    evidence: Evidence, stage: str, ruling: Ruling | None, located: Located | None = None
) -> Iterator[Difference]:
    """Yield one difference per cause, or one without a cause; `located` None: where the stage first differs."""
    located = located or evidence.judgement.first[stage]
    stage = stage.removeprefix("own_")
    causes: list[Cause | None] = []
    if ruling is not None and ruling.named:
        causes = [*_causes(ruling, _optimizer(evidence, located))]
    nearest = ruling.runner_up if ruling is not None and not causes else None
    cut_short = CUT_SHORT if ruling is not None and ruling.cut_short else ""
    common = "" if causes else _pattern(evidence, stage)
    partly = f"{ruling.partly}: {REMAINS}" if ruling is not None and ruling.partly and not causes else ""
    part = ruling.lines[0] if ruling is not None and ruling.lines and not causes else Lines()
    for cause in causes or [None]:
        yield Difference(
            stage,
            located.step,
            located.tensor,
            located.residual,
            located.allowed,
            cause=cause,
            nearest=None if nearest is None else (nearest.says, nearest.residual),
            detail=_joined(located.detail, partly, common, cut_short),
            jax=Quote.of(part.jax),
            torch=Quote.of(part.torch),
        )


def _joined(*details: str) -> str:
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
    own = [group for group in groups if group[NUMBER] in numbers]
    return TorchOptimizer(own[0][KIND] if own else "", own)


def _causes(ruling: Ruling, optimizer: TorchOptimizer) -> Iterator[Cause]:
    """Yield the faults that are present at once, each with the names that this run cannot tell apart."""
    other = ruling.runner_up
    runner_up = None if other is None else (other.says, other.residual)
    of_each = [_in_order(hypothesis, ruling.named[0].faults) for hypothesis in ruling.named]
    for position in range(len(ruling.named[0].faults)):
        says: dict[str, str] = {}
        for parts in of_each:
            says.setdefault(*parts[position])
        first = ruling.named[0]
        lines = ruling.lines[position] if position < len(ruling.lines) else Lines()
        yield Cause.of(tuple(says), tuple(says.values()), first.residual, runner_up, optimizer, first.measured, lines)


def _in_order(hypothesis: Hypothesis, faults: Sequence[str]) -> list[tuple[str, str]]:
    """Return (fault, line) pairs, with each fault that is in `faults` at its position there."""
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


def _explain_model(evidence: Evidence, searches: InterruptibleSearches, layers: bool) -> list[Difference]:
    """Explain losses, local gradients and buffers by replaying the torch loss in a torch rank."""
    first = evidence.judgement.first
    stages = [stage for stage in LOCAL_STAGES if stage in first]
    steps, compared = _comparable(evidence)

    layer, equal, casts = None, 0, ""
    stage = min(stages, key=lambda s: (first[s].step, LOCAL_STAGES.index(s)), default="")
    if stages and layers:
        # A layer that cannot be shown, for example one with a collective, is not a problem of the check.
        step = first[stage].step - 1
        found = searches.run(lambda: first_layer(evidence, searches.workers, step), problems=[])
        layer, equal, casts = found or (None, 0, "")
    reading = None
    if stages and (step := first[stage].step - 1) in steps:
        reading = _read(evidence, searches, "loss", step, _worst_rank(evidence, step, compared))
    of_model, of_buffers = None, None
    if steps and (stages or "buffers" in first):
        source, world_size = evidence.case.torch_source, evidence.case.world_size
        paths = evidence.start, evidence.torch_folder, evidence.jax_folder
        between = None if layer is None else (layer.before, layer.torch)
        job = ForwardDiagnosis(source, bool(stages), "buffers" in first, steps, *paths, world_size, compared, between)
        job = replace(job, thrifty=evidence.is_large, reading=reading)
        of_model, of_buffers = searches.run(lambda: searches.workers.torch.do(job)[0]) or (None, None)
    differences: list[Difference] = []
    if stages:
        for one in _differences(evidence, stage, of_model):
            in_loss = layer is None and equal and not one.cause and stage == "local_loss"
            alike = f"all {equal} layers that can be compared are equal: look after them, in the model or the loss"
            detail = alike if in_loss else one.detail
            differences.append(replace(one, layer=layer, detail=_joined(detail, "" if one.cause else casts)))
    # Buffers whose difference has no cause follow the model's difference.
    if "buffers" in first and (not stages or (of_buffers is not None and of_buffers.named)):
        differences += _differences(evidence, "buffers", of_buffers)
    return differences


def _read(evidence: Evidence, searches: InterruptibleSearches, loss: str, step: int, rank: int) -> Reading | None:
    """Read the port's program of a loss; None: it cannot be read."""
    read = ReadEquations(evidence.case, evidence.start, evidence.torch_folder, step, rank, loss)
    program = searches.run(lambda: searches.workers.jax.do(read), problems=[])
    return Reading(program, step, rank) if program is not None else None


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
    """Explain how the port's `flax_step` combines the micro-batches' gradients."""
    first = evidence.judgement.first
    stages = [stage for stage in (OWN_LOCAL, "gradients", "clipped_gradients") if stage in first]
    if not stages:
        return
    stage = min(stages, key=lambda s: (first[s].step, stages.index(s)))
    start = first[stage].step - 1
    steps = tuple(range(start, min(start + REDUCTION_STEPS, len(evidence.jax))))
    ruling = searches.run(lambda: _search_reduction(evidence, searches.workers, steps))
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
    return explain_reduction(of_steps, reference, evidence.summary.tied, evidence.summary.sizes)


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
