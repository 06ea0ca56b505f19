"""Optimizers with a mistake, as somebody would write them in optax."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import numpy as jnp

Transformation = optax.GradientTransformation | optax.GradientTransformationExtraArgs
Tree = dict[str, jax.Array]


def zeros(params: Tree) -> Tree:
    return {name: jnp.zeros_like(value) for name, value in params.items()}


def l2(decay: float, inner: Transformation, mask: Any = None) -> Transformation:
    """Add weight decay to the gradients, as torch's SGD and Adam do."""
    return optax.chain(optax.add_decayed_weights(decay, mask), inner)


def matrices(params: Tree) -> dict[str, bool]:
    return {name: value.ndim > 1 for name, value in params.items()}


def all_but(*names: str) -> Callable[[Tree], dict[str, bool]]:
    return lambda params: {name: name not in names for name in params}


def uncorrected_adam(lr: float) -> Transformation:
    def update(g: Tree, state: tuple[Tree, Tree], params: Any = None) -> tuple[Tree, tuple[Tree, Tree]]:
        m = {name: 0.9 * state[0][name] + 0.1 * g[name] for name in g}
        v = {name: 0.999 * state[1][name] + (1 - 0.999) * g[name] ** 2 for name in g}
        return {name: -lr * m[name] / (jnp.sqrt(v[name]) + 1e-8) for name in g}, (m, v)

    return optax.GradientTransformation(lambda params: (zeros(params), zeros(params)), update)


def adagrad_from(start: float, lr: float, eps: float) -> Transformation:
    """Return torch's Adagrad with another initial accumulator."""

    def update(g: Tree, s: Tree, params: Any = None) -> tuple[Tree, Tree]:
        s = {name: s[name] + g[name] ** 2 for name in g}
        return {name: -lr * g[name] / (jnp.sqrt(s[name]) + eps) for name in g}, s

    return optax.GradientTransformation(lambda params: {n: jnp.full_like(p, start) for n, p in params.items()}, update)


def then(inner: Transformation, change: Callable[[Tree], Tree]) -> Transformation:
    """Apply `change` to the updates."""
    return optax.chain(inner, optax.stateless(lambda updates, params: {**updates, **change(updates)}))


def stale(inner: Transformation, name: str) -> Transformation:
    """Give one tensor the update of the step before."""

    def update(updates: Tree, before: Tree | None, params: Any = None) -> tuple[Tree, Tree]:
        return {**updates, name: updates[name] if before is None else before[name]}, updates

    return optax.chain(inner, optax.GradientTransformation(lambda params: None, update))


def reset_every(steps: int, inner: Transformation) -> Transformation:
    """Reset the optimizer's state every so many steps."""

    def update(g: Tree, state: tuple[int, Any], params: Tree) -> tuple[Tree, tuple[int, Any]]:
        count, kept = state
        updates, kept = inner.update(g, inner.init(params) if count % steps == 0 else kept, params)
        return updates, (count + 1, kept)

    return optax.GradientTransformation(lambda params: (0, inner.init(params)), update)


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
