"""Metrics as sums and counts: added up on each rank, reduced once, divided last."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ref.distributed import World
from torch_ref.losses import Sums


def all_reduce_sums(steps: Sequence[Sums], world: World) -> list[dict[str, float]]:
    """Each step's sums over all ranks, in float64 and with one collective for all steps.

    >>> all_reduce_sums([{"loss": torch.tensor(6.0), "count": torch.tensor(4)}], World())
    [{'loss': 6.0, 'count': 4.0}]
    """
    if not steps:
        return []
    values: Tensor = torch.stack([torch.stack([value.double() for value in sums.values()]) for sums in steps])
    return [dict(zip(steps[0], row, strict=True)) for row in world.all_reduce(values).tolist()]


def total(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The sums of all steps together.

    >>> total([{"loss": 6.0, "count": 4.0}, {"loss": 2.0, "count": 1.0}])
    {'loss': 8.0, 'count': 5.0}
    """
    return {name: sum(sums[name] for sums in steps) for name in steps[0]}


def means(sums: dict[str, float]) -> dict[str, float]:
    """Every sum divided by the count: {"loss": sum l / n, ...}.

    >>> means({"count": 4.0, "loss": 2.0, "accuracy": 3.0})
    {'loss': 0.5, 'accuracy': 0.75}
    """
    count = sums["count"]
    return {name: value / count if count else math.nan for name, value in sums.items() if name != "count"}
