"""What hooks do in both frameworks, and what holds of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from examples.arrays import of_all_ranks, part_off
from examples.claims import Claim
from examples.gradient_hooks import in_jax, in_torch
from examples.gradient_hooks.settings import CONFIG, POISONED, POISONED_REPLICA
from jaxddp.distributed.replicas import Replicas
from jaxddp.tracking.gradient_metrics import histograms, norms
from torch_ref.launch import launch

Found = dict[str, Any]  # what `in_jax.hooked` returns
Gradients = Mapping[str, np.ndarray]  # parameter -> (W, ...)
ROUNDING = 1e-12  # relative, float64; measured: 2e-16


def of_jax(replicas: Replicas) -> Found:
    """Hooks in JAX."""
    return in_jax.hooked(replicas)


def of_torch() -> Found:
    """Hooks in torch, on all ranks."""
    of_ranks = launch(in_torch.hooked, CONFIG)
    gathered = {what: of_all_ranks([of_rank[what] for of_rank in of_ranks]) for what in ("seen", "clipped")}
    return of_ranks[0] | gathered


def spread(gradients: Gradients) -> float:
    """How far the replicas are from their mean."""
    return part_off(gradients, _mean(gradients))


def _mean(gradients: Gradients) -> dict[str, np.ndarray]:
    return {name: np.broadcast_to(of.mean(axis=0), of.shape) for name, of in gradients.items()}


def log_difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """The largest relative difference of two logs' norms; infinite if a histogram differs."""
    if histograms(ours) != histograms(theirs):
        return np.inf
    return max(abs(norm / norms(theirs)[name] - 1) for name, norm in norms(ours).items())


def gradients_before_the_first_message(order: list[str]) -> int:
    """How far the backward pass has come when torch sends for the first time."""
    return order.index(in_torch.SENT)


def claims(ours: Found, theirs: Found) -> list[Claim]:
    """What holds of both."""
    both = (ours, theirs)
    local, mean = ([found["seen"][when] for found in both] for when in ("local", "mean"))
    before, after = ([found["clipped"][when] for found in both] for when in ("local", "mean"))
    of_mean = [part_off(a, _mean(b)) for a, b in zip(mean, local, strict=True)]
    apart = max(part_off(*pair) for pair in (local, mean, before, after))
    spreads = [[spread(of) for of in when] for when in (local, mean)]
    clips = [part_off(*pair) for pair in zip(before, after, strict=True)]
    logs = log_difference(ours["logged"], theirs["logged"])
    told = [f"replica {POISONED_REPLICA}" if found["told"].startswith(expected()) else "no" for found in both]
    count, early = len(local[0]), gradients_before_the_first_message(theirs["order"])
    at_once = ours["all_reduces"] == 1
    return [
        Claim("before the mean each replica sees its own gradient: spread", min(spreads[0]) > 0.1, *spreads[0]),
        Claim("after it all see the same: spread", max(spreads[1]) == 0, *spreads[1]),
        Claim("which is the mean of their own: difference", max(of_mean) < ROUNDING, *of_mean),
        Claim("clipped before the mean and clipped after it are two things: difference", min(clips) > 0.1, *clips),
        Claim("in all of this JAX's gradients are torch's: difference", apart < ROUNDING, apart),
        Claim("so are the logged norms; histograms are equal: difference", logs < ROUNDING, logs),
        Claim(f"a NaN in {POISONED} is traced to it, and to its replica", "no" not in told, *told),
        Claim(
            "gradients that there are when the first are sent (torch: small buckets)",
            at_once and early < count,
            f"{count if at_once else '?'} of {count}",
            f"{early} of {count}",
        ),
    ]


def expected() -> str:
    """How a report of the planted NaN begins."""
    return f"the gradient of {POISONED} on replica {POISONED_REPLICA} is NaN"
