"""Members of an optax chain that never change the updates are seen, each at its line."""

from collections.abc import Iterator
from typing import Any

import jax
import optax
import pytest
from jax import numpy as jnp

from jaxddp.parity.idle_operations import Called
from jaxddp.parity.jax_side.idle_members import kept_by, with_members
from jaxddp.parity.jax_side.optimizer_line import note_optimizers

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(optax.GradientTransformation, "__new__", optax.GradientTransformation.__new__)
    note_optimizers()
    yield


def idle_members(optimizer: optax.GradientTransformation, *gradients: Any) -> list[str]:
    members: list[Called] = []
    update = jax.jit(with_members(optimizer.update, members))
    state, idle = optimizer.init(PARAMS), None
    for of_step in gradients:
        (_, state), flags = update(of_step, state, PARAMS)
        kept = {called.function for called, kept in kept_by(members, flags).items() if kept.operands}
        idle = kept if idle is None else idle & kept
    return sorted(idle or ())


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: optax.clip_by_global_norm(100.0), "clip_by_global_norm"),
        (lambda: optax.clip(100.0), "clip"),
        (lambda: optax.adaptive_grad_clip(1e6), "adaptive_grad_clip"),
        (lambda: optax.zero_nans(), "zero_nans"),
        (lambda: optax.add_decayed_weights(0.0), "add_decayed_weights"),
        (lambda: optax.scale(1.0), "scale"),
        (lambda: optax.masked(optax.trace(0.9), {"w": False, "b": False}), "masked"),
        (lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.where(x > 99, 0.0, x), u)), "stateless"),
        (lambda: optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u, s)), "GradientTransformation"),
    ],
)
def test_a_member_that_passes_all_updates_on_is_seen(made: Any, name: str) -> None:
    assert name in idle_members(optax.chain(made(), optax.adam(1e-2)), PARAMS, PARAMS)


def test_a_member_that_acts_once_is_not_idle() -> None:
    large = jax.tree.map(lambda x: 1e3 * x, PARAMS)
    chain = optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(1e-2))
    assert idle_members(chain, PARAMS) == ["clip_by_global_norm"]
    assert idle_members(chain, PARAMS, large) == []


def test_parts_that_an_optimizer_makes_by_itself_are_not_seen() -> None:
    assert idle_members(optax.adamw(1e-2, weight_decay=0.0), PARAMS) == []
    assert idle_members(optax.chain(optax.sgd(1e-2)), PARAMS) == []


def test_an_update_that_was_always_finite_shows_its_guard_without_effect() -> None:
    guarded = optax.apply_if_finite(optax.sgd(1e-2), 3)
    bad = {**PARAMS, "b": jnp.full(3, jnp.nan)}
    assert idle_members(guarded, PARAMS) == ["apply_if_finite"]
    assert idle_members(guarded, PARAMS, bad) == []
