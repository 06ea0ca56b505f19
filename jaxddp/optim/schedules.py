"""torch's learning-rate schedulers as optax schedules, stepped once per optimizer step.

A schedule is a function of the number of optimizer steps taken so far (0 at the first step).
torch's schedulers compute each rate from the one before; here each rate has a closed form, so
that a run resumed at step 1000 needs nothing but the number 1000.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError
from jaxddp.optim.cycles import (
    BASE_MOMENTUM,
    ONE_CYCLE_END_FACTOR,
    ONE_CYCLE_RISE,
    ONE_CYCLE_START_FACTOR,
    cosine,
    cosine_restarts,
    cyclic,
    cyclic_momentum,
    half_cosine,
    one_cycle,
    one_cycle_momentum,
    swa,
)
from jaxddp.optim.decays import (
    by_epoch,
    chained,
    constant_factor,
    exponential,
    lambda_,
    linear,
    multi_step,
    multiplicative,
    polynomial,
    sequential,
)

__all__ = [
    "BASE_MOMENTUM",
    "ONE_CYCLE_END_FACTOR",
    "ONE_CYCLE_RISE",
    "ONE_CYCLE_START_FACTOR",
    "WARMUP_START_FACTOR",
    "Schedules",
    "by_epoch",
    "chained",
    "constant",
    "constant_factor",
    "cosine",
    "cosine_restarts",
    "cyclic",
    "cyclic_momentum",
    "exponential",
    "from_config",
    "lambda_",
    "linear",
    "multi_step",
    "multiplicative",
    "one_cycle",
    "one_cycle_momentum",
    "polynomial",
    "sequential",
    "step",
    "swa",
    "warmup_cosine",
]

WARMUP_START_FACTOR = 1 / 3  # torch's default for LinearLR


class Schedules(NamedTuple):
    """Schedules of a run; `momentum` None: the optimizer's momentum stays constant."""

    lr: optax.Schedule
    momentum: optax.Schedule | None = None


def from_config(config: TrainerConfig, total_steps: int) -> Schedules:
    """Return the schedules that `--schedule` names, over a run of `total_steps` optimizer steps, SWA's at its end.

    With `--schedule plateau` the rate is constant: `jaxddp.optim.from_config` lets a metric change it.

    Raises:
        InputError: `--warmup-steps` leaves no step for the cosine.

    >>> schedule = from_config(TrainerConfig(schedule="one_cycle", lr=0.1), total_steps=10)
    >>> print(f"{schedule.lr(2):.3f} {schedule.momentum(2):.3f}")
    0.100 0.850
    """
    total_steps = total_steps or config.warmup_steps + 1  # a run of 0 epochs takes no step, but builds an optimizer
    given, lr = config.schedule_options(), config.base_lr
    cycled = given.pop("cycle_momentum", False)
    momentum = None
    if config.schedule == "cosine":
        given = {"T_max": total_steps} | given
    if config.schedule == "warmup_cosine":
        given = {"warmup_steps": config.warmup_steps, "min_lr": config.min_lr, "total_steps": total_steps}
    if config.schedule == "one_cycle":
        given["total_steps"] = total_steps
        momentum = one_cycle_momentum(total_steps, config.pct_start) if cycled else None
    if config.schedule == "cyclic" and cycled:
        momentum = cyclic_momentum(**{name: x for name, x in given.items() if name != "max_lr"})
    make = _SCHEDULES.get(config.schedule)
    main = Schedules(constant(lr) if make is None else make(lr, **given), momentum)
    if config.swa_lr is None or config.swa_start is None:
        return main
    steps_per_epoch = max(1, total_steps // max(1, config.epochs))
    start = config.swa_start * steps_per_epoch
    late = by_epoch(swa(float(main.lr(start)), config.swa_lr, config.anneal_epochs), steps_per_epoch)
    kept = None if momentum is None else lambda count: momentum(jnp.minimum(count, start))
    return Schedules(sequential([main.lr, late], [start]), kept)


def constant(lr: float) -> optax.Schedule:
    """Keep the same rate at every step.

    >>> constant(0.1)(7)
    0.1
    """
    return optax.constant_schedule(lr)


def step(lr: float, step_size: int, gamma: float = 0.1) -> optax.Schedule:
    """Decay by `gamma` every `step_size` steps: `lr * gamma ** (t // step_size)`.

    Source: torch.optim.lr_scheduler.StepLR.

    >>> schedule = step(0.1, step_size=100, gamma=0.5)
    >>> print([round(float(schedule(t)), 4) for t in (99, 100, 200)])
    [0.1, 0.05, 0.025]
    """
    return lambda count: lr * gamma ** (jnp.asarray(count) // step_size)


def warmup_cosine(lr: float, total_steps: int, warmup_steps: int = 0, min_lr: float = 0.0) -> optax.Schedule:
    """Rise linearly from a third of `lr`, then fall along half a cosine to `min_lr`.

    With `w = warmup_steps`, `T = total_steps`:

        lr (1/3 + 2/3 t/w)                                          t < w
        min_lr + (lr - min_lr) (1 + cos(pi (t - w) / (T - w))) / 2  w <= t < T

    and `min_lr` from step T on.

    Source: torch.optim.lr_scheduler, SequentialLR([LinearLR(total_iters=w),
    CosineAnnealingLR(T_max=T - w, eta_min=min_lr)], milestones=[w]).

    Raises:
        InputError: the warm-up is as long as the run, or longer.

    >>> schedule = warmup_cosine(0.3, total_steps=12, warmup_steps=2)
    >>> print([round(float(schedule(t)), 4) for t in (0, 1, 2, 7, 12, 13)])
    [0.1, 0.2, 0.3, 0.15, 0.0, 0.0]
    """
    if warmup_steps >= total_steps:
        raise InputError(f"--warmup-steps {warmup_steps}: must be below the run's {total_steps} optimizer steps")
    # Floats: the quotient of int32 step counts, which optax has, would be float32 even in x64 mode.
    rise_steps, fall_steps = float(max(warmup_steps, 1)), float(total_steps - warmup_steps)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.minimum(count, total_steps)
        rise = lr * (WARMUP_START_FACTOR + (1 - WARMUP_START_FACTOR) * count / rise_steps)
        fall = half_cosine(lr, min_lr, (total_steps - count) / fall_steps)
        return jnp.where(count < warmup_steps, rise, fall)

    return schedule


_SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    **{"step": step, "multi_step": multi_step, "constant_factor": constant_factor, "linear": linear},
    **{"exponential": exponential, "polynomial": polynomial, "cosine": cosine, "cosine_restarts": cosine_restarts},
    **{"cyclic": cyclic, "one_cycle": one_cycle, "warmup_cosine": warmup_cosine},
}
