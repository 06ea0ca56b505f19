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


def without_every_third(inner: Transformation, state_moves: bool) -> Transformation:
    """Leave out every third update, with or without that of the state."""

    def update(updates: Tree, state: Any, params: Any = None) -> tuple[Tree, Any]:
        count, before = state
        is_made = (count + 1) % 3 != 0
        made, after = inner.update(updates, before, params)
        kept = jax.tree.map(lambda new, old: jnp.where(is_made | state_moves, new, old), after, before)
        return jax.tree.map(lambda u: jnp.where(is_made, u, 0.0), made), (count + 1, kept)

    return optax.GradientTransformation(lambda params: (jnp.int32(0), inner.init(params)), update)


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


def asgd(lr: float, lambd: float, alpha: float = 0.75) -> Transformation:
    """Return torch's ASGD, with the rate of each step in the dtype of the parameters."""

    def update(gradients: Tree, step: jax.Array, params: Tree) -> tuple[Tree, jax.Array]:
        eta = lr / (1 + lambd * lr * step) ** alpha
        return {name: -eta * (lambd * params[name] + g) for name, g in gradients.items()}, step + 1

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def nadam(lr: float) -> Transformation:
    """Return torch's NAdam, with its product of momenta in the dtype of the parameters."""

    def update(gradients: Tree, state: Any, params: Any = None) -> tuple[Tree, Any]:
        step, product, means, squares = state
        now, later = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * (step + ahead))) for ahead in (1, 2))
        product = product * now
        means = {name: 0.9 * means[name] + 0.1 * g for name, g in gradients.items()}
        squares = {name: 0.999 * squares[name] + 0.001 * g * g for name, g in gradients.items()}
        root = {name: jnp.sqrt(s / (1 - 0.999 ** (step + 1))) + 1e-8 for name, s in squares.items()}
        ahead = {
            name: g * (1 - now) / (1 - product) + means[name] * later / (1 - product * later)
            for name, g in gradients.items()
        }
        return {name: -lr * x / root[name] for name, x in ahead.items()}, (step + 1, product, means, squares)

    return optax.GradientTransformation(lambda params: (jnp.zeros(()), jnp.ones(()), *[zeros(params)] * 2), update)
