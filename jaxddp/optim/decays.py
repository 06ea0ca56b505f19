"""torch's schedulers that multiply the rate by a factor, and their combinations.

`lr` is the rate of the optimizer, which torch's schedulers scale. The other arguments have torch's names and defaults.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.errors import InputError

Count = jax.typing.ArrayLike


def multi_step(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> optax.Schedule:
    """Decay by `gamma` at each milestone: `lr * gamma ** (number of milestones up to t)`.

    Source: torch.optim.lr_scheduler.MultiStepLR.

    >>> schedule = multi_step(0.1, milestones=[30, 80], gamma=0.5)
    >>> print([round(float(schedule(t)), 4) for t in (29, 30, 80)])
    [0.1, 0.05, 0.025]
    """
    reached = np.sort(np.asarray(milestones))
    return lambda count: lr * gamma ** jnp.searchsorted(reached, jnp.asarray(count), side="right")


def constant_factor(lr: float, factor: float = 1 / 3, total_iters: int = 5) -> optax.Schedule:
    """Multiply the rate by `factor` until step `total_iters`.

    Source: torch.optim.lr_scheduler.ConstantLR.

    >>> schedule = constant_factor(0.1, factor=0.5, total_iters=4)
    >>> print([round(float(schedule(t)), 4) for t in (3, 4)])
    [0.05, 0.1]
    """
    return lambda count: lr * jnp.where(jnp.asarray(count) < total_iters, factor, 1.0)


def linear(lr: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> optax.Schedule:
    """Change the factor of the rate linearly, from `start_factor` to `end_factor` at step `total_iters`.

    Source: torch.optim.lr_scheduler.LinearLR.

    >>> schedule = linear(0.1, start_factor=0.5, total_iters=4)
    >>> print([round(float(schedule(t)), 4) for t in (0, 2, 4, 5)])
    [0.05, 0.075, 0.1, 0.1]
    """
    change = (end_factor - start_factor) / total_iters
    return lambda count: lr * (start_factor + change * jnp.minimum(jnp.asarray(count), total_iters))


def exponential(lr: float, gamma: float) -> optax.Schedule:
    """Decay by `gamma` at every step: `lr * gamma ** t`.

    Source: torch.optim.lr_scheduler.ExponentialLR.

    >>> print(round(float(exponential(0.1, gamma=0.5)(3)), 4))
    0.0125
    """
    return lambda count: lr * gamma ** jnp.asarray(count)


def polynomial(lr: float, total_iters: int = 5, power: float = 1.0) -> optax.Schedule:
    """Decay to 0 at step `total_iters`: `lr * (1 - t / total_iters) ** power`.

    Source: torch.optim.lr_scheduler.PolynomialLR.

    >>> schedule = polynomial(0.1, total_iters=4, power=2.0)
    >>> print([round(float(schedule(t)), 4) for t in (0, 2, 4, 5)])
    [0.1, 0.025, 0.0, 0.0]
    """
    return lambda count: (
        lr * ((total_iters - jnp.minimum(jnp.asarray(count), total_iters)) / float(total_iters)) ** power
    )


def lambda_(lr: float, lr_lambda: Callable[[jax.Array], jax.typing.ArrayLike]) -> optax.Schedule:
    """Multiply the rate by a function of the step: `lr * lr_lambda(t)`.

    Args:
        lr_lambda: called with a floating-point scalar of jax, so it uses `jnp.where` in place of `if`.

    Source: torch.optim.lr_scheduler.LambdaLR.

    >>> print(lambda_(0.1, lambda step: 0.5**step)(1))
    0.05
    """
    return lambda count: lr * jnp.asarray(lr_lambda(jnp.asarray(count, float)))  # a quotient of int32 would be float32


def multiplicative(lr: float, lr_lambda: Callable[[int], float], total_steps: int) -> optax.Schedule:
    """Multiply the rate at each step by a function of the step: `lr * lr_lambda(1) * ... * lr_lambda(t)`.

    Args:
        lr_lambda: called with the numbers 1 to `total_steps`, once.
        total_steps: step after which the rate stays.

    Source: torch.optim.lr_scheduler.MultiplicativeLR.

    >>> schedule = multiplicative(0.1, lambda step: 0.5 if step % 2 else 1.0, total_steps=4)
    >>> print([round(float(schedule(t)), 4) for t in (0, 1, 2, 3)])
    [0.1, 0.05, 0.05, 0.025]
    """
    rates = lr * np.cumprod([1.0, *(lr_lambda(step) for step in range(1, total_steps + 1))])
    return lambda count: jnp.asarray(rates, float)[jnp.minimum(jnp.asarray(count), total_steps)]


def sequential(schedules: Sequence[optax.Schedule], milestones: Sequence[int]) -> optax.Schedule:
    """Use one schedule after the other; each starts at its own step 0 when its milestone is reached.

    Raises:
        InputError: the milestones do not ascend, or are not one fewer than the schedules.

    Source: torch.optim.lr_scheduler.SequentialLR.

    >>> schedule = sequential([constant_factor(0.1, 0.5), exponential(0.1, 0.9)], milestones=[2])
    >>> print([round(float(schedule(t)), 4) for t in (1, 2, 3)])
    [0.05, 0.1, 0.09]
    """
    if len(milestones) != len(schedules) - 1 or list(milestones) != sorted(milestones):
        raise InputError(f"milestones {list(milestones)}: must be {len(schedules) - 1} ascending steps")

    def schedule(count: Count) -> jax.Array:
        count = jnp.asarray(count)
        rate = jnp.asarray(schedules[0](count))
        for start, following in zip(milestones, schedules[1:], strict=True):
            rate = jnp.where(count < start, rate, following(jnp.maximum(count - start, 0)))
        return rate

    return schedule


def chained(lr: float, schedules: Sequence[Callable[[float], optax.Schedule]]) -> optax.Schedule:
    """Apply several schedules at once: `lr` times the product of their factors.

    Args:
        schedules: functions from a rate to a schedule that multiplies it, such as `lambda lr: exponential(lr, 0.9)`.

    Source: torch.optim.lr_scheduler.ChainedScheduler.

    >>> schedule = chained(0.1, [lambda lr: exponential(lr, 0.9), lambda lr: constant_factor(lr, 0.5, 2)])
    >>> print([round(float(schedule(t)), 4) for t in (0, 1, 2)])
    [0.05, 0.045, 0.081]
    """
    factors = [make(1.0) for make in schedules]

    def schedule(count: Count) -> jax.Array:
        rate = jnp.asarray(lr, float)
        for factor in factors:
            rate = rate * factor(count)
        return rate

    return schedule


def by_epoch(schedule: optax.Schedule, steps_per_epoch: int) -> optax.Schedule:
    """Step a schedule once per epoch of `steps_per_epoch` optimizer steps, like most of torch's training loops.

    >>> schedule = by_epoch(exponential(0.1, 0.5), steps_per_epoch=100)
    >>> print([round(float(schedule(t)), 4) for t in (0, 99, 100, 200)])
    [0.1, 0.1, 0.05, 0.025]
    """
    return lambda count: schedule(jnp.asarray(count) // steps_per_epoch)
