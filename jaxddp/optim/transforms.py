"""Gradient transformations that torch's optimizers need and optax lacks.

Schedules are functions of the number of steps taken so far, as in `jaxddp.optim.optimizers`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Betas = tuple[optax.ScalarOrSchedule, float]


class TraceState(NamedTuple):
    """Number of steps taken, and the momentum buffer."""

    steps: jax.Array
    buffer: optax.Updates


class AdamState(NamedTuple):
    """Number of steps taken, and running means of gradients and their squares; amsgrad: largest mean squares."""

    steps: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    nu_max: optax.Updates | None


def trace(decay: optax.ScalarOrSchedule, dampening: float = 0, nesterov: bool = False) -> optax.GradientTransformation:
    """Accumulate the momentum buffer of `sgd`; the identity if `decay` is 0.

    `optax.trace` has no dampening and no schedule.
    """
    if decay == 0:
        return optax.identity()

    def init(params: optax.Params) -> TraceState:
        return TraceState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(grads: optax.Updates, state: TraceState, params: Any = None) -> tuple[optax.Updates, TraceState]:
        momentum = at(decay, state.steps)
        share = jnp.where(state.steps == 0, 1.0, 1 - dampening)  # torch does not dampen the first gradient
        buffer = jax.tree.map(lambda g, b: (share * g + momentum * b).astype(b.dtype), grads, state.buffer)
        ahead = jax.tree.map(lambda g, b: (g + momentum * b).astype(g.dtype), grads, buffer) if nesterov else buffer
        return ahead, TraceState(optax.safe_increment(state.steps), buffer)

    return optax.GradientTransformation(init, update)


def scale_by_adam(betas: Betas, eps: float, amsgrad: bool = False) -> optax.GradientTransformation:
    """Rescale gradients to Adam's `u = m / (1 - beta1^t) / (sqrt(w / (1 - beta2^t)) + eps)`.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2;  amsgrad: w <- max(w, v), else w = v

    With a schedule, `beta1^t` is the power of the current value. Two differences from optax: amsgrad
    compares `v` before bias correction, and `1 - beta^t` keeps its digits in float32, where the first
    step of optax.adam has a relative error of 7e-6.
    """

    def init(params: optax.Params) -> AdamState:
        mu, nu, nu_max = (optax.tree.zeros_like(params) for _ in range(3))
        return AdamState(jnp.zeros([], jnp.int32), mu, nu, nu_max if amsgrad else None)

    def update(grads: optax.Updates, state: AdamState, params: Any = None) -> tuple[optax.Updates, AdamState]:
        beta1, beta2 = at(betas[0], state.steps), betas[1]
        steps = optax.safe_increment(state.steps)
        mu = optax.tree.cast_like(optax.tree.update_moment(grads, state.mu, beta1, 1), state.mu)
        nu = optax.tree.update_moment(grads, state.nu, beta2, 2)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else None
        rest1, rest2 = _one_minus_power(beta1, steps), _one_minus_power(beta2, steps)
        updates = jax.tree.map(
            lambda m, w: (m / rest1 / (jnp.sqrt(w / rest2) + eps)).astype(m.dtype), mu, nu_max if amsgrad else nu
        )
        return updates, AdamState(steps, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)


def scale_by_root_of_sum(eps: float, initial: float) -> optax.GradientTransformation:
    """Rescale gradients to Adagrad's `g / (sqrt(s) + eps)`; `optax.scale_by_rss` has `eps` inside the root."""

    def init(params: optax.Params) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(optax.tree.full_like(params, initial))

    def update(grads: optax.Updates, state: optax.ScaleByRssState, params: Any = None) -> tuple[optax.Updates, Any]:
        total = jax.tree.map(lambda g, s: s + g**2, grads, state.sum_of_squares)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), grads, total), optax.ScaleByRssState(total)

    return optax.GradientTransformation(init, update)


def at(value: optax.ScalarOrSchedule, steps: jax.Array) -> Any:
    """Evaluate a number or schedule after `steps` steps."""
    return value(steps) if callable(value) else value


def _one_minus_power(beta: Any, steps: jax.Array) -> jax.Array:
    """Compute `1 - beta^steps` without cancellation, in float32 or better for any dtype of the leaves."""
    if isinstance(beta, float):  # take the logarithm in Python: float32 would round beta first
        log_beta = math.log(beta) if beta else -math.inf
        return -jnp.expm1(steps.astype(float) * log_beta)
    return -jnp.expm1(steps.astype(float) * jnp.log(beta))
