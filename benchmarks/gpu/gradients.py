"""Gradients of a workload in several precisions: what is computed, and how far two of them are apart; NumPy only."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.workloads import Workload, workloads

Gradients = Mapping[str, np.ndarray]

WORKLOADS = ("wide_mlp", "residual")
EXACT = "float64"
MODES = ("float32", "tf32", "bf16")  # bf16: weights in float32, products in bf16


def workload_named(name: str, smoke: bool) -> Workload:
    """Return a workload, whose first batch is differentiated."""
    return workloads(smoke)[name]


def file_of(folder: Path, framework: str, workload: str, mode: str) -> Path:
    """Return the file in which a framework's gradients are kept, under torch's names."""
    return folder / f"{framework}-{workload}-{mode}.npz"


def save(path: Path, gradients: Gradients) -> None:
    """Write gradients to a file."""
    np.savez(path, **dict(gradients))  # type: ignore[arg-type]


def load(path: Path) -> Gradients:
    """Read gradients from a file."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name].astype(np.float64) for name in arrays.files}


def error(gradients: Gradients, exact: Gradients) -> float:
    """Return the norm of the difference over the norm of the exact gradients, over all parameters together.

    Raises:
        ValueError: the names differ.

    >>> error({"a": np.array([3.0, 4.5])}, {"a": np.array([3.0, 4.0])})
    0.1
    """
    if gradients.keys() != exact.keys():
        raise ValueError(f"gradients of other parameters: {sorted(gradients.keys() ^ exact.keys())}")
    difference = sum(float(np.sum((gradients[name] - exact[name]) ** 2)) for name in exact)
    size = sum(float(np.sum(exact[name] ** 2)) for name in exact)
    return float(f"{(difference / size) ** 0.5:.3g}")
