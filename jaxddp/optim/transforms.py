"""Parts of torch's optimizers: gradient transformations that optax lacks, and what all optimizers share.

Schedules are functions of the number of steps taken so far, as in `jaxddp.optim.optimizers`.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import optax

from jaxddp.config.ranges import RANGES, check_range

P = ParamSpec("P")
Betas = tuple[optax.ScalarOrSchedule, float]

DEFAULT_BETAS: Betas = (0.9, 0.999)


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
        mu, nu = update_moments(grads, state, (beta1, beta2))
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else None
        rest1, rest2 = one_minus_power(beta1, steps), one_minus_power(beta2, steps)
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


def ranges_checked(make: Callable[P, optax.GradientTransformation]) -> Callable[P, optax.GradientTransformation]:
    """Raise `InputError` for values outside of their ranges, which are the flags'."""

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformation:
        for name, value in inspect.signature(make).bind(*args, **kwargs).arguments.items():
            for number in value if isinstance(value, tuple) else (value,):
                if name in RANGES and isinstance(number, int | float):  # not a schedule, nor traced
                    check_range(name, number, f"{name} {value}")
        return make(*args, **kwargs)

    return checked


def directed(maximize: bool, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer, or with `maximize` one that goes uphill: torch negates the gradients first of all."""
    if not maximize:
        return optimizer
    return optax.GradientTransformation(
        optimizer.init,
        lambda grads, state, params=None: optimizer.update(jax.tree.map(jnp.negative, grads), state, params),
    )


def decayed(
    rescale: optax.GradientTransformation, lr: optax.ScalarOrSchedule, weight_decay: float, decoupled: bool = False
) -> optax.GradientTransformation:
    """Chain weight decay, `rescale` and the learning rate: decay of the gradient, or decoupled of the update."""
    decay = optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
    parts = (rescale, decay) if decoupled else (decay, rescale)
    return optax.chain(*parts, optax.scale_by_learning_rate(lr))


def update_moments(grads: optax.Updates, state: Any, betas: tuple[Any, float]) -> tuple[optax.Updates, optax.Updates]:
    """Return the running means of gradients and of their squares, `mu` and `nu` of a state, after `grads`."""
    mu = optax.tree.cast_like(optax.tree.update_moment(grads, state.mu, betas[0], 1), state.mu)
    return mu, optax.tree.update_moment(grads, state.nu, betas[1], 2)


def at(value: optax.ScalarOrSchedule, steps: jax.Array) -> Any:
    """Evaluate a number or schedule after `steps` steps."""
    return value(steps) if callable(value) else value


def one_minus_power(beta: Any, steps: jax.Array) -> jax.Array:
    """Compute `1 - beta^steps` without cancellation, in float32 or better for any dtype of the leaves."""
    if isinstance(beta, float):  # take the logarithm in Python: float32 would round beta first
        log_beta = math.log(beta) if beta else -math.inf
        return -jnp.expm1(steps.astype(float) * log_beta)
    return -jnp.expm1(steps.astype(float) * jnp.log(beta))
