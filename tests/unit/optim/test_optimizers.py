"""jaxddp.optim against torch.optim, step by step, on the same gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import lr_scheduler

from jaxddp import optim
from jaxddp.config import TrainConfig
from jaxddp.config.choices import BELONGS_TO, OPTIMIZERS
from jaxddp.errors import InputError
from jaxddp.optim import schedules

Trajectory = dict[str, np.ndarray]  # name -> the parameter after each step, (STEPS, *shape)
Scheduler = Callable[[torch.optim.Optimizer], Any]

# Limits, with the measured values beside them.
TOLERANCE = 1e-12  # deviation in float64: 2.1e-14 (adamw with one_cycle, first steps)
FAULT = 1000 * TOLERANCE  # smallest deviation with a planted fault: 2.1e-5 (Adam's eps inside the root)
FLOAT32_FACTOR = 2.0  # distance from float64, ours divided by torch's: 1.2 (rmsprop); optax.adam's: 12
FIRST_STEP = 3e-7  # Adam's first float32 step: 3.2e-8; optax.adam's: 6.7e-6

STEPS = 100
LR = 0.05
SHAPES = {"matrix": (4, 3), "vector": (5,), "scalar": ()}
GRADIENT_SCALES = {"matrix": 1.0, "vector": 1e-3, "scalar": 30.0}
# Initial values are not much larger than a step, so that the comparison sees the step, not the parameter's rounding.
START_SCALES = {"matrix": 1.0, "vector": 1e-3, "scalar": 1.0}
TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}
EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "amsgrad": True}),
    ("adamw", {"weight_decay": 0.1, "amsgrad": True}),
    ("adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("adamax", {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("nadam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "momentum_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("adadelta", {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
    ("asgd", {"lambd": 0.1, "alpha": 0.5, "t0": 20, "weight_decay": 0.1}),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TORCH),
    *((name, {"maximize": True}) for name in TORCH),
    ("nadam", {"weight_decay": 0.1}),
    ("radam", {"weight_decay": 0.1}),
    ("radam", {"betas": (0.9, 0.9)}),
    ("rprop", {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.1)}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "dampening": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"dampening": 0.5, "weight_decay": 0.1}),  # without momentum, nothing is dampened
    ("adam", {"betas": (0.8, 0.95)}),
    ("adam", {"betas": (0.0, 0.9)}),
    ("adam", {"eps": 1e-3}),
    ("adam", {"weight_decay": 0.1}),
    ("adam", {"amsgrad": True}),
    ("adamw", {"weight_decay": 0.0}),
    ("adagrad", {"eps": 1e-2}),
    ("adagrad", {"lr_decay": 0.1}),
    ("adagrad", {"weight_decay": 0.1}),
    ("adagrad", {"initial_accumulator_value": 0.5}),
    ("rmsprop", {"alpha": 0.9, "eps": 1e-2}),
    ("rmsprop", {"centered": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"weight_decay": 0.1}),
    *EVERYTHING,
]


def label(value: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else str(value)


@functools.cache
def problem() -> tuple[Trajectory, Trajectory]:
    """Return initial parameters and gradients, exact in float32; one element has zero gradient at every step."""
    rng = np.random.default_rng(0)
    start, gradients = (
        {name: (scale * rng.normal(size=(*steps, *SHAPES[name]))).astype("float32") for name, scale in scales.items()}
        for steps, scales in (((), START_SCALES), ((STEPS,), GRADIENT_SCALES))
    )
    gradients["matrix"][:, 0, 0] = 0
    return start, gradients


def run_torch(
    name: str, options: dict[str, Any], scheduler: Scheduler | None = None, dtype: str = "float64"
) -> Trajectory:
    start, gradients = problem()
    params = {key: torch.nn.Parameter(torch.tensor(value.astype(dtype))) for key, value in start.items()}
    optimizer = TORCH[name](params.values(), **{"lr": LR, **options})
    schedule = scheduler(optimizer) if scheduler else None
    visited: dict[str, list[np.ndarray]] = {key: [] for key in params}
    for step in range(STEPS):
        for key, param in params.items():
            param.grad = torch.tensor(gradients[key][step].astype(dtype))
        optimizer.step()
        if schedule:
            schedule.step()
        for key, param in params.items():
            visited[key].append(param.detach().numpy().copy())
    return {key: np.stack(values) for key, values in visited.items()}


def run_jax(optimizer: optax.GradientTransformation, dtype: str = "float64") -> Trajectory:
    params, gradients = jax.tree.map(lambda x: jnp.asarray(x, dtype), problem())

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    _, visited = jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), gradients))()
    return jax.tree.map(np.asarray, visited)


def deviation(ours: Trajectory, truth: Trajectory) -> float:
    """Return the largest distance over steps and tensors, relative to the tensor's distance from its initial value."""

    def norms(difference: np.ndarray) -> np.ndarray:
        return np.linalg.norm(difference.reshape(STEPS, -1).astype("float64"), axis=1)

    start, _ = problem()
    ratios = [norms(ours[k] - truth[k]) / np.maximum.accumulate(norms(truth[k] - start[k])) for k in truth]
    return float(np.max(ratios))


def step_lr(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)


def one_cycle_lr(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    cycles = not {"momentum", "betas"}.isdisjoint(optimizer.defaults)
    return lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS, cycle_momentum=cycles)


CYCLED = {*BELONGS_TO["optimizer"]["momentum"], *BELONGS_TO["optimizer"]["betas"]}
STEP = schedules.step(LR, step_size=7, gamma=0.8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "options"), CASES, ids=label)
def test_optimizers_equal_torch_in_float64(name: str, options: dict, x64: None) -> None:
    ours = run_jax(getattr(optim, name)(lr=LR, **options))
    assert deviation(ours, run_torch(name, options)) <= TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "options"), EVERYTHING, ids=label)
def test_optimizers_with_a_schedule_equal_torch_in_float64(name: str, options: dict, x64: None) -> None:
    ours = run_jax(getattr(optim, name)(lr=STEP, **options))
    assert deviation(ours, run_torch(name, options, step_lr)) <= TOLERANCE


ONE_CYCLE_CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("sgd", {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}),
    ("adam", {"betas": (0.5, 0.99), "amsgrad": True}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "options"), ONE_CYCLE_CASES, ids=label)
def test_optimizers_with_one_cycle_from_config_equal_torch_in_float64(name: str, options: dict, x64: None) -> None:
    config = TrainConfig(optimizer=name, lr=LR, schedule="one_cycle", cycle_momentum=name in CYCLED, **options)
    ours = run_jax(optim.from_config(config, STEPS))
    assert deviation(ours, run_torch(name, options, one_cycle_lr)) <= TOLERANCE


def late(schedule: optax.Schedule) -> optax.Schedule:
    return lambda count: schedule(jnp.maximum(count - 1, 0))


def chain(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(*parts, optax.scale_by_learning_rate(LR))


CYCLE, CYCLE_MOMENTUM = schedules.one_cycle(LR, STEPS), schedules.one_cycle_momentum(STEPS)
DAMPED, DECAYED = {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "weight_decay": 0.1}
RMS = optax.scale_by_rms(0.99, 1e-8, eps_in_sqrt=False)
FAULTS: dict[str, tuple[optax.GradientTransformation, str, dict[str, Any], Scheduler | None]] = {
    "dampening ignored": (optim.sgd(LR, 0.9), "sgd", DAMPED, None),
    "first gradient dampened": (chain(optax.scale(0.5), optax.trace(0.9)), "sgd", DAMPED, None),
    "nesterov ignored": (optim.sgd(LR, 0.9), "sgd", {"momentum": 0.9, "nesterov": True}, None),
    "decay after trace": (chain(optax.trace(0.9), optax.add_decayed_weights(0.1)), "sgd", DECAYED, None),
    "rate a step late": (optim.sgd(late(STEP)), "sgd", {}, step_lr),
    "momentum a step late": (optim.sgd(CYCLE, late(CYCLE_MOMENTUM)), "sgd", {}, one_cycle_lr),
    "beta1 a step late": (optim.adam(CYCLE, (late(CYCLE_MOMENTUM), 0.999)), "adam", {}, one_cycle_lr),
    "beta1 not cycled": (optim.adam(CYCLE), "adam", {}, one_cycle_lr),
    "beta2 off": (optim.adam(LR, (0.9, 0.998)), "adam", {}, None),
    "adam's eps inside the root": (optax.adam(LR, eps=0, eps_root=1e-16), "adam", {}, None),
    "adam's decay decoupled": (optim.adamw(LR, weight_decay=0.1), "adam", {"weight_decay": 0.1}, None),
    "adamw's decay coupled": (optim.adam(LR, weight_decay=0.01), "adamw", {}, None),
    "amsgrad of corrected moments": (optax.amsgrad(LR), "adam", {"amsgrad": True}, None),
    "adagrad's eps inside the root": (optax.adagrad(LR, 0.0, eps=1e-10), "adagrad", {}, None),
    "rate decayed early": (optim.adagrad(lambda count: LR / (1.1 + 0.1 * count)), "adagrad", {"lr_decay": 0.1}, None),
    "rmsprop's eps inside the root": (optax.rmsprop(LR, 0.99, 1e-8), "rmsprop", {}, None),
    "nadam's momentum not scheduled": (optax.nadam(LR), "nadam", {}, None),
    "radam's threshold in float32": (optax.radam(LR), "radam", {}, None),
    "rprop's sizes a step late": (optax.rprop(LR), "rprop", {}, None),
    "adamax's beta2 off": (optim.adamax(LR, (0.9, 0.998)), "adamax", {}, None),
    "asgd's rate constant": (optim.sgd(LR), "asgd", {"lambd": 0.1}, None),
    "uphill": (optim.adadelta(LR), "adadelta", {"maximize": True}, None),
    "not centered": (optim.rmsprop(LR), "rmsprop", {"centered": True}, None),
    "rate before momentum": (
        optax.chain(RMS, optax.scale_by_learning_rate(STEP), optax.trace(0.9)),
        *("rmsprop", {"momentum": 0.9}, step_lr),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_float64_comparison_catches(fault: str, x64: None) -> None:
    faulty, name, options, scheduler = FAULTS[fault]
    assert deviation(run_jax(faulty), run_torch(name, options, scheduler)) > FAULT


def float32_factor(ours: optax.GradientTransformation, name: str, options: dict) -> float:
    truth = run_torch(name, options)
    return deviation(run_jax(ours, "float32"), truth) / deviation(run_torch(name, options, dtype="float32"), truth)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in OPTIMIZERS), *EVERYTHING], ids=label)
def test_float32_is_as_close_to_float64_as_torch(name: str, options: dict) -> None:
    assert float32_factor(getattr(optim, name)(lr=LR, **options), name, options) <= FLOAT32_FACTOR


def test_the_float32_comparison_catches_a_rounded_bias_correction() -> None:
    assert float32_factor(optax.adam(LR), "adam", {}) > 3 * FLOAT32_FACTOR


def test_the_first_adam_step_keeps_its_digits_in_float32() -> None:
    grads = problem()[1]["vector"][0]
    exact = grads.astype("float64")
    truth = -LR * exact / (np.abs(exact) + 1e-8)

    def error(optimizer: optax.GradientTransformation) -> float:
        updates, _ = optimizer.update(jnp.asarray(grads), optimizer.init(jnp.zeros_like(grads)))
        return float(np.max(np.abs(updates / truth - 1)))

    assert error(optim.adam(LR)) <= FIRST_STEP
    assert error(optax.adam(LR)) > 10 * FIRST_STEP  # rounds beta2^t to float32


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize(("name", "options"), EVERYTHING, ids=label)
def test_parameters_and_state_keep_shape_and_dtype(name: str, options: dict, wide: bool) -> None:
    def strong(value: float) -> optax.Schedule:  # returns the widest float; a Python float would adapt to the leaf
        return lambda count: jnp.asarray(value, float)

    cycled = {"momentum": strong(0.9)} if "momentum" in options else {}
    cycled |= {"betas": (strong(0.9), 0.999)} if name.startswith("adam") else {}
    with jax.enable_x64(wide):
        optimizer = getattr(optim, name)(**options | cycled, lr=strong(LR))
        params = (jnp.ones(2), {"half": [jnp.ones((2, 3), jnp.bfloat16)]}, jnp.ones((), jnp.float32))
        step = jax.jit(optimizer.update, donate_argnums=1)  # refuses state that shares buffers
        state = optimizer.init(params)
        layout = jax.tree.map(jax.typeof, state)
        updates, state = step(params, state, params)
        assert jax.tree.map(jax.typeof, (updates, state)) == (jax.tree.map(jax.typeof, params), layout)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.sgd(nesterov=True), "^--nesterov"),
        (lambda: optim.sgd(nesterov=True, momentum=0.9, dampening=0.1), "^--nesterov"),
        (lambda: optim.sgd(-1.0), r"^lr -1.0: must be at least 0$"),
        (lambda: optim.adagrad(eps=float("nan")), r"^eps nan: must be at least 0$"),
        (lambda: optim.rmsprop(alpha=float("inf")), r"^alpha inf: must be finite$"),
        (lambda: optim.adam(betas=(1.5, 0.9)), r"^betas \(1.5, 0.9\): must be at least 0 and below 1$"),
    ],
)
def test_values_that_torch_refuses_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
