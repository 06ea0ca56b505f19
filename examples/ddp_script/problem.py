"""Data, settings and results of both scripts; needs neither jax nor torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxddp.config.choices import DTYPES, PLATFORMS
from jaxddp.config.options import Platform
from jaxddp.errors import InputError, check_name

Arrays = dict[str, NDArray[Any]]

FEATURES, HIDDEN, CLASSES = 2, (30, 20), 2

# Two clouds of points; the last of the five lies in the cloud of the other class.
TRAIN = [(-1.3, 2.1, 0), (-0.4, 1.7, 0), (2.2, -0.6, 1), (1.5, -1.4, 1), (-0.9, 1.2, 1)]
TEST = [(-0.7, 2.4, 0), (1.9, -1.1, 1)]


@dataclass(frozen=True)
class Settings:
    """A toy classifier, trained data-parallel by SGD."""

    devices: int = 2
    """Number of replicas."""
    platform: Platform = "cpu"
    """cpu | gpu"""
    epochs: int = 3
    batch_size: int = 2
    """Rows per replica and step."""
    lr: float = 0.5
    seed: int = 123
    """Seed of the initial weights."""
    drop_last: bool = True
    """Drop an epoch's last batch if it is smaller."""
    dtype: str = "float32"
    """float32 | float64"""

    def __post_init__(self) -> None:
        check_name("--platform", self.platform, PLATFORMS)
        check_name("--dtype", self.dtype, DTYPES)
        for name in ("devices", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Line:
    """One step of one replica.

    Attributes:
        replica, epoch: numbers counted from 0.
        rows: numbers of the replica's examples, counted from 0.
        loss: mean loss of these examples before the step.
    """

    replica: int
    epoch: int
    rows: tuple[int, ...]
    loss: float

    def text(self, epochs: int) -> str:
        """Format the line for printing.

        >>> Line(1, 0, (4, 2), 0.70214).text(3)
        '[replica 1]  epoch 1/3  batch size 2  rows x5 x3  loss 0.702140'
        """
        rows = " ".join(f"x{row + 1}" for row in self.rows)
        where = f"[replica {self.replica}]  epoch {self.epoch + 1}/{epochs}  batch size {len(self.rows)}"
        return f"{where}  rows {rows}  loss {self.loss:.6f}"


@dataclass(frozen=True)
class Accuracy:
    """Number of rows that are right, and number of rows counted."""

    right: int
    counted: int

    def __str__(self) -> str:
        return f"{self.right}/{self.counted} = {self.right / self.counted:.2f}"


@dataclass(frozen=True, eq=False)
class Run:
    """Results of a script.

    Attributes:
        lines: a line per step and replica.
        train, test: accuracies, with each row counted once.
        by_loader: accuracy over the training loader's rows, by its drop_last.
        weights: trained weights, arrays by torch's names.
        processes: ids of the processes that trained.
    """

    lines: list[Line]
    train: Accuracy
    test: Accuracy
    by_loader: dict[bool, Accuracy]
    weights: Arrays
    processes: set[int]

    def show(self, settings: Settings) -> None:
        """Print the lines and the accuracies."""
        for line in self.lines:
            print(line.text(settings.epochs))
        print(f"training accuracy {self.train}   test accuracy {self.test}")


def arrays(rows: list[tuple[float, float, int]], dtype: str) -> Arrays:
    """Convert rows to arrays x (N, 2), y (N,) and row (N,), the rows' numbers."""
    x, y = np.array([row[:2] for row in rows], dtype), np.array([row[2] for row in rows], np.int32)
    return {"x": x, "y": y, "row": np.arange(len(rows), dtype=np.int32)}
