"""What the ring and the collectives do in both frameworks, and what holds of it."""

from typing import Any

import numpy as np

from examples.arrays import distance, of_all_ranks
from examples.claims import Claim
from examples.ring import in_jax, in_torch
from examples.ring.inputs import COLLECTIVES, Arrays
from jaxddp.distributed.replicas import Replicas
from torch_ref.config import TorchConfig
from torch_ref.launch import launch

Found = dict[str, Any]  # "ring": buffer -> what was found; "collectives": name -> results; of all replicas, (N, ...)
ROUNDING = 1e-15  # of the largest sum, float64; measured: 1.4e-16, as sums are made in another order


def of_jax(replicas: Replicas) -> Found:
    """What jaxddp's ring and collectives give."""
    return {"ring": in_jax.ring(replicas), "collectives": in_jax.talk(replicas)}


def of_torch(replicas: int, platform: str = "cpu") -> Found:
    """What torch's give."""
    return of_all_ranks(launch(in_torch.talk, TorchConfig(devices=replicas, platform=platform)))


def ring_error(found: Found) -> float:
    """The largest difference of the ring's sums and all-reduce's, of all buffers, relative to the largest sum."""
    return max(distance(of["ring"], of["all_reduce"]) for of in found["ring"].values())


def share_sent(found: Found, buffer: str) -> float:
    """What a replica sends, in buffers."""
    of = found["ring"][buffer]
    return float(of["bytes"].max() / of["ring"][0].nbytes)


def share_summed(found: Found, half: int) -> float:
    """How much of the buffer is the whole sum on a replica after N-1 steps, or after twice as many."""
    steps = found["ring"]["large"]["steps"]
    held = steps[:, half * (len(steps) - 1)]
    return float(np.isclose(held, steps[:, -1], rtol=1e-12, atol=0).mean(axis=(1, 2)).max())


def step_distance(ours: Found, theirs: Found) -> float:
    """The largest difference of what any replica holds after any step, relative to the largest number."""
    return max(distance(ours["ring"][name]["steps"], of["steps"]) for name, of in theirs["ring"].items())


def different(ours: Arrays, theirs: Arrays) -> list[str]:
    """The collectives whose results are not torch's."""
    return [name for name in COLLECTIVES if not np.array_equal(ours[name], theirs[name])]


def claims(ours: Found, theirs: Found) -> list[Claim]:
    """What holds of both."""
    both, n = (ours, theirs), len(ours["collectives"]["broadcast"])
    errors = [ring_error(found) for found in both]
    even, uneven = ([share_sent(found, name) for found in both] for name in ("even", "uneven"))
    first, second = ([share_summed(found, half) for found in both] for half in (1, 2))
    apart, wrong = step_distance(ours, theirs), different(ours["collectives"], theirs["collectives"])
    filled = 2 * (n - 1) * 2 / (2 * n - 1)  # 2 (N-1) chunks of 2 numbers, of 2 N - 1 numbers
    return [
        Claim("the ring's sums are all-reduce's: largest difference", max(errors) <= ROUNDING, *errors),
        Claim("after each step both frameworks hold the same: largest difference", apart <= ROUNDING, apart),
        Claim("a replica sends 2 (N-1)/N of the buffer", even == [2 * (n - 1) / n] * 2, *even),
        Claim("and somewhat more where N does not divide it", uneven == [filled] * 2, *uneven),
        Claim("after N-1 steps a replica has the whole sum of 1/N of the buffer", first == [1 / n] * 2, *first),
        Claim("after N-1 more it has it of all", second == [1.0, 1.0], *second),
        Claim("collectives whose results differ between the frameworks", not wrong, len(wrong)),
    ]
