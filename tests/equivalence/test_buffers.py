"""Running statistics taken from rank 0, averaged, or kept by each replica, against torch."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxddp import optim
from jaxddp.config.choices import BUFFERS
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn import layers
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.cases import even_case
from tests.support.trajectories import check_differs, check_equal, compare, run_in_both

TOLERANCE = 1e-12  # float64; measured: up to 1.2e-15
FAULT = 1e-3  # smallest difference, of the buffers' change, that a planted fault must cause; measured: 0.06


def case_of(buffers: str, world_size: int) -> Any:
    return even_case(
        "char_mlp", "sgd", world_size, steps=8, buffers=buffers, accumulation_steps=2, global_batch_size=64
    )


def of_each(run: Trajectory, step: int) -> dict[str, np.ndarray]:
    """Return each replica's value of the buffers that differ between replicas, (W, ...)."""
    spread = run.records[step]["spread"]
    return {key.removeprefix("buffers:"): value for key, value in spread.items() if key.startswith("buffers:")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("buffers", BUFFERS)
def test_buffers_equal_torchs(buffers: str, world_size: int, pool: TorchPool) -> None:
    jax_run, torch_run = run_in_both(case_of(buffers, world_size), pool)
    check_equal((jax_run, torch_run), TOLERANCE)
    for step in range(8):
        local = of_each(jax_run, step)
        assert set(local) == ({"bn.running_mean", "bn.running_var"} if buffers == "local" else set())
        for name, values in local.items():
            np.testing.assert_allclose(values, torch_run.records[step]["local_buffers"][name], rtol=1e-12)


@pytest.mark.parametrize(("buffers", "wrong"), [("rank0", "mean"), ("mean", "local"), ("local", "mean")])
def test_a_wrong_choice_of_buffers_is_detected(buffers: str, wrong: str, pool: TorchPool) -> None:
    runs = run_in_both(case_of(buffers, 2), pool, case_of(wrong, 2))
    check_differs(compare(*runs, TOLERANCE), "buffers", FAULT)


@pytest.mark.large
def test_evaluation_and_saved_values_use_replica_0s_local_buffers() -> None:
    def loss_fn(bn: nnx.Module, batch: Any) -> jax.Array:
        return ((bn(batch["x"]) - 1) ** 2).mean(axis=-1)

    ddp = DistributedDataParallel(
        layers.BatchNorm(3), optim.sgd(), loss_fn, replicas=Replicas(jax.devices()[:2]), keep_buffers="local"
    )
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    state, _ = ddp.step(ddp.init(), ddp.replicas.shard({"x": x}))
    np.testing.assert_allclose(state.buffers["mean"], 0.1 * x.mean(axis=1), rtol=1e-5)
    ddp.verify(state)  # local buffers are not compared
    _, buffers = ddp.values(state)
    np.testing.assert_array_equal(buffers["mean"], state.buffers["mean"][0])
    one = DistributedDataParallel(layers.BatchNorm(3), optim.sgd(), loss_fn, replicas=Replicas(jax.devices()[:1]))
    alone = one.init(*ddp.values(state))
    data = {"x": x.reshape(8, 3)}
    assert ddp.evaluate(state, data)["loss"] == pytest.approx(one.evaluate(alone, data)["loss"], rel=1e-6)
