"""Local losses and gradients, combined from micro-batches in the reference's way or in a mistaken one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.diagnosis.forward.fit import Item, Stages
from jaxddp.parity.diagnosis.forward.replay import ReplicaResult
from jaxddp.parity.diagnosis.micro_batches import (
    MICRO_BATCH,
    not_divided,
    other_means,
    over_of,
    summed_in_loss,
    weights,
)

SUM = "a sum over the elements that count, the reference takes the mean"


@dataclass(frozen=True)
class Combination(Item):
    """A way to combine micro-batches and replicas.

    Attributes:
        names: names of its faults; none for the reference's way.
        what: description of the faults.
        over: range of the mean, see `micro_batches.weights`.
        loss_times, gradient_times: factors.
        shared: the loss reported is the sum over the replicas.
        scaled: what a fitted factor applies to: "", "loss and gradients" or "gradients".
        sizes: sizes of the batch, in words.
    """

    names: tuple[str, ...]
    what: str
    over: str
    loss_times: float = 1.0
    gradient_times: float = 1.0
    shared: bool = False
    scaled: str = ""
    sizes: tuple[tuple[int, str], ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of `catalogue.FAULTS`."""
        return self.names

    @property
    def says(self) -> str:
        """Description of the faults, with the fitted factor."""
        return scaled(self.what, self.gradient_times, dict(self.sizes)) if self.scaled else self.what

    @property
    def reference(self) -> float | None:
        """Factor that changes nothing; None: no factor is fitted."""
        return 1.0 if self.scaled else None

    @property
    def start(self) -> float:
        """Initial factor of the fit."""
        return 2.0

    @property
    def value(self) -> float | None:
        """Factor; None: no factor is fitted."""
        return self.gradient_times if self.scaled else None

    @property
    def plausible(self) -> bool:
        """Return whether the factor, or its inverse, is an integer or has few digits, so that a programmer chose it.

        Other factors have other origins, such as the share of labels that are ignored.
        """
        factor = abs(self.gradient_times) or 1.0
        return any(math.isclose(x, float(f"{x:.3g}")) or math.isclose(x, round(x)) for x in (factor, 1 / factor))

    def at(self, value: float) -> "Combination":
        """Return the fault with another factor."""
        return replace(self, gradient_times=value, loss_times=value if self.scaled != "gradients" else 1.0)

    def excludes(self, other: object) -> bool:
        """Return whether the other fault is a way to combine, too."""
        return isinstance(other, Combination)


def combinations(
    loss_normalization: str, world_size: int, micro_batches: int, sizes: Mapping[int, str] | None = None
) -> Iterator[Combination]:
    """Yield all ways of combining except the reference's.

    >>> [combination.faults for combination in combinations("ddp", world_size=1, micro_batches=2)][-2:]
    [('loss_scale',), ('loss_scale',)]
    """
    reference = over_of(loss_normalization)
    others = [((fault,), says, over) for over, fault, says in other_means(reference, world_size, micro_batches)]
    for faults, says, over in (((), "", reference), *others):
        if faults:
            yield Combination(faults, says, over)
        for name, factor, whats, shared, loss in _multiples(world_size, micro_batches if over == MICRO_BATCH else 1):
            joined = " and ".join(filter(None, (says, whats)))
            yield Combination((*faults, name), joined, over, loss, factor, shared)
    if reference == MICRO_BATCH:
        yield Combination(("loss_scale",), SUM, "")
    for times in ("loss and gradients", "gradients"):
        known = tuple((sizes or {}).items())
        yield Combination(("loss_scale",), f"{times} times", reference, scaled=times, sizes=known)


def _multiples(world_size: int, micro_batches: int) -> Iterator[tuple[str, float, str, bool, float]]:
    """Yield fault, factor of the gradients, description, whether losses are summed, factor of the loss."""
    if micro_batches > 1:
        for loss in (1.0, float(micro_batches)):
            yield *not_divided(micro_batches), False, loss
    if world_size > 1:
        for shared, loss in ((False, 1.0), (True, 1.0), (True, 1 / world_size)):
            yield *summed_in_loss(world_size), shared, loss
        what = "the loss of every replica is the mean over the replicas"
        yield "collective_in_loss", 1.0, what, True, 1 / world_size


def reference_combination(loss_normalization: str) -> Combination:
    """Return the reference's way."""
    return Combination((), "", over_of(loss_normalization))


def counts_of(results: Sequence[ReplicaResult]) -> np.ndarray:
    """Return the number of elements that each replica counts in each micro-batch, (replicas, micro-batches)."""
    return np.array([[piece.count for piece in result.pieces] for result in results])


def combined(
    combination: Combination,
    results: Sequence[ReplicaResult],
    ranks: Sequence[int],
    wanted: Sequence[int],
    counts: np.ndarray,
) -> Stages:
    """Return the local losses and gradients of the wanted replicas.

    Args:
        combination: the way to combine.
        results: of the replicas `ranks`.
        ranks: the wanted replicas, and perhaps others.
        wanted: replicas to return.
        counts: of all replicas, (world_size, micro-batches).
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a replica without a label has the loss 0/0
        shares = weights(combination.over, counts)
        pieces = {
            rank: list(zip(shares[rank], one.pieces, strict=True)) for rank, one in zip(ranks, results, strict=True)
        }
        losses = {rank: sum(weight * piece.loss for weight, piece in pieces[rank]) for rank in ranks}
        gradients = {
            name: np.stack([sum(weight * piece.gradients[name] for weight, piece in pieces[rank]) for rank in wanted])
            for name in results[0].pieces[0].gradients
        }
    multiplied = {name: combination.gradient_times * gradient for name, gradient in gradients.items()}
    reported = [sum(losses.values()) if combination.shared else losses[rank] for rank in wanted]
    return {"local_loss": {"loss": combination.loss_times * np.array(reported)}, "local_gradients": multiplied}
