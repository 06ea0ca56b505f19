"""Mistakes in the reduction and in clipping, as changes of the recipe."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxddp.parity.diagnosis.reduction.recipe import Recipe, ReductionStep, norm_of
from jaxddp.parity.diagnosis.reduction.rounding import WIRES


@dataclass(frozen=True)
class Edit:
    """A fault as a change of the recipe.

    Attributes:
        kind: edits of one kind exclude each other.
        fault: a name of `catalogue.FAULTS`.
        says: the fault in words.
        change: function that makes the change.
    """

    kind: str
    fault: str
    says: str
    change: Callable[[Recipe], Recipe]


def edits(reference: Recipe, world_size: int, pieces: int, tied: Sequence[str]) -> Iterator[Edit]:
    """Yield all mistakes that apply to a step.

    Args:
        reference: the torch side's reduction.
        world_size: number of replicas.
        pieces: number of micro-batches.
        tied: parameters that have two names.
    """
    yield from _local_edits(reference, world_size, pieces)
    yield from _reduction_edits(world_size)
    if reference.clip_norm is not None:
        yield from _clip_edits(world_size, tied)


def _local_edits(reference: Recipe, world_size: int, pieces: int) -> Iterator[Edit]:
    """Yield mistakes in combining a replica's micro-batches."""
    reference_has = "over all ranks'" if reference.loss_normalization == "global" else "over each micro-batch's"
    if reference.loss_normalization != "ddp" and pieces > 1:
        says = f"each micro-batch's loss is a mean over its own elements; the reference's, {reference_has}"
        yield Edit("normalization", "mean_per_micro_batch", says, _changed(loss_normalization="ddp"))
    if reference.loss_normalization != "ddp" or pieces > 1:
        says = f"each rank's loss is a mean over its own elements; the reference's, {reference_has}"
        yield Edit("normalization", "mean_per_rank", says, _changed(loss_normalization="rank"))
    if reference.loss_normalization != "global" and world_size > 1:
        says = f"one mean over all ranks' elements; the reference's, {reference_has}"
        yield Edit("normalization", "global_mean", says, _changed(loss_normalization="global"))
    if pieces > 1:
        says = f"gradients times {pieces}, the number of micro-batches"
        yield Edit("normalization", "accumulation_not_divided", says, _changed(loss_normalization="ddp", divide=False))
        for size in range(1, pieces):
            for early in itertools.combinations(range(pieces), size):
                which = ", ".join(str(a + 1) for a in early)
                says = (
                    f"of {pieces} micro-batches only {which} {'are' if size > 1 else 'is'} averaged over the replicas"
                )
                yield Edit("reduction", "synchronised_early", says, _changed(early=frozenset(early)))
    if world_size > 1:
        says = f"the local gradients are {world_size} times too large, the number of replicas"
        yield Edit("local", "collective_in_loss", says, _changed(local_factor=float(world_size)))
        says = "every replica's local gradient is the sum of all of them already"
        yield Edit("local", "check_vma", f"{says}, and is averaged", _changed(summed_at_once=True))
        yield Edit(
            "local", "check_vma", f"{says}, and is summed again", _changed(summed_at_once=True, factor=world_size)
        )
    yield Edit("stale", "stale_parameters", "gradients at the parameters of the step before", _changed(stale=True))


def _changed(**fields: Any) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(recipe, **fields)


def _reduction_edits(world_size: int) -> Iterator[Edit]:
    """Yield mistakes in reducing the local gradients."""

    def times(factor: float) -> Callable[[Recipe], Recipe]:
        return lambda recipe: replace(recipe, factor=recipe.factor * factor)

    if world_size == 1:
        return
    n = world_size
    yield Edit("factor", "sum_not_mean", f"gradients times {n}, the number of replicas: a sum", times(n))
    yield Edit("factor", "check_vma", f"gradients times {n}, the number of replicas: reduced once more", times(n))
    yield Edit("factor", "check_vma", f"gradients times {n * n}, the square of the number of replicas", times(n * n))
    yield Edit("factor", "averaged_twice", f"gradients divided by {n} once too often", times(1 / n))
    for local in (k for k in range(2, n) if n % k == 0):
        says = f"gradients times {n // local}: divided by {local} and not by {n} replicas"
        yield Edit("factor", "local_device_count", says, times(n / local))
    says = "every replica keeps its own gradient"
    yield Edit("reduction", "no_sync", says, _changed(synchronised=False))
    says = "every replica has its own gradient, as that of a pmean of the loss is"
    yield Edit("reduction", "collective_in_loss", says, _changed(synchronised=False))
    for wire in WIRES:
        says = f"gradients are rounded to {wire.split(',')[0]} on their way between the replicas"
        yield Edit("wire", "compressed_all_reduce", says, _changed(wire=wire))


def _clip_edits(world_size: int, tied: Sequence[str]) -> Iterator[Edit]:
    """Yield mistakes in clipping."""
    says = "clipping divides by the norm; the reference adds 1e-06 to it"
    yield Edit("epsilon", "clip_epsilon", says, _changed(clip_epsilon=0.0))
    yield Edit("norm", "clip_missing", "the gradients are not clipped", _changed(clip_norm=None))
    if world_size > 1:
        yield Edit("order", "clipped_before_mean", "each replica clips its own gradient", _changed(clip_first=True))
        yield Edit("norm", "clip_norm_local", "clipped by the norm of the local gradient", _changed(clip_by="own"))
        for power, what in (
            (0.5, "the root of the number"),
            (1.0, "the number"),
            (-0.5, "one over the root of the number"),
        ):
            says = f"clipped by a norm times {world_size**power:.4g}, {what} of replicas"
            yield Edit("norm", "clip_norm_local", says, _changed(clip_by=float(world_size**power)))
    for name in tied:
        yield Edit("twice", "tied_weights", f"the norm counts {name} twice", _changed(twice=name))


def aliases(reference: Recipe, step: ReductionStep, floor: float) -> Iterator[Edit]:
    """Yield one edit if few tensors are wrong: each has the gradient of another tensor of its size."""
    stage = "gradients" if "gradients" in step.shown else "clipped_gradients"
    if stage not in step.shown:
        return
    predicted, shown = reference.predict(step)[stage], step.shown[stage]
    scale = norm_of(shown)
    wrong = [name for name in shown if not np.linalg.norm(predicted[name] - shown[name]) <= floor * scale]
    if not wrong or 2 * len(wrong) > len(shown):
        return
    pairs = []
    for name in wrong:
        same_size = [other for other in predicted if other != name and predicted[other].size == shown[name].size]
        distance = {o: np.linalg.norm(predicted[o].ravel() - shown[name].ravel()) for o in same_size}
        if not distance:
            return
        pairs.append((name, min(distance, key=lambda other: distance[other])))
    says = ", ".join(f"{name} has the gradient of {other}" for name, other in pairs)
    yield Edit("alias", "aliased_buffers", says, _changed(aliases=tuple(pairs)))
