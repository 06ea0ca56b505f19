"""torch.optim's relatives of Adam: Adamax, NAdam and RAdam.

The notation and the rules are those of `jaxddp.optim.optimizers`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.optim.transforms import (
    DEFAULT_BETAS,
    Betas,
    at,
    decayed,
    directed,
    one_minus_power,
    ranges_checked,
    update_moments,
)


class MomentsState(NamedTuple):
    """Number of steps taken, running means of gradients, and of their squares (Adamax: largest gradients)."""

    steps: jax.Array
    mu: optax.Updates
    nu: optax.Updates


class NAdamState(NamedTuple):
    """Number of steps taken, running means of gradients and of their squares, and product of the momenta so far."""

    steps: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    mu_product: jax.Array


@ranges_checked
def adamax(
    lr: optax.ScalarOrSchedule = 2e-3,
    betas: Betas = DEFAULT_BETAS,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Adamax: Adam with the largest recent gradient in place of the root mean square.

        g <- g + weight_decay p
        m <- beta1 m + (1 - beta1) g
        u <- max(beta2 u, |g| + eps)
        p <- p - lr m / (1 - beta1^t) / u

    Args:
        betas: decay rates of the running mean and of the largest gradient.
        eps: added to the gradient's absolute value.
        weight_decay: L2 penalty.
        maximize: go uphill.

    Source: torch.optim.Adamax; Kingma and Ba, https://arxiv.org/abs/1412.6980, section 7.

    >>> optimizer = adamax(lr=0.5)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(3))
    [-0.5  0.5]
    """

    def update(grads: optax.Updates, state: MomentsState, params: Any = None) -> tuple[optax.Updates, MomentsState]:
        beta1, steps = at(betas[0], state.steps), optax.safe_increment(state.steps)
        mu = optax.tree.cast_like(optax.tree.update_moment(grads, state.mu, beta1, 1), state.mu)
        nu = jax.tree.map(lambda g, u: jnp.maximum(betas[1] * u, jnp.abs(g) + eps).astype(u.dtype), grads, state.nu)
        rest = one_minus_power(beta1, steps)
        return jax.tree.map(lambda m, u: (m / rest / u).astype(m.dtype), mu, nu), MomentsState(steps, mu, nu)

    return directed(maximize, decayed(optax.GradientTransformation(_no_moments, update), lr, weight_decay))


@ranges_checked
def nadam(
    lr: optax.ScalarOrSchedule = 2e-3,
    betas: Betas = DEFAULT_BETAS,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """NAdam: Adam with Nesterov momentum that grows from half of beta1 to beta1.

        mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        u = (1 - mu_t) / (1 - mu_1 ... mu_t) g + mu_{t+1} / (1 - mu_1 ... mu_{t+1}) m
        p <- p - lr u / (sqrt(v / (1 - beta2^t)) + eps)

    torch keeps the product of the momenta in float32, whatever the dtype of the parameters, and so does this.

    Args:
        betas: decay rates of the running means of the gradients and of their squares.
        eps: added to the root.
        weight_decay: L2 penalty, or with `decoupled_weight_decay` that of `adamw`.
        momentum_decay: speed at which the momentum grows.
        decoupled_weight_decay: subtract `lr weight_decay p` instead of adding `weight_decay p` to the gradient.
        maximize: go uphill.

    Source: torch.optim.NAdam; Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.

    >>> optimizer = nadam(lr=0.5)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(3))
    [-0.528  0.528]
    """

    def init(params: optax.Params) -> NAdamState:
        return NAdamState(*_no_moments(params), jnp.ones([], jnp.float32))

    def update(grads: optax.Updates, state: NAdamState, params: Any = None) -> tuple[optax.Updates, NAdamState]:
        beta1, steps = at(betas[0], state.steps), optax.safe_increment(state.steps)
        now, following = (beta1 * (1 - 0.96 ** (t.astype(float) * momentum_decay) / 2) for t in (steps, steps + 1))
        product = state.mu_product * jnp.asarray(now, jnp.float32)
        of_gradient = (1 - now) / (1 - product.astype(float))
        of_mean = following / (1 - product.astype(float) * following)
        mu, nu = update_moments(grads, state, (beta1, betas[1]))
        rest = one_minus_power(betas[1], steps)

        def ahead(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return ((of_gradient * g + of_mean * m) / (jnp.sqrt(v / rest) + eps)).astype(m.dtype)

        return jax.tree.map(ahead, grads, mu, nu), NAdamState(steps, mu, nu, product)

    core = optax.GradientTransformation(init, update)
    return directed(maximize, decayed(core, lr, weight_decay, decoupled_weight_decay))


@ranges_checked
def radam(
    lr: optax.ScalarOrSchedule = 1e-3,
    betas: Betas = DEFAULT_BETAS,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """RAdam: Adam that adapts its rate once the variance of the adaptation is small, and then by its share.

        rho_inf = 2 / (1 - beta2) - 1
        rho_t = rho_inf - 2 t beta2^t / (1 - beta2^t)
        r_t = sqrt((rho_t - 4) (rho_t - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho_t))
        p <- p - lr m / (1 - beta1^t) r_t sqrt(1 - beta2^t) / (sqrt(v) + eps)   rho_t > 5
        p <- p - lr m / (1 - beta1^t)                                          else

    with `m` and `v` as in `nadam`.

    Args:
        betas: decay rates of the running means of the gradients and of their squares.
        eps: added to the root.
        weight_decay: L2 penalty, or with `decoupled_weight_decay` that of `adamw`.
        decoupled_weight_decay: subtract `lr weight_decay p` instead of adding `weight_decay p` to the gradient.
        maximize: go uphill.

    Source: torch.optim.RAdam; Liu et al., https://arxiv.org/abs/1908.03265.

    >>> optimizer = radam(lr=0.5)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(2))
    [-1.5   0.05]
    """
    factors = _rectifications(betas[1])

    def update(grads: optax.Updates, state: MomentsState, params: Any = None) -> tuple[optax.Updates, MomentsState]:
        beta1, steps = at(betas[0], state.steps), optax.safe_increment(state.steps)
        mu, nu = update_moments(grads, state, (beta1, betas[1]))
        rest = one_minus_power(beta1, steps)
        factor = jnp.asarray(factors, float)[jnp.minimum(steps, len(factors) - 1)]

        def rectified(m: jax.Array, v: jax.Array) -> jax.Array:
            adaptive = jnp.where(factor > 0, factor / (jnp.sqrt(v) + eps), 1)
            return (m / rest * adaptive).astype(m.dtype)

        return jax.tree.map(rectified, mu, nu), MomentsState(steps, mu, nu)

    core = optax.GradientTransformation(_no_moments, update)
    return directed(maximize, decayed(core, lr, weight_decay, decoupled_weight_decay))


def _no_moments(params: optax.Params) -> MomentsState:
    return MomentsState(jnp.zeros([], jnp.int32), *(optax.tree.zeros_like(params) for _ in range(2)))


def _rectifications(beta2: float) -> np.ndarray:
    """Return RAdam's `r_t sqrt(1 - beta2^t)` for t from 0, 0 where it does not adapt; the last holds for all later t.

    `rho_t` is a difference of numbers near `rho_inf`, of which float32 keeps three digits in the first steps.
    """
    most = int(min(40 / (1 - beta2), 2**20))  # by then beta2^t is below e^-40, or 4 MB are enough
    t = np.arange(most + 1, dtype=float)
    power = np.array([beta2**step for step in t.tolist()])  # torch's bits, which the difference would magnify
    rho_inf = 2 / (1 - beta2) - 1
    with np.errstate(all="ignore"):  # at t = 0, and below the threshold
        rho = rho_inf - 2 * t * power / (1 - power)
        r = np.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        return np.where(rho > 5, r * np.sqrt(1 - power), 0.0)
