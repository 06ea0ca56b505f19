"""What is trained, and on how many replicas; knows no framework."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from jaxddp.data import datasets
from jaxddp.data.datasets import Dataset
from jaxddp.errors import InputError
from torch_ref.config import TorchConfig

FEATURES, CLASSES = 784, 10


@dataclass(frozen=True)
class Options:
    """Examples per second on 1, 2, 4, ... and all devices of this machine, with the same batch on each."""

    framework: Literal["both", "jax", "torch"] = "both"
    """Who trains; under torchrun: torch."""
    hidden_sizes: tuple[int, ...] = (1024, 1024)
    """Widths of the multilayer perceptron's hidden layers."""
    batch_per_replica: int = 256
    """Examples of a replica and step; they lie on the devices from the start."""
    steps: int = 20
    """Optimizer steps of a round."""
    rounds: int = 5
    """Rounds that are timed, of which the median counts; one before them is not."""
    devices: int | None = None
    """How many at most. None: all GPUs, or 2 CPU devices."""
    platform: Literal["cpu", "gpu"] | None = None
    """None: GPUs where there are any."""

    def __post_init__(self) -> None:
        for name in ("batch_per_replica", "steps", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")

    def config(self, world_size: int | None) -> TorchConfig:
        """The job on so many replicas; None: on as many as there are."""
        return TorchConfig(
            model="mlp",
            hidden_sizes=self.hidden_sizes,
            dataset="linear",
            num_features=FEATURES,
            num_classes=CLASSES,
            num_examples=self.batch_per_replica,
            devices=world_size,
            platform=self.platform,
        )

    def batch(self) -> Dataset:
        """The examples of a replica; that all have the same takes no time off a step."""
        return datasets.load(self.config(None))

    def examples_per_second(self, world_size: int, round_of_steps: Callable[[], object]) -> float:
        """The median speed of `round_of_steps`, which returns when all replicas have made their steps."""
        round_of_steps()
        seconds = []
        for _ in range(self.rounds):
            started = perf_counter()
            round_of_steps()
            seconds.append(perf_counter() - started)
        return world_size * self.batch_per_replica * self.steps / statistics.median(seconds)


def world_sizes(most: int) -> list[int]:
    """The powers of 2 below a number, and the number.

    >>> world_sizes(6)
    [1, 2, 4, 6]
    """
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def table(speeds: dict[str, dict[int, float]]) -> str:
    """Speeds, and their share of as many times one replica's, by framework and world size.

    >>> print(table({"JAX": {1: 1000.0, 2: 1900.0}}))
    replicas        JAX examples/s
    1                 1,000   100%
    2                 1,900    95%
    """
    lines = ["replicas" + "".join(f"{side + ' examples/s':>22}" for side in speeds)]
    for size in next(iter(speeds.values())):
        columns = [f"{found[size]:>15,.0f}{found[size] / size / found[1]:>7.0%}" for found in speeds.values()]
        lines.append(f"{size:<8}" + "".join(columns))
    return "\n".join(lines)
