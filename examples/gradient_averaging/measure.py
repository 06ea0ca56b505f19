"""What the document claims of gradients, measured in JAX and in torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from examples.arrays import part_off
from examples.claims import Claim
from examples.gradient_averaging import in_jax, in_torch, steps
from examples.gradient_averaging.differences import SUMS_TO_ZERO, Difference, differences, worst
from examples.gradient_averaging.problem import PER_REPLICA, Arrays, batch, parameters, split, state_dict
from jaxddp import Replicas

SAME_DRAWS = 1e-6  # measured: 2.4e-7
SAME = {"float64": 1e-13, "float32": 1e-4}  # of a gradient's largest element; measured: 2e-15, 6e-7
SAME_GRADIENT = 1e-13  # ||a - b|| / ||b||; measured: 6e-16
ANOTHER_GRADIENT = 1e-2  # measured: from 0.10


@dataclass(frozen=True)
class Written:
    """Gradients of one batch with respect to everything, in each framework.

    Attributes:
        jax, torch: those written by hand, against autodiff's.
        of_jax, of_torch: autodiff's.
    """

    jax: dict[str, Difference]
    torch: dict[str, Difference]
    of_jax: Arrays
    of_torch: Arrays


def written(dtype: str) -> Written:
    """Differentiate the document's loss by hand and automatically."""
    given = parameters(), batch(PER_REPLICA), dtype
    of_jax, of_torch = in_jax.by_autodiff(*given), in_torch.by_autodiff(*given)
    by_hand = differences(in_jax.by_hand(*given), of_jax), differences(in_torch.by_hand(*given), of_torch)
    return Written(*by_hand, of_jax, of_torch)


def of_draws() -> Claim:
    """Are the parameters torch's?"""
    ours, theirs = parameters(), in_torch.drawn()
    largest = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    return Claim("the parameters are those that torch draws for the seed", largest < SAME_DRAWS, largest)


def of_written(found: Written, dtype: str) -> list[Claim]:
    """Is every gradient right?"""
    errors = worst(found.jax), worst(found.torch)
    claims = [Claim(f"every hand-written gradient is autodiff's, {dtype}", max(errors) < SAME[dtype], *errors)]
    if dtype == "float64":
        between = worst(differences(found.of_jax, found.of_torch))
        claims.append(Claim("every gradient of JAX's autodiff is torch's, float64", between < SAME[dtype], between))
        for name, terms in SUMS_TO_ZERO.items():
            sizes = [
                float(np.abs(side[name]).max() / np.abs(side[terms]).max()) for side in (found.of_jax, found.of_torch)
            ]
            claims.append(Claim(f"the gradient of {name} is 0 but for rounding", max(sizes) < SAME[dtype], *sizes))
    return claims


def of_one_over_n(world_sizes: Sequence[int]) -> list[Claim]:
    """Where the mean over the batch is in the gradient, and what the mean over replicas makes of it."""
    claims = []
    for count in (1, *world_sizes):
        size = count * PER_REPLICA
        examples = batch(size)
        whole = _of_logprobs(examples)
        labels = np.eye(whole[0].shape[1])[examples["y"]]
        errors = [float(np.abs(size * found + labels).max()) for found in whole]
        says = f"d loss / d logprobs is -1/{size} at the labels of {size} examples, else 0"
        claims.append(Claim(says, max(errors) < SAME["float64"], *errors))
        if count > 1:
            parts = zip(*map(_of_logprobs, split(examples, count)), strict=True)
            errors = [float(np.abs(size * np.concatenate(part) / count + labels).max()) for part in parts]
            says = f"  and so is the mean of what {count} replicas of {PER_REPLICA} have"
            claims.append(Claim(says, max(errors) < SAME["float64"], *errors))
    return claims


def _of_logprobs(examples: Arrays) -> tuple[np.ndarray, np.ndarray]:
    given = parameters(), examples, "float64"
    return in_jax.by_autodiff(*given)["logprobs"], in_torch.by_autodiff(*given)["logprobs"]


def by_share(sizes: Sequence[int], count: int) -> dict[int, float]:
    """How far the mean of `count` replicas' gradients is from the whole batch's, by the examples of a replica.

    Of the document's own model, by hand, in NumPy.
    """
    p = {name: array.astype(np.float64) for name, array in parameters().items()}

    def gradient(examples: Arrays) -> Arrays:
        found = steps.backward(np, p, examples["x"], examples["y"])
        return {name: found[name] for name in p}

    far = {}
    for size in sizes:
        whole = batch(count * size)
        parts = [gradient(part) for part in split(whole, count)]
        far[size] = part_off({name: np.mean([part[name] for part in parts], axis=0) for name in p}, gradient(whole))
    return far


@dataclass(frozen=True)
class Shared:
    """Gradients of a batch that replicas share, by which BatchNorm there is, and of one replica that has all of it.

    Attributes:
        count: how many they are.
        devices, device: JAX's.
        ranks, process: torch's; not with synchronised BatchNorm.
    """

    count: int
    devices: dict[str, Arrays]
    device: dict[str, Arrays]
    ranks: dict[str, Arrays]
    process: dict[str, Arrays]


def shared(devices: Sequence[jax.Device], platform: str) -> Shared:
    """Differentiate on all devices, and on one.

    Args:
        devices: at least 2.
        platform: where torch's ranks run, "cpu" or "gpu".
    """
    count = len(devices)
    size = count * PER_REPLICA
    ranks, process = (in_torch.gradients_of_ranks(size, world_size, platform) for world_size in (count, 1))
    return Shared(
        count,
        {norm: on_devices(norm, size, devices) for norm in ("none", "local", "synchronised")},
        {norm: on_devices(norm, size, devices[:1]) for norm in ("none", "local")},
        ranks,
        process,
    )


def on_devices(norm: str, size: int, devices: Sequence[jax.Device]) -> Arrays:
    """The gradient of `size` examples that JAX's devices share."""
    weights = state_dict(parameters(), batch_norm=norm != "none")
    return in_jax.gradient_of_replicas(norm, weights, batch(size), Replicas(devices))


def of_replicas(found: Shared) -> list[Claim]:
    """Is the gradient of N replicas that of one with the whole batch?"""
    devices, device, ranks, process = found.devices, found.device, found.ranks, found.process
    none, local = (
        (part_off(devices[norm], device[norm]), part_off(ranks[norm], process[norm])) for norm in ("none", "local")
    )
    synchronised = tuple(part_off(devices["synchronised"], one["local"]) for one in (device, process))
    between = max(part_off(devices[norm], ranks[norm]) for norm in ranks)
    count = found.count
    same = f"{count} devices have the gradient of one with {count} x the batch"
    return [
        Claim(f"{same}: no BatchNorm", max(none) < SAME_GRADIENT, *none),
        Claim("  and not if each has a BatchNorm of its own", min(local) > ANOTHER_GRADIENT, *local),
        Claim("  but with synchronised BatchNorm", max(synchronised) < SAME_GRADIENT, *synchronised),
        Claim(f"{count} devices of JAX have the gradient of {count} ranks of DDP", between < SAME_GRADIENT, between),
    ]
