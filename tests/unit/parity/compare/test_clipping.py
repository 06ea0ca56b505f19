"""Clipping in NumPy computes what torch.nn.utils.clip_grad_norm_ computes, also where the norm is not finite."""

import math

import numpy as np
import pytest
import torch

from jaxddp.parity.compare.clipping import Clipping

ROUNDING = 1e-15  # measured: 0


def clipped_by_torch(gradients: dict[str, np.ndarray], max_norm: float) -> dict[str, np.ndarray]:
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in gradients.items()}
    for name, tensor in tensors.items():
        tensor.grad = torch.tensor(gradients[name])
    torch.nn.utils.clip_grad_norm_(tensors.values(), max_norm)
    return {name: tensor.grad.numpy() for name, tensor in tensors.items() if tensor.grad is not None}


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
@pytest.mark.parametrize("first", [3.0, 0.0, math.nan, math.inf], ids=str)
def test_every_gradient_is_torchs(first: float, max_norm: float) -> None:
    gradients = {"w": np.array([[first, -4.0]]), "b": np.array([0.5])}
    with np.errstate(invalid="ignore"):  # inf * 0
        ours = Clipping(max_norm).clip(gradients)
    theirs = clipped_by_torch(gradients, max_norm)
    for name in gradients:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=ROUNDING)


def test_the_comparison_catches_a_missing_epsilon() -> None:
    gradients = {"w": np.array([3.0, -4.0])}
    difference = Clipping(1.0, epsilon=0.0).clip(gradients)["w"] - clipped_by_torch(gradients, 1.0)["w"]
    assert np.abs(difference).max() > 1e8 * ROUNDING  # measured: 1.6e-7


def test_each_replica_has_its_own_factor() -> None:
    of_each = Clipping(1.0, epsilon=0.0).factor(np.array([0.0, 0.5, 2.0]))
    np.testing.assert_array_equal(of_each, [1.0, 1.0, 0.5])
    assert Clipping(0.0, epsilon=0.0).factor(0.0) == 1.0
