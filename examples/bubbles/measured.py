"""The steps of all cases in both frameworks, and what holds of them."""

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
LITTLE = 0.5  # of a share of waiting that is long
LONG = 0.1  # of a step; measured: 0.2 and more


@dataclass(frozen=True)
class Found:
    """A case in one framework.

    Attributes:
        steps: what each replica did in them.
        gradient: of the last.
    """

    steps: list[Timeline]
    gradient: NDArray[np.float32]

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of a step that each replica waits, the median of the steps."""
        return np.median([waiting(step) for step in self.steps], axis=0)

    @property
    def step(self) -> Timeline:
        """The one to show: whose length and shares are nearest to the medians."""
        length = np.median([duration(step) for step in self.steps])

        def oddity(step: Timeline) -> float:
            return float(abs(duration(step) / length - 1) + np.abs(waiting(step) - self.shares).sum())

        return min(self.steps, key=oddity)


Cases = dict[str, Found]


def of_jax(plan: Plan, replicas: Replicas) -> Cases:
    """The cases in JAX."""
    cases = in_jax.measure(plan, replicas)
    return {name: Found([timeline(marks) for marks in of["steps"]], of["gradient"]) for name, of in cases.items()}


def of_torch(plan: Plan) -> Cases:
    """The cases in torch."""
    ranks = launch(partial(in_torch.measure, plan), TorchConfig(devices=REPLICAS, platform="cpu"))
    found = {}
    for name in plan.cases:
        steps = zip(*(rank[name]["steps"] for rank in ranks), strict=True)
        found[name] = Found([timeline(marks) for marks in steps], ranks[0][name]["gradient"].numpy())
    return found


def claims(ours: Cases, theirs: Cases, all_reduces: Sequence[int]) -> list[Claim]:
    """What holds of both.

    Args:
        all_reduces: of a step of jaxddp's own, with the loss of each replica's mean, and with that of all examples.
    """
    both = (ours, theirs)
    idle = [float(of[UNBALANCED].shares[0]) for of in both]
    balanced = [float(of[BALANCED].shares.max()) for of in both]
    in_turns, batch_norm, alone, together = (
        [float(of[name].shares.mean()) for of in both] for name in (IN_TURNS, BATCH_NORM, LOSS_ALONE, LOSS_TOGETHER)
    )
    apart = part_off(*({name: found.gradient for name, found in of.items()} for of in both))
    normalised = [part_off(*({"": of[name].gradient} for name in (LOSS_ALONE, LOSS_TOGETHER))) for of in both]
    return [
        Claim("who has less to do waits: share of the step", min(idle) > 2 * LONG, *idle),
        Claim("with equal work nobody waits as long", _less(balanced, idle, LITTLE), *balanced),
        Claim("nor where work evens out before the gradients are sent", _less(in_turns, batch_norm, LITTLE), *in_turns),
        Claim("but there batch norm over all replicas waits each time", min(batch_norm) > LONG, *batch_norm),
        Claim("as the loss does, if the number of all examples comes first", min(alone) > LONG, *alone),
        Claim("beside the gradients the number makes them wait less", _less(together, alone), *together),
        Claim("and gives the same gradient: difference", max(normalised) < ROUNDING, *normalised),
        Claim("jaxddp sends it so: all-reduces of a step", set(all_reduces) == {1}, max(all_reduces)),
        Claim("both frameworks' gradients are the same: difference", apart < ROUNDING, apart),
    ]


def _less(shares: Sequence[float], others: Sequence[float], part: float = 1.0) -> bool:
    return all(share < part * other for share, other in zip(shares, others, strict=True))
