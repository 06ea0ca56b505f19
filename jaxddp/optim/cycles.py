"""torch's schedulers that rise and fall: cosines, cycles of straight lines, and one cycle over a run.

`lr` is the rate of the optimizer. The other arguments have torch's names and defaults.
"""

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.errors import InputError, check_name

# torch's defaults for OneCycleLR.
ONE_CYCLE_RISE = 0.3
ONE_CYCLE_START_FACTOR = 1 / 25
ONE_CYCLE_END_FACTOR = ONE_CYCLE_START_FACTOR / 1e4
BASE_MOMENTUM, MAX_MOMENTUM = 0.85, 0.95

MODES = ("triangular", "triangular2", "exp_range")
ANNEAL_STRATEGIES = ("cos", "linear")


def cosine(lr: float, T_max: int, eta_min: float = 0.0) -> optax.Schedule:
    """Follow a cosine of period `2 T_max`: `eta_min + (lr - eta_min) (1 + cos(pi t / T_max)) / 2`.

    Source: torch.optim.lr_scheduler.CosineAnnealingLR; Loshchilov and Hutter, https://arxiv.org/abs/1608.03983.

    >>> schedule = cosine(0.1, T_max=10)
    >>> print([round(float(schedule(t)), 4) for t in (0, 5, 10, 15)])
    [0.1, 0.05, 0.0, 0.05]
    """

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        phase = jnp.asarray(count) % (2 * T_max)
        return half_cosine(lr, eta_min, jnp.abs(T_max - phase) / float(T_max))

    return schedule


def cosine_restarts(lr: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> optax.Schedule:
    """Fall along half a cosine to `eta_min` within `T_0` steps, restart at `lr`, and take `T_mult` times as long.

    Source: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts.

    >>> schedule = cosine_restarts(0.1, T_0=2, T_mult=2)
    >>> print([round(float(schedule(t)), 4) for t in range(7)])
    [0.1, 0.05, 0.1, 0.0854, 0.05, 0.0146, 0.1]
    """
    lengths = [T_0]
    while T_mult > 1 and sum(lengths) < 2**31:
        lengths.append(lengths[-1] * T_mult)
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)  # which jax has with and without 64 bits

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        period = jnp.searchsorted(starts, count, side="right") - 1
        length = jnp.asarray(np.array(lengths, float), float)[period]
        passed = (count - jnp.asarray(starts)[period]) % T_0 if T_mult == 1 else count - jnp.asarray(starts)[period]
        return half_cosine(lr, eta_min, (length - passed) / length)

    return schedule


def cyclic(
    base_lr: float,
    max_lr: float,
    step_size_up: int = 2000,
    step_size_down: int | None = None,
    mode: str = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[jax.Array], jax.typing.ArrayLike] | None = None,
    scale_mode: str = "cycle",
) -> optax.Schedule:
    """Rise linearly from `base_lr` to `max_lr` and fall again, over and over.

    Args:
        step_size_up, step_size_down: steps of the rise and of the fall; None: as many as of the rise.
        mode: "triangular"; "triangular2" halves the height at each cycle, "exp_range" multiplies it by `gamma ** t`.
        scale_fn: factor of the height, instead of that of `mode`: a function of a floating-point scalar of jax, the
            number of the cycle from 1 or, with `scale_mode` "iterations", the step.

    Source: torch.optim.lr_scheduler.CyclicLR; Smith, https://arxiv.org/abs/1506.01186.

    Raises:
        InputError: an unknown mode or `scale_mode`.

    >>> schedule = cyclic(0.1, 0.3, step_size_up=2, mode="triangular2")
    >>> print([round(float(schedule(t)), 4) for t in range(8)])
    [0.1, 0.2, 0.3, 0.2, 0.1, 0.15, 0.2, 0.15]
    """
    check_name("mode", mode, MODES)
    check_name("scale_mode", scale_mode, ("cycle", "iterations"))
    height = _triangle(step_size_up, step_size_down)
    total = step_size_up + (step_size_down or step_size_up)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        if scale_fn is not None:
            scale = jnp.asarray(scale_fn(jnp.asarray(1 + count // total if scale_mode == "cycle" else count, float)))
        else:
            scale = {"triangular": jnp.asarray(1.0), "triangular2": 0.5 ** (count // total), "exp_range": gamma**count}[
                mode
            ]
        return base_lr + (max_lr - base_lr) * height(count) * scale

    return schedule


def cyclic_momentum(
    base_momentum: float = 0.8,
    max_momentum: float = 0.9,
    step_size_up: int = 2000,
    step_size_down: int | None = None,
    mode: str = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[jax.Array], jax.typing.ArrayLike] | None = None,
    scale_mode: str = "cycle",
) -> optax.Schedule:
    """Cycle momentum (Adam: beta1) opposite to the rate of `cyclic`, from `max_momentum` to `base_momentum` and back.

    The other arguments are those of `cyclic`.

    Source: torch.optim.lr_scheduler.CyclicLR with `cycle_momentum`.

    >>> schedule = cyclic_momentum(step_size_up=2)
    >>> print([round(float(schedule(t)), 4) for t in range(5)])
    [0.9, 0.85, 0.8, 0.85, 0.9]
    """
    return cyclic(max_momentum, base_momentum, step_size_up, step_size_down, mode, gamma, scale_fn, scale_mode)


def one_cycle(
    max_lr: float,
    total_steps: int,
    pct_start: float = ONE_CYCLE_RISE,
    anneal_strategy: str = "cos",
    div_factor: float = 1 / ONE_CYCLE_START_FACTOR,
    final_div_factor: float = ONE_CYCLE_START_FACTOR / ONE_CYCLE_END_FACTOR,
    three_phase: bool = False,
) -> optax.Schedule:
    """Rise to `max_lr` in 30 % of the run, then fall to a 250,000th of it.

    Rise and fall follow half a cosine each; the rate is constant from step `total_steps - 1` on. A run
    too short to rise (up to 3 steps) starts in the fall, as in torch.

    Args:
        pct_start: share of the run in which the rate rises.
        anneal_strategy: "cos" for half cosines, "linear" for straight lines.
        div_factor: `max_lr` over the first rate.
        final_div_factor: first rate over the last.
        three_phase: fall to the first rate as fast as it rose, and then to the last.

    Source: torch.optim.lr_scheduler.OneCycleLR; Smith and Topin, "Super-Convergence",
    https://arxiv.org/abs/1708.07120.

    Raises:
        InputError: fewer than one step, `pct_start` outside of 0 to 1 or such that the rise takes no time, or an
            unknown strategy.

    >>> schedule = one_cycle(1.0, total_steps=10)
    >>> print([round(float(schedule(t)), 6) for t in (0, 2, 9)])
    [0.04, 1.0, 4e-06]
    """
    start = max_lr / div_factor
    end = start / final_div_factor
    values = (start, max_lr, start, end) if three_phase else (start, max_lr, end)
    return _cycle(values, total_steps, pct_start, anneal_strategy)


def one_cycle_momentum(
    total_steps: int,
    pct_start: float = ONE_CYCLE_RISE,
    anneal_strategy: str = "cos",
    base_momentum: float = BASE_MOMENTUM,
    max_momentum: float = MAX_MOMENTUM,
    three_phase: bool = False,
) -> optax.Schedule:
    """Cycle momentum (Adam: beta1) opposite to the rate of `one_cycle`: from 0.95 to 0.85 and back.

    The other arguments are those of `one_cycle`.

    Source: torch.optim.lr_scheduler.OneCycleLR with `cycle_momentum`.

    Raises:
        InputError: as `one_cycle`.

    >>> schedule = one_cycle_momentum(total_steps=10)
    >>> print([round(float(schedule(t)), 4) for t in (0, 2, 9)])
    [0.95, 0.85, 0.95]
    """
    values = (max_momentum, base_momentum, max_momentum, *([max_momentum] if three_phase else []))
    return _cycle(values, total_steps, pct_start, anneal_strategy)


def swa(lr: float, swa_lr: float, anneal_epochs: int = 10, anneal_strategy: str = "cos") -> optax.Schedule:
    """Go from `lr` to `swa_lr` within `anneal_epochs` steps, along half a cosine or a straight line, and stay there.

    torch steps it once per epoch: use `by_epoch`, and `sequential` to begin late in the run, with `lr` the rate that
    is reached by then.

    Args:
        anneal_strategy: "cos" or "linear".

    Source: torch.optim.swa_utils.SWALR; Izmailov et al., https://arxiv.org/abs/1803.05407.

    Raises:
        InputError: an unknown strategy.

    >>> schedule = swa(0.1, swa_lr=0.5, anneal_epochs=4, anneal_strategy="linear")
    >>> print([round(float(schedule(t)), 4) for t in (0, 1, 4, 9)])
    [0.1, 0.2, 0.5, 0.5]
    """
    check_name("anneal_strategy", anneal_strategy, ANNEAL_STRATEGIES)
    steps = float(max(anneal_epochs, 1))
    rest = 0 if anneal_epochs == 0 else 1  # torch takes the first step of none at once
    return lambda count: _annealed(lr, swa_lr, rest * (steps - jnp.asarray(count)) / steps, anneal_strategy)


def _cycle(values: tuple[float, ...], total_steps: int, pct_start: float, anneal_strategy: str) -> optax.Schedule:
    """Anneal from each of the values to the next, to the last at the end of the run."""
    check_name("anneal_strategy", anneal_strategy, ANNEAL_STRATEGIES)
    if total_steps < 1:
        raise InputError(f"--schedule one_cycle: needs at least one optimizer step, not {total_steps}")
    peak_step = pct_start * total_steps - 1  # as in torch: possibly between two steps, or before the first
    if not 0 <= pct_start <= 1 or peak_step == 0:
        raise InputError(f"one_cycle: pct_start {pct_start} of {total_steps} steps: must be 0 to 1, and not one step")
    # torch's second phase of three ends at twice the step at which the first does.
    ends = [0.0, *(peak_step * phase for phase in range(1, len(values) - 1)), float(total_steps - 1)]

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count, rate = jnp.minimum(count, total_steps - 1), jnp.asarray(0.0)
        phases = list(zip(pairwise(ends), pairwise(values), strict=True))
        for (begin, end), (start, stop) in reversed(phases):
            phase = _annealed(start, stop, (end - count) / (end - begin or 1.0), anneal_strategy)
            rate = phase if end == ends[-1] else jnp.where(count <= end, phase, rate)
        return rate

    return schedule


def _annealed(start: float, end: float, remaining: jax.Array, strategy: str) -> jax.Array:
    if strategy == "cos":
        return half_cosine(start, end, remaining)
    return end + (start - end) * jnp.clip(remaining, 0, 1)


def half_cosine(start: float, end: float, remaining: jax.Array) -> jax.Array:
    """Compute `end + (start - end) (1 + cos(pi (1 - remaining))) / 2`, for `remaining` from 1 to 0.

    Half the angle avoids cancellation: float32 keeps its digits down to the last step, where
    `1 + cos` would lose most of them.
    """
    angle = jnp.pi / 2 * jnp.clip(remaining, 0, 1)
    return start * jnp.sin(angle) ** 2 + end * jnp.cos(angle) ** 2


def _triangle(up: int, down: int | None) -> optax.Schedule:
    down = down or up

    def height(count: jax.typing.ArrayLike) -> jax.Array:
        phase = jnp.asarray(count) % (up + down)
        return jnp.where(phase <= up, phase / float(up), (up + down - phase) / float(down))

    return height
