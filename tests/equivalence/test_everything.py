"""All features that can be combined, turned on at once, against torch DDP in every stage of every step."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jax import numpy as jnp

import torch_ref.gradient_hooks
from jaxddp.parity.cases import Case
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.torch_side.side import BuiltIn, TorchSide
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.gradient_hooks import GradientHook
from tests.support.cases import make_case
from tests.support.trajectories import STAGES, Comparison, compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 7.9e-14, of the moving average's change
FAULT = 1e-3  # smallest difference of a stage with one feature left out; measured: 4.3e-3
STEPS = 10
SCALER = {"init_scale": 2.0**10, "growth_interval": 3}
ALL = {
    "accumulation_steps": 2,
    "loss_normalization": "global",
    "ignored_labels": 0.3,
    "clip_grad_norm": 0.05,
    "buffers": "mean",
    "ema_decay": 0.9,
    "dropout": 0.2,
    "dropout_masks": "example",
    "freeze": ("embedding.weight",),
    "schedule": "warmup_cosine",
    "warmup_steps": 3,
}
POWER_SGD = {
    "comm_hook": "powerSGD",
    "matrix_approximation_rank": 2,
    "min_compression_rate": 1.0,
    "start_power_sgd_iter": 4,
}
# Only the first has hooks on the mean gradients: a replica with a sharded optimizer holds only a slice of them.
EVERYTHING = {
    "powerSGD": ALL | POWER_SGD,
    "sharded": ALL | {"shard_optimizer": True},
}
LIMIT = 0.01 * SCALER["init_scale"]  # local hooks see scaled gradients


@dataclass(frozen=True)
class EverythingSource(BuiltIn):
    """torch's side, with what the configuration cannot express: custom hooks, and a loss scaler in float64."""

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        make = torch_ref.gradient_hooks.GradientHook
        hooks = [make("*.bias", lambda name, g: g.clamp(-LIMIT, LIMIT), "local")]
        if not self.config.shard_optimizer:
            hooks.append(make("fc1.*", lambda name, g: g / 2, "mean"))
        scaler = torch.amp.GradScaler("cpu", **SCALER)  # type: ignore[arg-type]
        return super().torch_side(steps, dtype)._replace(scaler=scaler, gradient_hooks=tuple(hooks))


@dataclass(frozen=True)
class Everything(Case):
    """Case with all features; `hooks` and `scaler` turn them off on jaxddp's side only."""

    hooks: bool = True
    scaler: bool = True

    @property
    def torch_source(self) -> BuiltIn:
        return EverythingSource(self.config, self.dataset())

    def jax_side(self) -> JaxSide:
        side = super().jax_side()
        hooks = [GradientHook("*.bias", lambda name, g: jnp.clip(g, -LIMIT, LIMIT), "local")]
        if not self.config.shard_optimizer:
            hooks.append(GradientHook("fc1.*", lambda name, g: g / 2, "mean"))
        step = dataclasses.replace(
            side.replica_step,  # type: ignore[type-var]
            gradient_hooks=tuple(hooks) if self.hooks else (),
            scaler=GradScaler(**SCALER) if self.scaler else None,  # type: ignore[arg-type]
        )
        return dataclasses.replace(side, replica_step=step)


def case_of(name: str, world_size: int, hooks: bool = True, scaler: bool = True, **changes: Any) -> Everything:
    options = EVERYTHING[name] | changes
    plain = make_case("char_mlp", "adamw", world_size, steps=STEPS, global_batch_size=16 * world_size, **options)
    return Everything(plain.config, world_size, STEPS, plain.ignored_labels, hooks, scaler)


def run_and_compare(ours: Everything, theirs: Everything, pool: TorchPool) -> Comparison:
    weights = theirs.initial_weights()
    stages = (*STAGES, "averaged", "scaler") if ours.scaler else (*STAGES, "averaged")
    run = run_jax(ours, weights)
    assert not any(record["spread"] for record in run.records)
    return compare(run, pool.run(theirs, weights), TOLERANCE, stages)


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param("powerSGD", 2),
        pytest.param("powerSGD", 4, marks=pytest.mark.large),
        pytest.param("sharded", 2, marks=pytest.mark.large),
        pytest.param("sharded", 4),
    ],
)
def test_all_features_at_once_equal_torchs(name: str, world_size: int, pool: TorchPool) -> None:
    comparison = run_and_compare(case_of(name, world_size), case_of(name, world_size), pool)
    assert comparison.equal, comparison


CHANGES: list[dict[str, Any]] = [
    {"comm_hook": "allreduce"},
    {"ema_decay": 0.8},
    {"hooks": False},
    {"scaler": False},
    {"buffers": "rank0"},
    {"dropout_masks": "replica"},
    {"freeze": ()},
    {"clip_grad_norm": None},
    {"loss_normalization": "ddp"},
    {"schedule": "constant"},
]
ONE_CHANGE = [
    pytest.param(change, id=next(iter(change)), marks=pytest.mark.large if number else ())
    for number, change in enumerate(CHANGES)
]


@pytest.mark.large
@pytest.mark.parametrize("change", ONE_CHANGE)
def test_one_feature_left_out_or_changed_is_detected(change: dict[str, Any], pool: TorchPool) -> None:
    comparison = run_and_compare(case_of("powerSGD", 2, **change), case_of("powerSGD", 2), pool)
    assert not comparison.equal
    assert max(residual.value for residual in comparison.worst.values()) > FAULT
