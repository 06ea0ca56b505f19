"""All features that can be combined, turned on at once, against torch DDP in every stage of every step."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from jax import numpy as jnp

import torch_ref.gradient_hooks
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.torch_side.side import TorchSide
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.gradient_hooks import GradientHook
from jaxddp.step.replica_step import ReplicaStep
from tests.support.cases import ChangedCase, make_case
from tests.support.trajectories import STAGES, Comparison, compare, run_in_both

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


def of_torch(side: TorchSide, mean_hook: bool) -> TorchSide:
    """Add what the configuration cannot express: custom hooks, and a loss scaler in float64."""
    make = torch_ref.gradient_hooks.GradientHook
    hooks = [make("*.bias", lambda name, g: g.clamp(-LIMIT, LIMIT), "local")]
    if mean_hook:
        hooks.append(make("fc1.*", lambda name, g: g / 2, "mean"))
    scaler = torch.amp.GradScaler("cpu", **SCALER)  # type: ignore[arg-type]
    return side._replace(scaler=scaler, gradient_hooks=tuple(hooks))


def of_jax(step: ReplicaStep, mean_hook: bool, hooks: bool, scaler: bool) -> ReplicaStep:
    """Add the same, unless `hooks` and `scaler` turn them off."""
    every = [GradientHook("*.bias", lambda name, g: jnp.clip(g, -LIMIT, LIMIT), "local")]
    if mean_hook:
        every.append(GradientHook("fc1.*", lambda name, g: g / 2, "mean"))
    return dataclasses.replace(
        step,
        gradient_hooks=tuple(every) if hooks else (),
        scaler=GradScaler(**SCALER) if scaler else None,  # type: ignore[arg-type]
    )


def case_of(name: str, world_size: int, hooks: bool = True, scaler: bool = True, **changes: Any) -> ChangedCase:
    options = EVERYTHING[name] | changes
    plain = make_case("char_mlp", "adamw", world_size, steps=STEPS, global_batch_size=16 * world_size, **options)
    mean_hook = name != "sharded"
    return ChangedCase(
        **vars(plain),
        of_jax=partial(of_jax, mean_hook=mean_hook, hooks=hooks, scaler=scaler),
        of_torch=partial(of_torch, mean_hook=mean_hook),
    )


def run_and_compare(name: str, world_size: int, pool: TorchPool, **change: Any) -> Comparison:
    """Compare a run with all features in torch and a run in jaxddp, in which one may be changed."""
    ours, theirs = run_in_both(case_of(name, world_size), pool, case_of(name, world_size, **change))
    assert not any(record["spread"] for record in ours.records)
    stages = (*STAGES, "averaged") if "scaler" in change else (*STAGES, "averaged", "scaler")
    return compare(ours, theirs, TOLERANCE, stages)


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "world_size"),
    [("powerSGD", 2), ("powerSGD", 4), ("sharded", 2), ("sharded", 4)],
)
def test_all_features_at_once_equal_torchs(name: str, world_size: int, pool: TorchPool) -> None:
    comparison = run_and_compare(name, world_size, pool)
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


@pytest.mark.large
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_one_feature_left_out_or_changed_is_detected(change: dict[str, Any], pool: TorchPool) -> None:
    comparison = run_and_compare("powerSGD", 2, pool, **change)
    assert not comparison.equal
    assert max(residual.value for residual in comparison.worst.values()) > FAULT
