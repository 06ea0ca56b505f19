"""Schedules of the learning rate, torch's and as functions of the step, right and wrong ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jax import numpy as jnp
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

COSINE = partial(CosineAnnealingLR, T_max=30)
WARM = partial(LinearLR, start_factor=0.25, total_iters=4)


def peaked(lr: float, warm: int, least: float, numpy: Any = jnp) -> Callable[[Any], Any]:
    """Rise in `warm` steps, then fall in a cosine to a share of the peak at step 20."""

    def rate(t: Any) -> Any:
        fall = least + (1 - least) * (1 + numpy.cos(np.pi * (t - warm) / (20 - warm))) / 2
        return lr * numpy.where(t < warm, (t + 1.0) / warm, fall)

    return rate


PEAKED = partial(LambdaLR, lr_lambda=lambda t: float(peaked(1.0, 2, 0.1, np)(t)))
MILESTONE = partial(MultiStepLR, milestones=[2], gamma=0.1)
ONE_CYCLE = partial(OneCycleLR, max_lr=0.1, total_steps=40, cycle_momentum=False)  # which rises from 0.004 in 11 steps
HALF = partial(CosineAnnealingLR, T_max=30, eta_min=5e-4)
STAIRS = partial(StepLR, step_size=2, gamma=0.8)
LINE = partial(PolynomialLR, total_iters=20, power=1.0)


def cosine(lr: float) -> Callable[[Any], Any]:
    return lambda count: lr * (1 + jnp.cos(jnp.pi * count / 30)) / 2


def warm(lr: float) -> Callable[[Any], Any]:
    return lambda count: lr * (0.25 + 0.75 * jnp.minimum(count, 4) / 4)


def rising(lr: float, first: float, steps: int) -> Callable[[Any], Any]:
    return lambda count: first + (lr - first) * jnp.minimum(count, steps) / steps


def wave(peak: float, steps: int) -> Callable[[Any], Any]:
    """Rise to the peak in half a wave of a cosine, as OneCycleLR does."""
    return lambda count: peak * (1 - 0.96 * (1 + jnp.cos(jnp.pi * count / steps)) / 2)


def shifted(schedule: Callable[[Any], Any], by: int) -> Callable[[Any], Any]:
    return lambda count: schedule(jnp.maximum(count + by, 0))
