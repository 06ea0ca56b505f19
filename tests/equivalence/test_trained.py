"""Frozen parameters, and parameters that the loss does not depend on, against torch step by step."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxddp.errors import InputError
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import PortCase
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.port import PortFile
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.step.replica_step import ReplicaStep
from tests.support.cases import ChangedCase, even_case, unchanged
from tests.support.small_port import Change, write
from tests.support.trajectories import check_differs, check_equal, compare, drawn, run_in_both, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 7.3e-15
FAULT = 1e-3  # smallest difference of a stage that a planted fault must cause; measured: 5.8e-3
FROZEN = ("layers.0.weight", "layers.0.bias")
STAGES = ("local_loss", "clipped_gradients", "params")

Changed = Callable[[ReplicaStep], ReplicaStep]


@dataclass(frozen=True)
class UnusedPort(PortCase):
    """Port with parameters that the loss does not depend on, and what jaxddp is told of them."""

    find_unused_parameters: bool | None = None

    def jax_side(self) -> JaxSide:
        side = super().jax_side()
        assert isinstance(side.replica_step, ReplicaStep)
        step = dataclasses.replace(side.replica_step, find_unused_parameters=self.find_unused_parameters)
        return dataclasses.replace(side, replica_step=step)


def case_of(optimizer: str, world_size: int, change: Changed = unchanged) -> ChangedCase:
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    case = even_case(
        "mlp", optimizer, world_size, steps=8, freeze=("layers.0.*",), clip_grad_norm=0.3, ema_decay=0.9, **options
    )
    return ChangedCase(**vars(case), of_jax=change)


def tensor_names(run: Trajectory, stage: str) -> set[str]:
    """Return the names of all tensors that a run records in a stage."""
    return set().union(*(record[stage] for record in run.records))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_frozen_parameters_equal_torchs(optimizer: str, world_size: int, pool: TorchPool) -> None:
    case = case_of(optimizer, world_size)
    ours, theirs = run_in_both(case, pool)
    check_equal((ours, theirs), TOLERANCE, ("local_gradients", "gradients", "averaged", *STAGES))
    for stage in ("local_gradients", "gradients", "clipped_gradients"):
        assert tensor_names(ours, stage) == tensor_names(theirs, stage) == theirs.start.keys() - set(FROZEN)
    for name in FROZEN:
        np.testing.assert_array_equal(ours.records[-1]["params"][name], theirs.start[name])
        np.testing.assert_array_equal(ours.records[-1]["averaged"][name], theirs.start[name])


def known_to_the_optimizer(step: ReplicaStep) -> ReplicaStep:
    """Freeze by a gradient of zero only: the optimizer still applies decay."""

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        stopped = {n: jax.lax.stop_gradient(x) if n in step.frozen else x for n, x in params.items()}
        return step.loss(stopped, buffers, batch)

    return dataclasses.replace(step, frozen=(), loss=loss, find_unused_parameters=None)


def part_of_the_norm(step: ReplicaStep) -> ReplicaStep:
    """Freeze by masking the updates only: the gradients still count in the norm."""

    def labels(params: Any) -> Any:
        return {name: "frozen" if name in step.frozen else "trained" for name in params}

    masked = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": step.optimizer}, labels)
    return dataclasses.replace(step, frozen=(), optimizer=masked)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("change", "stage"), [(known_to_the_optimizer, "params"), (part_of_the_norm, "clipped_gradients")]
)
def test_freezing_in_another_way_is_detected(change: Changed, stage: str, pool: TorchPool) -> None:
    runs = run_in_both(case_of("adamw", 2), pool, case_of("adamw", 2, change))
    check_differs(compare(*runs, TOLERANCE, STAGES), stage, FAULT)


# `unused` is never called; `fc3` is called by half of the replicas, alternating from step to step.
UNUSED: list[Change] = [
    (
        "self.fc2 = torch.nn.Linear(5, 4)",
        "self.fc2, self.fc3, self.unused = (torch.nn.Linear(a, b) for a, b in ((5, 4), (4, 4), (3, 2)))",
    ),
    (
        "self.fc2 = nnx.Linear(5, 4, rngs=rngs)",
        "self.fc2, self.fc3, self.unused = (nnx.Linear(a, b, rngs=rngs) for a, b in ((5, 4), (4, 4), (3, 2)))",
    ),
    (
        "return self.fc2(torch.tanh(self.fc1(x)))",
        "y = self.fc2(torch.tanh(self.fc1(x)))\n        return self.fc3(y) if x[0, 0] > 0 else y",
    ),
    (
        "return self.fc2(nnx.tanh(self.fc1(x)))",
        "y = self.fc2(nnx.tanh(self.fc1(x)))\n"
        "            fc3 = lambda y: y @ self.fc3.kernel + self.fc3.bias[None]\n"
        "            return jax.lax.cond(x[0, 0] > 0, fc3, lambda y: y, y)",
    ),
    ("    from flax import nnx", "    import jax\n    from flax import nnx"),
    ('return {"x": rng.normal(1, 1, (12, 3)),', 'return {"x": abs(rng.normal(1, 1, (12, 3))) * (-1) ** (step + rank),'),
    (
        'optimizer = "sgd"',
        "from jaxddp.config import TrainConfig\n"
        'optimizer = TrainConfig(optimizer="adamw", lr=0.01, weight_decay=0.1)\n'
        "clip_grad_norm, find_unused_parameters = 0.3, True",
    ),
]
NEVER = {"unused.weight", "unused.bias"}


def with_unused(folder: Path, world_size: int, find_unused_parameters: bool | None) -> UnusedPort:
    port = PortFile(str(write(folder, *UNUSED)))
    return UnusedPort(port, world_size, 8, find_unused_parameters=find_unused_parameters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [2, 4])
def test_unused_parameters_equal_torchs(world_size: int, tmp_path: Path, pool: TorchPool) -> None:
    case = with_unused(tmp_path, world_size, True)
    weights = drawn(case)
    ours, theirs = run_jax(case, weights), pool.run(case, weights)
    comparison = compare(ours, theirs, TOLERANCE, STAGES)
    assert comparison.equal, comparison
    for run in (ours, theirs):
        assert tensor_names(run, "clipped_gradients") == weights.keys() - NEVER
    for record in theirs.records:  # zero on the replicas whose loss does not depend on fc3
        shares = np.abs(record["local_gradients"]["fc3.weight"]).sum(axis=(1, 2))
        assert np.count_nonzero(shares) == world_size // 2
    for name in NEVER:
        np.testing.assert_array_equal(ours.records[-1]["params"][name], theirs.start[name])


def test_decay_of_unused_parameters_is_detected(tmp_path: Path, pool: TorchPool) -> None:
    case = with_unused(tmp_path, 2, True)
    weights = drawn(case)
    ours = run_jax(with_unused(tmp_path, 2, None), weights)
    comparison = compare(ours, pool.run(case, weights), TOLERANCE, STAGES)
    assert comparison.first is not None and comparison.first[0] == "params"
    assert comparison.first[1].tensor in NEVER and comparison.first[1].value > FAULT
    assert tensor_names(ours, "clipped_gradients") == weights.keys()


def test_unexpected_unused_parameters_raise_with_their_names(tmp_path: Path) -> None:
    case = with_unused(tmp_path, 2, False)
    with pytest.raises(InputError, match=r"jax_loss: does not depend on unused.bias, unused.kernel; freeze"):
        run_jax(case, drawn(case))
