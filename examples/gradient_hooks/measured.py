"""Results of hooks in both frameworks, and the claims about them."""

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

Results = dict[str, Any]  # returned by `in_jax.hooked`
Gradients = Mapping[str, np.ndarray]  # parameter -> (W, ...)
ROUNDING = 1e-12  # relative, float64; measured: 2e-16


def of_jax(replicas: Replicas) -> Results:
    """Run hooks in JAX."""
    return in_jax.hooked(replicas)


def of_torch() -> Results:
    """Run hooks in torch, on all ranks."""
    of_ranks = launch(in_torch.hooked, CONFIG)
    gathered = {key: of_all_ranks([of_rank[key] for of_rank in of_ranks]) for key in ("seen", "clipped")}
    return of_ranks[0] | gathered


def spread(gradients: Gradients) -> float:
    """Return the relative distance of the replicas' gradients from their mean."""
    return part_off(gradients, _mean(gradients))


def _mean(gradients: Gradients) -> dict[str, np.ndarray]:
    return {name: np.broadcast_to(of.mean(axis=0), of.shape) for name, of in gradients.items()}


def log_difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Return the largest relative difference of two logs' norms; infinity if a histogram differs."""
    if histograms(ours) != histograms(theirs):
        return np.inf
    return max(abs(norm / norms(theirs)[name] - 1) for name, norm in norms(ours).items())


def gradients_before_the_first_message(order: list[str]) -> int:
    """Count the gradients that torch has computed when it sends the first bucket."""
    return order.index(in_torch.SENT)


def claims(ours: Results, theirs: Results) -> list[Claim]:
    """Return the claims about both frameworks."""
    both = (ours, theirs)
    local, mean = ([results["seen"][when] for results in both] for when in ("local", "mean"))
    before, after = ([results["clipped"][when] for results in both] for when in ("local", "mean"))
    of_mean = [part_off(a, _mean(b)) for a, b in zip(mean, local, strict=True)]
    apart = max(part_off(*pair) for pair in (local, mean, before, after))
    spreads = [[spread(of) for of in when] for when in (local, mean)]
    clips = [part_off(*pair) for pair in zip(before, after, strict=True)]
    logs = log_difference(ours["logged"], theirs["logged"])
    traced = [f"replica {POISONED_REPLICA}" if of["nan_report"].startswith(expected()) else "no" for of in both]
    count, early = len(local[0]), gradients_before_the_first_message(theirs["order"])
    at_once = ours["all_reduces"] == 1
    return [
        Claim("before the mean each replica sees its own gradient: spread", min(spreads[0]) > 0.1, *spreads[0]),
        Claim("after the mean all replicas see the same: spread", max(spreads[1]) == 0, *spreads[1]),
        Claim("and that is the mean of their own gradients: difference", max(of_mean) < ROUNDING, *of_mean),
        Claim("clipping before the mean differs from clipping after it", min(clips) > 0.1, *clips),
        Claim("all of these gradients are equal in JAX and in torch: difference", apart < ROUNDING, apart),
        Claim("logged norms and histograms are equal too: difference", logs < ROUNDING, logs),
        Claim(f"a NaN in {POISONED} is traced to its parameter and replica", "no" not in traced, *traced),
        Claim(
            "gradients computed when the first are sent (torch: small buckets)",
            at_once and early < count,
            f"{count if at_once else '?'} of {count}",
            f"{early} of {count}",
        ),
    ]


def expected() -> str:
    """Return the beginning of a report of the planted NaN."""
    return f"the gradient of {POISONED} on replica {POISONED_REPLICA} is NaN"
