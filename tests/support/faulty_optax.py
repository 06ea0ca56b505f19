"""Optimizers with a mistake, as somebody would write them in optax."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import numpy as jnp

from tests.faults import planted_optimizer
from tests.faults.recipes import Recipe

Transformation = optax.GradientTransformation | optax.GradientTransformationExtraArgs
Tree = dict[str, jax.Array]


def zeros(params: Tree) -> Tree:
    return {name: jnp.zeros_like(value) for name, value in params.items()}


def l2(decay: float, inner: Transformation, mask: Any = None) -> Transformation:
    """Add weight decay to the gradients, as torch's SGD and Adam do."""
    return optax.chain(optax.add_decayed_weights(decay, mask), inner)


def all_but(*names: str) -> Callable[[Tree], dict[str, bool]]:
    return lambda params: {name: name not in names for name in params}


def uncorrected_adam(lr: float) -> Transformation:
    return optax.chain(planted_optimizer.uncorrected_adam(Recipe("adam", lr)), optax.scale_by_learning_rate(lr))


def then(inner: Transformation, change: Callable[[Tree], Tree]) -> Transformation:
    """Apply `change` to the updates."""
    return optax.chain(inner, optax.stateless(lambda updates, params: {**updates, **change(updates)}))


def stale(inner: Transformation, name: str) -> Transformation:
    """Give one tensor the update of the step before."""

    def update(updates: Tree, before: Tree | None, params: Any = None) -> tuple[Tree, Tree]:
        return {**updates, name: updates[name] if before is None else before[name]}, updates

    return optax.chain(inner, optax.GradientTransformation(lambda params: None, update))


def decay_towards_start(decay: float) -> Transformation:
    """Decay towards the initial weights instead of 0."""

    def update(updates: Tree, start: Tree, params: Tree) -> tuple[Tree, Tree]:
        return {name: u + decay * (params[name] - start[name]) for name, u in updates.items()}, start

    return optax.GradientTransformation(lambda params: params, update)


def a_step_late(lr: float) -> Transformation:
    """Return SGD with the gradients of the step before."""
    return optax.GradientTransformation(
        zeros, lambda g, before, params=None: ({n: -lr * b for n, b in before.items()}, g)
    )
