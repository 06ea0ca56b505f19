"""Gradient hooks before and after the mean, against torch's `register_hook` and a loop over `parameter.grad`."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import torch_ref.gradient_hooks
from jaxddp import optim
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.errors import InputError
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.torch_side.side import TorchSide
from jaxddp.step.gradient_hooks import GradientHook
from tests.support.cases import ChangedCase, even_case
from tests.support.step_cases import Net, first
from tests.support.trajectories import check_differs, check_equal, compare, run_in_both

TOLERANCE = 1e-12  # float64; measured: up to 4.6e-15
FAULT = 1e-3  # smallest difference of a stage that a wrong hook must cause; measured: 1.7e-2

# Clipping by value is not linear, so that clipping before and after the mean differ.
HALF, LIMIT = 0.5, 0.004


@dataclass(frozen=True)
class Hooks:
    """Two hooks: one halves a layer's gradients, one clips the gradients of all biases by value.

    Attributes:
        halved, clipped: stage of each hook, "local" or "mean".
        layer: pattern of torch's parameter names.
    """

    halved: str = "mean"
    clipped: str = "local"
    layer: str = "layers.0.*"

    def of_jax(self) -> tuple[GradientHook, ...]:
        return (
            GradientHook(self.layer, lambda name, g: HALF * g, self.halved),
            GradientHook("*.bias", lambda name, g: jnp.clip(g, -LIMIT, LIMIT), self.clipped),
        )

    def of_torch(self, side: TorchSide) -> TorchSide:
        make = torch_ref.gradient_hooks.GradientHook
        halve = make(self.layer, lambda name, g: HALF * g, self.halved)
        clip = make("*.bias", lambda name, g: g.clamp(-LIMIT, LIMIT), self.clipped)
        return side._replace(gradient_hooks=(halve, clip))


def registered(side: TorchSide) -> TorchSide:
    """Clip by torch's own `register_hook`."""
    for name, parameter in side.model.named_parameters():
        if name.endswith(".bias"):
            parameter.register_hook(lambda g: g.clamp(-LIMIT, LIMIT))
    halve, _ = Hooks().of_torch(side).gradient_hooks
    return side._replace(gradient_hooks=(halve,))


def case_of(world_size: int, hooks: Hooks, of_torch: Any = None, **options: Any) -> ChangedCase:
    plain = even_case("mlp", "sgd", world_size, steps=6, clip_grad_norm=0.3, momentum=0.9, **options)
    return ChangedCase(
        **vars(plain),
        of_jax=lambda step: dataclasses.replace(step, gradient_hooks=hooks.of_jax()),
        of_torch=of_torch or hooks.of_torch,
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("hooks", "of_torch", "options"),
    [
        (Hooks(), registered, {}),  # one micro-batch: torch's register_hook is called once
        (Hooks(halved="local", clipped="mean"), None, {"accumulation_steps": 2}),
        (Hooks(), None, {"accumulation_steps": 2, "comm_hook": "bf16_compress", "global_batch_size": 64}),
    ],
    ids=["registered", "accumulated", "compressed"],
)
def test_gradient_hooks_equal_torchs(
    hooks: Hooks, of_torch: Any, options: dict[str, Any], world_size: int, pool: TorchPool
) -> None:
    if "comm_hook" in options and world_size > 2:
        options = options | {"comm_hook": "allreduce"}  # sums over more replicas are rounded in another order
    check_equal(run_in_both(case_of(world_size, hooks, of_torch, **options), pool), TOLERANCE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("wrong", "stage"),
    [
        (Hooks(clipped="mean"), "local_gradients"),  # clipped after the mean
        (Hooks(halved="local"), "local_gradients"),  # halved before the mean
        (Hooks(layer="layers.1.*"), "clipped_gradients"),  # another layer
    ],
)
def test_wrong_hooks_are_detected(wrong: Hooks, stage: str, pool: TorchPool) -> None:
    comparison = compare(*run_in_both(case_of(2, Hooks()), pool, case_of(2, wrong)), TOLERANCE)
    check_differs(comparison, stage, FAULT)
    assert comparison.worst["clipped_gradients"].value > FAULT


def trainer(*hooks: GradientHook) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), optim.sgd(0.1), replicas=first(2), gradient_hooks=hooks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientHook("*", lambda name, g: g, "after"), "GradientHook: when after: unknown"),
        (lambda: trainer(GradientHook("fc3.*", lambda name, g: g)), r"gradient_hooks fc3.\*: matches no parameter"),
    ],
)
def test_invalid_hooks_raise(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_hook_that_changes_the_shape_raises() -> None:
    ddp = trainer(GradientHook("fc1.*", lambda name, g: g.sum()))
    batch = ddp.replicas.shard({"x": jnp.ones((2, 3, 4)), "y": jnp.zeros((2, 3), int)})
    with pytest.raises(InputError, match=r"gradient_hooks fc1.\*: returns float32\[\] for fc1.bias; must be float32"):
        ddp.step(ddp.init(), batch)


@pytest.mark.large
def test_a_local_hook_sees_each_replicas_own_gradient() -> None:
    seen: list[tuple[str, float]] = []
    record = GradientHook(
        "fc2.bias", lambda name, g: jax.debug.callback(lambda x: seen.append((name, float(x))), g[0]), "local"
    )
    ddp = trainer(record)
    batch = ddp.replicas.shard(
        {"x": jnp.ones((2, 3, 4)) * jnp.array([1.0, 2.0])[:, None, None], "y": jnp.zeros((2, 3), int)}
    )
    ddp.step(ddp.init(), batch)
    jax.effects_barrier()
    assert len(seen) == 2 and len(set(seen)) == 2 and {name for name, _ in seen} == {"fc2.bias"}
