"""Job, options and table of speeds; needs no framework."""

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
    """Measure examples per second on 1, 2, 4, ... and all devices of this machine, with the same batch on each."""

    framework: Literal["both", "jax", "torch"] = "both"
    """Framework that trains; under torchrun: torch."""
    hidden_sizes: tuple[int, ...] = (1024, 1024)
    """Widths of the multilayer perceptron's hidden layers."""
    batch_per_replica: int = 256
    """Examples per replica and step, placed on the devices beforehand."""
    steps: int = 20
    """Optimizer steps per round."""
    rounds: int = 5
    """Timed rounds, of which the median counts; a warm-up round precedes them."""
    devices: int | None = None
    """Largest number of devices. None: all GPUs, or 2 CPU devices."""
    platform: Literal["cpu", "gpu"] | None = None
    """None: GPUs if there are any."""

    def __post_init__(self) -> None:
        for name in ("batch_per_replica", "steps", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")

    def config(self, world_size: int | None) -> TorchConfig:
        """Return the job's configuration on `world_size` replicas; None: on all devices."""
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
        """Return a replica's examples; all replicas use the same, which makes no step faster."""
        return datasets.load(self.config(None))

    def examples_per_second(self, world_size: int, round_of_steps: Callable[[], object]) -> float:
        """Time `round_of_steps`, which returns when all replicas have taken their steps; return the median speed."""
        round_of_steps()
        seconds = []
        for _ in range(self.rounds):
            started = perf_counter()
            round_of_steps()
            seconds.append(perf_counter() - started)
        return world_size * self.batch_per_replica * self.steps / statistics.median(seconds)


def world_sizes(most: int) -> list[int]:
    """Return the powers of 2 below `most`, and `most`.

    >>> world_sizes(6)
    [1, 2, 4, 6]
    """
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def table(speeds: dict[str, dict[int, float]]) -> str:
    """Format speeds and scaling efficiency (1 replica = 100 %), by framework and world size.

    >>> print(table({"JAX": {1: 1000.0, 2: 1900.0}}))
    replicas        JAX examples/s
    1                 1,000   100%
    2                 1,900    95%
    """
    lines = ["replicas" + "".join(f"{side + ' examples/s':>22}" for side in speeds)]
    for size in next(iter(speeds.values())):
        columns = [f"{of[size]:>15,.0f}{of[size] / size / of[1]:>7.0%}" for of in speeds.values()]
        lines.append(f"{size:<8}" + "".join(columns))
    return "\n".join(lines)
