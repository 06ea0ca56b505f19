"""Every optimizer and schedule of jaxddp against torch's, with options drawn at random."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import lr_scheduler

from jaxddp import optim
from jaxddp.optim import schedules

SCHEDULES = 1e-12  # of the largest rate; measured in 1000 draws: 6.1e-14 (cosine, near its end)
OPTIMIZERS = 1e-12  # of the parameters' path; measured in 720 draws: 2.8e-14 (radam)
STEPS = 100
LR = 0.1


def schedule_draws(rng: random.Random) -> Iterator[tuple[str, Any, Callable, str]]:
    """Yield a name, the schedule of jaxddp, the scheduler of torch and the group's entry that they set."""
    length, gamma, factor = rng.randint(1, 60), rng.uniform(0.3, 1), rng.uniform(0.01, 1)
    low = rng.choice([0.0, rng.uniform(0, LR / 2)])
    strategy, three_phase = rng.choice(["cos", "linear"]), rng.random() < 0.5
    milestones = sorted(rng.choices(range(1, STEPS), k=rng.randint(1, 5)))
    of_torch = {
        "step": (schedules.step, lr_scheduler.StepLR, (length, gamma)),
        "multi-step": (schedules.multi_step, lr_scheduler.MultiStepLR, (milestones, gamma)),
        "constant": (schedules.constant_factor, lr_scheduler.ConstantLR, (factor, length)),
        "linear": (schedules.linear, lr_scheduler.LinearLR, (factor, rng.uniform(0, 1), length)),
        "exponential": (schedules.exponential, lr_scheduler.ExponentialLR, (gamma,)),
        "polynomial": (schedules.polynomial, lr_scheduler.PolynomialLR, (length, rng.uniform(0.5, 3))),
        "cosine": (schedules.cosine, lr_scheduler.CosineAnnealingLR, (length, low)),
        "restarts": (schedules.cosine_restarts, lr_scheduler.CosineAnnealingWarmRestarts, (length, 1, low)),
        "growing": (schedules.cosine_restarts, lr_scheduler.CosineAnnealingWarmRestarts, (length, 2, low)),
        "swa": (schedules.swa, torch.optim.swa_utils.SWALR, (rng.uniform(0, 0.2), rng.randint(0, 60), strategy)),
    }
    for name, (ours, theirs, options) in of_torch.items():
        yield f"{name} {options}", ours(LR, *options), lambda opt, c=theirs, o=options: c(opt, *o), "lr"
    parts = rng.sample([name for name in of_torch if name != "swa"], 3)  # torch's SequentialLR cannot restart SWALR
    starts = sorted(rng.sample(range(1, STEPS), 2))
    ours_in_turn = [of_torch[name][0](LR, *of_torch[name][2]) for name in parts]
    yield (
        f"sequential {parts} {starts}",
        schedules.sequential(ours_in_turn, starts),
        lambda opt: lr_scheduler.SequentialLR(opt, [of_torch[n][1](opt, *of_torch[n][2]) for n in parts], starts),
        "lr",
    )
    factors_of_lr = rng.sample(["step", "multi-step", "constant", "linear", "exponential"], 3)
    yield (
        f"chained {factors_of_lr}",
        schedules.chained(LR, [lambda lr, n=n: of_torch[n][0](lr, *of_torch[n][2]) for n in factors_of_lr]),
        lambda opt: lr_scheduler.ChainedScheduler([of_torch[n][1](opt, *of_torch[n][2]) for n in factors_of_lr]),
        "lr",
    )
    scales: dict[str, Any] = {"mode": rng.choice(["triangular", "triangular2", "exp_range"]), "gamma": gamma}
    if rng.random() < 0.3:
        scales = {"scale_fn": lambda x: 1 / (5 + x), "scale_mode": rng.choice(["cycle", "iterations"])}
    sizes = {"step_size_up": length, "step_size_down": rng.choice([None, rng.randint(1, 60)])}
    cycles = {**sizes, **scales}
    bounds = {"base_momentum": 0.5, "max_momentum": 0.99}
    torch_cyclic = functools.partial(lr_scheduler.CyclicLR, base_lr=low, max_lr=LR, **cycles, **bounds)
    yield f"cyclic {cycles}", schedules.cyclic(low, LR, **cycles), torch_cyclic, "lr"
    yield f"cyclic momentum {cycles}", schedules.cyclic_momentum(**bounds, **cycles), torch_cyclic, "momentum"
    one = {"pct_start": rng.uniform(0, 1), "anneal_strategy": strategy, "three_phase": three_phase}
    factors = {"div_factor": rng.uniform(1, 30), "final_div_factor": rng.uniform(1, 1e4)}
    total = rng.choice([STEPS, STEPS + rng.randint(0, 50)])
    torch_one = functools.partial(lr_scheduler.OneCycleLR, max_lr=LR, total_steps=total, **one, **factors, **bounds)
    yield f"one cycle {total, one}", schedules.one_cycle(LR, total, **one, **factors), torch_one, "lr"
    yield f"its momentum {total, one}", schedules.one_cycle_momentum(total, **one, **bounds), torch_one, "momentum"


def torch_values(scheduler: Callable, entry: str) -> np.ndarray:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)
    schedule, visited = scheduler(optimizer), []
    for step in range(STEPS):
        visited.append(optimizer.param_groups[0][entry])
        optimizer.step()
        if step + 1 < STEPS:
            schedule.step()
    return np.array(visited)


@pytest.mark.parametrize("seed", range(2))
def test_schedules_equal_torchs_with_any_options(seed: int, x64: None) -> None:
    for name, ours, scheduler, entry in schedule_draws(random.Random(seed)):
        truth = torch_values(scheduler, entry)
        values = np.broadcast_to(ours(jnp.arange(STEPS, dtype=jnp.int32)), STEPS)
        assert np.abs(values - truth).max() <= SCHEDULES * np.abs(truth).max(), name


def optimizer_draws(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Return options for every optimizer by torch's name; each is at its default in one draw of three."""
    # Lower beta2, and Muon's rounding, make paths on which torch's differ as much from themselves, an ulp apart.
    flag, decay = rng.random() < 0.5, rng.choice([0.0, rng.uniform(0, 0.3)])
    betas, eps = (rng.choice([0.0, rng.uniform(0, 0.99)]), rng.uniform(0.9, 0.9999)), 10 ** rng.uniform(-12, -1)
    dampening = rng.uniform(0, 1) if flag else 0.0
    nesterov = {"momentum": rng.uniform(0.01, 0.99), "nesterov": True}
    of_adam = {"betas": betas, "eps": eps, "weight_decay": decay}
    every: dict[str, dict[str, Any]] = {
        "SGD": {"momentum": rng.uniform(0, 0.99), "dampening": dampening} if flag else nesterov,
        "Adam": {**of_adam, "amsgrad": flag, "decoupled_weight_decay": rng.random() < 0.5},
        "AdamW": {**of_adam, "amsgrad": flag},
        "Adagrad": {"lr_decay": rng.uniform(0, 0.5), "initial_accumulator_value": rng.uniform(0, 1), "eps": eps},
        "RMSprop": {"alpha": rng.uniform(0.5, 1), "eps": eps, "momentum": rng.uniform(0, 0.99), "centered": flag},
        "Adadelta": {"rho": rng.uniform(0, 1), "eps": eps},
        "Adamax": of_adam,
        "NAdam": {**of_adam, "momentum_decay": rng.uniform(0, 0.1), "decoupled_weight_decay": flag},
        "RAdam": {**of_adam, "decoupled_weight_decay": flag},
        "ASGD": {"lambd": rng.uniform(0, 0.5), "alpha": rng.uniform(0, 1), "t0": rng.choice([0, 3, 50, 1e6])},
        "Rprop": {"etas": (rng.uniform(0.1, 0.9), rng.uniform(1.01, 2)), "step_sizes": (1e-4, rng.uniform(0.01, 9))},
        "Adafactor": {"beta2_decay": -rng.uniform(0.1, 1), "eps": (rng.choice([None, 1e-3]), eps), "d": 1 + 2 * decay},
    }
    for name in ("SGD", "Adagrad", "RMSprop", "Adadelta", "ASGD", "Adafactor"):
        every[name]["weight_decay"] = decay
    for options in every.values():
        options["maximize"] = rng.random() < 0.5
    return {
        name: {k: v for k, v in options.items() if k in ("momentum", "nesterov") or rng.random() < 2 / 3}
        for name, options in every.items()
    }


@functools.cache
def problem() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(STEPS, 4, 3)) * 10.0 ** rng.integers(-1, 2, size=(4, 3))
    return rng.normal(size=(4, 3)), gradients


def path_of_torch(name: str, options: dict[str, Any], lr: float) -> np.ndarray:
    start, gradients = problem()
    parameter, visited = torch.nn.Parameter(torch.tensor(start)), []
    optimizer = getattr(torch.optim, name)([parameter], lr=lr, **options)
    schedule = lr_scheduler.StepLR(optimizer, 7, 0.9)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        schedule.step()
        visited.append(parameter.detach().numpy().copy())
    return np.stack(visited)


def path_of_jax(name: str, options: dict[str, Any], lr: float) -> np.ndarray:
    optimizer = getattr(optim, name.lower())(schedules.step(lr, 7, 0.9), **options)
    start, gradients = map(jnp.asarray, problem())

    def step(carry: Any, gradient: jax.Array) -> Any:
        updates, state = optimizer.update(gradient, carry[1], carry[0])
        after = optax.apply_updates(carry[0], updates)
        return (after, state), after

    return np.asarray(jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), gradients)[1])())


def path_error(name: str, options: dict[str, Any], lr: float) -> float:
    truth, (start, _) = path_of_torch(name, options, lr), problem()
    moved = np.maximum.accumulate(np.abs(truth - start).max(axis=(1, 2)))
    return float((np.abs(path_of_jax(name, options, lr) - truth).max(axis=(1, 2)) / moved).max())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", optimizer_draws(random.Random(0)))
def test_optimizers_equal_torchs_with_any_options(name: str, x64: None) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        options, lr = optimizer_draws(rng)[name], 10 ** rng.uniform(-2, 0)
        assert path_error(name, options, lr) <= OPTIMIZERS, options
