"""Ports whose schedule of the learning rate has a mistake, as optimizer_ports has them of optimizers."""

from functools import partial

import optax
from jax import numpy as jnp
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, StepLR

from tests.support.faulty_optax import Transformation
from tests.support.faulty_schedules import (
    COSINE,
    HALF,
    LINE,
    MILESTONE,
    ONE_CYCLE,
    PEAKED,
    STAIRS,
    WARM,
    cosine,
    peaked,
    rising,
    shifted,
    warm,
    wave,
)
from tests.support.optimizer_ports import adam, adamw, momentum, planted, same_adamw, sgd


def decaying(alpha: float) -> Transformation:
    return optax.adam(lambda t: 1e-3 * (alpha + (1 - alpha) * cosine(1.0)(t)))


SCHEDULES = [
    planted("lr_off_by_one", adam, optax.adam(shifted(cosine(1e-3), 1)), "one step ahead", scheduler=COSINE),
    planted("lr_off_by_one", momentum, optax.sgd(shifted(cosine(0.1), -1), 0.9), "one step behind", scheduler=COSINE),
    planted("lr_off_by_one", momentum, optax.sgd(shifted(warm(0.1), 1), 0.9), "one step ahead", scheduler=WARM),
    planted("schedule", momentum, optax.sgd(lambda t: cosine(0.1)(0.5 * t), 0.9), "takes 2 steps", scheduler=COSINE),
    planted("schedule", adam, optax.adam(lambda t: cosine(1e-3)(t // 2 * 2)), "only every 2 steps", scheduler=COSINE),
    planted("schedule", adamw, same_adamw(lambda t: cosine(1e-3)(t // 4)), "advances only every 4", scheduler=COSINE),
    planted(
        "schedule", momentum, optax.sgd(lambda t: cosine(0.1)(t % 3), 0.9), "again every 3 steps", scheduler=COSINE
    ),
    planted(
        "schedule",
        adam,
        optax.adam(lambda t: 2e-4 + 0.8 * cosine(1e-3)(t)),
        "falls to 0.0002, the reference's to 0",
        scheduler=COSINE,
    ),
    planted("warmup_start", adam, optax.adam(rising(1e-3, 0.0, 4)), "at 0, the reference's at 0.00025", scheduler=WARM),
    planted("warmup_start", momentum, optax.sgd(rising(0.1, 0.005, 4), 0.9), "starts at 0.005, the", scheduler=WARM),
    planted("warmup_start", momentum, optax.sgd(rising(0.1, 0.025, 5), 0.9), "ends a step later than", scheduler=WARM),
    planted("warmup_start", sgd, optax.sgd(rising(0.1, 0.025, 8)), "takes 8 steps, the reference's 4", scheduler=WARM),
    planted(
        "warmup_start", adam, optax.adam(peaked(1e-3, 5, 0.1)), "takes 5 steps, the reference's 2", scheduler=PEAKED
    ),
    planted("lr_off_by_one", sgd, optax.sgd(optax.piecewise_constant_schedule(0.1, {3: 0.1})), scheduler=MILESTONE),
    planted(
        "warmup_start", momentum, optax.sgd(wave(0.1, 12), 0.9), "12 steps, the reference's 11", scheduler=ONE_CYCLE
    ),
    planted(
        "schedule", adam, optax.adam(peaked(1e-3, 2, 0.0)), "falls to 0, the reference's to 0.0001", scheduler=PEAKED
    ),
    planted("schedule", adam, optax.adam(lambda t: 1e-3 * (1 - 0.05 * t) ** 2), "to the power 2", scheduler=LINE),
    planted("schedule", adam, optax.adam(lambda t: 1e-3 * 0.8 ** (t // 3)), "every 3 steps, the", scheduler=STAIRS),
    planted(
        "schedule", adam, optax.adam(lambda t: 1e-3 * 0.5 ** (t // 2)), "factor 0.5 every 2 steps", scheduler=STAIRS
    ),
    planted(
        "schedule",
        momentum,
        optax.sgd(lambda t: 0.1 * 0.95**t, 0.9),
        "factor 0.95 at each step, the reference's by 0.9",
        scheduler=partial(ExponentialLR, gamma=0.9),
    ),
    planted("schedule", adam, decaying(alpha=0.6), "falls to 0.0006, the reference's to 0.0005", scheduler=HALF),
    planted("schedule", adam, decaying(alpha=4e-4), "falls to 4e-7, the reference's to 0.0005", scheduler=HALF),
    planted(
        "schedule",
        adam,
        optax.adam(lambda t: 1e-3 * (0.4 + 0.6 * 0.9**t)),
        "falls 0.6 times as far from its peak as the reference's",
        scheduler=partial(ExponentialLR, gamma=0.9),
    ),
    planted("schedule", momentum, optax.sgd(0.1, 0.9), "stays at 0.1, the reference's changes", scheduler=COSINE),
    planted("schedule", momentum, optax.sgd(0.04, 0.9), "stays at 0.04, the reference's changes", scheduler=COSINE),
    planted("warmup_start", adam, optax.adam(1e-3), "no warm-up, the reference's starts at 0.00025", scheduler=WARM),
    planted(
        "warmup_start",
        momentum,
        optax.sgd(lambda count: 0.1 * count / 100, 0.9),
        "starts at 0, rising by 0.001 a step, the reference's at 0.01, rising by 0.0009 a step",
        scheduler=partial(LinearLR, start_factor=0.1, total_iters=100),
    ),
    # In a geometric schedule, one step ahead is a factor.
    planted(
        "lr_off_by_one | lr_scaled",
        adam,
        optax.adam(lambda c: 1e-3 * 0.9 ** (c + 1)),
        "one step ahead",
        scheduler=partial(ExponentialLR, gamma=0.9),
    ),
    planted("scheduler_too_fast", adam, optax.adam(lambda c: cosine(1e-3)(4 * c)), "4 times per", scheduler=COSINE),
    planted(
        "scheduler_too_fast",
        momentum,
        optax.sgd(lambda c: 0.1 * 0.5**c, 0.9),
        "3 times per step, the number of micro-batches",
        scheduler=partial(StepLR, step_size=3, gamma=0.5),
    ),
]
# Schedules that no edit of the reference's makes.
STEPS_OF_TWO = partial(LambdaLR, lr_lambda=lambda t: 1 if t < 2 else 0.1 if t < 5 else 0.05)
OTHER_SCHEDULES = [
    planted(
        "schedule",
        adamw,
        same_adamw(optax.piecewise_constant_schedule(1e-3, {3: 0.1, 5: 0.5})),
        "0.001 at step 3, the reference's 0.0001; it differs at 1 of 6 steps",
        scheduler=STEPS_OF_TWO,
    ),
    planted("schedule", adam, optax.adam(lambda t: 1e-3 / (1 + t) ** 0.7), "0.000615572 at step 2, the reference's"),
    planted(
        "schedule",
        sgd,
        optax.sgd(lambda c: 0.1 * jnp.minimum((c + 1) / 5, 1) ** 2),
        "0.004 at step 1, the reference's 0.025; it differs at 4 of 6 steps",
        scheduler=WARM,
    ),
]
