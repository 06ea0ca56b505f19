"""Claims about gradients, measured in JAX and in torch."""

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
from jaxddp.config.options import Platform

SAME_DRAWS = 1e-6  # measured: 2.4e-7
SAME = {"float64": 1e-13, "float32": 1e-4}  # relative to a gradient's largest element; measured: 2e-15, 6e-7
SAME_GRADIENT = 1e-13  # ||a - b|| / ||b||; measured: 6e-16
ANOTHER_GRADIENT = 1e-2  # measured: at least 0.10


@dataclass(frozen=True)
class Written:
    """Gradients of one batch with respect to every intermediate and parameter, in each framework.

    Attributes:
        jax, torch: differences between hand-written gradients and autodiff's.
        of_jax, of_torch: autodiff's gradients.
    """

    jax: dict[str, Difference]
    torch: dict[str, Difference]
    of_jax: Arrays
    of_torch: Arrays


def written(dtype: str) -> Written:
    """Differentiate the loss by hand and automatically."""
    inputs = parameters(), batch(PER_REPLICA), dtype
    of_jax, of_torch = in_jax.by_autodiff(*inputs), in_torch.by_autodiff(*inputs)
    by_hand = differences(in_jax.by_hand(*inputs), of_jax), differences(in_torch.by_hand(*inputs), of_torch)
    return Written(*by_hand, of_jax, of_torch)


def of_draws() -> Claim:
    """Claim that the parameters are torch's."""
    ours, theirs = parameters(), in_torch.drawn()
    largest = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    return Claim("the parameters are those that torch draws for the seed", largest < SAME_DRAWS, largest)


def of_written(written: Written, dtype: str) -> list[Claim]:
    """Claim that every gradient is right."""
    errors = worst(written.jax), worst(written.torch)
    claims = [Claim(f"every hand-written gradient equals autodiff's, {dtype}", max(errors) < SAME[dtype], *errors)]
    if dtype == "float64":
        sides = (written.of_jax, written.of_torch)
        between = worst(differences(*sides))
        claims.append(Claim("every gradient of JAX's autodiff equals torch's, float64", between < SAME[dtype], between))
        for name, terms in SUMS_TO_ZERO.items():
            sizes = [float(np.abs(side[name]).max() / np.abs(side[terms]).max()) for side in sides]
            claims.append(Claim(f"the gradient of {name} is 0 up to rounding", max(sizes) < SAME[dtype], *sizes))
    return claims


def of_one_over_n(world_sizes: Sequence[int]) -> list[Claim]:
    """Claim that the mean over the batch is a factor 1/n at the loss, which averaging over replicas completes."""
    claims = []
    for count in (1, *world_sizes):
        size = count * PER_REPLICA
        examples = batch(size)
        whole = _of_logprobs(examples)
        labels = np.eye(whole[0].shape[1])[examples["y"]]
        errors = [float(np.abs(size * gradient + labels).max()) for gradient in whole]
        says = f"d loss / d logprobs is -1/{size} at the labels of {size} examples, else 0"
        claims.append(Claim(says, max(errors) < SAME["float64"], *errors))
        if count > 1:
            parts = zip(*map(_of_logprobs, split(examples, count)), strict=True)
            errors = [float(np.abs(size * np.concatenate(part) / count + labels).max()) for part in parts]
            says = f"  and so is the mean over {count} replicas of {PER_REPLICA} examples"
            claims.append(Claim(says, max(errors) < SAME["float64"], *errors))
    return claims


def _of_logprobs(examples: Arrays) -> tuple[np.ndarray, np.ndarray]:
    inputs = parameters(), examples, "float64"
    return in_jax.by_autodiff(*inputs)["logprobs"], in_torch.by_autodiff(*inputs)["logprobs"]


def by_share(sizes: Sequence[int], count: int) -> dict[int, float]:
    """Compute the relative error of the mean of `count` replicas' gradients, by the number of examples per replica.

    The model has a BatchNorm; its gradients are the hand-written ones, in NumPy.
    """
    p = {name: array.astype(np.float64) for name, array in parameters().items()}

    def gradient(examples: Arrays) -> Arrays:
        gradients = steps.backward(np, p, examples["x"], examples["y"])
        return {name: gradients[name] for name in p}

    far = {}
    for size in sizes:
        whole = batch(count * size)
        parts = [gradient(part) for part in split(whole, count)]
        far[size] = part_off({name: np.mean([part[name] for part in parts], axis=0) for name in p}, gradient(whole))
    return far


@dataclass(frozen=True)
class Shared:
    """Gradients of a batch that replicas share, and of one replica with the full batch; by the kind of BatchNorm.

    Attributes:
        count: number of replicas.
        devices, device: gradients of all devices and of one, in JAX.
        ranks, process: gradients of all ranks and of one process, in torch; without synchronised BatchNorm.
    """

    count: int
    devices: dict[str, Arrays]
    device: dict[str, Arrays]
    ranks: dict[str, Arrays]
    process: dict[str, Arrays]


def shared(devices: Sequence[jax.Device], platform: Platform) -> Shared:
    """Differentiate on all devices, and on one.

    Args:
        devices: JAX's devices, at least 2.
        platform: platform of torch's ranks, "cpu" or "gpu".
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
    """Compute the gradient of `size` examples that JAX's devices share."""
    weights = state_dict(parameters(), batch_norm=norm != "none")
    return in_jax.gradient_of_replicas(norm, weights, batch(size), Replicas(devices))


def of_replicas(gradients: Shared) -> list[Claim]:
    """Claim that N replicas have the gradient of one replica with the full batch."""
    devices, device, ranks, process = gradients.devices, gradients.device, gradients.ranks, gradients.process
    none, local = (
        (part_off(devices[norm], device[norm]), part_off(ranks[norm], process[norm])) for norm in ("none", "local")
    )
    synchronised = tuple(part_off(devices["synchronised"], one["local"]) for one in (device, process))
    between = max(part_off(devices[norm], ranks[norm]) for norm in ranks)
    count = gradients.count
    same = f"{count} devices have the gradient of one with {count} x the batch"
    return [
        Claim(f"{same}: no BatchNorm", max(none) < SAME_GRADIENT, *none),
        Claim("  but not with a BatchNorm per device", min(local) > ANOTHER_GRADIENT, *local),
        Claim("  and again with synchronised BatchNorm", max(synchronised) < SAME_GRADIENT, *synchronised),
        Claim(f"{count} devices of JAX have the gradient of {count} ranks of DDP", between < SAME_GRADIENT, between),
    ]
