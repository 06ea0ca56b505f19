"""How far two sets of gradients are from each other."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from examples.gradient_averaging.problem import Arrays

CLOSE = 1e-8  # what counts as approximately equal in the table, as torch.allclose has it

# Gradients that are 0 but for rounding, and what they are the sum of.
SUMS_TO_ZERO = {"b1": "hprebn", "logit_maxes": "norm_logits"}


@dataclass(frozen=True)
class Difference:
    """Of a gradient from another.

    Attributes:
        exact: all bits are equal.
        close: no element differs by more than CLOSE, or 1e-5 of itself.
        largest: of all elements.
        relative: that, over the gradient's largest element; of one that sums up to 0, over its terms' largest.
    """

    exact: bool
    close: bool
    largest: float
    relative: float


def differences(found: Arrays, right: Arrays) -> dict[str, Difference]:
    """Gradients against others, name by name, in the order of `found`.

    Raises:
        ValueError: a shape is not the other's.
    """
    return {name: _difference(array, name, right) for name, array in found.items()}


def worst(found: Mapping[str, Difference]) -> float:
    """The largest relative difference."""
    return max(difference.relative for difference in found.values())


def _difference(found: np.ndarray, name: str, others: Arrays) -> Difference:
    right = others[name]
    if found.shape != right.shape:
        raise ValueError(f"{name}: shape {found.shape} and not {right.shape}")
    largest = float(np.abs(found - right).max())
    scale = float(np.abs(others[SUMS_TO_ZERO.get(name, name)]).max())
    close = np.allclose(found, right, rtol=1e-5, atol=CLOSE)
    return Difference(bool((found == right).all()), bool(close), largest, largest / scale)
