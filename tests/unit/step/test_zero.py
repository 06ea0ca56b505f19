"""A sharded optimizer state: memory on each device, collectives of a step, layout and checkpoints."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxddp import optim
from jaxddp.config import TrainConfig
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.nn.torch_weights import load_weights
from jaxddp.step import zero
from jaxddp.train import main
from tests.support.processor import needs_float16
from tests.support.step_cases import Net, dealt, first

ROUNDING = 1e-12  # float64, of weights; measured: up to 4e-16
FAULT = 1e-4  # smallest difference of weights that a planted fault must cause; measured: 3e-3


def ddp(world_size: int, *, shard: bool = True, optimizer: Any = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        Net(), optimizer or optim.adam(), replicas=first(world_size), shard_optimizer=shard, **options
    )


# ---- memory


def bytes_on_each(tree: Any) -> list[int]:
    """Return the bytes that the arrays of a tree take on each device."""
    counted: Counter = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            counted[shard.device] += shard.data.nbytes
    return list(counted.values())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("optimizer", [optim.adam(), optim.sgd(momentum=0.9)], ids=["adam", "sgd"])
def test_a_device_holds_one_slice_of_the_optimizer_state(world_size: int, optimizer: Any) -> None:
    sharding = ddp(world_size, optimizer=optimizer)
    state = sharding.init()
    for _ in range(2):
        held = bytes_on_each(state.opt_state)
        (whole,) = set(bytes_on_each(ddp(world_size, shard=False, optimizer=optimizer).init().opt_state))
        vectors = sum(isinstance(node, zero.Slices) for node in nodes(state.opt_state))
        padding = vectors * (world_size - 1) * 4 + 4  # less than one element per replica, and a counter
        assert len(held) == world_size and max(held) <= whole / world_size + padding
        state, _ = sharding.steps(state, sharding.replicas.shard(dealt(world_size, 1, (2,))))


def nodes(opt_state: Any) -> list[Any]:
    return jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, zero.Slices))


# ---- the program


def sent(world_size: int, **options: Any) -> Counter:
    """Count the collectives in the program of three steps, a loop over one step."""
    trainer = ddp(world_size, **options)
    hlo = trainer.compiled_text(trainer.init(), trainer.replicas.shard(dealt(world_size, 3, (2, 2))))
    return Counter(re.findall(r" (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)\(", hlo))


ONE_OF_EACH = {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1}  # gradients, parameters, metrics


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ONE_OF_EACH),
        ({"loss_normalization": "global"}, ONE_OF_EACH),
        ({"clip_grad_norm": 0.05}, ONE_OF_EACH),  # the norm is in the all-reduce of the metrics
        # The count first.
        ({"clip_grad_norm": 0.05, "loss_normalization": "global"}, ONE_OF_EACH | {"all-reduce": 2}),
        ({"shard": False}, {"all-reduce": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.large)])
def test_a_step_runs_no_needless_collectives(
    options: dict[str, Any], expected: dict[str, int], world_size: int
) -> None:
    assert sent(world_size, **options) == expected


@pytest.mark.large
def test_virtual_replicas_make_the_same_steps() -> None:
    batch = dealt(4, 2, (2,))
    both = []
    for replicas in (first(4), VirtualReplicas(4)):
        trainer = DistributedDataParallel(
            Net(), optim.adam(), replicas=replicas, shard_optimizer=True, clip_grad_norm=0.05
        )
        state, _ = trainer.steps(trainer.init(), replicas.shard(batch))
        both.append(jax.device_get(trainer.unsharded(state)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), *both)  # float32: 2e-7


# ---- the layout


@needs_float16
def test_joined_is_the_inverse_of_sliced_for_several_dtypes() -> None:
    rng = np.random.default_rng(0)
    params = {
        "b": rng.normal(size=3).astype("float32"),
        "scalar": np.float32(7),
        "half": rng.normal(size=(2, 5)).astype("float16"),
        "a": rng.normal(size=(3, 1, 2)).astype("float32"),
    }
    slices = zero.sliced(params, zero.layout_of(params, lambda name: 0), 4)
    assert {str(vector.dtype): vector.shape for vector in slices.vectors.values()} == {
        "float16": (4, 3),
        "float32": (4, 3),
    }
    joined = zero.joined(slices)
    assert joined.keys() == params.keys()
    for name, value in params.items():
        assert joined[name].dtype == value.dtype
        np.testing.assert_array_equal(joined[name], value)


def test_an_optimizer_that_copies_the_parameters_gets_copies_of_their_slices() -> None:
    """Its state holds the initial parameters, towards which it pulls back."""

    def pull_back(strength: float) -> optax.GradientTransformation:
        def update(grads: Any, anchor: Any, params: Any = None) -> Any:
            return jax.tree.map(lambda g, p, a: -0.1 * g - strength * (p - a), grads, params, anchor), anchor

        return optax.GradientTransformation(lambda params: params, update)

    batch = dealt(2, 3, (2,))
    states = []
    for shard in (True, False):
        trainer = ddp(2, shard=shard, optimizer=pull_back(0.3))
        state, _ = trainer.steps(trainer.init(), trainer.replicas.shard(batch))
        states.append(jax.device_get(trainer.unsharded(state)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), *states)  # float32: 2e-7


# ---- checkpoints


def run(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Return the weights at the end of a run of jaxddp.train."""
    config = {"dataset": "linear", "num_examples": 256, "dtype": "float64", "platform": "cpu", "devices": 2}
    config |= {"hidden_sizes": (5,), "lr": 0.01, "clip_grad_norm": 0.5, "shard_optimizer": True}
    config |= {"epochs": 2, "output": str(folder)}
    main(TrainConfig(**config | changes))
    return load_weights(folder / "model.safetensors")


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(np.abs(a[name] - b[name]).max() for name in b)


@pytest.mark.large
@pytest.mark.parametrize(
    ("before", "then"),
    [({}, {}), ({}, {"devices": 4}), ({}, {"shard_optimizer": False}), ({"shard_optimizer": False}, {})],
    ids=str,
)
def test_a_run_resumes_with_sharding_or_without_and_on_more_replicas(
    before: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", epochs=1, **before)
    parts = run(tmp_path / "parts", resume=str(tmp_path / "parts"), **then)
    assert distance(parts, whole) <= (ROUNDING if before or then else 0)


@pytest.mark.large
def test_slices_joined_in_another_order_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, join = run(tmp_path / "whole"), zero.Sharded.join
    with monkeypatch.context() as patch:
        patch.setattr(zero.Sharded, "join", lambda self, state: join(self, jax.tree.map(lambda x: x[::-1], state)))
        run(tmp_path / "parts", epochs=1)
    assert distance(run(tmp_path / "parts", resume=str(tmp_path / "parts")), whole) > FAULT
