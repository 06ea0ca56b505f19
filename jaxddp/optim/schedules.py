"""torch's learning-rate schedulers as optax schedules, stepped once per optimizer step.

A schedule is a function of the number of optimizer steps taken so far (0 at the first step).
torch's schedulers compute each rate from the one before; here each rate has a closed form, so
that a run resumed at step 1000 needs nothing but the number 1000.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError

__all__ = [
    "BASE_MOMENTUM",
    "ONE_CYCLE_END_FACTOR",
    "ONE_CYCLE_RISE",
    "ONE_CYCLE_START_FACTOR",
    "WARMUP_START_FACTOR",
    "Schedules",
    "constant",
    "from_config",
    "one_cycle",
    "one_cycle_momentum",
    "step",
    "warmup_cosine",
]

# torch's defaults for LinearLR and OneCycleLR.
WARMUP_START_FACTOR = 1 / 3
ONE_CYCLE_RISE = 0.3
ONE_CYCLE_START_FACTOR = 1 / 25
ONE_CYCLE_END_FACTOR = ONE_CYCLE_START_FACTOR / 1e4
BASE_MOMENTUM, MAX_MOMENTUM = 0.85, 0.95


class Schedules(NamedTuple):
    """Schedules of a run; `momentum` None: the optimizer's momentum stays constant."""

    lr: optax.Schedule
    momentum: optax.Schedule | None = None


def from_config(config: TrainConfig, total_steps: int) -> Schedules:
    """Return the schedules that `--schedule` names, over a run of `total_steps` optimizer steps.

    Raises:
        InputError: `--warmup-steps` leaves no step for the cosine.

    >>> schedule = from_config(TrainConfig(schedule="one_cycle", lr=0.1), total_steps=10)
    >>> print(f"{schedule.lr(2):.3f} {schedule.momentum(2):.3f}")
    0.100 0.850
    """
    total_steps = max(total_steps, 1)  # a run of 0 epochs takes no step, but still builds an optimizer
    lr = config.base_lr
    if config.schedule == "step":
        return Schedules(step(lr, config.step_size, config.gamma))
    if config.schedule == "warmup_cosine":
        return Schedules(warmup_cosine(lr, total_steps, config.warmup_steps, config.min_lr))
    if config.schedule == "one_cycle":
        return Schedules(one_cycle(lr, total_steps), one_cycle_momentum(total_steps) if config.cycle_momentum else None)
    return Schedules(constant(lr))


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
        fall = _half_cosine(lr, min_lr, (total_steps - count) / fall_steps)
        return jnp.where(count < warmup_steps, rise, fall)

    return schedule


def one_cycle(max_lr: float, total_steps: int) -> optax.Schedule:
    """Rise from `max_lr / 25` to `max_lr` in 30 % of the run, then fall to `max_lr / 250000`.

    Rise and fall follow half a cosine each; the rate is constant from step `total_steps - 1` on. A run
    too short to rise (up to 3 steps) starts in the fall, as in torch.

    Source: torch.optim.lr_scheduler.OneCycleLR with its defaults; Smith and Topin,
    "Super-Convergence", https://arxiv.org/abs/1708.07120.

    Raises:
        InputError: fewer than one step.

    >>> schedule = one_cycle(1.0, total_steps=10)
    >>> print([round(float(schedule(t)), 6) for t in (0, 2, 9)])
    [0.04, 1.0, 4e-06]
    """
    return _cycle(max_lr * ONE_CYCLE_START_FACTOR, max_lr, max_lr * ONE_CYCLE_END_FACTOR, total_steps)


def one_cycle_momentum(total_steps: int) -> optax.Schedule:
    """Cycle momentum (Adam: beta1) opposite to the rate of `one_cycle`: from 0.95 to 0.85 and back.

    Source: torch.optim.lr_scheduler.OneCycleLR with `cycle_momentum`.

    Raises:
        InputError: fewer than one step.

    >>> schedule = one_cycle_momentum(total_steps=10)
    >>> print([round(float(schedule(t)), 4) for t in (0, 2, 9)])
    [0.95, 0.85, 0.95]
    """
    return _cycle(MAX_MOMENTUM, BASE_MOMENTUM, MAX_MOMENTUM, total_steps)


def _cycle(start: float, peak: float, end: float, total_steps: int) -> optax.Schedule:
    if total_steps < 1:
        raise InputError(f"--schedule one_cycle: needs at least one optimizer step, not {total_steps}")
    peak_step = ONE_CYCLE_RISE * total_steps - 1  # as in torch: possibly between two steps, or before the first
    last_step = total_steps - 1

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.minimum(count, last_step)
        rise = _half_cosine(start, peak, (peak_step - count) / peak_step)
        fall = _half_cosine(peak, end, (last_step - count) / (last_step - peak_step))
        return jnp.where(count <= peak_step, rise, fall)

    return schedule


def _half_cosine(start: float, end: float, remaining: jax.Array) -> jax.Array:
    """Compute `end + (start - end) (1 + cos(pi (1 - remaining))) / 2`, for `remaining` from 1 to 0.

    Half the angle avoids cancellation: float32 keeps its digits down to the last step, where
    `1 + cos` would lose most of them.
    """
    angle = jnp.pi / 2 * jnp.clip(remaining, 0, 1)
    return start * jnp.sin(angle) ** 2 + end * jnp.cos(angle) ** 2
