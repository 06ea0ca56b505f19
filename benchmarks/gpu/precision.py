"""Errors of gradients in float32, TF32 and bf16 against float64, each within its framework; NumPy only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.runner import FAILURE

Gradients = Mapping[str, np.ndarray]

WORKLOADS = ("wide_mlp", "residual")
EXACT = "float64"
MODES = ("float32", "tf32", "bf16")  # bf16: weights in float32, products in bf16
WEIGHTS = "weights"  # name of the file with the weights at which gradients are taken
SAME = 1e-10  # largest difference of the frameworks' float64 gradients; measured on CPU: 9e-16


def file_of(folder: Path, workload: str, name: str) -> Path:
    """Return the file in which jax's gradients in a precision, or the weights, are kept, under torch's names."""
    return folder / f"gradients-{workload}-{name}.npz"


def load(path: Path) -> Gradients:
    """Read gradients or weights."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def errors(jax: Mapping[str, Gradients], torch: Mapping[str, Gradients]) -> dict[str, Any]:
    """Return the relative errors of both frameworks by mode, and how far they are apart in float64.

    Args:
        jax, torch: gradients by mode, `EXACT` among them.
    """
    sides = {"jax": jax, "torch": torch}
    table = {mode: {name: error(of[mode], of[EXACT]) for name, of in sides.items()} for mode in MODES}
    return {EXACT: error(jax[EXACT], torch[EXACT]), **table}


def row(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row with the errors by workload, and with a failure where the frameworks differ in float64."""
    far = [name for name, of in table.items() if not of[EXACT] <= SAME]
    failure = {FAILURE: f"float64 gradients of jax and torch differ: {', '.join(far)}"} if far else {}
    return {"errors": table, **failure}


def error(gradients: Gradients, exact: Gradients) -> float:
    """Return the norm of the difference over the norm of the exact gradients, over all parameters together.

    Raises:
        ValueError: the names differ.

    >>> error({"a": np.array([3.0, 4.5])}, {"a": np.array([3.0, 4.0])})
    0.1
    """
    if gradients.keys() != exact.keys():
        raise ValueError(f"gradients of other parameters: {sorted(gradients.keys() ^ exact.keys())}")
    difference = sum(float(np.sum((gradients[name].astype(np.float64) - exact[name]) ** 2)) for name in exact)
    size = sum(float(np.sum(exact[name].astype(np.float64) ** 2)) for name in exact)
    return float(f"{(difference / size) ** 0.5:.3g}")
