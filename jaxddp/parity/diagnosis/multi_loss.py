"""Causes of differences between a `torch_step` and its twin, which show their losses and their optimizers' inputs."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.parity.compare.judge import ALLOWED, Located
from jaxddp.parity.diagnosis.as_differences import as_differences
from jaxddp.parity.diagnosis.cause_lines import (
    REDUCTION,
    STEP,
    explain_forward,
    read_program,
    with_function_lines,
    with_optimizer_lines,
)
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.forward.rank_job import UNKNOWN, ForwardDiagnosis
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.optimizer.update import explain_one_of
from jaxddp.parity.diagnosis.reduction.reduction_causes import Received, explain_received
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.findings import Difference
from jaxddp.parity.records import NUMBER, Lazy, Tensors, of_loss

NO_OPTIMIZER = "the step itself changes this tensor, and not one of torch's optimizers"
FOLLOWS = 2.0  # an average of weights differs by no more than so many times what its weights' updates differ by
EQUAL_LOSSES = (
    "all losses are equal: look at what is differentiated, where jax.lax.stop_gradient is applied, and at clipping"
)
NO_UPDATE = "torch's optimizer makes no update in this step"
OF_MEAN = "it is the mean over the replicas; return each replica's own loss"
BEHIND = "it follows the update of a large tensor, which is recorded only as an excerpt: no cause was sought"
Search = Callable[[ForwardDiagnosis], tuple[Ruling | None, Ruling | None] | None]
Read = Callable[..., Reading | None]


def differences_of_losses(evidence: Evidence, searches: InterruptibleSearches) -> Iterator[Difference]:
    """Yield the differences of a `torch_step` and its twin: in losses, in what the optimizers get, in updates."""
    first, follow = evidence.judgement.first, False
    read = partial(read_program, evidence, searches)
    search = partial(explain_forward, evidence, searches)
    losses = differing_losses(evidence)
    with searches.share(2 if losses else 1):  # first, because the search for a loss may take all of the time
        updates = [*_explained_updates(evidence, searches, search, read)]
    for left, located in zip(range(len(losses), 0, -1), losses, strict=True):
        with searches.share(left):
            ruling_on_loss = explain_loss(evidence, located, search, read)
            if ruling_on_loss is None:
                continue
            follow, (ruling, place) = True, ruling_on_loss
            explained = with_function_lines(evidence, searches, ruling, STEP)
        yield from as_differences(evidence, "local_loss", explained, place)
    if "gradients" in first and not follow:
        ruling = explain_gradients(evidence, search, read)
        if ruling.named or not updates:  # else a loss after a wrong update may explain them
            located = located_gradients(evidence, ruling)
            ruling = with_function_lines(evidence, searches, ruling, REDUCTION)
            yield from as_differences(evidence, "gradients", ruling, located)
    if "buffers" in first and not follow:
        yield from as_differences(evidence, "buffers", with_function_lines(evidence, searches, None, STEP))
    for located, ruling_on_update in updates:
        yield from as_differences(evidence, "update", ruling_on_update, located)


def _explained_updates(
    evidence: Evidence, searches: InterruptibleSearches, search: Search, read: Read
) -> Iterator[tuple[Located, Ruling | None]]:
    """Yield where the updates of each optimizer, and those without one, differ first, with the ruling."""
    for located, number in differing_updates(evidence):
        if number is not None:
            ruling = searches.on_rank(explain_one_of, evidence, number)
            yield located, with_optimizer_lines(evidence, searches, ruling, located.tensor)
        else:
            alone = located.detail == NO_OPTIMIZER
            moved = explain_moved(evidence, located, search, read) if alone else None
            yield (replace(located, detail="") if moved and moved.named else located), moved


def differing_losses(evidence: Evidence) -> list[Located]:
    """Return where each differing loss differs first, in the order of the steps."""
    allowed = ALLOWED["local_loss"]
    first: dict[str, Located] = {}
    for step, of_step in enumerate(evidence.judgement.residuals.get("local_loss", ()), start=1):
        for name, residual in of_step.items():
            if not residual <= allowed:
                first.setdefault(name, Located(step, name, residual, allowed))
    return list(first.values())


def explain_loss(
    evidence: Evidence, located: Located, search: Search, read: Read
) -> tuple[Ruling | None, Located] | None:
    """Explain a loss that differs.

    Args:
        evidence: records of both sides, compared.
        located: where the loss first differs.
        search: runs a search on a torch rank; None: it failed.
        read: name of a loss, step (from 0), rank, and whether with cotangents -> the port's program, None if it cannot
            be read.

    Returns:
        The ruling, None without a search, and where the loss differs; None: it follows from an update that differs.
    """
    name, replicas = located.tensor, evidence.case.world_size
    of_torch, of_jax = (np.stack([of_loss(x, "local_loss")[name] for x in of]) for of in (evidence.torch, evidence.jax))
    if replicas > 1 and np.allclose(of_jax, of_torch.mean(1, keepdims=True), rtol=located.allowed, atol=0):
        return None, replace(located, detail=OF_MEAN)
    job, step = replace(_job(evidence), loss=name), located.step - 1
    if not job.steps:
        return None, located
    if step in job.steps:
        worst = int(np.argmax(np.abs(of_jax[step] - of_torch[step])))
        job = replace(job, reading=read(name, step, worst))
    found = search(job)
    if found is not None and found[0] is None:
        return None
    if found is not None and found[0] == UNKNOWN:
        update = evidence.judgement.first.get("update")
        return None if update is not None and update.step <= located.step else (None, replace(located, detail=BEHIND))
    return (None if found is None else found[0]), located


def differing_updates(evidence: Evidence) -> Iterator[tuple[Located, int | None]]:
    """Yield where the update of each optimizer first differs, with the optimizer's number; None: no optimizer moved it.

    Tensors that the step updates without an optimizer, such as a target network's weights, may follow from an
    optimizer's update, so they are yielded only if they differ more at that step than any of these does.
    """
    groups = evidence.torch[0].notes["groups"]
    of_optimizers: dict[int, set[str]] = {}
    for group in groups:
        of_optimizers.setdefault(group[NUMBER], set()).update(group["names"])
    found = [(_first(evidence, names), number) for number, names in of_optimizers.items()]
    for located, number in found:
        if located is None:
            continue
        given = evidence.torch[located.step - 1]["clipped_gradients"].keys()
        if given & of_optimizers[number]:
            yield located, number
        else:
            yield replace(located, detail=NO_UPDATE), None
    held = set().union(*of_optimizers.values())
    moved = evidence.judgement.residuals["update"][0].keys() - held
    if (located := _first(evidence, moved)) is not None:
        there = evidence.judgement.residuals["update"][located.step - 1]
        if located.residual > FOLLOWS * max((there[name] for name in held if name in there), default=0.0):
            yield replace(located, detail=NO_OPTIMIZER), None


def explain_moved(evidence: Evidence, located: Located, search: Search, read: Read) -> Ruling | None:
    """Explain updates that a step makes without an optimizer, as of a moving average; None: without a search.

    Args:
        evidence, search, read: see `explain_loss`.
        located: where such an update first differs.
    """
    job, step = _job(evidence), located.step - 1
    held = {name for group in evidence.torch[0].notes["groups"] for name in group["names"]}
    shapes, updates = evidence.judgement.shapes, evidence.torch[step]["update"]
    names = [name for name, x in updates.items() if name not in held and x.shape == shapes[name] and x.any()]
    if step not in job.steps or located.tensor not in names:
        return None
    names.sort(key=lambda name: name != located.tensor)
    found = search(replace(job, reading=read(located.tensor, step, 0), moved=tuple(names)))
    return None if found is None or found[0] is None else _of_tensors(found[0], names)


def _job(evidence: Evidence) -> ForwardDiagnosis:
    """Return a search over the steps in which all replicas were given the same examples, over none of a large model."""
    everyone, same = tuple(range(evidence.case.world_size)), evidence.judgement.same_examples
    steps = tuple(step for step, ranks in enumerate(same) if len(ranks) == len(everyone) and not evidence.is_large)
    paths = evidence.start, evidence.torch_folder, evidence.jax_folder
    return ForwardDiagnosis(evidence.case.torch_source, True, False, steps, *paths, len(everyone), everyone)


def _of_tensors(ruling: Ruling, names: Sequence[str]) -> Ruling:
    """Add to what causes say which tensors they are about."""
    moved = f"{names[0].partition('.')[0]}.*" if len(names) > 1 else names[0]
    named = ([replace(of, what=of.what.but(moved=moved)) for of in one.deviations] for one in ruling.named)
    both = zip(ruling.named, named, strict=True)
    return replace(ruling, named=tuple(replace(one, deviations=tuple(deviations)) for one, deviations in both))


def _first(evidence: Evidence, names: Collection[str]) -> Located | None:
    """Return where an update of one of these parameters first differs."""
    for step, of_step in enumerate(evidence.judgement.residuals["update"], start=1):
        allowed = evidence.judgement.allowed("update", step)
        beyond = {name: x for name, x in of_step.items() if name in names and not x <= allowed}
        if beyond:
            return Located.worst(step, beyond, allowed)
    return None


def located_gradients(evidence: Evidence, ruling: Ruling) -> Located:
    """Return where the gradients first differ; if nothing else differs and nothing explains it, add where to look."""
    first = evidence.judgement.first
    alone = not ruling.named and "local_loss" not in first
    return replace(first["gradients"], detail=EQUAL_LOSSES) if alone else first["gradients"]


def explain_gradients(evidence: Evidence, search: Search, read: Read) -> Ruling:
    """Explain the gradients that JAX's optimizers got, by their mean, or by the gradients of losses that are equal.

    Args:
        evidence, search, read: see `explain_loss`.
    """
    count = min(len(evidence.torch), len(evidence.jax))
    steps = Lazy(lambda: count, lambda step: _received(evidence, step))
    ruling = explain_received(steps, evidence.summary.sizes)
    at, job = evidence.judgement.first["gradients"].step - 1, _job(evidence)
    alike = not any(name.startswith("gradients:") for name in evidence.jax[at]["spread"])
    names = _of_one_optimizer(evidence, at)
    equal = not any(located.step - 1 <= at for located in differing_losses(evidence))  # else they follow from a loss
    if ruling.named or not (alike and names and equal) or at not in job.steps:
        return ruling
    readings = {loss: read(loss, at, 0, True) for loss in of_loss(evidence.torch[at], "local_loss")}
    lengths = {loss: len(reading.program) for loss, reading in readings.items() if reading is not None}
    for loss in sorted(lengths, key=lengths.__getitem__):  # a loss after an update computes more than its own
        found = search(replace(job, loss=loss, received=names, reading=readings[loss]))
        if found is not None and found[0] is not None and found[0].named:
            return found[0]
    return ruling


def _of_one_optimizer(evidence: Evidence, step: int) -> tuple[str, ...]:
    """Return the parameters with a gradient that the optimizer of the tensor updates whose gradient first differs."""
    groups, tensor = evidence.torch[step].notes["groups"], evidence.judgement.first["gradients"].tensor
    numbers = {group[NUMBER] for group in groups if tensor in group["names"]}
    held = {name for group in groups if group[NUMBER] in numbers for name in group["names"]}
    held -= {summand.other for summand in evidence.summands}
    return tuple(name for name in evidence.torch[step]["gradients"] if name in held)


def _received(evidence: Evidence, step: int) -> Received:
    of_jax, of_torch = evidence.jax[step], evidence.torch[step]["gradients"]
    shape = (evidence.case.world_size,)
    same: Tensors = {name: np.broadcast_to(x, shape + x.shape) for name, x in of_jax["gradients"].items()}
    return {name: of_jax["spread"].get(f"gradients:{name}", x) for name, x in same.items()}, of_torch
