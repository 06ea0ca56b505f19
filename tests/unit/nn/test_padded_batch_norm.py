"""BatchNorm with padded examples: in no statistic, and in no gradient."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.nn import layers
from jaxddp.nn.functional import Functional
from tests.support.step_cases import distance, first
from tests.unit.nn.test_layers import run_torch

TOLERANCE = 1e-14  # float64, relative to an array's largest value; measured: up to 1.2e-15
FAULT = 1e-2  # smallest difference if padding counted; measured: 4e4, as large as the padding
VALID = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], np.float32)  # of 4 replicas


def batch_norm(sync: bool, x: np.ndarray, valid: np.ndarray, cotangent: np.ndarray) -> dict[str, Any]:
    """Compute output, gradients and new statistics of each replica."""
    functional = Functional(layers.BatchNorm(3, sync=sync))

    def run(x: jax.Array, valid: jax.Array, cotangent: jax.Array) -> dict[str, jax.Array]:
        def loss(params: Any, x: jax.Array) -> Any:
            bn = functional.module(params, functional.buffers)
            bn.set_attributes(valid=nnx.data(valid))
            y = bn(x)
            bn.set_attributes(valid=None)
            return (y * cotangent * valid[:, None, None]).sum(), (y, Functional(bn).buffers)

        (d_params, d_x), (y, buffers) = jax.grad(loss, argnums=(0, 1), has_aux=True)(functional.params, x)
        return {"y": y, "d_x": d_x, "d_scale": d_params["scale"], **buffers}

    return jax.device_get(first(len(x)).map(run, (0, 0, 0), 0)(x, valid, cotangent))


def padded_inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(2, 1, (4, 4, 2, 3))
    x[VALID == 0] = 1e6
    return x, rng.normal(size=x.shape)


@pytest.mark.parametrize("sync", [True, False])
def test_batch_norm_ignores_padding(sync: bool) -> None:
    """Synchronised or per replica; a replica with padding alone keeps its statistics."""
    (x, cotangent), chosen = padded_inputs(), VALID > 0
    with jax.enable_x64(True):
        found = batch_norm(sync, x, VALID, cotangent)
        assert all(np.isfinite(array).all() for array in found.values())
        assert (found["d_x"][~chosen] == 0).all()
        if sync:
            whole = whole_batch_norm(x[chosen], cotangent[chosen])
            ours = {"y": found["y"][chosen], "d_x": found["d_x"][chosen], "d_scale": found["d_scale"].sum(axis=0)}
            assert distance({**ours, "mean": found["mean"][2], "var": found["var"][2]}, whole) < TOLERANCE
            wrong = whole_batch_norm(x.reshape(-1, 2, 3), cotangent.reshape(-1, 2, 3))
            assert abs(wrong["mean"] - found["mean"][0]).max() > FAULT
            return
        for rank in (0, 1, 3):
            mask = chosen[rank]
            alone = whole_batch_norm(x[rank][mask], cotangent[rank][mask])
            ours = {"y": found["y"][rank][mask], "d_x": found["d_x"][rank][mask]}
            ours |= {name: found[name][rank] for name in ("d_scale", "mean", "var")}
            assert distance(ours, alone) < TOLERANCE
        assert found["num_batches_tracked"].tolist() == [1, 1, 0, 1]
        assert (found["mean"][2] == 0).all() and (found["var"][2] == 1).all()


def whole_batch_norm(x: np.ndarray, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the same with torch's BatchNorm, in one process."""
    found = run_torch(torch.nn.BatchNorm1d(3).double(), x.reshape(-1, 3), cotangent.reshape(-1, 3))
    return {name: found[name] for name in ("d_scale", "mean", "var")} | {
        n: found[n].reshape(x.shape) for n in ("y", "d_x")
    }


def test_a_mask_of_another_length_is_refused() -> None:
    bn = layers.BatchNorm(3)
    bn.valid = nnx.data(jnp.ones(2))
    with pytest.raises(InputError, match=r"BatchNorm: valid has 2 examples, but the input has shape \(4, 3\)"):
        bn(jnp.ones((4, 3)))


def test_a_batch_norm_that_cannot_ignore_padding_is_refused() -> None:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    functional = Functional(model)
    batch = {"x": jnp.ones((4, 2)), "valid": jnp.ones(4)}

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return model(batch["x"]).sum(axis=-1)

    with pytest.raises(InputError, match=r"layers\.1: BatchNorm would include padded examples in its statistics; use"):
        functional.local_loss(loss_fn, train=True)(functional.params, functional.buffers, batch)
    functional.local_loss(loss_fn, train=False)(functional.params, functional.buffers, batch)  # no statistics
