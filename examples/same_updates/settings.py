"""What is trained, in which of three ways, and what a run tells of itself."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from tyro.conf import FlagCreatePairsOff

from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError, check_name

OPTIMIZERS = ("sgd", "adam", "adagrad", "rmsprop")
ONE, MANY, DDP = "one device", "many devices", "DDP"  # DDP: one process for each device
WAYS = (ONE, MANY, DDP)
FRAMEWORKS = ("jax", "torch")

Switch = Annotated[bool, FlagCreatePairsOff]


@dataclass(frozen=True)
class Settings:
    """A linear classifier of random examples, and its training.

    The names and defaults are those of the document's program.
    """

    num_examples: int = 100
    """Drawn from a normal distribution, each with a random label."""
    dim: int = 42
    """Numbers of an example."""
    num_labels: int = 13
    """Labels to choose from."""
    batch_size: int = 5
    """Of each device."""
    opt: str = "adam"
    """sgd | adam | adagrad | rmsprop; adam is AdamW, with torch's weight decay of 0.01."""
    lr: float = 1.0
    """The learning rate of one process; DDP takes it times the devices where --opt is sgd."""
    eps: float = 0.0
    """What an optimizer adds to the root; 0 makes it indifferent to the scale of gradients."""
    epochs: int = 3
    """Passes over the examples."""
    drop_last: Switch = False
    """With DDP, leave out examples instead of repeating some."""
    no_shuffle: Switch = False
    """Take the examples as they come."""
    seed: int = 42
    """Of weights, examples, labels and their order."""

    def __post_init__(self) -> None:
        check_name("--opt", self.opt, OPTIMIZERS)
        for name in ("num_examples", "dim", "num_labels", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("lr", "eps"):
            if not 0 <= getattr(self, name) < np.inf:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least 0 and finite")
        Generator(self.seed)  # knows which seeds there are

    @property
    def optimizer_options(self) -> dict[str, float]:
        """As torch and jaxddp call them."""
        return {"lr": self.lr} if self.opt == "sgd" else {"lr": self.lr, "eps": self.eps}


@dataclass(frozen=True)
class Options(Settings):
    """The same updates on one device, on many, and by DDP, in JAX and in PyTorch.

    The flags are those of the document's program, and three more.
    """

    devices: int = 2
    """How many share a batch."""
    platform: str | None = None
    """cpu or gpu, for JAX; left out: GPUs where there are enough."""
    framework: str = "both"
    """jax | torch | both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("--framework", self.framework, (*FRAMEWORKS, "both"))
        if self.platform is not None:
            check_name("--platform", self.platform, ("cpu", "gpu"))
        if self.devices < 2:
            raise InputError(f"--devices {self.devices}: must be at least 2, to be compared with one")
        if self.num_examples < self.devices:
            raise InputError(
                f"--num-examples {self.num_examples}: must be at least 1 for each of {self.devices} devices"
            )

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Those that were asked for."""
        return FRAMEWORKS if self.framework == "both" else (self.framework,)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        settings: `batch_size` is of each process, and `lr` as the optimizer gets it.
        way: one of `WAYS`.
        devices: that take part; 1 for `ONE`.
        dtype: of all floating-point numbers; they are drawn in float32.
        reduction: what the loss makes of a batch's losses, "sum" or "mean"; `MANY` has the sum alone.
    """

    settings: Settings
    way: str
    devices: int
    dtype: str = "float32"
    reduction: str = "sum"


def same_updates(settings: Settings, way: str, devices: int) -> Case:
    """The run that makes the updates of one device with a batch of `devices * settings.batch_size` examples.

    Args:
        settings: `lr` is that of one process, `batch_size` that of a device.
    """
    if way != DDP:
        whole_batch = replace(settings, batch_size=devices * settings.batch_size)
        return Case(whole_batch, way, devices if way == MANY else 1)
    # DDP averages the processes' sums; an optimizer that divides the gradient by its size does not notice.
    factor = devices if settings.opt == "sgd" else 1
    return Case(replace(settings, lr=factor * settings.lr), way, devices)


class Epoch(NamedTuple):
    """An epoch's sums: the loss by steps; right answers, in per cent, as the document counts them and as it should."""

    steps: int
    loss: float
    accuracy: float
    accuracy_once: float


@dataclass(frozen=True)
class Record:
    """What a run tells.

    Attributes:
        first_loss: of the first process's first batch.
        reduced_loss: of the first batches of all processes.
        gradient: its element [0, 0] at the first step, as the optimizer gets it.
        weights: before the first step and after each, (steps + 1, num_labels, dim).
        epochs: one by one.
    """

    first_loss: float
    reduced_loss: float
    gradient: float
    weights: np.ndarray
    epochs: list[Epoch]


def distance(one: Record, other: Record) -> float:
    """The largest difference of any weight after any step, over the way that the weights have gone until then."""
    moved = np.abs(other.weights[1:] - other.weights[0]).max(axis=(1, 2))
    apart = np.abs(one.weights[1:] - other.weights[1:]).max(axis=(1, 2))
    return float((apart / moved).max())
