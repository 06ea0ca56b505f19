"""Clipping by the global norm: torch.nn.utils.clip_grad_norm_."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxddp import optim

CLIP = 1e-14  # in float64: 2e-16; without torch's 1e-6: 1e-7
GRADIENTS = {"matrix": (1.0, (4, 3)), "vector": (1e-3, (5,)), "scalar": (30.0, ())}  # name -> (scale, shape)


def clip_errors(clip: Callable, scale: float, max_norm: float) -> tuple[float, float]:
    """Return the largest relative error of the clipped gradients, and the relative error of the norm."""
    rng = np.random.default_rng(0)
    grads = {key: scale * size * rng.normal(size=shape) for key, (size, shape) in GRADIENTS.items()}
    params = {key: torch.nn.Parameter(torch.zeros(value.shape, dtype=torch.float64)) for key, value in grads.items()}
    for key, param in params.items():
        param.grad = torch.tensor(grads[key])
    norm = float(torch.nn.utils.clip_grad_norm_(params.values(), max_norm))
    ours, our_norm = clip(jax.tree.map(jnp.asarray, grads), max_norm)
    ratios = [np.abs(ours[k] - p.grad.numpy()).max() / p.grad.abs().max() for k, p in params.items()]
    return float(max(ratios)), abs(float(our_norm) / norm - 1)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_clipping_equals_torch(scale: float, max_norm: float, x64: None) -> None:
    assert max(clip_errors(optim.clip_by_global_norm, scale, max_norm)) <= CLIP


def test_the_clipping_comparison_catches_a_missing_epsilon(x64: None) -> None:
    def without_epsilon(grads: Any, max_norm: float) -> tuple[Any, Any]:
        clipper = optax.clip_by_global_norm(max_norm)
        return clipper.update(grads, clipper.init(grads))[0], optax.tree.norm(grads)

    error, norm_error = clip_errors(without_epsilon, scale=1.0, max_norm=1.0)
    assert error > 1e-9
    assert norm_error <= CLIP


def test_zero_gradients_stay_zero_when_clipped() -> None:
    clipped, norm = optim.clip_by_global_norm({"w": jnp.zeros(3, jnp.bfloat16)}, 1.0)
    assert clipped["w"].dtype == jnp.bfloat16
    assert not np.any(clipped["w"]) and norm == 0
