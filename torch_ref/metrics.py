"""Metrics as sums and counts: summed on each rank, reduced once, divided last."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jaxddp.config.choices import COUNT_OF
from jaxddp.tracking.gradient_metrics import norms, of_gradients, of_step
from torch_ref.distributed import World
from torch_ref.losses import Sums


def all_reduce_sums(steps: Sequence[Sums], world: World) -> list[dict[str, float]]:
    """Sum each step's metrics over all ranks, in float64 and with one collective for all steps.

    >>> all_reduce_sums([{"loss": torch.tensor(6.0), "count": torch.tensor(4)}], World())
    [{'loss': 6.0, 'count': 4.0}]
    """
    if not steps:
        return []
    values: Tensor = torch.stack([torch.stack([value.double() for value in sums.values()]) for sums in steps])
    reduced = [dict(zip(steps[0], row, strict=True)) for row in world.all_reduce(values).tolist()]
    return [
        {name: value / world.world_size if of_step(name) else value for name, value in sums.items()} for sums in reduced
    ]


def total(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sum over all steps, without steps that were skipped because their loss is not finite.

    >>> total([{"loss": 6.0, "count": 4.0}, {"loss": 2.0, "count": 1.0}])
    {'loss': 8.0, 'count': 5.0}
    """
    finite = [sums for sums in steps if math.isfinite(sums["loss"])]
    totals = {name: sum(sums[name] for sums in finite) for name in steps[0]}
    return totals | {name: sum(sums[name] for sums in steps) for name in steps[0] if name == "skipped"}


def means(sums: dict[str, float]) -> dict[str, float]:
    """Divide every sum by the count, or by its own: {"loss": sum l / n, ...}, without metrics that are not sums.

    >>> means({"count": 4.0, "loss": 2.0, "accuracy": 3.0})
    {'loss': 0.5, 'accuracy': 0.75}
    """
    counts = {name: sums.get(COUNT_OF + name, sums["count"]) for name in sums}
    others = ("count", *(COUNT_OF + name for name in sums))
    of_elements = {n: x for n, x in sums.items() if n not in others and not of_step(n) and not of_gradients(n)}
    return {name: value / counts[name] if counts[name] else math.nan for name, value in of_elements.items()}


def step_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of one step: the means, and metrics that are not means, such as gradient norms."""
    return means(sums) | {name: value for name, value in sums.items() if of_step(name)} | norms(sums)
