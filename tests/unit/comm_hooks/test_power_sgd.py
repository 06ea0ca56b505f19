"""PowerSGD without torch: messages of the compiled program, refused options, checkpoints, no deadlock."""

import re

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxddp import comm_hooks, optim
from jaxddp.comm_hooks.power_sgd import BatchedPowerSGD, PowerSGD, orthogonalize
from jaxddp.config import TrainConfig
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas, VirtualReplicas
from jaxddp.errors import InputError
from jaxddp.models.mlp import MLP
from jaxddp.plan.messages import Messages, all_reduces
from jaxddp.train import main
from tests.support.train_runs import train, train_whole_and_in_parts
from torch_ref.config import TorchConfig
from torch_ref.launch import launch
from torch_ref.train import train as torch_train

ORTHONORMAL = 1e-6  # float32; measured: 2e-7
NEITHER = {"use_error_feedback": False, "warm_start": False}
VIRTUAL = 1e-7  # float32, of parameters up to 0.23; measured: 1.5e-8


def parallel(hook: comm_hooks.CommHook, replicas: Replicas) -> DistributedDataParallel:
    return DistributedDataParallel(
        MLP(30, (20,), 10, generator=Generator(0)), optim.sgd(0.1), replicas=replicas, comm_hook=hook
    )


def batches(replicas: Replicas, steps: int) -> MicroBatches:
    rng = np.random.default_rng(0)
    shape = (replicas.world_size, steps, 4)
    x, y = rng.normal(size=(*shape, 30)).astype("float32"), rng.integers(0, 10, shape)
    return replicas.shard(MicroBatches(None, {"x": x, "y": y}))


def sent_by_branches(hook: comm_hooks.CommHook) -> list[Messages]:
    """Return the messages that each branch of the program's only conditional sends."""
    replicas = Replicas(jax.devices()[:2])
    ddp = parallel(hook, replicas)
    text = ddp.compiled_text(ddp.init(), batches(replicas, 3))
    (branches,) = re.findall(r" conditional\(.*branch_computations=\{([^}]*)\}", text)
    without_entry = text.replace("\nENTRY ", "\n")
    return [all_reduces(without_entry.replace(f"\n{name} ", f"\nENTRY {name} ", 1)) for name in branches.split(", ")]


WHOLE = (30 * 20 + 20 + 20 * 10 + 10) * 4  # bytes


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("hook", "numbers"),
    [
        (comm_hooks.powerSGD(matrix_approximation_rank=2), 2 * (30 + 20) + 20 + 2 * (20 + 10) + 10),
        (comm_hooks.powerSGD(matrix_approximation_rank=4), 4 * (30 + 20) + 20 + 20 * 10 + 10),
        (comm_hooks.batched_powerSGD(warm_start=False), 29 + 29),  # 29 x 29 has room for 830 numbers
    ],
    ids=["rank 2", "rank 4", "batched"],
)
def test_two_messages_carry_p_and_q_and_the_uncompressed_tensors(hook: comm_hooks.CommHook, numbers: int) -> None:
    compressed, before = sent_by_branches(hook)
    assert compressed == Messages(count=2, bytes=4 * numbers)
    assert before == Messages(count=1, bytes=WHOLE)
    assert compressed.bytes < before.bytes


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_orthogonalize_returns_an_orthonormal_basis_of_the_columns(rank: int) -> None:
    matrix = np.random.default_rng(rank).normal(size=(9, rank)).astype("float32")
    q = orthogonalize(jnp.asarray(matrix))
    np.testing.assert_allclose(q.T @ q, np.eye(rank), atol=ORTHONORMAL)
    np.testing.assert_allclose(q @ (q.T @ matrix), matrix, atol=10 * ORTHONORMAL)  # the same column space
    basis = jnp.eye(9, rank, dtype=jnp.bfloat16)  # QR does not take 16 bits
    assert jnp.array_equal(orthogonalize(2 * basis), basis)


def test_the_square_holds_the_gradients_in_the_order_of_the_bucket_without_frozen_parameters() -> None:
    gradients = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    assert BatchedPowerSGD(order=("frozen", "b", "a")).pack(gradients)[0].tolist() == [[3, 1], [2, 0]]
    with pytest.raises(InputError, match=r"^matrix_approximation_rank 3: must be at most 2, the square's side"):
        BatchedPowerSGD(matrix_approximation_rank=3).init(gradients)


@pytest.mark.large
@pytest.mark.parametrize("warm_start", [True, False])
def test_virtual_replicas_compute_the_same_parameters(warm_start: bool) -> None:
    hook = comm_hooks.powerSGD(matrix_approximation_rank=2, start_power_sgd_iter=2, warm_start=warm_start)
    params = []
    for replicas in (Replicas(jax.devices()[:4]), VirtualReplicas(4)):
        trainer = parallel(hook, replicas)
        state, _ = trainer.steps(trainer.init(), batches(replicas, steps=4))
        params.append(jax.device_get(state.params))
    for name, on_devices in params[0].items():
        np.testing.assert_allclose(params[1][name], on_devices, rtol=0, atol=VIRTUAL)


def test_an_epsilon_keeps_a_matrix_of_zeros_from_becoming_nan() -> None:
    assert np.isnan(orthogonalize(jnp.zeros((3, 1)))).all()
    assert not orthogonalize(jnp.zeros((3, 1)), 1e-8).any()


@pytest.mark.large
def test_drawing_q_on_the_host_in_every_step_does_not_deadlock() -> None:
    replicas = Replicas(jax.devices()[:8])
    ddp = parallel(comm_hooks.powerSGD(start_power_sgd_iter=1, **NEITHER), replicas)
    state, sharded = ddp.init(), batches(replicas, 25)
    for _ in range(4):
        state, sums = ddp.steps(state, sharded)
    assert np.isfinite(sums.table).all()
    ddp.verify(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank 0: must be at least 1"),
        (
            {"start_power_sgd_iter": 1, "warm_start": False},
            "start_power_sgd_iter 1: must be at least 2 with error feed",
        ),
        ({"start_power_sgd_iter": 1, "use_error_feedback": False}, "start_power_sgd_iter 1: must be at least 2 with"),
        ({"start_power_sgd_iter": 0} | NEITHER, "start_power_sgd_iter 0: must be at least 1$"),
        ({"random_seed": -1}, "random_seed -1: must be from 0"),
        ({"random_seed": 2**32}, "random_seed 4294967296: must be from 0"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon -1e-08: must be at least 0"),
        ({"min_compression_rate": float("nan")}, "min_compression_rate nan: must be at least 0"),
        ({"order": ["w"]}, "order: must hold each parameter's name; s, t, u, v is missing"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        PowerSGD(**options).init(dict.fromkeys("vtus", jnp.ones(2)))


def test_both_trainers_refuse_a_rank_above_the_side_of_the_square(tmp_path) -> None:
    options = {"comm_hook": "batched_powerSGD", "matrix_approximation_rank": 99, "hidden_sizes": (5,), "devices": 1}
    options |= {"platform": "cpu", "output": str(tmp_path / "run"), "start_power_sgd_iter": 2}
    for run in (lambda: main(TrainConfig(**options)), lambda: launch(torch_train, TorchConfig(**options))):
        with pytest.raises(InputError, match=r"^--matrix-approximation-rank 99: must be at most 20, the side of a squ"):
            run()
    assert not (tmp_path / "run").exists()


@pytest.mark.large
def test_resuming_restores_the_error_feedback_bit_for_bit(tmp_path) -> None:
    flags = ["--comm-hook", "powerSGD", "--start-power-sgd-iter", "4", "--devices", "2"]
    train_whole_and_in_parts(tmp_path, *flags, first=1, then=2)
    for other, message in [
        (["--devices", "4"], "--devices 4: the run in .* has separate --comm-hook states for 2 replicas"),
        (["--comm-hook", "allreduce"], "--comm-hook allreduce: the run in .* must continue with --comm-hook powerSGD"),
    ]:
        with pytest.raises(InputError, match=message):
            train("--resume", str(tmp_path / "parts"), *other)


def test_torch_refuses_to_resume_with_power_sgd_state() -> None:
    with pytest.raises(InputError, match=r"^--resume runs/a: the state of --comm-hook powerSGD is laid out as DDP's"):
        TorchConfig(comm_hook="powerSGD", resume="runs/a")
