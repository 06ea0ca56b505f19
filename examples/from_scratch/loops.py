"""The loops around a SimpleDDP, right and wrong: the same words in every framework."""

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from examples.from_scratch.problem import ACCUMULATION
from examples.from_scratch.skeleton import Skeleton

DDP = TypeVar("DDP", bound=Skeleton)


def train(ddp: DDP, batches: Sequence[Any]) -> DDP:
    """One optimizer step for each batch; within `ddp.no_sync()` every replica trains for itself."""
    for batch in batches:
        ddp.backward(batch)
        ddp.sync_gradients()
        ddp.step()
    return ddp


def accumulate(
    ddp: Skeleton, micro_batches: Sequence[Any], *, divided: bool = True, on_first: bool = False
) -> list[int]:
    """One optimizer step for each `ACCUMULATION` micro-batches, whose gradients are sent once.

    Args:
        divided: each micro-batch counts 1 / ACCUMULATION, so that their sum is the mean; without it a mistake.
        on_first: step on the first micro-batch of each group instead of the last: a mistake.

    Returns:
        Of how many micro-batches each step was made, and last how many no step was made of.
    """
    stepping, taken = 0 if on_first else ACCUMULATION - 1, [0]
    for number, batch in enumerate(micro_batches):
        steps = number % ACCUMULATION == stepping
        with contextlib.nullcontext() if steps else ddp.no_sync():
            ddp.backward(batch, 1 / ACCUMULATION if divided else 1.0)
            ddp.sync_gradients()
        taken[-1] += 1
        if steps:
            ddp.step()
            taken.append(0)
    return taken


def milliseconds(ddp: Skeleton, batches: Sequence[Any], rounds: int = 3) -> float:
    """Time of a training step: the median of `rounds` passes over the batches, after one that does not count.

    A pass ends when all of its work is done, and not when all of it has been asked for.
    """
    train(ddp, batches).wait()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        train(ddp, batches).wait()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds) / len(batches)
