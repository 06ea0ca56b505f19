"""Settings of the runs, the three ways to train, and the record of a run."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from tyro.conf import FlagCreatePairsOff

from jaxddp.config.options import Platform
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError, check_name

OPTIMIZERS = ("sgd", "adam", "adagrad", "rmsprop")
ONE, MANY, DDP = "one device", "many devices", "DDP"  # DDP: one process per device
WAYS = (ONE, MANY, DDP)
FRAMEWORKS = ("jax", "torch")

Switch = Annotated[bool, FlagCreatePairsOff]


@dataclass(frozen=True)
class Settings:
    """A linear classifier of random examples, and its training."""

    num_examples: int = 100
    """Number of examples, drawn from a normal distribution, each with a random label."""
    dim: int = 42
    """Features per example."""
    num_labels: int = 13
    """Number of labels."""
    batch_size: int = 5
    """Examples per device and step."""
    opt: str = "adam"
    """sgd | adam | adagrad | rmsprop; adam is AdamW, with torch's weight decay of 0.01."""
    lr: float = 1.0
    """Learning rate of one process; for sgd, DDP multiplies it by the number of devices."""
    eps: float = 0.0
    """Term that an optimizer adds to the root; with 0 its updates do not depend on the scale of gradients."""
    epochs: int = 3
    """Passes over the examples."""
    drop_last: Switch = False
    """With DDP, drop examples instead of repeating some."""
    no_shuffle: Switch = False
    """Keep the order of the examples."""
    seed: int = 42
    """Seed of weights, examples, labels and order."""

    def __post_init__(self) -> None:
        check_name("--opt", self.opt, OPTIMIZERS)
        for name in ("num_examples", "dim", "num_labels", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("lr", "eps"):
            if not 0 <= getattr(self, name) < np.inf:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least 0 and finite")
        Generator(self.seed)  # refuses seeds out of range

    @property
    def optimizer_options(self) -> dict[str, float]:
        """Keyword arguments of the optimizer, in torch and in jaxddp."""
        return {"lr": self.lr} if self.opt == "sgd" else {"lr": self.lr, "eps": self.eps}


@dataclass(frozen=True)
class Options(Settings):
    """Compare the updates of one device, of many, and of DDP, in JAX and in PyTorch."""

    devices: int = 2
    """Number of devices that share a batch."""
    platform: Platform | None = None
    """cpu or gpu, for JAX; left out: GPUs if there are enough."""
    framework: str = "both"
    """jax | torch | both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("--framework", self.framework, (*FRAMEWORKS, "both"))
        if self.platform is not None:
            check_name("--platform", self.platform, ("cpu", "gpu"))
        if self.devices < 2:
            raise InputError(f"--devices {self.devices}: must be at least 2")
        if self.num_examples < self.devices:
            raise InputError(f"--num-examples {self.num_examples}: must be at least 1 per device ({self.devices})")

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Frameworks to run."""
        return FRAMEWORKS if self.framework == "both" else (self.framework,)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        settings: the settings; `batch_size` is per process, `lr` the optimizer's.
        way: one of `WAYS`.
        devices: number of devices; 1 for `ONE`.
        dtype: dtype of all floating-point numbers, which are drawn in float32.
        reduction: reduction of a batch's losses, "sum" or "mean"; only "sum" for `MANY`.
    """

    settings: Settings
    way: str
    devices: int
    dtype: str = "float32"
    reduction: str = "sum"


def same_updates(settings: Settings, way: str, devices: int) -> Case:
    """Return the run with the updates of one device on batches of `devices * settings.batch_size` examples.

    Args:
        settings: the settings; `lr` is for one process, `batch_size` per device.
        way: one of `WAYS`.
        devices: number of devices that share a batch.
    """
    if way != DDP:
        whole_batch = replace(settings, batch_size=devices * settings.batch_size)
        return Case(whole_batch, way, devices if way == MANY else 1)
    # DDP averages the processes' sums. Optimizers that divide the gradient by its size are unaffected.
    factor = devices if settings.opt == "sgd" else 1
    return Case(replace(settings, lr=factor * settings.lr), way, devices)


class Epoch(NamedTuple):
    """Summary of an epoch.

    Attributes:
        steps: number of steps.
        loss: mean loss of a step.
        accuracy: accuracy in per cent, repeated examples counted each time.
        accuracy_once: accuracy in per cent with each example counted once.
    """

    steps: int
    loss: float
    accuracy: float
    accuracy_once: float


@dataclass(frozen=True)
class Record:
    """Results of a run.

    Attributes:
        first_loss: loss of the first process's first batch.
        reduced_loss: loss of the first batches of all processes.
        gradient: element [0, 0] of the optimizer's first gradient.
        weights: weights before the first step and after each, (steps + 1, num_labels, dim).
        epochs: summary of each epoch.
    """

    first_loss: float
    reduced_loss: float
    gradient: float
    weights: np.ndarray
    epochs: list[Epoch]


def distance(one: Record, other: Record) -> float:
    """Return the largest difference of any weight after any step, relative to the weights' largest change so far."""
    moved = np.abs(other.weights[1:] - other.weights[0]).max(axis=(1, 2))
    apart = np.abs(one.weights[1:] - other.weights[1:]).max(axis=(1, 2))
    return float((apart / moved).max())
