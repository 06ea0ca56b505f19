"""Differences between two sets of gradients."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from examples.gradient_averaging.problem import Arrays

CLOSE = 1e-8  # absolute tolerance of "close" in the table, torch.allclose's default

# Gradients that are 0 up to rounding, and the terms that they sum.
SUMS_TO_ZERO = {"b1": "hprebn", "logit_maxes": "norm_logits"}


@dataclass(frozen=True)
class Difference:
    """Difference between two gradients.

    Attributes:
        exact: all elements are equal.
        close: every element differs by at most CLOSE + 1e-5 of its size.
        largest: largest difference of any element.
        relative: `largest` over the gradient's largest element, or over its largest term where the terms sum to 0.
    """

    exact: bool
    close: bool
    largest: float
    relative: float


def differences(actual: Arrays, expected: Arrays) -> dict[str, Difference]:
    """Compare gradients name by name, in the order of `actual`.

    Raises:
        ValueError: two shapes differ.
    """
    return {name: _difference(array, name, expected) for name, array in actual.items()}


def worst(of_names: Mapping[str, Difference]) -> float:
    """Return the largest relative difference."""
    return max(difference.relative for difference in of_names.values())


def _difference(actual: np.ndarray, name: str, all_expected: Arrays) -> Difference:
    expected = all_expected[name]
    if actual.shape != expected.shape:
        raise ValueError(f"{name}: shape {actual.shape}, must be {expected.shape}")
    largest = float(np.abs(actual - expected).max())
    scale = float(np.abs(all_expected[SUMS_TO_ZERO.get(name, name)]).max())
    close = np.allclose(actual, expected, rtol=1e-5, atol=CLOSE)
    return Difference(bool((actual == expected).all()), bool(close), largest, largest / scale)
