"""Averages of the parameters: the exponential moving average, and the equal average of stochastic weight averaging."""

from typing import NamedTuple

import jax
from jax import numpy as jnp

from jaxddp.state import Params


class EqualAverage(NamedTuple):
    """Mean of the parameters at some times of a run.

    Attributes:
        n_averaged: int32 scalar, how many times; 0: none yet, and `params` means nothing.
        params: the mean, under the parameters' names.
    """

    n_averaged: jax.Array
    params: Params


def moving_average(average: Params, params: Params, decay: float, is_first: jax.Array) -> Params:
    """Move an exponential moving average towards the parameters after a step.

        a <- p                         after the first step
        a <- a + (1 - decay) (p - a)   after every later step

    Args:
        average: a, under the parameters' names.
        params: p, after the step.
        is_first: boolean scalar, whether this is the first step that updates the parameters.

    >>> average = {"w": jnp.array([1.0])}
    >>> for step in range(2):
    ...     average = moving_average(average, {"w": jnp.array([3.0 + step])}, decay=0.5, is_first=jnp.array(step == 0))
    ...     print(average["w"])
    [3.]
    [3.5]

    Source: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn
    """
    share = jnp.where(is_first, 1.0, 1.0 - decay)
    return jax.tree.map(lambda a, p: a + share.astype(p.dtype) * (p - a), average, params)


def equal_average(average: EqualAverage, params: Params) -> EqualAverage:
    """Add the parameters to an equal average: `a + (p - a) / (n + 1)`, with n the number of times before.

    >>> average = EqualAverage(jnp.int32(0), {"w": jnp.array([9.0])})
    >>> for value in (1.0, 2.0, 6.0):
    ...     average = equal_average(average, {"w": jnp.array([value])})
    >>> print(average.n_averaged, average.params["w"])
    3 [3.]

    Source: torch.optim.swa_utils.AveragedModel; Izmailov et al., https://arxiv.org/abs/1803.05407
    """

    def moved(a: jax.Array, p: jax.Array) -> jax.Array:
        return jnp.where(average.n_averaged == 0, p, a + (p - a) / (average.n_averaged + 1).astype(p.dtype))

    return EqualAverage(average.n_averaged + 1, jax.tree.map(moved, average.params, params))
