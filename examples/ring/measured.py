"""Results of the ring and the collectives in both frameworks, and the claims about them."""

from typing import Any

import numpy as np

from examples.arrays import distance, of_all_ranks
from examples.claims import Claim
from examples.ring import in_jax, in_torch
from examples.ring.inputs import COLLECTIVES, Arrays
from jaxddp.config.options import Platform
from jaxddp.distributed.replicas import Replicas
from torch_ref.config import TorchConfig
from torch_ref.launch import launch

Results = dict[str, Any]  # "ring": buffer -> arrays by name; "collectives": name -> array; of all replicas, (N, ...)
ROUNDING = 1e-15  # relative to the largest sum, float64; measured: 1.4e-16, from the order of summation


def of_jax(replicas: Replicas) -> Results:
    """Run jaxddp's ring and collectives."""
    return {"ring": in_jax.ring(replicas), "collectives": in_jax.talk(replicas)}


def of_torch(replicas: int, platform: Platform = "cpu") -> Results:
    """Run torch's ring and collectives."""
    return of_all_ranks(launch(in_torch.talk, TorchConfig(devices=replicas, platform=platform)))


def ring_error(results: Results) -> float:
    """Return the largest `distance` of the ring's sums from all-reduce's, over all buffers."""
    return max(distance(of["ring"], of["all_reduce"]) for of in results["ring"].values())


def share_sent(results: Results, buffer: str) -> float:
    """Return the bytes that a replica sends, relative to the size of the buffer."""
    of = results["ring"][buffer]
    return float(of["bytes"].max() / of["ring"][0].nbytes)


def share_summed(results: Results, half: int) -> float:
    """Return the share of the buffer that holds the complete sum on a replica after `half` times N-1 steps."""
    steps = results["ring"]["large"]["steps"]
    held = steps[:, half * (len(steps) - 1)]
    return float(np.isclose(held, steps[:, -1], rtol=1e-12, atol=0).mean(axis=(1, 2)).max())


def step_distance(ours: Results, theirs: Results) -> float:
    """Return the largest `distance` between the frameworks' chunks after any step, over all buffers."""
    return max(distance(ours["ring"][name]["steps"], of["steps"]) for name, of in theirs["ring"].items())


def different(ours: Arrays, theirs: Arrays) -> list[str]:
    """Return the collectives whose results differ from torch's."""
    return [name for name in COLLECTIVES if not np.array_equal(ours[name], theirs[name])]


def claims(ours: Results, theirs: Results) -> list[Claim]:
    """Return the claims about both frameworks."""
    both, n = (ours, theirs), len(ours["collectives"]["broadcast"])
    errors = [ring_error(results) for results in both]
    even, uneven = ([share_sent(results, name) for results in both] for name in ("even", "uneven"))
    first, second = ([share_summed(results, half) for results in both] for half in (1, 2))
    apart, wrong = step_distance(ours, theirs), different(ours["collectives"], theirs["collectives"])
    padded = 2 * (n - 1) * 2 / (2 * n - 1)  # 2 (N-1) chunks of 2 numbers, for 2 N - 1 numbers
    return [
        Claim("the ring's sums equal all-reduce's: largest difference", max(errors) <= ROUNDING, *errors),
        Claim("both frameworks hold the same after each step: largest difference", apart <= ROUNDING, apart),
        Claim("a replica sends 2 (N-1)/N of the buffer", even == [2 * (n - 1) / n] * 2, *even),
        Claim("and somewhat more if N does not divide the buffer", uneven == [padded] * 2, *uneven),
        Claim("after N-1 steps a replica holds the complete sum of 1/N of the buffer", first == [1 / n] * 2, *first),
        Claim("after N-1 more steps, of the whole buffer", second == [1.0, 1.0], *second),
        Claim("no collective's result differs between the frameworks", not wrong, len(wrong)),
    ]
