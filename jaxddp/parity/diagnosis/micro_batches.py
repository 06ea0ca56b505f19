"""Shares of micro-batches in a replica's loss and gradients, as the reference has them or mistaken.

With replicas r = 1..W, micro-batches a = 1..A, sums of losses s_ra, their gradients G_ra and counts n_ra,
a replica's local loss and gradient are sum_a c_ra s_ra and sum_a c_ra G_ra, where c_ra is

    a mean over each micro-batch ("ddp")    1 / (A n_ra)
    a sum over each micro-batch             1 / A
    a mean over each rank                   1 / sum_a n_ra
    one mean over all ranks ("global")      W / sum_ra n_ra
"""

from collections.abc import Iterator

import numpy as np

from jaxddp.parity.catalogue.optimizer import COUNTED
from jaxddp.parity.deviation import Deviation, Statement, Value

MICRO_BATCH, RANK, ALL = "micro_batch", "rank", "global"
STALE = Deviation("stale_parameters", Statement("stale_gradients"))
# Over each micro-batch.
SUMMED = Deviation("loss_scale", Statement("summed"), (Value("sum", "mean", key=COUNTED),))
# Range of a mean -> the fault of a port that has it in place of the reference's.
OVER = {MICRO_BATCH: "mean_per_micro_batch", RANK: "mean_per_rank", ALL: "global_mean"}


def over_of(loss_normalization: str) -> str:
    """Return the range of the reference's mean."""
    return ALL if loss_normalization == "global" else MICRO_BATCH


def other_means(reference: str, world_size: int, micro_batches: int) -> Iterator[tuple[str, Deviation]]:
    """Yield each mean that differs from the reference's: its range, and the fault.

    >>> [over for over, _ in other_means(MICRO_BATCH, 2, 1)], [over for over, _ in other_means(ALL, 2, 1)]
    (['global'], ['rank'])
    """
    distinct = [MICRO_BATCH] * (micro_batches > 1) + [RANK] + [ALL] * (world_size > 1)
    for over in distinct:
        if over != (reference if reference in distinct else RANK):
            yield over, Deviation(OVER[over], Statement("other_mean", jax=over, torch=reference))


def not_divided(micro_batches: int) -> tuple[Deviation, float]:
    """Return micro-batches that are added up, and the factor of the gradients."""
    what = Statement("micro_batches_added", micro_batches=micro_batches)
    return Deviation("accumulation_not_divided", what), micro_batches


def summed_in_loss(world_size: int) -> tuple[Deviation, float]:
    """Return a loss that is summed over the replicas, and the factor of the local gradients."""
    what = Statement("summed_in_loss", replicas=world_size)
    return Deviation("collective_in_loss", what, (Value(f"{world_size}", "1", is_factor=True),)), world_size


def weights(over: str, counts: np.ndarray) -> np.ndarray:
    """Return c_ra, see the module's docstring.

    Args:
        over: range of the mean, a key of `OVER`; "": a sum over each micro-batch.
        counts: n_ra, (W, A).
    """
    if over == MICRO_BATCH:
        return 1 / (counts.shape[1] * counts)
    if over == RANK:
        return np.broadcast_to(1 / counts.sum(1, keepdims=True), counts.shape)
    if over == ALL:
        return np.full(counts.shape, counts.shape[0] / counts.sum())
    return np.full(counts.shape, 1 / counts.shape[1])
