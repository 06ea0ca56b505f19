"""Pooling against torch's: values and gradients, of equal elements and NaN too."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch.nn import functional as F

from jaxddp.errors import InputError
from jaxddp.layers import avg_pool, max_pool

TOLERANCE = 1e-15  # relative to 1, float64; measured: 0 for maxima, 2.3e-16 for means
OURS = {"max": max_pool, "avg": avg_pool}
# Spatial shape, window, stride, padding.
SIZES: list[tuple[tuple[int, ...], Any, Any, Any]] = [
    ((6, 8), 2, None, 0),
    ((7, 5), 2, None, 0),
    ((9, 8), 3, 2, 1),
    ((7, 6), (3, 2), (1, 3), (1, 0)),
    ((8, 8), 2, 3, 1),
    ((11,), 4, 2, 2),
    ((4, 5, 6), (2, 1, 3), 2, (1, 0, 1)),
]


def torch_pool(kind: str, x: np.ndarray, cotangent: np.ndarray, *sizes: Any) -> list[np.ndarray]:
    """Return pooled values and the gradient of their sum weighted by `cotangent`, channels last."""
    leaf = torch.from_numpy(np.moveaxis(x, -1, 1).copy()).requires_grad_()
    y = getattr(F, f"{kind}_pool{x.ndim - 2}d")(leaf, *sizes)
    y.backward(torch.from_numpy(np.moveaxis(cotangent, -1, 1).copy()))
    return [np.moveaxis(tensor.detach().numpy(), 1, -1) for tensor in (y, leaf.grad)]


def our_pool(kind: str, x: np.ndarray, cotangent: np.ndarray, *sizes: Any) -> list[np.ndarray]:
    with jax.enable_x64(True):
        return [*map(np.asarray, _pooled(kind, sizes, x, cotangent))]


@partial(jax.jit, static_argnums=(0, 1))
def _pooled(kind: str, sizes: tuple[Any, ...], x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, pullback = jax.vjp(lambda x: OURS[kind](x, *sizes), x)
    return y, *pullback(cotangent)


def pair(kind: str, x: np.ndarray, *sizes: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with jax.enable_x64(True):
        shape = jax.eval_shape(lambda x: OURS[kind](x, *sizes), x).shape
    cotangent = np.random.default_rng(1).normal(size=shape)
    return our_pool(kind, x, cotangent, *sizes), torch_pool(kind, x, cotangent, *sizes)


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("sizes", SIZES)
def test_pooling_and_its_gradient_are_those_of_torch(kind: str, sizes: tuple[Any, ...]) -> None:
    shape, *sizes_ = sizes
    x = np.random.default_rng(0).normal(size=(2, *shape, 3))
    for ours, theirs in zip(*pair(kind, x, *sizes_), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    x = np.random.default_rng(0).integers(0, 3, size=(2, 8, 6, 3)).astype("float64")
    for sizes in ((2, None, 0), (3, 1, 1)):
        (_, ours), (_, theirs) = pair("max", x, *sizes)
        np.testing.assert_array_equal(ours, theirs)
    with jax.enable_x64(True):  # jnp.max shares it among them: the planted fault
        shared = jax.jit(jax.grad(lambda x: jnp.sum(x.reshape(2, 4, 2, 3, 2, 3).max(axis=(2, 4)))))(x)
        first = jax.jit(jax.grad(lambda x: jnp.sum(max_pool(x, 2))))(x)
    assert np.abs(shared - first).max() > 0.4


def test_nan_passes_through() -> None:
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 2))
    x[0, 1, 0, 0] = x[0, 2, 3, 1] = np.nan
    for ours, theirs in zip(*pair("max", x, 2), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.isnan(our_pool("max", x, np.ones((1, 2, 2, 2)), 2)[0]).sum() == 2


def test_forward_mode_and_integers_work() -> None:
    x = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    tangent = jax.jit(lambda x: jax.jvp(lambda x: max_pool(x, 2), (x,), (x,))[1])(x)
    assert tangent[0, ..., 0].tolist() == [[5, 7], [13, 15]]
    assert max_pool(-jnp.arange(4).reshape(1, 4, 1), 3, 1, 1)[0, :, 0].tolist() == [0, 0, -1, -2]


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((1, 4, 4, 1), (0,), r"max_pool: window 0: must be at least 1"),
        ((1, 4, 4, 1), ((2, 2, 2),), r"max_pool: window \(2, 2, 2\): needs one size per spatial axis of x \(.*\)"),
        ((1, 4), (2,), r"max_pool: window 2: needs one size per spatial axis of x \(1, 4\)"),
        ((1, 4, 4, 1), (2, 0), r"max_pool: stride 0: must be at least 1"),
        ((1, 4, 4, 1), (2, 2, -1), r"max_pool: padding -1: must be at least 0"),
        ((1, 4, 4, 1), (2, 2, 2), r"max_pool: padding 2: must be at most half of the window 2"),
        ((1, 4, 4, 1), (5,), r"max_pool: window 5: larger than x \(1, 4, 4, 1\) with padding 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(shape: tuple[int, ...], sizes: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        max_pool(jnp.zeros(shape), *sizes)
