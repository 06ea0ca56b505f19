"""Dynamic loss scaling is torch's GradScaler with DDP on gloo: scale, skipped steps, and all that they leave."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import rank
from jaxddp.parity.cases import Case
from jaxddp.parity.flax_side.side import FlaxSide
from jaxddp.parity.question import Trajectory
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.torch_side.side import BuiltIn, TorchSide
from jaxddp.parity.workers import Workers
from jaxddp.state import Params, TrainState
from jaxddp.step import grad_scaler
from jaxddp.step.grad_scaler import GradScaler, ScalerState
from jaxddp.step.replica_step import ReplicaStep
from tests.support.cases import even_case
from tests.support.trajectories import STAGES, compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 1.5e-14, of the parameters' way
OPTIONS = {"init_scale": 2.0**10, "growth_interval": 3}
STEPS = 12
OVERFLOWS = (2, 6, 7)  # so that the scale grows at steps 5 and 10, and falls twice in a row
SCALES = [1024, 1024, 512, 512, 512, 1024, 512, 256, 256, 256, 512, 512]


@dataclass(frozen=True)
class Scaling(BuiltIn):
    """torch's half, in float64 with a GradScaler."""

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        scaler = torch.amp.GradScaler("cpu", **OPTIONS)  # type: ignore[arg-type]
        return super().torch_side(steps, dtype)._replace(scaler=scaler)


@dataclass(frozen=True)
class Scaled(Case):
    """A case with a loss scaler; on jaxddp's side perhaps a wrong one."""

    change: Callable[[ReplicaStep], ReplicaStep] | None = None

    @property
    def torch_source(self) -> BuiltIn:
        return Scaling(self.config, self.dataset())

    def flax_side(self) -> FlaxSide:
        side = super().flax_side()
        step = dataclasses.replace(side.replica_step, scaler=GradScaler(**OPTIONS))  # type: ignore[arg-type,type-var]
        return dataclasses.replace(side, replica_step=step if self.change is None else self.change(step))


def case(world_size: int, model: str = "linear", optimizer: str = "adam", **options: Any) -> Scaled:
    plain = even_case(model, optimizer, world_size, steps=STEPS, **options)
    return Scaled(plain.config, world_size, STEPS, plain.ignored_labels)


def batches(asked: Case) -> list[MicroBatches]:
    """The case's, with an infinity among the last replica's inputs in some steps."""
    every = list(asked.batches())
    for step in OVERFLOWS:
        every[step].last["x"][-1, 0, 0] = np.inf
    return every


def both(asked: Scaled, pool: TorchPool) -> tuple[Trajectory, Trajectory]:
    weights = asked.initial_weights()
    return run_jax(asked, weights, batches=batches(asked)), pool.run(asked, weights, batches=batches(asked))


CLIPPED = {"clip_grad_norm": 0.1, "ema_decay": 0.9, "schedule": "one_cycle"}
GLOBAL = {"accumulation_steps": 2, "loss_normalization": "global", "ignored_labels": 0.3}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, CLIPPED), (4, CLIPPED | GLOBAL | {"shard_optimizer": True}), (2, GLOBAL | {"comm_hook": "fp16_compress"})],
)
def test_every_step_is_torchs(world_size: int, options: dict[str, Any], pool: TorchPool) -> None:
    ours, theirs = both(case(world_size, **options), pool)
    averaged = ("averaged",) if "ema_decay" in options else ()
    comparison = compare(ours, theirs, TOLERANCE, (*STAGES, *averaged, "scaler"))
    assert comparison.equal, comparison
    assert [float(record["scaler"]["loss_scale"]) for record in ours.records] == SCALES
    assert int(ours.records[-1]["scaler"]["skipped"]) == len(OVERFLOWS)
    for step in OVERFLOWS:
        before, after = ours.records[step - 1]["params"], ours.records[step]["params"]
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert ours.records[step]["spread"] == {}


def test_an_overflow_in_the_first_steps_is_torchs(pool: TorchPool) -> None:
    """Nothing has been stepped yet: the moving average starts, and the schedule, with the first step that is made."""
    asked = case(2, **CLIPPED)
    every = list(asked.batches())
    for step in (0, 1):
        every[step].last["x"][0, 0, 0] = -np.inf
    weights = asked.initial_weights()
    ours, theirs = run_jax(asked, weights, batches=every), pool.run(asked, weights, batches=every)
    comparison = compare(ours, theirs, TOLERANCE, (*STAGES, "averaged", "scaler"))
    assert comparison.equal, comparison


class Unscaled(GradScaler):
    """Gradients go on as they are."""

    def unscale(self, state: ScalerState, gradients: Params) -> Params:
        return gradients


class Alone(GradScaler):
    """Replica 0 does not see the overflow."""

    def step(self, before: TrainState, after: TrainState, finite: jax.Array) -> Any:
        return super().step(before, after, finite | (rank() == 0))


class Forgetful(GradScaler):
    """Good steps need not be in a row."""

    def update(self, state: ScalerState, finite: jax.Array) -> ScalerState:
        tracker = jnp.where(finite, 0, state.growth_tracker)
        after = super().update(state, finite)
        return after._replace(growth_tracker=after.growth_tracker + tracker)


def wrong_scaler(kind: type[GradScaler], **changes: Any) -> Callable[[ReplicaStep], ReplicaStep]:
    return lambda step: dataclasses.replace(step, scaler=kind(**OPTIONS | changes))


def clipped_before_it_is_unscaled(step: ReplicaStep) -> ReplicaStep:
    assert step.clip_grad_norm is not None
    return dataclasses.replace(step, clip_grad_norm=step.clip_grad_norm / OPTIONS["init_scale"])


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Trajectory:
    """torch's run of what the faults are planted in."""
    asked = case(2, **CLIPPED)
    return workers.torch.run(asked, asked.initial_weights(), batches=batches(asked))


def faulty(change: Callable[[ReplicaStep], ReplicaStep]) -> Trajectory:
    asked = dataclasses.replace(case(2, **CLIPPED), change=change)
    return run_jax(asked, asked.initial_weights(), batches=batches(asked))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "stage", "step", "size"),
    [  # size: of the residual, at least; measured: 170, inf, 0.5, 0.5, inf, 0.16
        (wrong_scaler(Unscaled), "local_gradients", 1, 100),
        (wrong_scaler(Alone), "params", 3, np.inf),
        (wrong_scaler(GradScaler, growth_interval=4), "scaler", 6, 0.1),
        (wrong_scaler(GradScaler, backoff_factor=0.25), "scaler", 3, 0.1),
        (wrong_scaler(Forgetful), "scaler", 3, np.inf),
        (clipped_before_it_is_unscaled, "clipped_gradients", 1, 0.1),
    ],
    ids=["not unscaled", "one replica", "growth late", "backoff", "not in a row", "clipped scaled"],
)
def test_another_scaler_would_be_noticed(fault: Any, stage: str, step: int, size: float, reference: Trajectory) -> None:
    comparison = compare(faulty(fault), reference, TOLERANCE, (*STAGES, "averaged", "scaler"))
    assert comparison.first is not None, comparison
    assert (comparison.first[0], comparison.first[1].step) == (stage, step)
    assert comparison.first[1].value >= size


@pytest.mark.one_in(3)
@pytest.mark.parametrize("forgotten", grad_scaler.MOVED)
def test_whatever_a_skipped_step_moved_would_be_noticed(
    forgotten: str, reference: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_scaler, "MOVED", tuple(name for name in grad_scaler.MOVED if name != forgotten))
    comparison = compare(faulty(lambda step: step), reference, TOLERANCE, (*STAGES, "averaged", "scaler"))
    assert comparison.first is not None
    # The optimizer's moments show in the next step that is made.
    assert comparison.first[1].step == OVERFLOWS[0] + (2 if forgotten == "opt_state" else 1)
    assert comparison.first[1].value == np.inf
