"""torch.optim's Adadelta, ASGD and Rprop, which treat each element by itself, like Adam.

The notation and the rules are those of `jaxddp.optim.optimizers`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.optim.transforms import at, decayed, directed, ranges_checked


class ASGDState(NamedTuple):
    """Number of steps taken, rate and share of the next step, and average of the parameters."""

    steps: jax.Array
    rate: jax.Array
    share: jax.Array
    average: optax.Params


class RpropState(NamedTuple):
    """Last gradient, 0 where it changed its sign, and size of the next step."""

    previous: optax.Updates
    sizes: optax.Updates


@ranges_checked
def adadelta(
    lr: optax.ScalarOrSchedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Adadelta: gradients in units of the parameter, by the ratio of recent updates to recent gradients.

        g <- g + weight_decay p
        v <- rho v + (1 - rho) g^2
        d = sqrt(a + eps) / sqrt(v + eps) g
        a <- rho a + (1 - rho) d^2
        p <- p - lr d

    Args:
        rho: decay rate of the running means.
        eps: added inside both roots.
        weight_decay: L2 penalty.
        maximize: go uphill.

    Source: torch.optim.Adadelta; Zeiler, https://arxiv.org/abs/1212.5701.

    >>> optimizer = adadelta()
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(5))
    [-0.00316  0.00316]
    """
    return directed(maximize, decayed(optax.scale_by_adadelta(rho, eps), lr, weight_decay))


@ranges_checked
def asgd(
    lr: optax.ScalarOrSchedule = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Averaged stochastic gradient descent; the state holds the average, `average`.

        g <- g + weight_decay p
        p <- (1 - lambd eta) p - eta g;  eta = lr at the first step, else lr / (1 + lambd lr (t - 1))^alpha
        average <- average + (p - average) / max(1, t - 1 - t0)

    torch keeps `eta` in float32, whatever the dtype of the parameters, and so does this; a schedule's rate is used one
    step late, as in torch.

    Args:
        lambd: decay of the parameters.
        alpha: power by which the rate falls.
        t0: step from which parameters are averaged.
        weight_decay: L2 penalty.
        maximize: go uphill.

    Source: torch.optim.ASGD; Polyak and Juditsky, https://dl.acm.org/citation.cfm?id=131098.

    >>> optimizer, params = asgd(lr=0.5), jnp.zeros(2)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(params), params)
    >>> print(updates, state.average)
    [-1.5   0.05] [-1.5   0.05]
    """

    def init(params: optax.Params) -> ASGDState:
        zero = jnp.zeros([], jnp.int32)
        average = optax.tree.zeros_like(params)
        return ASGDState(zero, jnp.asarray(at(lr, zero), jnp.float32), jnp.ones([], jnp.float32), average)

    def update(grads: optax.Updates, state: ASGDState, params: Any = None) -> tuple[optax.Updates, ASGDState]:
        steps, eta, share = optax.safe_increment(state.steps), state.rate.astype(float), state.share.astype(float)
        rate = at(lr, state.steps)
        updates = jax.tree.map(lambda g, p: (-eta * (g + (weight_decay + lambd) * p)).astype(p.dtype), grads, params)
        after = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda a, p: jnp.where(share == 1, p, a + (p - a) * share).astype(a.dtype), state.average, after
        )
        eta = jnp.asarray(rate / (1 + lambd * rate * steps.astype(float)) ** alpha, jnp.float32)
        share = (1 / jnp.maximum(1.0, steps.astype(float) - t0)).astype(jnp.float32)
        return updates, ASGDState(steps, eta, share, average)

    return directed(maximize, optax.GradientTransformation(init, update))


@ranges_checked
def rprop(
    lr: optax.ScalarOrSchedule = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Rprop: steps whose size grows while the gradient keeps its sign, and shrinks where it changes it.

        s <- clamp(s etas[1 if g g' > 0, 0 if g g' < 0], step_sizes);  g <- 0 where g g' < 0
        p <- p - s sign(g)

    with `g'` the gradient of the step before. For full batches.

    Args:
        lr: size of the first step; of a schedule only the first rate counts, as in torch.
        etas: factors by which a step shrinks and grows.
        step_sizes: smallest and largest step.
        maximize: go uphill.

    Source: torch.optim.Rprop; Riedmiller and Braun, IEEE ICNN 1993.

    >>> optimizer = rprop(lr=0.5)
    >>> _, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(optimizer.update(jnp.array([2.0, 0.1]), state)[0])
    [-0.6 -0. ]
    """

    def init(params: optax.Params) -> RpropState:
        return RpropState(optax.tree.zeros_like(params), optax.tree.full_like(params, at(lr, jnp.zeros([], jnp.int32))))

    def update(grads: optax.Updates, state: RpropState, params: Any = None) -> tuple[optax.Updates, RpropState]:
        signs = jax.tree.map(lambda g, before: jnp.sign(g * before), grads, state.previous)

        def sized(sign: jax.Array, size: jax.Array) -> jax.Array:
            factor = jnp.where(sign > 0, etas[1], jnp.where(sign < 0, etas[0], 1.0))
            return jnp.clip(size * factor, *step_sizes).astype(size.dtype)

        sizes = jax.tree.map(sized, signs, state.sizes)
        kept = jax.tree.map(lambda g, sign: jnp.where(sign < 0, 0, g).astype(g.dtype), grads, signs)
        return jax.tree.map(lambda g, size: -jnp.sign(g) * size, kept, sizes), RpropState(kept, sizes)

    return directed(maximize, optax.GradientTransformation(init, update))
