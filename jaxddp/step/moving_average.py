"""Exponential moving average of the parameters."""

import jax
from jax import numpy as jnp

from jaxddp.state import Params


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
