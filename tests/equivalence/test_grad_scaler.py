"""Dynamic loss scaling against torch's GradScaler with DDP on gloo: scale, skipped steps and the state after them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from jaxddp.distributed.collectives import rank
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import Case
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.torch_side.side import TorchSide
from jaxddp.parity.workers import Workers
from jaxddp.state import Params, TrainState
from jaxddp.step import grad_scaler
from jaxddp.step.grad_scaler import GradScaler, ScalerState
from jaxddp.step.replica_step import ReplicaStep
from tests.support.cases import ChangedCase, even_case
from tests.support.trajectories import STAGES, check_equal, compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 1.5e-14, of the parameters' change
OPTIONS = {"init_scale": 2.0**10, "growth_interval": 3}
STEPS = 12
OVERFLOWS = (2, 6, 7)  # so that the scale grows at steps 5 and 10, and shrinks twice in a row
SCALES = [1024, 1024, 512, 512, 512, 1024, 512, 256, 256, 256, 512, 512]


def scaled(side: TorchSide) -> TorchSide:
    return side._replace(scaler=torch.amp.GradScaler("cpu", **OPTIONS))  # type: ignore[arg-type]


def scaling(kind: type[GradScaler] = GradScaler, **changes: Any) -> Callable[[ReplicaStep], ReplicaStep]:
    return lambda step: dataclasses.replace(step, scaler=kind(**OPTIONS | changes))


def case_of(world_size: int, **options: Any) -> ChangedCase:
    """Return a case with a loss scaler in float64."""
    plain = even_case("linear", "adam", world_size, steps=STEPS, **options)
    return ChangedCase(**vars(plain), of_jax=scaling(), of_torch=scaled)


def batches_of(case: Case, replica: int = -1, steps: Sequence[int] = OVERFLOWS, value: float = np.inf) -> list[Any]:
    """Return the case's batches, with an infinite input on one replica in some steps."""
    batches = list(case.batches())
    for step in steps:
        batches[step].last["x"][replica, 0, 0] = value
    return batches


def run_in_both(case: Case, pool: TorchPool, batches: list[Any]) -> tuple[Trajectory, Trajectory]:
    weights = case.initial_weights()
    return run_jax(case, weights, batches=batches), pool.run(case, weights, batches=batches)


CLIPPED = {"clip_grad_norm": 0.1, "ema_decay": 0.9, "schedule": "one_cycle"}
GLOBAL = {"accumulation_steps": 2, "loss_normalization": "global", "ignored_labels": 0.3}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, CLIPPED), (4, CLIPPED | GLOBAL | {"shard_optimizer": True}), (2, GLOBAL | {"comm_hook": "fp16_compress"})],
)
def test_every_step_with_loss_scaling_equals_torchs(world_size: int, options: dict[str, Any], pool: TorchPool) -> None:
    case = case_of(world_size, **options)
    ours, theirs = run_in_both(case, pool, batches_of(case))
    averaged = ("averaged",) if "ema_decay" in options else ()
    check_equal((ours, theirs), TOLERANCE, (*STAGES, *averaged, "scaler"))
    assert [float(record["scaler"]["loss_scale"]) for record in ours.records] == SCALES
    assert int(ours.records[-1]["scaler"]["skipped"]) == len(OVERFLOWS)
    for step in OVERFLOWS:
        before, after = ours.records[step - 1]["params"], ours.records[step]["params"]
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert ours.records[step]["spread"] == {}


def test_overflows_in_the_first_steps_are_handled_as_in_torch(pool: TorchPool) -> None:
    """Moving average and schedule start with the first step that is not skipped."""
    case = case_of(2, **CLIPPED)
    runs = run_in_both(case, pool, batches_of(case, 0, (0, 1), -np.inf))
    check_equal(runs, TOLERANCE, (*STAGES, "averaged", "scaler"))


class WithoutUnscaling(GradScaler):
    """Scaler that leaves gradients scaled."""

    def unscale(self, state: ScalerState, gradients: Params) -> Params:
        return gradients


class OneSided(GradScaler):
    """Scaler whose replica 0 does not see the overflow."""

    def step(self, before: TrainState, after: TrainState, finite: jax.Array) -> Any:
        return super().step(before, after, finite | (rank() == 0))


class Tolerant(GradScaler):
    """Scaler that grows after enough good steps, even if they are not in a row."""

    def update(self, state: ScalerState, finite: jax.Array) -> ScalerState:
        tracker = jnp.where(finite, 0, state.growth_tracker)
        after = super().update(state, finite)
        return after._replace(growth_tracker=after.growth_tracker + tracker)


def clipped_before_unscaling(step: ReplicaStep) -> ReplicaStep:
    assert step.clip_grad_norm is not None
    return dataclasses.replace(scaling()(step), clip_grad_norm=step.clip_grad_norm / OPTIONS["init_scale"])


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Trajectory:
    """Run in torch the case in which the faults are planted."""
    case = case_of(2, **CLIPPED)
    return workers.torch.run(case, case.initial_weights(), batches=batches_of(case))


def run_faulty(change: Callable[[ReplicaStep], ReplicaStep]) -> Trajectory:
    case = dataclasses.replace(case_of(2, **CLIPPED), of_jax=change)
    return run_jax(case, case.initial_weights(), batches=batches_of(case))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("fault", "stage", "step", "size"),
    [  # size: smallest residual; measured: 170, inf, 0.5, 0.5, 1 (of an integer), 0.16
        (scaling(WithoutUnscaling), "local_gradients", 1, 100),
        (scaling(OneSided), "params", 3, np.inf),
        (scaling(growth_interval=4), "scaler", 6, 0.1),
        (scaling(backoff_factor=0.25), "scaler", 3, 0.1),
        (scaling(Tolerant), "scaler", 3, 1),
        (clipped_before_unscaling, "clipped_gradients", 1, 0.1),
    ],
    ids=["not unscaled", "one replica only", "late growth", "other backoff", "not in a row", "clipped while scaled"],
)
def test_a_wrong_scaler_is_detected(fault: Any, stage: str, step: int, size: float, reference: Trajectory) -> None:
    comparison = compare(run_faulty(fault), reference, TOLERANCE, (*STAGES, "averaged", "scaler"))
    assert comparison.first is not None, comparison
    assert (comparison.first[0], comparison.first[1].step) == (stage, step)
    assert comparison.first[1].value >= size


@pytest.mark.one_in(3)
@pytest.mark.parametrize("not_restored", grad_scaler.MOVED)
def test_state_not_restored_after_a_skipped_step_is_detected(
    not_restored: str, reference: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_scaler, "MOVED", tuple(name for name in grad_scaler.MOVED if name != not_restored))
    comparison = compare(run_faulty(scaling()), reference, TOLERANCE, (*STAGES, "averaged", "scaler"))
    assert comparison.first is not None
    # The optimizer's moments show only in the next step that is not skipped.
    assert comparison.first[1].step == OVERFLOWS[0] + (2 if not_restored == "opt_state" else 1)
    assert comparison.first[1].value == np.inf
