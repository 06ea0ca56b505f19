"""Local losses and gradients, combined from micro-batches in the reference's way or in a mistaken one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.forward.replay import ReplicaResult
from jaxddp.parity.diagnosis.micro_batches import (
    MICRO_BATCH,
    SUMMED,
    not_divided,
    other_means,
    over_of,
    summed_in_loss,
    weights,
)
from jaxddp.parity.diagnosis.search.fit import Scaling, Stages


@dataclass(frozen=True, kw_only=True)
class Combination(Scaling):
    """A way to combine micro-batches and replicas.

    Attributes:
        over: range of the mean, see `micro_batches.weights`.
        loss_times, gradient_times: factors.
        shared: the loss reported is the sum over the replicas.
        of_loss: a fitted factor multiplies the loss, too.
    """

    over: str
    loss_times: float = 1.0
    gradient_times: float = 1.0
    shared: bool = False
    of_loss: bool = False

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
    others = [(over, (mean,)) for over, mean in other_means(reference, world_size, micro_batches)]
    for over, mean in ((reference, ()), *others):
        if mean:
            yield Combination(known=mean, over=over)
        for more, times, shared, loss in _multiples(world_size, micro_batches if over == MICRO_BATCH else 1):
            together = Statement("together", each=tuple(one.what for one in (*mean, more)))
            both = tuple(replace(one, what=together if mean else one.what) for one in (*mean, more))
            yield Combination(known=both, over=over, loss_times=loss, gradient_times=times, shared=shared)
    if reference == MICRO_BATCH:
        yield Combination(known=(SUMMED,), over="")
    for of_loss, quantity in ((True, "loss_and_gradients"), (False, "gradients")):
        yield Combination(
            quantity=quantity, over=reference, value=1.0, of_loss=of_loss, sizes=tuple((sizes or {}).items())
        )


def _multiples(world_size: int, micro_batches: int) -> Iterator[tuple[Deviation, float, bool, float]]:
    """Yield a fault, the factor of the gradients, whether losses are summed, and the factor of the loss."""
    if micro_batches > 1:
        for loss in (1.0, float(micro_batches)):
            yield *not_divided(micro_batches), False, loss
    if world_size > 1:
        for shared, loss in ((False, 1.0), (True, 1.0), (True, 1 / world_size)):
            yield *summed_in_loss(world_size), shared, loss
        mean = Deviation("collective_in_loss", Statement("loss_averaged"))
        yield mean, 1.0, True, 1 / world_size


def reference_combination(loss_normalization: str) -> Combination:
    """Return the reference's way."""
    return Combination(over=over_of(loss_normalization))


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
    times = combination.gradient_times * combination.times
    multiplied = {name: times * gradient for name, gradient in gradients.items()}
    reported = [sum(losses.values()) if combination.shared else losses[rank] for rank in wanted]
    of_loss = combination.loss_times * (combination.times if combination.of_loss else 1.0)
    return {"local_loss": {"loss": of_loss * np.array(reported)}, "local_gradients": multiplied}
