"""Dropout masks: where they differ, where they are the same, and for which models they are refused."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.errors import InputError
from jaxddp.loader import Loader
from jaxddp.nn import layers
from jaxddp.nn.functional import Functional
from jaxddp.state import Params
from tests.support.step_cases import Net, distance, examples, first

P, F = 0.3, 50
GLOBAL_BATCH = 16
TOLERANCE = 1e-12  # float64; measured: 7e-17
FAULT = 0.1  # smallest distance of parameters if devices draw different masks; measured: 0.31


class Recorder(nnx.Module):
    """Two dropout layers, the first called twice, whose outputs are kept in a buffer (3, B, F)."""

    def __init__(self, make: Callable[..., Any], batch_size: int):
        rngs = nnx.Rngs(0)
        self.drops = nnx.List([make(P, rngs=rngs), make(P, rngs=rngs)])
        self.scale = nnx.Param(jnp.ones(F))
        self.outputs = nnx.Variable(jnp.zeros((3, batch_size, F)))

    def __call__(self, x: jax.Array) -> jax.Array:
        one, other = self.drops
        self.outputs[...] = jnp.stack([one(x), one(x), other(x)])
        return self.outputs[...].sum(axis=0) @ self.scale[...] / F


def loss_fn(model: nnx.Module, batch: Any) -> jax.Array:
    return model(batch["x"])


def recording(make: Callable[..., Any], world_size: int = 2, **options: Any) -> DistributedDataParallel:
    model = Recorder(make, GLOBAL_BATCH // world_size)
    return DistributedDataParallel(
        model, optim.sgd(), loss_fn, replicas=first(world_size), keep_buffers="local", **options
    )


def outputs_for_ones(make: Callable[..., Any], world_size: int = 2, **options: Any) -> np.ndarray:
    """Return dropout outputs (step, micro-batch, replica, call, B, F): 2 steps, 2 micro-batches, 3 calls."""
    ddp = recording(make, world_size, **options)
    state, outputs = ddp.init(), []
    batch = ddp.replicas.shard({"x": np.ones((world_size, GLOBAL_BATCH // world_size, F), np.float32)})
    for _ in range(2):
        accumulated = ddp.no_sync(state, batch)
        of_first = np.asarray(accumulated.buffers["outputs"])
        state, _ = ddp.step(state, batch, accumulated)
        outputs.append([of_first, np.asarray(state.buffers["outputs"])])
    return np.array(outputs)


def check_all_differ(masks: np.ndarray) -> None:
    """Check that masks are independent: two of 400 elements differ in 400 x 2 p (1 - p) = 168, give or take 10."""
    assert all(120 < (a != b).sum() < 220 for a, b in combinations(masks, 2))  # measured: 139 to 203


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [layers.Dropout, nnx.Dropout])
def test_masks_differ_between_replicas_steps_micro_batches_layers_and_calls(make: Callable[..., Any]) -> None:
    outputs = outputs_for_ones(make)
    assert outputs.shape == (2, 2, 2, 3, 8, F)
    masks = outputs > 0
    check_all_differ(masks.reshape(-1, 8 * F))
    np.testing.assert_allclose(outputs[masks], 1 / (1 - P), rtol=1e-6)
    dropped, deviation = 1 - masks.mean(), np.sqrt(P * (1 - P) / masks.size)
    assert abs(dropped - P) < 3 * deviation  # measured: 0.9 deviations


def test_shared_masks_are_the_same_on_all_replicas_and_differ_elsewhere() -> None:
    masks = outputs_for_ones(layers.Dropout, dropout_masks="shared") > 0
    np.testing.assert_array_equal(masks[:, :, 0], masks[:, :, 1])
    check_all_differ(masks[:, :, 0].reshape(-1, 8 * F))


@pytest.mark.large
def test_per_example_masks_are_the_same_on_any_number_of_replicas() -> None:
    def by_position(masks: np.ndarray) -> np.ndarray:
        return masks.transpose(0, 3, 1, 4, 2, 5).reshape(2, 3, 2 * GLOBAL_BATCH, F)

    one, four = (outputs_for_ones(layers.Dropout, world_size, dropout_masks="example") > 0 for world_size in (1, 4))
    np.testing.assert_array_equal(by_position(one), by_position(four))
    assert not np.array_equal(by_position(one), by_position(four[:, :, ::-1]))  # with the replicas in reverse order
    check_all_differ(one.reshape(-1, 8 * F))


@pytest.mark.large
def test_training_with_per_example_masks_is_the_same_on_any_number_of_devices() -> None:
    """12 examples fill a global batch of 16 in part, so that the second of 2 micro-batches is smaller."""
    data = examples(12)

    def trained(world_size: int, masks: str) -> dict[str, np.ndarray]:
        options: dict[str, Any] = {"dtype": "float64", "dropout_masks": masks, "loss_normalization": "global"}
        ddp = DistributedDataParallel(Net(dropout=0.5), optim.sgd(0.3), replicas=first(world_size), **options)
        loader = Loader(data, ddp.replicas, global_batch_size=16, accumulation_steps=2)
        state = ddp.init()
        for epoch in range(3):
            for batches in loader.epoch(epoch):
                state, _ = ddp.steps(state, batches)
        return jax.device_get(state.params)

    with jax.enable_x64(True):
        one = trained(1, "example")
        off = [distance(trained(*options), one) for options in ((2, "example"), (4, "example"), (2, "replica"))]
    assert max(off[:2]) < TOLERANCE and off[2] > FAULT


SETTINGS = {"jax_threefry_partitionable": False, "jax_default_prng_impl": "rbg", "jax_random_seed_offset": 5}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("masks", ["replica", "shared", "example"])
@pytest.mark.parametrize("name", SETTINGS)
def test_masks_follow_from_the_seed_whatever_jax_is_set_to(name: str, masks: str) -> None:
    def make(p: float, rngs: nnx.Rngs) -> Any:
        return layers.dropout(p, seed=2**32 - 1)

    expected = outputs_for_ones(make, dropout_masks=masks)
    before = getattr(jax.config, name)
    jax.config.update(name, SETTINGS[name])
    try:
        np.testing.assert_array_equal(outputs_for_ones(make, dropout_masks=masks), expected)
    finally:
        jax.config.update(name, before)


def test_random_state_is_not_in_the_train_state_and_evaluation_drops_nothing() -> None:
    ddp = recording(layers.Dropout)
    state = ddp.init()
    assert state.params.keys() == {"scale"} and state.buffers.keys() == {"outputs"}
    assert isinstance(ddp.module(state).drops[0], layers.Dropout)
    assert ddp.evaluate(state, {"x": np.ones((16, F), np.float32)})["loss"] == 3


def test_a_loss_without_a_place_in_a_run_draws_from_the_keys_as_built_under_grad_too() -> None:
    functional = Functional(Recorder(nnx.Dropout, 8))
    loss = functional.local_loss(loss_fn, train=True)
    batch = {"x": jnp.ones((8, F))}

    def value(params: Params) -> jax.Array:
        return loss(params, functional.buffers, batch)[0]["loss"]

    of_grad, _ = jax.jit(jax.value_and_grad(value))(functional.params)
    assert of_grad == pytest.approx(float(value(functional.params)), rel=1e-6)


# ---- refused options


@pytest.mark.parametrize(
    ("model", "masks", "message"),
    [
        (
            Recorder(nnx.Dropout, 8),
            "example",
            r"^dropout_masks example: drops.0.rngs, drops.1.rngs would draw one mask",
        ),
        (Net(), "shared", r"^dropout_masks shared: this model draws no random numbers$"),
        (Net(dropout=0.5), "replicas", r"^dropout_masks replicas: unknown; did you mean replica\?"),
    ],
    ids=["flax", "none", "unknown"],
)
def test_masks_that_cannot_be_drawn_are_refused(model: nnx.Module, masks: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DistributedDataParallel(model, optim.sgd(), replicas=first(2), dropout_masks=masks)


def test_per_example_masks_need_examples_on_the_leading_axis() -> None:
    class Transposed(Recorder):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x.T).sum()

    ddp = DistributedDataParallel(
        Transposed(layers.Dropout, 8), optim.sgd(), loss_fn, replicas=first(2), dropout_masks="example"
    )
    with pytest.raises(InputError, match=r"^Dropout: per-example masks need 8 examples on axis 0, got input \(50, 8\)"):
        ddp.step(ddp.init(), ddp.replicas.shard({"x": np.ones((2, 8, F), np.float32)}))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_drop_probability_outside_of_0_to_1_is_refused(p: float) -> None:
    with pytest.raises(InputError, match=rf"^Dropout: p {p}: must be at least 0 and below 1$"):
        layers.Dropout(p, rngs=nnx.Rngs(0))
