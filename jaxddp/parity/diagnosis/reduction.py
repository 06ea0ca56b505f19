"""What a port's own step does between the loss and the optimizer, told from its gradients.

    sums over each micro-batch -> local gradients -> mean over replicas -> clipping

Given the gradients of each micro-batch's loss (taken from the port's own loss, and so right
whatever the step does with them), each hypothesis predicts all that follows.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.diagnosis.rounding import WIRES, mean_of
from jaxddp.parity.diagnosis.search import Hypothesis, Ruling, decide

FLOOR = 1e-12  # of the stage's norm; measured: right names up to 1e-15

Tensors = Mapping[str, np.ndarray]
SHOWN = ("local_gradients", "gradients", "clipped_gradients")
TORCH_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class ReductionStep:
    """One step. W replicas, A micro-batches.

    Attributes:
        counts: weights of each micro-batch's elements, summed, (W, A).
        sums: gradients of each micro-batch's summed loss, (W, A, ...).
        stale: the same at the parameters of the step before; None at the first step.
        found: what the port's step shows of `SHOWN`, of all replicas, (W, ...).
    """

    counts: np.ndarray
    sums: Tensors
    stale: Tensors | None
    found: Mapping[str, Tensors]


@dataclass(frozen=True)
class Recipe:
    """What a step does with gradients; the default is what torch's DDP does.

    Attributes:
        loss_normalization: "ddp", "global", or "rank": a mean over each rank's elements.
        divide: whether the micro-batches' means are divided by their number.
        stale: gradients of the parameters of the step before.
        early: the micro-batches that are averaged over the replicas, where some are not.
        local_factor, factor: on the local, on the reduced gradients.
        summed_at_once: every replica's local gradient is the sum of all, as shard_map's check_vma makes it.
        synchronised: whether there is a mean over the replicas at all.
        wire: dtype between the replicas.
        clip_norm: largest norm; None: no clipping.
        clip_epsilon: added to the norm.
        clip_first: each replica clips its own, and then they are averaged.
        clip_by: whose norm: "mean", "own", or a number that the norm is multiplied by.
        twice: the tensor that the norm counts twice.
        aliases: a tensor -> the one whose gradient it has.
    """

    loss_normalization: str = "ddp"
    divide: bool = True
    stale: bool = False
    early: frozenset[int] | None = None
    local_factor: float = 1.0
    factor: float = 1.0
    summed_at_once: bool = False
    synchronised: bool = True
    wire: str = ""
    clip_norm: float | None = None
    clip_epsilon: float = TORCH_CLIP_EPSILON
    clip_first: bool = False
    clip_by: str | float = "mean"
    twice: str = ""
    aliases: tuple[tuple[str, str], ...] = ()

    def predict(self, step: ReductionStep) -> dict[str, dict[str, np.ndarray]]:
        """Every stage of `SHOWN`, (W, ...)."""
        sums = step.sums if not self.stale or step.stale is None else step.stale
        micro = {name: self._of_micro_batches(value, step.counts) for name, value in sums.items()}
        local = {name: self.local_factor * value.sum(1) for name, value in micro.items()}
        if self.summed_at_once:
            local = {name: len(value) * _everywhere(value) for name, value in local.items()}
        if self.early is not None:
            together = [a in self.early for a in range(step.counts.shape[1])]
            gradients = {
                n: _everywhere(v[:, together].sum(1)) + v[:, np.logical_not(together)].sum(1) for n, v in micro.items()
            }
        elif self.clip_first:
            gradients = self._reduced(self._clipped(local, local))
        else:
            gradients = self._reduced(local)
        gradients |= {name: gradients[other].reshape(gradients[name].shape) for name, other in self.aliases}
        clipped = gradients if self.clip_first else self._clipped(gradients, local)
        return {"local_gradients": local, "gradients": gradients, "clipped_gradients": clipped}

    def _of_micro_batches(self, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(W, A, ...): each micro-batch's share of its replica's gradient."""
        replicas, pieces = counts.shape
        per_micro = {
            "ddp": counts * (pieces if self.divide else 1),
            "rank": np.broadcast_to(counts.sum(1, keepdims=True), counts.shape),
            "global": np.full(counts.shape, counts.sum() / replicas),
        }[self.loss_normalization]
        return sums / per_micro.reshape(replicas, pieces, *(1,) * (sums.ndim - 2))

    def _reduced(self, local: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not self.synchronised:
            return {name: self.factor * value for name, value in local.items()}
        return {name: self.factor * _everywhere(value, self.wire) for name, value in local.items()}

    def _clipped(self, gradients: dict[str, np.ndarray], local: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.clip_norm is None:
            return gradients
        norms = _norms(local if self.clip_by == "own" else gradients, self.twice)
        if isinstance(self.clip_by, float):
            norms = norms * self.clip_by
        share = np.minimum(1.0, self.clip_norm / (norms + self.clip_epsilon))
        return {name: value * share.reshape(-1, *(1,) * (value.ndim - 1)) for name, value in gradients.items()}


@dataclass(frozen=True)
class Edit:
    """A fault as a change of the recipe; edits of one kind do not go together."""

    kind: str
    fault: str
    says: str
    change: Callable[[Recipe], Recipe]


def explain_reduction(
    steps: Sequence[ReductionStep], reference: Recipe, tied: Sequence[str] = (), floor: float = FLOOR
) -> Ruling:
    """Name what the step does otherwise than the reference.

    Args:
        steps: some that differ, the first among them.
        reference: what the torch side does.
        tied: parameters that have two names.
        floor: the largest residual that is rounding.
    """
    world_size, pieces = steps[0].counts.shape
    edits = [*_edits(reference, world_size, pieces, tied), *_aliases(reference, steps[0], floor)]
    singles = [_tried((edit,), reference, steps) for edit in edits]
    ruling = decide(singles, floor)
    if ruling.named:
        return ruling
    pairs = [(a, b) for a, b in itertools.combinations(edits, 2) if a.kind != b.kind]
    return decide(singles + [_tried(pair, reference, steps) for pair in pairs], floor)


def _aliases(reference: Recipe, step: ReductionStep, floor: float) -> Iterator[Edit]:
    """Where single tensors are wrong: each has the gradient of another of its size."""
    stage = "gradients" if "gradients" in step.found else "clipped_gradients"
    if stage not in step.found:
        return
    predicted, found = reference.predict(step)[stage], step.found[stage]
    scale = _norm(found)
    wrong = [name for name in found if not np.linalg.norm(predicted[name] - found[name]) <= floor * scale]
    if 2 * len(wrong) > len(found):
        return
    pairs = []
    for name in wrong:
        same_size = [other for other in predicted if other != name and predicted[other].size == found[name].size]
        distance = {o: np.linalg.norm(predicted[o].ravel() - found[name].ravel()) for o in same_size}
        if not distance:
            return
        pairs.append((name, min(distance, key=lambda other: distance[other])))
    says = ", ".join(f"{name} has the gradient of {other}" for name, other in pairs)
    yield Edit("alias", "aliased_buffers", says, lambda recipe: replace(recipe, aliases=tuple(pairs)))


def residual_of(recipe: Recipe, step: ReductionStep) -> float:
    """The largest ||predicted - found|| of a tensor over the norm of its stage."""
    predicted = recipe.predict(step)
    worst = 0.0
    for stage, found in step.found.items():
        scale = _norm(found)
        for name, value in found.items():
            difference = float(np.linalg.norm(predicted[stage][name] - value)) / scale
            worst = max(worst, difference if np.isfinite(difference) else np.inf)
    return worst


def _tried(edits: tuple[Edit, ...], reference: Recipe, steps: Sequence[ReductionStep]) -> Hypothesis:
    recipe = reference
    for edit in edits:
        recipe = edit.change(recipe)
    worst = 0.0
    for step in steps:
        worst = max(worst, residual_of(recipe, step))
        if worst > 1.0:
            break
    return Hypothesis(tuple(e.fault for e in edits), "; ".join(e.says for e in edits), worst)


def _edits(reference: Recipe, world_size: int, pieces: int, tied: Sequence[str]) -> Iterator[Edit]:
    yield from _local_edits(reference, world_size, pieces)
    yield from _reduction_edits(world_size)
    if reference.clip_norm is not None:
        yield from _clip_edits(world_size, tied)


def _local_edits(reference: Recipe, world_size: int, pieces: int) -> Iterator[Edit]:
    """What becomes of a replica's micro-batches."""

    def changed(**fields: object) -> Callable[[Recipe], Recipe]:
        return lambda recipe: replace(recipe, **fields)  # type: ignore[arg-type]

    if reference.loss_normalization == "global":
        if pieces > 1:
            says = "each micro-batch's loss is a mean over its own elements; the reference's, over all of the step"
            yield Edit("normalization", "mean_per_micro_batch", says, changed(loss_normalization="ddp"))
        says = "each rank's loss is a mean over its own elements; the reference's, over all ranks'"
        yield Edit("normalization", "mean_per_rank", says, changed(loss_normalization="rank"))
    if pieces > 1:
        says = f"gradients times {pieces}, the number of micro-batches"
        yield Edit("normalization", "accumulation_not_divided", says, changed(loss_normalization="ddp", divide=False))
        for size in range(1, pieces):
            for early in itertools.combinations(range(pieces), size):
                which = ", ".join(str(a + 1) for a in early)
                says = (
                    f"of {pieces} micro-batches only {which} {'are' if size > 1 else 'is'} averaged over the replicas"
                )
                yield Edit("reduction", "synchronised_early", says, changed(early=frozenset(early)))
    if world_size > 1:
        says = f"the local gradients are {world_size} times too large, the number of replicas"
        yield Edit("local", "collective_in_loss", says, changed(local_factor=float(world_size)))
        says = "every replica's local gradient is the sum of all of them already"
        yield Edit("local", "check_vma", f"{says}, and is averaged", changed(summed_at_once=True))
        yield Edit(
            "local", "check_vma", f"{says}, and is summed again", changed(summed_at_once=True, factor=world_size)
        )
    yield Edit("stale", "stale_parameters", "gradients at the parameters of the step before", changed(stale=True))


def _reduction_edits(world_size: int) -> Iterator[Edit]:
    """What becomes of the local gradients."""

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
    yield Edit("reduction", "no_sync", says, lambda recipe: replace(recipe, synchronised=False))
    says = "every replica has its own gradient, as that of a pmean of the loss is"
    yield Edit("reduction", "collective_in_loss", says, lambda recipe: replace(recipe, synchronised=False))
    for wire in WIRES:
        says = f"gradients are rounded to {wire.split(',')[0]} on their way between the replicas"
        yield Edit("wire", "compressed_all_reduce", says, lambda recipe, wire=wire: replace(recipe, wire=wire))


def _clip_edits(world_size: int, tied: Sequence[str]) -> Iterator[Edit]:
    """What clipping does."""

    def changed(**fields: object) -> Callable[[Recipe], Recipe]:
        return lambda recipe: replace(recipe, **fields)  # type: ignore[arg-type]

    says = "clipping divides by the norm; the reference adds 1e-06 to it"
    yield Edit("epsilon", "clip_epsilon", says, changed(clip_epsilon=0.0))
    if world_size > 1:
        yield Edit("order", "clipped_before_mean", "each replica clips its own gradient", changed(clip_first=True))
        yield Edit("norm", "clip_norm_local", "clipped by the norm of the local gradient", changed(clip_by="own"))
        for power, what in (
            (0.5, "the root of the number"),
            (1.0, "the number"),
            (-0.5, "one over the root of the number"),
        ):
            says = f"clipped by a norm times {world_size**power:.4g}, {what} of replicas"
            yield Edit("norm", "clip_norm_local", says, changed(clip_by=float(world_size**power)))
    for name in tied:
        yield Edit("twice", "tied_weights", f"the norm counts {name} twice", changed(twice=name))


def _everywhere(local: np.ndarray, wire: str = "") -> np.ndarray:
    """The mean over the replicas, on each of them."""
    return np.broadcast_to(mean_of(local, wire), local.shape)


def _norm(tensors: Tensors) -> float:
    """The norm of all of them together; 1 if it is 0."""
    return float(np.sqrt(sum(float(np.sum(value**2)) for value in tensors.values()))) or 1.0


def _norms(gradients: Mapping[str, np.ndarray], twice: str) -> np.ndarray:
    """Each replica's global norm, (W,)."""
    squares = [
        (2 if name == twice else 1) * np.square(value).reshape(len(value), -1).sum(1)
        for name, value in gradients.items()
    ]
    return np.sqrt(np.sum(squares, axis=0))
