"""Measured steps of all cases in both frameworks, and the claims about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from examples.arrays import part_off
from examples.bubbles import in_jax, in_torch
from examples.bubbles.cases import (
    BALANCED,
    BATCH_NORM,
    IN_TURNS,
    LOSS_ALONE,
    LOSS_TOGETHER,
    REPLICAS,
    UNBALANCED,
    Plan,
)
from examples.bubbles.trace import Timeline, duration, timeline, waiting
from examples.claims import Claim
from jaxddp.distributed.replicas import Replicas
from torch_ref.config import TorchConfig
from torch_ref.launch import launch

ROUNDING = 1e-4  # of the gradient, float32; measured: 3e-6
LITTLE = 0.5  # times a long share of waiting is a short one
LONG = 0.1  # share of a step; measured: 0.2 and more


@dataclass(frozen=True)
class Measurement:
    """A case as one framework ran it.

    Attributes:
        steps: each step's timeline.
        gradient: the gradient of the last step.
    """

    steps: list[Timeline]
    gradient: NDArray[np.float32]

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of a step that each replica waits, (W,): the median over the steps."""
        return np.median([waiting(step) for step in self.steps], axis=0)

    @property
    def step(self) -> Timeline:
        """Most typical step: its duration and shares are nearest to the medians."""
        length = np.median([duration(step) for step in self.steps])

        def oddity(step: Timeline) -> float:
            return float(abs(duration(step) / length - 1) + np.abs(waiting(step) - self.shares).sum())

        return min(self.steps, key=oddity)


Cases = dict[str, Measurement]


def of_jax(plan: Plan, replicas: Replicas) -> Cases:
    """Measure the cases in JAX."""
    cases = in_jax.measure(plan, replicas)
    return {name: Measurement([timeline(marks) for marks in of["steps"]], of["gradient"]) for name, of in cases.items()}


def of_torch(plan: Plan) -> Cases:
    """Measure the cases in torch."""
    ranks = launch(partial(in_torch.measure, plan), TorchConfig(devices=REPLICAS, platform="cpu"))
    cases = {}
    for name in plan.cases:
        steps = zip(*(rank[name]["steps"] for rank in ranks), strict=True)
        cases[name] = Measurement([timeline(marks) for marks in steps], ranks[0][name]["gradient"].numpy())
    return cases


def claims(ours: Cases, theirs: Cases, all_reduces: Sequence[int]) -> list[Claim]:
    """Return the claims about both frameworks.

    Args:
        ours, theirs: the cases in JAX and in torch.
        all_reduces: number of all-reduces in a step of `jaxddp.DistributedDataParallel`, with loss normalisation
            "ddp" and "global".
    """
    both = (ours, theirs)
    idle = [float(of[UNBALANCED].shares[0]) for of in both]
    balanced = [float(of[BALANCED].shares.max()) for of in both]
    in_turns, batch_norm, alone, together = (
        [float(of[name].shares.mean()) for of in both] for name in (IN_TURNS, BATCH_NORM, LOSS_ALONE, LOSS_TOGETHER)
    )
    apart = part_off(*({name: case.gradient for name, case in of.items()} for of in both))
    normalised = [part_off(*({"": of[name].gradient} for name in (LOSS_ALONE, LOSS_TOGETHER))) for of in both]
    return [
        Claim("a replica with less work waits: share of the step", min(idle) > 2 * LONG, *idle),
        Claim("with equal work no replica waits as long", _less(balanced, idle, LITTLE), *balanced),
        Claim("nor if work evens out before the gradients are sent", _less(in_turns, batch_norm, LITTLE), *in_turns),
        Claim("but synchronised BatchNorm then waits at every all-reduce", min(batch_norm) > LONG, *batch_norm),
        Claim("and so does a loss that needs the global count first", min(alone) > LONG, *alone),
        Claim("with the count sent beside the gradients replicas wait less", _less(together, alone), *together),
        Claim("and the gradient is the same: difference", max(normalised) < ROUNDING, *normalised),
        Claim("jaxddp sends the count that way: all-reduces in a step", set(all_reduces) == {1}, max(all_reduces)),
        Claim("JAX's gradients equal torch's: difference", apart < ROUNDING, apart),
    ]


def _less(shares: Sequence[float], others: Sequence[float], part: float = 1.0) -> bool:
    return all(share < part * other for share, other in zip(shares, others, strict=True))
