"""torch.optim's optimizers as optax gradient transformations.

Names, defaults and order of operations are torch's: in float64, hundreds of steps agree up to
rounding. optax's transformations are used where their definition is torch's.

`lr`, and `momentum` and `betas[0]`, which OneCycleLR cycles, are numbers or schedules: functions
of the number of steps taken so far. Parameters, gradients and state are any pytrees, and each
leaf keeps its dtype. `g` is the gradient, `p` the parameter, `t` the step counted from 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import BELONGS_TO
from jaxddp.errors import InputError
from jaxddp.optim import schedules
from jaxddp.optim.adam_variants import adamax, nadam, radam
from jaxddp.optim.elementwise import adadelta, asgd, rprop
from jaxddp.optim.plateau import reduce_on_plateau
from jaxddp.optim.transforms import (
    DEFAULT_BETAS,
    Betas,
    at,
    decayed,
    directed,
    ranges_checked,
    scale_by_adam,
    scale_by_root_of_sum,
    trace,
)


def from_config(config: TrainerConfig, total_steps: int) -> optax.GradientTransformation:
    """Return the optimizer that `config` names, with its schedule over a run of `total_steps` steps.

    Raises:
        InputError: the run is too short for the schedule.

    >>> optimizer = from_config(TrainerConfig(optimizer="sgd", lr=0.5), total_steps=10)
    >>> updates, state = optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))
    >>> print(updates)
    [-0.5 -0.5]
    """
    lr, momentum = schedules.from_config(config, total_steps)
    options = config.optimizer_options() | {"lr": lr}
    if momentum is not None and config.optimizer in BELONGS_TO["optimizer"]["betas"]:
        options["betas"] = (momentum, options.get("betas", DEFAULT_BETAS)[1])
    elif momentum is not None:
        options["momentum"] = momentum
    make = _OPTIMIZERS[config.optimizer]
    if config.schedule == "plateau":
        given = {"mode": config.best_mode} | config.schedule_options()
        return reduce_on_plateau(lambda rate: make(**options | {"lr": rate}), config.base_lr, **given)
    return make(**options)


@ranges_checked
def sgd(
    lr: optax.ScalarOrSchedule = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Stochastic gradient descent.

        g <- g + weight_decay p
        b <- momentum b + (1 - dampening) g;  b = g at the first step
        p <- p - lr b;  nesterov: p - lr (g + momentum b)

    Args:
        momentum: decay of the buffer `b`.
        dampening: share of a new gradient that does not enter the buffer.
        nesterov: look ahead by one momentum step.
        weight_decay: L2 penalty.
        maximize: go uphill.

    Raises:
        InputError: `nesterov` without momentum or with dampening.

    Source: torch.optim.SGD.

    >>> optimizer = sgd(lr=1.0, momentum=0.5)
    >>> updates, state = optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))
    >>> print(optimizer.update(jnp.ones(2), state)[0])
    [-1.5 -1.5]
    """
    if nesterov and (momentum == 0 or dampening != 0):
        raise InputError("--nesterov: needs --momentum above 0 and no --dampening")
    return directed(maximize, decayed(trace(momentum, dampening, nesterov), lr, weight_decay))


@ranges_checked
def adam(
    lr: optax.ScalarOrSchedule = 1e-3,
    betas: Betas = DEFAULT_BETAS,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> optax.GradientTransformation:
    """Adam with an L2 penalty: `p <- p - lr u`, with `u` from `scale_by_adam` of `g + weight_decay p`.

    Args:
        betas: decay rates of the running means of the gradients and of their squares.
        eps: added to the root.
        weight_decay: L2 penalty, or with `decoupled_weight_decay` that of `adamw`.
        amsgrad: divide by the largest mean square so far.
        maximize: go uphill.
        decoupled_weight_decay: subtract `lr weight_decay p` instead of adding `weight_decay p` to the gradient.

    Source: torch.optim.Adam; Kingma and Ba, https://arxiv.org/abs/1412.6980.

    >>> optimizer = adam(lr=0.5)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(3))
    [-0.5  0.5]
    """
    rescale = scale_by_adam(betas, eps, amsgrad)
    return directed(maximize, decayed(rescale, lr, weight_decay, decoupled_weight_decay))


@ranges_checked
def adamw(
    lr: optax.ScalarOrSchedule = 1e-3,
    betas: Betas = DEFAULT_BETAS,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay: `p <- p - lr (u + weight_decay p)`, with `u` from `scale_by_adam` of `g`.

    The arguments are those of `adam`.

    Source: torch.optim.AdamW; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.

    >>> optimizer, params = adamw(lr=0.25, weight_decay=0.5), jnp.full(2, 6.0)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(params), params)
    >>> print(updates.round(3))
    [-1.  -0.5]
    """
    return adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay=True)


@ranges_checked
def adagrad(
    lr: optax.ScalarOrSchedule = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """Adagrad: the learning rate of each element falls with the sum of its squared gradients.

        g <- g + weight_decay p
        s <- s + g^2
        p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    Args:
        lr_decay: hyperbolic decay of the learning rate.
        eps: added to the root.
        weight_decay: L2 penalty.
        initial_accumulator_value: initial `s`.
        maximize: go uphill.

    Source: torch.optim.Adagrad; Duchi et al., https://jmlr.org/papers/v12/duchi11a.html.

    >>> optimizer = adagrad(lr=0.5)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(3))
    [-0.5  0.5]
    """
    rescale = scale_by_root_of_sum(eps, initial_accumulator_value)
    return directed(maximize, decayed(rescale, lambda count: at(lr, count) / (1 + lr_decay * count), weight_decay))


@ranges_checked
def rmsprop(
    lr: optax.ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: optax.ScalarOrSchedule = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """RMSprop: gradients divided by the root of a running mean of their squares.

        g <- g + weight_decay p
        v <- alpha v + (1 - alpha) g^2;  centered: m <- alpha m + (1 - alpha) g, else m = 0
        b <- momentum b + g / (sqrt(v - m^2) + eps)
        p <- p - lr b

    Args:
        alpha: decay rate of the running means.
        eps: added to the root.
        weight_decay: L2 penalty.
        momentum: decay of the buffer `b`.
        centered: divide by the standard deviation.
        maximize: go uphill.

    Source: torch.optim.RMSprop; Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.

    >>> optimizer = rmsprop(lr=0.5)
    >>> updates, state = optimizer.update(jnp.array([3.0, -0.1]), optimizer.init(jnp.zeros(2)))
    >>> print(updates.round(3))
    [-5.  5.]
    """
    rescale = (optax.scale_by_stddev if centered else optax.scale_by_rms)(alpha, eps, eps_in_sqrt=False)
    decay = optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
    chained = optax.chain(decay, rescale, trace(momentum), optax.scale_by_learning_rate(lr))
    return directed(maximize, chained)


def clip_by_global_norm(
    grads: optax.Updates, max_norm: float, norm_of: Callable[[Any], jax.Array] = optax.tree.norm
) -> tuple[optax.Updates, jax.Array]:
    """Clip gradients to a global norm of `max_norm`: `g min(1, max_norm / (norm + 1e-6))`.

    `optax.clip_by_global_norm` has no 1e-6.

    Args:
        grads: any pytree.
        max_norm: largest norm of the clipped gradients.
        norm_of: computes the global norm of `grads`.

    Returns:
        The clipped gradients, and the norm before clipping.

    Source: torch.nn.utils.clip_grad_norm_.

    >>> clipped, norm = clip_by_global_norm({"w": jnp.array([3.0, 4.0])}, max_norm=1.0)
    >>> print(clipped["w"].round(3), norm)
    [0.6 0.8] 5.0
    """
    norm = norm_of(grads)
    factor = jnp.minimum(1, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), grads), norm


_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    **{"sgd": sgd, "adam": adam, "adamw": adamw, "adagrad": adagrad, "rmsprop": rmsprop},
    **{"adadelta": adadelta, "adamax": adamax, "asgd": asgd, "nadam": nadam, "radam": radam, "rprop": rprop},
}
