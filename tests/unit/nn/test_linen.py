"""Linen modules train in jaxddp's replica step like their nnx twins."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from flax.errors import InvalidRngError
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional, LocalLoss
from jaxddp.nn.linen import LinenFunctional
from jaxddp.state import TrainState
from jaxddp.step.replica_step import ReplicaStep

TOLERANCE = 1e-6  # float32, parameters of size 1; measured: equal bits


class Twin(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.Dense(4, use_bias=False, name="fc")(x)
        return linen.BatchNorm(use_running_average=not train, momentum=0.9, name="bn")(x)


class Original(nnx.Module):
    def __init__(self) -> None:
        self.fc = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.bn = nnx.BatchNorm(4, momentum=0.9, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.bn(self.fc(x))


def skewed(output: jax.Array) -> jax.Array:
    """Compute a loss other than a sum of squares, which BatchNorm would make the same for all weights."""
    return (output**3 - output).sum(axis=1)


def linen_loss(model: Any, batch: Any) -> jax.Array:
    return skewed(model(batch["x"], train=True))


def batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(1, 2, size=(2, 5, 3)).astype("float32")}


def two_steps(local_loss: LocalLoss, params: Any, buffers: Any) -> TrainState:
    optimizer = optim.sgd(0.1, momentum=0.9)
    state = TrainState(jnp.int32(0), params, buffers, optimizer.init(params))
    step = VirtualReplicas(2).map(ReplicaStep(local_loss, optimizer), (None, 0), (None, None, 0))
    for _ in range(2):
        state, _, _ = step(state, MicroBatches(None, batch()))
    return state


@pytest.mark.large
def test_a_linen_module_trains_as_its_nnx_twin() -> None:
    functional = LinenFunctional(Twin(), linen_loss, {"x": batch()["x"][0]})
    original = Functional(Original())
    assert functional.params.keys() == original.params.keys()
    assert functional.buffers.keys() == original.buffers.keys() == {"bn.mean", "bn.var"}
    actual = two_steps(functional.local_loss(linen_loss), original.params, original.buffers)
    expected = two_steps(
        original.local_loss(lambda model, batch: skewed(model(batch["x"])), train=True),
        original.params,
        original.buffers,
    )
    for name, value in (expected.params | expected.buffers).items():
        assert jnp.abs((actual.params | actual.buffers)[name] - value).max() < TOLERANCE, name
        assert jnp.abs(value - (original.params | original.buffers)[name]).max() > 1e-3, name


class Doubled(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for collection in "ab":
            self.variable(collection, "scale", lambda: jnp.ones(1))
        return linen.Dense(1)(x)


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (Twin(), lambda model, batch: batch["x"], "jax_loss: never calls the model"),
        (
            Doubled(),
            lambda model, batch: model(batch["x"]),
            "jax_model: two collections hold a variable of the same name",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(model: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        LinenFunctional(model, loss_fn, {"x": np.ones((2, 3))})


class Noisy(linen.Module):
    """A layer that asks for a key of a stream of its own, and a parameter."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(x) + jax.random.normal(self.make_rng("noise"), (len(x), 1))


def noisy_loss(**rngs: Any) -> jax.Array:
    batch = {"x": jnp.ones((4, 3))}
    functional = LinenFunctional(Noisy(), lambda model, batch: model(batch["x"])[:, 0], batch)
    loss = functional.local_loss(lambda model, batch: model(batch["x"], **rngs)[:, 0])
    return loss(functional.params, functional.buffers, batch)[0]["loss"]


def test_a_module_that_needs_keys_gets_the_losss_or_key_0_but_none_of_another_stream() -> None:
    key = jax.random.key
    assert noisy_loss() == noisy_loss(rngs=key(0)) != noisy_loss(rngs={"noise": key(1)})
    with pytest.raises(InvalidRngError, match="noise"):
        noisy_loss(rngs={"dropout": key(1)})
