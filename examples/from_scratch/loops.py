"""Training loops around a SimpleDDP, right and wrong, for either framework."""

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from examples.from_scratch.problem import ACCUMULATION
from examples.from_scratch.skeleton import Skeleton

DDP = TypeVar("DDP", bound=Skeleton)


def train(ddp: DDP, batches: Sequence[Any]) -> DDP:
    """Take one optimizer step per batch; within `ddp.no_sync()` every replica trains alone."""
    for batch in batches:
        ddp.backward(batch)
        ddp.sync_gradients()
        ddp.step()
    return ddp


def accumulate(
    ddp: Skeleton, micro_batches: Sequence[Any], *, divided: bool = True, on_first: bool = False
) -> list[int]:
    """Take one optimizer step per `ACCUMULATION` micro-batches, and send gradients once per step.

    Args:
        ddp: the replicas.
        micro_batches: batches for `ddp.backward`.
        divided: scale each micro-batch by 1 / ACCUMULATION, so that the sum is the mean; False is a mistake.
        on_first: step on the first micro-batch of each group instead of the last; True is a mistake.

    Returns:
        The number of micro-batches in each step, followed by the number left over.
    """
    stepping, taken = 0 if on_first else ACCUMULATION - 1, [0]
    for number, batch in enumerate(micro_batches):
        steps_now = number % ACCUMULATION == stepping
        with contextlib.nullcontext() if steps_now else ddp.no_sync():
            ddp.backward(batch, 1 / ACCUMULATION if divided else 1.0)
            ddp.sync_gradients()
        taken[-1] += 1
        if steps_now:
            ddp.step()
            taken.append(0)
    return taken


def milliseconds(ddp: Skeleton, batches: Sequence[Any], rounds: int = 3) -> float:
    """Time a training step: the median of `rounds` passes over the batches, after a warm-up pass.

    A pass ends when all of its work is done, not when all of it is dispatched.
    """
    train(ddp, batches).wait()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        train(ddp, batches).wait()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds) / len(batches)
