"""jaxddp.optim.schedules against torch's schedulers, at every step of runs of many lengths."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import lr_scheduler

from jaxddp.config import TrainConfig
from jaxddp.config.choices import NEEDED_BY_SCHEDULE
from jaxddp.errors import InputError
from jaxddp.optim import schedules
from torch_ref.optim import from_config as torch_from_config

Scheduler = Callable[[torch.optim.Optimizer], Any]

# Largest relative errors, with the measured ones beside them.
TOLERANCE = 1e-12  # float64 against torch: 5.3e-13 (warmup_cosine, 300 steps)
FAULT = 1e-8  # smallest with a planted fault: 5.4e-8 (float32 on the way)
FLOAT64 = 1e-14  # float64 against the formula in long double: 5.5e-16; torch: 2.1e-10
FLOAT32 = 2e-6  # float32 against float64: 8.0e-7 (one_cycle); with 1 + cos: 9.4e-2

LR = 0.1
# With up to 3 steps, one_cycle starts after its peak; with 10, the third step is the peak. Near the end of
# runs longer than these, torch's cosine loses more digits than the tolerance allows.
TOTALS = (1, 2, 3, 4, 7, 10, 11, 100, 300)
LONG = 5000


def torch_values(scheduler: Scheduler, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return learning rate and momentum at each step of a torch run of `total` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)
    schedule = scheduler(optimizer)
    rates, momenta = [], []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        schedule.step()
    return np.array(rates), np.array(momenta)


def values(schedule: optax.Schedule, total: int) -> np.ndarray:
    """Evaluate the schedule at each step of a run, at int32 counts, which optax has."""
    counts = jnp.arange(max(total, max(TOTALS)), dtype=jnp.int32)  # one length for most runs: jax compiles once
    return np.broadcast_to(schedule(counts), counts.shape)[:total]


def error(ours: np.ndarray, truth: np.ndarray) -> float:
    return float(np.max(np.abs(ours - truth) / np.abs(truth)))


def torch_step(step_size: int, gamma: float) -> Scheduler:
    return lambda optimizer: lr_scheduler.StepLR(optimizer, step_size, gamma)


def torch_warmup_cosine(total: int, warmup: int, min_lr: float) -> Scheduler:
    def scheduler(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=min_lr)
        if warmup == 0:
            return cosine
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / 3, total_iters=warmup)
        return lr_scheduler.SequentialLR(optimizer, [rise, cosine], milestones=[warmup])

    return scheduler


def torch_one_cycle(total: int, **options: Any) -> Scheduler:
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=total, **options)


@pytest.mark.parametrize(("step_size", "gamma"), [(1, 0.9), (7, 0.1), (100, 0.5), (1000, 0.5)])
def test_step_equals_torch(step_size: int, gamma: float, x64: None) -> None:
    rates, _ = torch_values(torch_step(step_size, gamma), 300)
    assert error(values(schedules.step(LR, step_size, gamma), 300), rates) <= TOLERANCE


@pytest.mark.parametrize("min_lr", [0.0, 1e-3])
@pytest.mark.parametrize("warmup", ["none", "one", "third", "all but one"])
@pytest.mark.parametrize("total", TOTALS)
def test_warmup_cosine_equals_torch(total: int, warmup: str, min_lr: float, x64: None) -> None:
    steps = {"none": 0, "one": min(1, total - 1), "third": total // 3, "all but one": total - 1}[warmup]
    rates, _ = torch_values(torch_warmup_cosine(total, steps, min_lr), total)
    assert error(values(schedules.warmup_cosine(LR, total, steps, min_lr), total), rates) <= TOLERANCE


@pytest.mark.parametrize("total", TOTALS)
def test_one_cycle_equals_torch(total: int, x64: None) -> None:
    rates, momenta = torch_values(torch_one_cycle(total), total)
    assert error(values(schedules.one_cycle(LR, total), total), rates) <= TOLERANCE
    assert error(values(schedules.one_cycle_momentum(total), total), momenta) <= TOLERANCE


def halved_every_third(step: int) -> float:
    return 0.5 if step % 3 == 0 else 1.0


# Every other scheduler of torch beside the schedule of jaxddp, over 300 steps.
OTHERS: dict[str, tuple[optax.Schedule, Scheduler]] = {
    "multi-step": (
        schedules.multi_step(LR, [30, 80, 80, 200], 0.5),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [30, 80, 80, 200], 0.5),
    ),
    "constant": (
        schedules.constant_factor(LR, 0.3, 40),
        lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, 40),
    ),
    "linear": (
        schedules.linear(LR, 0.2, 0.9, 70),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.2, 0.9, 70),
    ),
    "exponential": (schedules.exponential(LR, 0.98), lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.98)),
    "polynomial": (
        schedules.polynomial(LR, 301, 1.5),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 301, 1.5),
    ),
    "cosine": (
        schedules.cosine(LR, 70, 1e-3),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 70, 1e-3),
    ),
    "restarts": (
        schedules.cosine_restarts(LR, 40, eta_min=1e-3),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40, eta_min=1e-3),
    ),
    "growing restarts": (
        schedules.cosine_restarts(LR, 20, 2, 1e-3),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20, 2, 1e-3),
    ),
    "lambda": (
        schedules.lambda_(LR, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ),
    "multiplicative": (
        schedules.multiplicative(LR, halved_every_third, 30),
        lambda optimizer: lr_scheduler.MultiplicativeLR(
            optimizer, lambda step: halved_every_third(step) if step <= 30 else 1.0
        ),
    ),
    "sequential": (
        schedules.sequential(
            [schedules.constant_factor(LR, 0.1, 20), schedules.exponential(LR, 0.9), schedules.cosine(LR, 50, 1e-3)],
            milestones=[20, 50],
        ),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.ConstantLR(optimizer, 0.1, 20),
                lr_scheduler.ExponentialLR(optimizer, 0.9),
                lr_scheduler.CosineAnnealingLR(optimizer, 50, 1e-3),
            ],
            milestones=[20, 50],
        ),
    ),
    "chained": (
        schedules.chained(LR, [lambda lr: schedules.linear(lr, 0.2, 0.9, 70), lambda lr: schedules.step(lr, 30, 0.5)]),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(optimizer, 0.2, 0.9, 70), lr_scheduler.StepLR(optimizer, 30, 0.5)]
        ),
    ),
    **{
        mode: (
            schedules.cyclic(1e-3, LR, 20, 13, mode, 0.99),
            lambda optimizer, mode=mode: lr_scheduler.CyclicLR(optimizer, 1e-3, LR, 20, 13, mode, 0.99),
        )
        for mode in ("triangular", "triangular2", "exp_range")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_schedule_equals_torch(name: str, x64: None) -> None:
    schedule, scheduler = OTHERS[name]
    rates, _ = torch_values(scheduler, 300)
    assert error(values(schedule, 300), rates) <= TOLERANCE


def test_cyclic_momentum_equals_torch(x64: None) -> None:
    _, momenta = torch_values(OTHERS["triangular"][1], 300)
    ours = values(schedules.cyclic_momentum(step_size_up=20, step_size_down=13), 300)
    assert error(ours, momenta) <= TOLERANCE


COSINE, TORCH_COSINE = schedules.warmup_cosine(LR, 100, 10, 1e-3), torch_warmup_cosine(100, 10, 1e-3)
FAULTS: dict[str, tuple[optax.Schedule, Scheduler]] = {
    "float32 on the way": (lambda count: COSINE(count).astype("float32"), TORCH_COSINE),
    "a step late": (lambda count: schedules.step(LR, 7, 0.5)(jnp.maximum(count - 1, 0)), torch_step(7, 0.5)),
    "gamma off": (schedules.step(LR, 7, 0.50001), torch_step(7, 0.5)),
    "cosine a step long": (schedules.warmup_cosine(LR, 101, 10, 1e-3), TORCH_COSINE),
    "warm-up a step long": (schedules.warmup_cosine(LR, 100, 11, 1e-3), TORCH_COSINE),
    "warm-up from zero": (optax.warmup_cosine_decay_schedule(0.0, LR, 10, 100, 1e-3), TORCH_COSINE),
    "optax's one cycle": (jax.vmap(optax.cosine_onecycle_schedule(100, LR)), torch_one_cycle(100)),
    "peak off": (schedules.one_cycle(LR, 100), torch_one_cycle(100, pct_start=0.301)),
    "restarts a step late": (schedules.cosine_restarts(LR, 41, eta_min=1e-3), OTHERS["restarts"][1]),
    "cycle a step long": (schedules.cyclic(1e-3, LR, 20, 14), OTHERS["triangular"][1]),
    "second part not anew": (
        schedules.sequential([schedules.constant_factor(LR, 0.1, 20), schedules.exponential(LR, 0.9)], [21]),
        OTHERS["sequential"][1],
    ),
    "last rate off": (schedules.one_cycle(LR, 100), torch_one_cycle(100, final_div_factor=1.00001e4)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: str, x64: None) -> None:
    faulty, scheduler = FAULTS[fault]
    rates, _ = torch_values(scheduler, 100)
    assert error(values(faulty, 100), rates) > FAULT


def test_long_runs_keep_digits_that_torch_loses(x64: None) -> None:
    """torch's `1 + cos` is exact to 16 digits of the first rate, and near pi not of the last ones."""
    remaining = np.arange(LONG, 0, -1) / np.longdouble(LONG)
    exact = LR * np.sin(np.longdouble("3.14159265358979323846264338327950288") / 2 * remaining) ** 2
    ours = values(schedules.warmup_cosine(LR, LONG), LONG)
    rates, _ = torch_values(torch_warmup_cosine(LONG, 0, 0.0), LONG)
    assert error(ours, exact) <= FLOAT64
    assert error(rates, exact) > 100 * FLOAT64
    assert np.max(np.abs(rates - exact)) <= FLOAT64 * LR


FLOAT32_SCHEDULES = {
    "step": schedules.step(LR, LONG // 20, 0.7),
    "warmup_cosine": schedules.warmup_cosine(LR, LONG, 100),
    "one_cycle": schedules.one_cycle(LR, LONG),
    "momentum": schedules.one_cycle_momentum(LONG),
}


@pytest.mark.parametrize("name", FLOAT32_SCHEDULES)
def test_float32_keeps_its_digits_to_the_last_step(name: str) -> None:
    narrow = values(FLOAT32_SCHEDULES[name], LONG)
    with jax.enable_x64(True):
        wide = values(FLOAT32_SCHEDULES[name], LONG)
    assert (narrow.dtype, wide.dtype) == (np.float32, np.float64)
    assert error(narrow, wide) <= FLOAT32


def test_the_float32_comparison_catches_one_plus_cosine() -> None:
    def textbook(count: jax.Array) -> jax.Array:
        return LR * (1 + jnp.cos(jnp.pi * count / LONG)) / 2

    with jax.enable_x64(True):
        wide = values(textbook, LONG)
    assert error(values(textbook, LONG), wide) > 100 * FLOAT32


def test_schedules_stay_at_their_last_value(x64: None) -> None:
    after = jnp.array([100, 150, 10_000])
    assert np.all(schedules.warmup_cosine(LR, 100, 10, 1e-3)(after) == 1e-3)
    for schedule in (schedules.one_cycle(LR, 100), schedules.one_cycle_momentum(100)):
        assert np.all(schedule(after) == schedule(99))


# --schedule -> flags that differ from torch's defaults.
FLAGS: dict[str, dict[str, Any]] = {
    "constant": {},
    "step": {"step_size": 9, "gamma": 0.3},
    "multi_step": {"milestones": (5, 30), "gamma": 0.3},
    "constant_factor": {"factor": 0.7, "total_iters": 9},
    "linear": {"start_factor": 0.1, "end_factor": 0.6, "total_iters": 9},
    "exponential": {"gamma": 0.95},
    "polynomial": {"total_iters": 20, "power": 1.5},
    "cosine": {"t_max": 15, "min_lr": 1e-3},
    "cosine_restarts": {"t_0": 7, "t_mult": 2, "min_lr": 1e-3},
    "cyclic": {"max_lr": 0.4, "step_size_up": 6, "step_size_down": 4, "cyclic_mode": "exp_range", "gamma": 0.95},
    "one_cycle": {"pct_start": 0.4, "div_factor": 10.0, "final_div_factor": 100.0},
    "warmup_cosine": {"warmup_steps": 5, "min_lr": 1e-4},
}


@pytest.mark.parametrize("of_run", [{}, {"swa_start": 2, "swa_lr": 0.7, "anneal_epochs": 3}, None], ids=str)
@pytest.mark.parametrize("schedule", FLAGS)
def test_flags_give_the_rates_and_momenta_of_torch_refs_scheduler(
    schedule: str, of_run: dict[str, Any] | None, x64: None
) -> None:
    needed = {name: FLAGS[schedule][name] for name in NEEDED_BY_SCHEDULE.get(schedule, ())}
    flags = FLAGS[schedule] | of_run if of_run is not None else needed
    config = TrainConfig(optimizer="sgd", lr=LR, momentum=0.5, schedule=schedule, epochs=10, **flags)
    [parameter] = parameters = [torch.zeros(1, dtype=torch.float64, requires_grad=True)]
    optimizer, scheduler = torch_from_config(parameters, config, 50)
    parameter.grad = torch.zeros(1, dtype=torch.float64)
    expected = []
    for _ in range(50):
        expected.append([optimizer.param_groups[0][name] for name in ("lr", "momentum")])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    lr, momentum = schedules.from_config(config, 50)
    ours = [values(lr, 50), np.full(50, 0.5) if momentum is None else values(momentum, 50)]
    for mine, theirs in zip(ours, np.transpose(expected), strict=True):
        assert np.abs(mine - theirs).max() <= TOLERANCE * LR  # measured: 2.3e-15
    assert of_run is None or schedule == "constant" or np.ptp(ours[0]) > 0.01 * LR


def test_momentum_is_cycled_only_by_one_cycle_and_only_when_asked() -> None:
    assert schedules.from_config(TrainConfig(schedule="one_cycle"), 10).momentum is not None
    assert schedules.from_config(TrainConfig(schedule="one_cycle", cycle_momentum=False), 10).momentum is None
    assert schedules.from_config(TrainConfig(schedule="step"), 10).momentum is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.warmup_cosine(LR, 10, 10), "--warmup-steps 10: must be below the run's 10 "),
        (lambda: schedules.warmup_cosine(LR, 10, 11), "--warmup-steps 11: must be below the run's 10 "),
        (lambda: schedules.one_cycle(LR, 0), "one_cycle"),
        (lambda: schedules.one_cycle_momentum(0), "one_cycle"),
    ],
)
def test_runs_that_are_too_short_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("schedule", FLAGS)
def test_a_run_of_0_epochs_has_schedules(schedule: str) -> None:
    config = TrainConfig(schedule=schedule, epochs=0, **FLAGS[schedule])
    optimizer, _ = torch_from_config([torch.zeros(1)], config, 0)
    assert float(schedules.from_config(config, 0).lr(0)) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_restarts_are_compiled_without_64_bits_after_them() -> None:
    schedule = schedules.cosine_restarts(LR, 4)
    with jax.enable_x64(True):
        wide = jax.jit(schedule)(jnp.asarray(3, jnp.int32))
    assert jax.jit(schedule)(jnp.asarray(3, jnp.int32)) == pytest.approx(float(wide), rel=FLOAT32)
