"""An optax transformation that records the gradients it receives, and that can use others in their place."""

from typing import Any, NamedTuple

import jax
import optax
from jax import numpy as jnp


class Watched(NamedTuple):
    """State of a watched transformation.

    Attributes:
        inner: the transformation's state.
        received: gradients of the last update; zeros if there was none.
        given: gradients that take their place, where `forced` is not 0.
        forced: numbers, as many as the gradients have.
        updates: int32 scalar, number of updates since `fresh`.
    """

    inner: Any
    received: Any
    given: Any
    forced: Any
    updates: Any


def watched(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that makes the same updates and records the gradients it receives in its state.

    >>> sgd, params = watched(optax.sgd(0.5)), {"w": jnp.ones(1)}
    >>> updates, state = sgd.update({"w": jnp.ones(1)}, sgd.init(params), params)
    >>> float(updates["w"][0]), float(state.received["w"][0]), int(state.updates)
    (-0.5, 1.0, 1)
    """
    transformation = optax.with_extra_args_support(transformation)

    def init(params: Any) -> Watched:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Watched(transformation.init(params), zeros, zeros, zeros, jnp.int32(0))

    def update(updates: Any, state: Watched, params: Any = None, **extra: Any) -> tuple[Any, Watched]:
        used = jax.tree.map(lambda *leaves: jnp.where(*leaves), state.forced, state.given, updates)
        new, inner = transformation.update(used, state.inner, params, **extra)
        return new, Watched(inner, updates, state.given, state.forced, state.updates + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def fresh(state: Watched) -> Watched:
    """Return the state before a step: no gradients received, no updates made."""
    return state._replace(received=jax.tree.map(jnp.zeros_like, state.received), updates=jnp.int32(0))
