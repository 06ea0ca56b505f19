"""Mistakes in the reduction and in clipping, as changes of the recipe."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.diagnosis.micro_batches import MICRO_BATCH, STALE, SUMMED, not_divided, other_means, summed_in_loss
from jaxddp.parity.diagnosis.reduction.recipe import WIRES, ReductionRecipe, ReductionStep
from jaxddp.parity.diagnosis.search.fit import Scaling
from jaxddp.parity.diagnosis.wrong_clipping import ClippingFault, at_norm, by_value, wrong_clipping
from jaxddp.parity.records import stage_norm

TINY = 1e-9  # relative
FEW = 5  # micro-batches of which any choice is tried
NO_MEAN = Deviation("no_sync", Statement("own_gradients"))


@dataclass(frozen=True, kw_only=True)
class ReductionEdit(Scaling):
    """A fault as a change of the recipe.

    Attributes:
        kind: edits of one kind exclude each other.
        change: makes the change, given the fitted factor, 1 if there is none.
        of_two: factors that two separately named faults make together.
    """

    kind: str
    change: Callable[[ReductionRecipe, float], ReductionRecipe]
    of_two: tuple[float, ...] = ()

    @property
    def plausible(self) -> bool:
        """Return whether a programmer chose the factor, and two others do not make it."""
        return super().plausible and not np.isclose(self.of_two, self.times).any()

    def excludes(self, other: object) -> bool:
        """Return whether the other fault is of the same kind."""
        return isinstance(other, ReductionEdit) and other.kind == self.kind


def wrong_means(world_size: int) -> list[tuple[Deviation, float]]:
    """Return mistakes in the mean over the replicas, and the factors of the gradients."""
    return [
        (_multiplied("sum_not_mean", world_size, "sum"), world_size),
        (Deviation("averaged_twice", Statement("divided_twice", replicas=world_size)), 1 / world_size),
    ]


def _multiplied(fault: str, times: int, by: str) -> Deviation:
    what = Statement("gradients_times", times=times, by=by)
    return Deviation(fault, what, (Value(f"{times}", "1", is_factor=True),))


def edits(
    reference: ReductionRecipe, first: ReductionStep, tied: Sequence[str], sizes: Mapping[int, str]
) -> Iterator[ReductionEdit]:
    """Yield all mistakes that apply to a step.

    Args:
        reference: the torch side's reduction.
        first: the first step that differs.
        tied: parameters that have two names.
        sizes: sizes of the batch, in words.
    """
    world_size, pieces = first.counts.shape
    yield from _local_edits(reference, world_size, pieces)
    of_two = (pieces * world_size, pieces / world_size) if min(first.counts.shape) > 1 else ()
    fitted = partial(ReductionEdit, value=1.0, sizes=tuple(sizes.items()), of_two=of_two)
    if "local_gradients" in first.shown:
        yield fitted(kind="local", quantity="local_gradients", change=_times("local_factor"))
        yield fitted(kind="factor", quantity="reduced_gradients", change=_times("factor"))
        if world_size > 1:
            yield _edit("reduction", "global_mean", Statement("weighted_mean"), weighted=True)
    else:  # to scale either is the same
        yield fitted(kind="local", quantity="gradients", change=_times("local_factor"))
    yield from _reduction_edits(world_size)
    yield from _clip_edits(reference, world_size, tied)
    for early in _subsets(pieces):
        what = Statement("averaged_only", micro_batches=pieces, averaged=tuple(a + 1 for a in early))
        yield _edit("reduction", "synchronised_early", what, early=frozenset(early))


def _local_edits(reference: ReductionRecipe, world_size: int, pieces: int) -> Iterator[ReductionEdit]:
    """Yield mistakes in combining a replica's micro-batches."""
    for over, mean in other_means(reference.over, world_size, pieces):
        yield _known("normalization", mean, over=over)
    if reference.over == MICRO_BATCH:
        yield _known("normalization", SUMMED, over="")
    if pieces > 1:
        yield _known("normalization", not_divided(pieces)[0], over=MICRO_BATCH, divide=False)
        for kept in (0, pieces - 1):
            which = "last" if kept else "first"
            for divide in (True, False):
                what = Statement("micro_batches_lost", kept=which, micro_batches=pieces, divided=divide)
                yield _edit("normalization", "micro_batches_lost", what, kept=kept, divide=divide)
    if world_size > 1:
        summed, factor = summed_in_loss(world_size)
        yield _known("local", summed, local_factor=factor)
        averaged, summed_again = (Statement("summed_at_once", then=then) for then in ("averaged", "summed"))
        yield _edit("local", "check_vma", averaged, summed_at_once=True)
        yield _edit("local", "check_vma", summed_again, summed_at_once=True, factor=world_size)
    yield _known("stale", STALE, stale=True)


def _subsets(pieces: int) -> Iterable[tuple[int, ...]]:
    """Return some of the micro-batches: every choice of a few; of many, the first, the last, one, or all but one.

    >>> len([*_subsets(3)]), len([*_subsets(8)])
    (6, 26)
    """
    numbers = range(pieces)
    if pieces <= FEW:
        return itertools.chain.from_iterable(itertools.combinations(numbers, size) for size in range(1, pieces))
    ends = [half for k in range(1, pieces) for half in (numbers[:k], numbers[k:])]
    ones = [chosen for k in numbers for chosen in ([k], [*numbers[:k], *numbers[k + 1 :]])]
    return dict.fromkeys(map(tuple, (*ends, *ones)))


def _reduction_edits(world_size: int) -> Iterator[ReductionEdit]:
    """Yield mistakes in reducing the local gradients."""
    if world_size == 1:
        return
    n = world_size
    factors = [
        *wrong_means(n),
        (_multiplied("check_vma", n, "reduced_again"), n),
        (_multiplied("check_vma", n * n, "square"), n * n),
    ]
    for local in (k for k in range(2, n) if n % k == 0):
        what = Statement("divided_by_local", local=local, replicas=n)
        factors.append((Deviation("local_device_count", what), n / local))
    for one, factor in factors:
        yield ReductionEdit(kind="factor", known=(one,), change=_times("factor", factor))
    yield _known("reduction", NO_MEAN, synchronised=False)
    yield _edit("reduction", "collective_in_loss", Statement("own_gradients_of_mean"), synchronised=False)
    for wire in WIRES:
        what = Statement("rounded_between_replicas", dtype=wire.split(",")[0])
        yield _edit("wire", "compressed_all_reduce", what, wire=wire)


def _clip_edits(reference: ReductionRecipe, world_size: int, tied: Sequence[str]) -> Iterator[ReductionEdit]:
    """Yield mistakes in clipping."""
    yield from map(_clipping, wrong_clipping(reference.clipping, world_size))
    if (norm := reference.clipping.max_norm) is None:
        return
    yield _edit("norm", "clip_norm", Statement("tensors_clipped", at=norm), clip_by="tensor")
    if world_size > 1:
        yield _edit("order", "clipped_before_mean", Statement("replicas_clip"), clip_first=True)
        yield _edit("norm", "clip_norm_local", Statement("clipped_by_local_norm"), clip_by="own")
    for name in tied:
        yield _edit("twice", "tied_weights", Statement("counted_twice", name=name), twice=name)


def clip_values(reference: ReductionRecipe, steps: Sequence[ReductionStep]) -> Iterator[ReductionEdit]:
    """Yield the norm and the value at which gradients are clipped, read off the first step that is shown clipped."""
    for step in steps:
        if (after := step.shown.get("clipped_gradients")) is None:
            return
        before = step.shown.get("gradients") or reference.predict(step)["gradients"]
        # All replicas have the same gradients, or another stage differs.
        of_first = ({name: value[0] for name, value in of.items()} for of in (before, after))
        norm, clipped = (step.beyond * stage_norm(of_replica) for of_replica in of_first)
        if clipped >= norm * (1 - TINY):
            continue
        right = reference.clipping
        for epsilon in (right.epsilon, 0.0):
            largest = _rounded(clipped * (norm + epsilon) / norm)
            if largest != right.max_norm:
                yield _clipping(at_norm(largest, epsilon if right.max_norm is None else right.epsilon, right))
        yield _clipping(by_value(_rounded(max(float(np.abs(tensor).max()) for tensor in after.values())), right))
        return


def _rounded(value: float) -> float:
    """Round a value to six digits if that changes only its last bits; else return it unchanged."""
    short = float(f"{value:.6g}")
    return short if abs(short - value) <= TINY * value else value


def _clipping(wrong: ClippingFault) -> ReductionEdit:
    deviation, fields = wrong
    kind = "epsilon" if deviation.kind == "clip_epsilon" else "norm"
    return ReductionEdit(kind=kind, known=(deviation,), change=lambda recipe, _: recipe.with_clipping(**fields))


def _edit(kind: str, fault: str, what: Statement, **fields: Any) -> ReductionEdit:
    return _known(kind, Deviation(fault, what), **fields)


def _known(kind: str, deviation: Deviation, **fields: Any) -> ReductionEdit:
    """Return an edit that replaces fields of the recipe."""
    return ReductionEdit(kind=kind, known=(deviation,), change=lambda recipe, _: replace(recipe, **fields))


def _times(field: str, fixed: float = 1.0) -> Callable[[ReductionRecipe, float], ReductionRecipe]:
    """Return the change that multiplies a factor of the recipe, which another fault may have changed too."""
    return lambda recipe, fitted: replace(recipe, **{field: getattr(recipe, field) * fixed * fitted})


def aliases(reference: ReductionRecipe, step: ReductionStep, floor: float) -> Iterator[ReductionEdit]:
    """Yield one edit if few tensors are wrong: each has the gradient of another tensor of its size."""
    predicted, shown, wrong = _reduced_wrongly(reference, step, floor)
    if not wrong or 2 * len(wrong) > len(shown):
        return
    pairs = []
    for name in wrong:
        same_size = [other for other in predicted if other != name and predicted[other].size == shown[name].size]
        distance = {o: np.linalg.norm(predicted[o].ravel() - shown[name].ravel()) for o in same_size}
        if not distance:
            return
        pairs.append((name, min(distance, key=lambda other: distance[other])))
    what = Statement("gradients_of_others", each=tuple(pairs))
    yield _edit("alias", "aliased_buffers", what, aliases=tuple(pairs))


def not_averaged(reference: ReductionRecipe, step: ReductionStep, floor: float) -> Iterator[ReductionEdit]:
    """Yield one edit if some tensors are wrong: every replica keeps its own gradient of these."""
    _, shown, wrong = _reduced_wrongly(reference, step, floor)
    if len(step.counts) > 1 and 0 < len(wrong) < len(shown):
        vectors = {name for name, value in shown.items() if value.ndim == 2}  # (W, n)
        what = Statement("not_averaged", names=tuple(wrong), are_vectors=set(wrong) == vectors)
        yield _edit("reduction", "no_sync", what, not_averaged=frozenset(wrong))


def _reduced_wrongly(
    reference: ReductionRecipe, step: ReductionStep, floor: float
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray], list[str]]:
    """Return the reference's reduced gradients, the shown ones, and the tensors that differ."""
    stage = "gradients" if "gradients" in step.shown else "clipped_gradients"
    predicted, shown = reference.predict(step)[stage], step.shown.get(stage, {})
    scale = stage_norm(shown) or 1.0
    wrong = [name for name in shown if not np.linalg.norm(predicted[name] - shown[name]) <= floor * scale]
    return predicted, shown, wrong
